//! Files of counters: permissions, sharing and removal.

use std::ffi::CString;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::time::Duration;

use super::*;
use spinio_host::Settings;
use spinio_host::pool::{IdleTask, WorkerPool};
use spinio_host::syscalls::LinuxSyscalls;

struct NoIdle;

impl IdleTask for NoIdle {
    fn sleep_timeout(&self) -> Option<Duration> {
        None
    }
    fn reap_idle(&self) {}
}

fn workers() -> WorkerPool {
    WorkerPool::shadow_workers(&LinuxSyscalls, 1, Duration::ZERO, NoIdle).expect("workers")
}

fn private_dirs(path: &Path) -> StatsLocation {
    StatsLocation::PrivateDirs(vec![CString::new(path.as_os_str().as_bytes()).unwrap()])
}

fn names(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Counts a call; whether the file at `path` shows it.
fn shows_counters(region: &StatsRegion, path: &Path) -> bool {
    let span = region.stats().begin(Direction::Read, 3, None, 10);
    region.stats().end(&span, &Ok(10));
    fs::read(path).is_ok_and(|bytes| Snapshot::from_bytes(&bytes).unwrap() == region.stats().snapshot())
}

#[test]
fn process_file_is_private_and_locked() {
    let (workers, temp) = (workers(), tempfile::tempdir().unwrap());
    let (dir, pid) = (temp.path().join("spinio"), std::process::id());
    let region = StatsRegion::new(private_dirs(&dir), false, || Some(&workers));
    let file = dir.join(pid.to_string());
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(shows_counters(&region, &file));
    let snapshot = region.stats().snapshot();
    assert_eq!(snapshot.process.pid, pid);
    assert!(!snapshot.process.name.is_empty() && snapshot.process.started > 0);
    // A second region with the same PID: the lock of the first one shows that it is in use.
    let other = StatsRegion::new(private_dirs(&dir), false, || Some(&workers));
    assert_eq!(names(&dir), [pid.to_string(), format!("{pid}.1")]);
    assert!(shows_counters(&other, &dir.join(format!("{pid}.1"))));
    drop(other);
    assert_eq!(names(&dir), [pid.to_string()]);
    drop(region);
    assert!(names(&dir).is_empty());
}

#[test]
fn only_stale_files_are_removed() {
    let (workers, temp) = (workers(), tempfile::tempdir().unwrap());
    let dir = temp.path().join("spinio");
    let living = StatsRegion::new(private_dirs(&dir), false, || Some(&workers));
    let file = dir.join(std::process::id().to_string());
    // A copy is not locked, as if its process had been killed.
    fs::copy(&file, dir.join("999999")).unwrap();
    fs::copy(&file, dir.join("999999.2")).unwrap();
    fs::copy(&file, dir.join("notes")).unwrap();
    fs::write(dir.join("4711"), "not a table").unwrap();
    fs::copy(&file, temp.path().join("elsewhere")).unwrap();
    symlink(temp.path().join("elsewhere"), dir.join("4712")).unwrap();
    let other = StatsRegion::new(private_dirs(&dir), false, || Some(&workers));
    let pid = std::process::id();
    let mut left = vec![pid.to_string(), format!("{pid}.1"), "4711".into(), "4712".into(), "notes".into()];
    left.sort();
    assert_eq!(names(&dir), left);
    assert!(temp.path().join("elsewhere").exists());
    drop((living, other));
}

#[test]
fn stale_files_among_many_others_are_removed() {
    let (workers, temp) = (workers(), tempfile::tempdir().unwrap());
    let dir = temp.path().join("spinio");
    let living = StatsRegion::new(private_dirs(&dir), false, || Some(&workers));
    let file = dir.join(std::process::id().to_string());
    let stale = || (0..20).map(|n| dir.join(format!("99{n:05}")));
    for n in 0..500 {
        fs::write(dir.join(format!("98{n:05}")), "no table, so it stays").unwrap();
        // Of whatever order the directory lists them in, some are after many others.
        if let Some(stale) = (n % 25 == 0).then(|| stale().nth(n / 25)).flatten() {
            fs::copy(&file, stale).unwrap();
        }
    }
    let other = StatsRegion::new(private_dirs(&dir), false, || Some(&workers));
    assert_eq!(stale().filter(|path| path.exists()).count(), 0);
    assert_eq!(names(&dir).len(), 502);
    drop((living, other));
}

#[test]
fn shared_directory_is_rejected() {
    let (workers, temp) = (workers(), tempfile::tempdir().unwrap());
    let (open, link) = (temp.path().join("open"), temp.path().join("link"));
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, fs::Permissions::from_mode(0o755)).unwrap();
    fs::create_dir(temp.path().join("mine")).unwrap();
    fs::set_permissions(temp.path().join("mine"), fs::Permissions::from_mode(0o700)).unwrap();
    symlink(temp.path().join("mine"), &link).unwrap();
    for dir in [&open, &link, &temp.path().join("no/such")] {
        let region = StatsRegion::new(private_dirs(dir), false, || Some(&workers));
        let span = region.stats().begin(Direction::Read, 3, None, 10);
        region.stats().end(&span, &Ok(10));
        assert_eq!(region.stats().snapshot().read.calls, 1, "counted in memory instead");
        assert!(!dir.exists() || names(dir).is_empty());
    }
    // The next directory is used.
    let second = temp.path().join("second");
    let path = |p: &Path| CString::new(p.as_os_str().as_bytes()).unwrap();
    let region =
        StatsRegion::new(StatsLocation::PrivateDirs(vec![path(&open), path(&second)]), false, || Some(&workers));
    assert_eq!(names(&second), [std::process::id().to_string()]);
    drop(region);
}

