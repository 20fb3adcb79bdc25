//! Files of counters: who may see them, who removes them.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use super::*;
use spinio_host::Settings;
use spinio_host::pool::{Crew, Tidy};
use spinio_host::syscalls::Linux;

struct Nothing;

impl Tidy for Nothing {
    fn nap(&self) -> Option<Duration> {
        None
    }
    fn tidy(&self) {}
}

fn crew() -> Crew {
    Crew::keepers(&Linux, 1, Duration::ZERO, Nothing).expect("helpers")
}

fn own(path: &Path) -> Place {
    Place::Own(vec![CString::new(path.as_os_str().as_bytes()).unwrap()])
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Counts something; whether the file at `path` shows it.
fn shows(home: &Home, path: &Path) -> bool {
    let watch = home.stats().begin(Direction::Read, 3, None, 10);
    home.stats().end(&watch, &Ok(10));
    fs::read(path).is_ok_and(|bytes| Snapshot::from_bytes(&bytes).unwrap() == home.stats().snapshot())
}

#[test]
fn a_process_has_a_locked_file_in_a_folder_of_its_users() {
    let (crew, temp) = (crew(), tempfile::tempdir().unwrap());
    let (folder, pid) = (temp.path().join("spinio"), std::process::id());
    let home = Home::new(own(&folder), false, || Some(&crew));
    let file = folder.join(pid.to_string());
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(shows(&home, &file));
    let snapshot = home.stats().snapshot();
    assert_eq!(snapshot.process.pid, pid);
    assert!(!snapshot.process.name.is_empty() && snapshot.process.born > 0);
    // Another one of the same number, which the first one's lock keeps from being taken for dead.
    let other = Home::new(own(&folder), false, || Some(&crew));
    assert_eq!(names(&folder), [pid.to_string(), format!("{pid}.1")]);
    assert!(shows(&other, &folder.join(format!("{pid}.1"))));
    drop(other);
    assert_eq!(names(&folder), [pid.to_string()]);
    drop(home);
    assert!(names(&folder).is_empty());
}

#[test]
fn what_the_dead_left_is_removed_and_nothing_else() {
    let (crew, temp) = (crew(), tempfile::tempdir().unwrap());
    let folder = temp.path().join("spinio");
    let living = Home::new(own(&folder), false, || Some(&crew));
    let file = folder.join(std::process::id().to_string());
    // A copy has no lock, as if its process had been killed.
    fs::copy(&file, folder.join("999999")).unwrap();
    fs::copy(&file, folder.join("999999.2")).unwrap();
    fs::copy(&file, folder.join("notes")).unwrap();
    fs::write(folder.join("4711"), "no table at all").unwrap();
    fs::copy(&file, temp.path().join("elsewhere")).unwrap();
    symlink(temp.path().join("elsewhere"), folder.join("4712")).unwrap();
    let other = Home::new(own(&folder), false, || Some(&crew));
    let pid = std::process::id();
    let mut left = vec![pid.to_string(), format!("{pid}.1"), "4711".into(), "4712".into(), "notes".into()];
    left.sort();
    assert_eq!(names(&folder), left);
    assert!(temp.path().join("elsewhere").exists());
    drop((living, other));
}

#[test]
fn a_folder_that_others_could_have_filled_is_not_used() {
    let (crew, temp) = (crew(), tempfile::tempdir().unwrap());
    let (open, link) = (temp.path().join("open"), temp.path().join("link"));
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(temp.path().join("mine")).unwrap();
    fs::set_permissions(temp.path().join("mine"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink(temp.path().join("mine"), &link).unwrap();
    for folder in [&open, &link, &temp.path().join("no/such")] {
        let home = Home::new(own(folder), false, || Some(&crew));
        let watch = home.stats().begin(Direction::Read, 3, None, 10);
        home.stats().end(&watch, &Ok(10));
        assert_eq!(home.stats().snapshot().read.calls, 1, "counted in memory instead");
        assert!(!folder.exists() || names(folder).is_empty());
    }
    // The next best is taken.
    let second = temp.path().join("second");
    let path = |p: &Path| CString::new(p.as_os_str().as_bytes()).unwrap();
    let home = Home::new(Place::Own(vec![path(&open), path(&second)]), false, || Some(&crew));
    assert_eq!(names(&second), [std::process::id().to_string()]);
    drop(home);
}

#[test]
fn without_helpers_there_is_no_file_but_counting_goes_on() {
    let temp = tempfile::tempdir().unwrap();
    let home = Home::new(own(&temp.path().join("spinio")), false, || None);
    let watch = home.stats().begin(Direction::Read, 3, None, 10);
    home.stats().end(&watch, &Ok(10));
    assert_eq!(home.stats().snapshot().read.bytes, 10);
    assert!(!temp.path().join("spinio").exists());
}

#[test]
fn a_file_by_name_is_shared_and_a_foreign_one_left_alone() {
    let (crew, temp) = (crew(), tempfile::tempdir().unwrap());
    let (ours, foreign) = (temp.path().join("counters"), temp.path().join("letter"));
    fs::write(&foreign, "dear").unwrap();
    let path = |p: &Path| Place::File(CString::new(p.as_os_str().as_bytes()).unwrap());
    let (a, b) = (Home::new(path(&ours), false, || Some(&crew)), Home::new(path(&ours), false, || Some(&crew)));
    assert!(shows(&a, &ours) && shows(&b, &ours));
    assert_eq!(a.stats().snapshot().read.calls, 2);
    let c = Home::new(path(&foreign), false, || Some(&crew));
    assert!(c.stats().snapshot().is_empty());
    assert_eq!(fs::read(&foreign).unwrap(), b"dear");
    drop((a, b, c));
    assert!(ours.exists(), "a file that the user named stays");
}

#[test]
fn settings_say_where() {
    let with = |stats: Option<&str>, runtime: Option<&str>| Settings {
        stats: stats.map(str::to_owned),
        runtime_folder: runtime.map(str::to_owned),
        ..Settings::default()
    };
    let path = |p: &str| CString::new(p).unwrap();
    assert_eq!(Place::of(&with(None, None), false), Place::Memory);
    assert_eq!(Place::of(&with(Some("off"), None), true), Place::Off);
    assert_eq!(Place::of(&with(Some("a/b"), None), true), Place::File(path("a/b")));
    assert_eq!(Place::of(&with(Some("a/b/"), None), true), Place::Folder(path("a/b")));
    let shm = format!("/dev/shm/spinio-{}", linux::geteuid());
    let own = Place::Own(vec![path("/run/user/7/spinio"), path(&shm)]);
    assert_eq!(Place::of(&with(None, Some("/run/user/7")), true), own);
    assert_eq!(Place::of(&with(None, Some("relative")), true), Place::Own(vec![path(&shm)]));
}