#[test]
fn stats_work_without_workers() {
    let temp = tempfile::tempdir().unwrap();
    let region = StatsRegion::new(private_dirs(&temp.path().join("spinio")), false, || None);
    let span = region.stats().begin(Direction::Read, 3, None, 10);
    region.stats().end(&span, &Ok(10));
    assert_eq!(region.stats().snapshot().read.bytes, 10);
    assert!(!temp.path().join("spinio").exists());
}

#[test]
fn named_file_is_shared_unless_foreign() {
    let (workers, temp) = (workers(), tempfile::tempdir().unwrap());
    let (ours, foreign) = (temp.path().join("counters"), temp.path().join("letter"));
    fs::write(&foreign, "dear").unwrap();
    let path = |p: &Path| StatsLocation::File(CString::new(p.as_os_str().as_bytes()).unwrap());
    let (a, b) = (
        StatsRegion::new(path(&ours), false, || Some(&workers)),
        StatsRegion::new(path(&ours), false, || Some(&workers)),
    );
    assert!(shows_counters(&a, &ours) && shows_counters(&b, &ours));
    assert_eq!(a.stats().snapshot().read.calls, 2);
    let c = StatsRegion::new(path(&foreign), false, || Some(&workers));
    assert!(c.stats().snapshot().is_empty());
    assert_eq!(fs::read(&foreign).unwrap(), b"dear");
    drop((a, b, c));
    assert!(ours.exists(), "a file that the user named is not removed");
}

#[test]
fn process_that_traces_into_a_shared_file_has_its_disk_space() {
    use std::os::unix::fs::MetadataExt;
    let (workers, temp) = (workers(), tempfile::tempdir().unwrap());
    let file = temp.path().join("counters");
    let location = || StatsLocation::File(CString::new(file.as_os_str().as_bytes()).unwrap());
    let allocated = || fs::metadata(&file).unwrap().blocks() * 512 >= layout::TABLE_WORDS as u64 * 8;
    let traces = |region: &StatsRegion| region.stats().traced(3, Some(0), 1).is_some();
    let untraced = StatsRegion::new(location(), false, || Some(&workers));
    assert!(!allocated(), "the ring of a process that does not trace takes no space");
    let traced = StatsRegion::new(location(), true, || Some(&workers));
    assert!(allocated() && traces(&traced));
    assert!(!traces(&untraced) && !traces(&StatsRegion::new(location(), false, || Some(&workers))));
}

#[test]
fn tracer_switches_a_process_off_that_traces_from_its_first_request() {
    let (workers, temp) = (workers(), tempfile::tempdir().unwrap());
    let named = |path: &Path| CString::new(path.as_os_str().as_bytes()).unwrap();
    let traces = |region: &StatsRegion| region.stats().traced(3, Some(0), 1).is_some();
    for location in [private_dirs(&temp.path().join("spinio")), StatsLocation::Directory(named(temp.path()))] {
        let region = StatsRegion::new(location, true, || Some(&workers));
        assert!(traces(&region));
        let (path, _) = region.file.as_ref().unwrap();
        let file = fs::OpenOptions::new().write(true).open(Path::new(path.to_str().unwrap())).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[0; 8], trace::file::TRACING_AT).unwrap();
        assert!(!traces(&region));
    }
    // No tool finds a table in memory: its ring would only take space.
    for location in [StatsLocation::Memory, StatsLocation::File(named(temp.path()))] {
        assert!(!traces(&StatsRegion::new(location, true, || Some(&workers))));
    }
}

#[test]
fn location_follows_settings() {
    let with = |stats: Option<&str>, runtime: Option<&str>| Settings {
        stats: stats.map(str::to_owned),
        runtime_dir: runtime.map(str::to_owned),
        ..Settings::default()
    };
    let path = |p: &str| CString::new(p).unwrap();
    assert_eq!(StatsLocation::from_settings(&with(None, None), false), StatsLocation::Memory);
    assert_eq!(StatsLocation::from_settings(&with(Some("off"), None), true), StatsLocation::Off);
    assert_eq!(StatsLocation::from_settings(&with(Some("a/b"), None), true), StatsLocation::File(path("a/b")));
    assert_eq!(StatsLocation::from_settings(&with(Some("a/b/"), None), true), StatsLocation::Directory(path("a/b")));
    let shm = format!("/dev/shm/spinio-{}", linux::geteuid());
    let leaf_name = StatsLocation::PrivateDirs(vec![path("/run/user/7/spinio"), path(&shm)]);
    assert_eq!(StatsLocation::from_settings(&with(None, Some("/run/user/7")), true), leaf_name);
    assert_eq!(
        StatsLocation::from_settings(&with(None, Some("relative")), true),
        StatsLocation::PrivateDirs(vec![path(&shm)])
    );
}
