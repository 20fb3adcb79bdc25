//! `spinio gaia mount` of an ordinary user, started by root's test program: what other users see of it, and files of
//! other users below it.

mod common;

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{PROGRAM, is_root};

/// The user, and another one.
const USER: u32 = 65534;
const OTHER: u32 = 1;

/// A directory of the user and a copy of the command that every user may start.
struct Place {
    dir: tempfile::TempDir,
    program: PathBuf,
}

impl Place {
    /// `None` if a user cannot have a mount here; says why.
    fn new() -> Option<Place> {
        if !Path::new("/usr/bin/fusermount3").exists() {
            eprintln!("skipped: no fusermount3");
            return None;
        }
        Place::for_root()
    }

    /// The same where only root mounts.
    fn for_root() -> Option<Place> {
        let why = if !is_root() {
            "not root, who can start programs of several users"
        } else if !Path::new("/dev/fuse").exists() {
            "no /dev/fuse"
        } else {
            let dir = tempfile::Builder::new().prefix("spinio-gaia-user-").tempdir().unwrap();
            std::fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
            let program = dir.path().join("spinio");
            // Not by this process: another test's child would have the copy open for writing for a moment.
            assert!(Command::new("cp").arg(PROGRAM).arg(&program).status().unwrap().success());
            let place = Place { dir, program };
            std::fs::create_dir(place.data()).unwrap();
            chown(place.data(), Some(USER), Some(USER)).unwrap();
            return Some(place);
        };
        eprintln!("skipped: {why}");
        None
    }

    fn data(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn command(&self, program: &Path, user: u32) -> Command {
        let mut command = Command::new("timeout");
        command.arg("300").arg(program).current_dir("/").env_clear().env("PATH", "/usr/bin:/bin");
        if user != 0 {
            command.uid(user).gid(user);
        }
        command
    }

    fn gaia(&self, user: u32, arguments: &[&str]) -> Output {
        let mut command = self.command(&self.program, user);
        command.arg("gaia").args(arguments).arg(self.data()).output().unwrap()
    }

    /// A shell in the directory above the mount.
    fn sh(&self, user: u32, script: &str) -> Output {
        let mut command = self.command(Path::new("sh"), user);
        command.args(["-c", script]).current_dir(self.dir.path()).output().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-lq").arg(self.data()).status();
    }
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Files of running mounts of the user, where there is no other directory for them.
fn claims() -> Vec<PathBuf> {
    let files = std::fs::read_dir(format!("/tmp/spinio-{USER}/gaia")).into_iter().flatten().flatten();
    files.map(|file| file.path()).collect()
}

#[test]
fn mount_is_for_its_user_alone_and_leaves_nothing() {
    let Some(place) = Place::new() else { return };
    let mounted = place.gaia(USER, &["mount"]);
    assert!(mounted.status.success() && mounted.stderr.is_empty(), "{mounted:?}");
    let data = place.data();
    let line = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let line = line.lines().find(|line| line.contains(data.to_str().unwrap())).unwrap().to_owned();
    assert!(line.contains("fuse.spinio-gaia") && !line.contains("allow_other"), "{line}");
    // NUMBER.sock of this connection.
    let number = line.split_whitespace().nth(2).unwrap().split_once(':').unwrap().1.to_owned();
    let own = |path: &PathBuf| path.file_stem().is_some_and(|stem| stem.to_str() == Some(&number));

    assert!(place.sh(USER, "umask 027; echo text >data/file; cat data/file").stdout == b"text\n");
    for other in [0, OTHER] {
        let tried = place.sh(other, "ls data || cat data/file || echo text >data/other");
        assert!(!tried.status.success() && stderr(&tried).contains("Permission denied"), "{tried:?}");
    }
    let explained =
        place.command(&place.program, USER).args(["gaia", "explain"]).arg(data.join("file")).output().unwrap();
    assert!(explained.status.success(), "{explained:?}");
    let status = place.gaia(USER, &["status"]);
    assert!(status.status.success() && stdout(&status).contains(data.to_str().unwrap()), "{status:?}");
    // Root trusts no daemon of another user.
    for other in [0, OTHER] {
        let status = place.gaia(other, &["status"]);
        assert!(!status.status.success() && stderr(&status).contains("another user"), "{status:?}");
        let all = place.command(&place.program, other).args(["gaia", "status"]).output().unwrap();
        assert!(!stdout(&all).contains(data.to_str().unwrap()), "{all:?}");
        let refused = place.gaia(other, &["umount"]);
        assert!(!refused.status.success() && stderr(&refused).contains("another user"), "{refused:?}");
    }
    assert!(claims().iter().any(own));

    let script = format!("exec 9>data/busy; {} gaia umount data", place.program.display());
    let busy = place.sh(USER, &script);
    assert!(!busy.status.success() && stderr(&busy).contains("in use"), "{busy:?}");
    let unmounted = place.gaia(USER, &["umount"]);
    assert!(unmounted.status.success(), "{unmounted:?}");
    assert!(!std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(data.to_str().unwrap()));
    assert_eq!(std::fs::read(data.join("file")).unwrap(), b"text\n");
    assert_eq!(std::fs::metadata(data.join("file")).unwrap().permissions().mode() & 0o777, 0o640);
    // Another mount may have the number by now; a socket with no listener is none of it.
    let left: Vec<_> = claims().into_iter().filter(own).collect();
    let is_used = std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(&format!(" 0:{number} "));
    assert!(left.is_empty() || is_used, "{left:?}");
}

#[test]
fn roots_mount_is_listed_for_users_without_numbers() {
    let Some(place) = Place::for_root() else { return };
    assert!(place.gaia(0, &["mount"]).status.success());
    let data = place.data();
    let all = |user: u32, arguments: &[&str]| {
        let mut command = place.command(&place.program, user);
        command.arg("gaia").args(arguments).output().unwrap()
    };
    for arguments in [&["status"][..], &["status", "--json"], &["top", "--once", "--every", "0.01"]] {
        let said = all(USER, arguments);
        assert!(said.status.success() && said.stderr.is_empty(), "{said:?}");
        // A table breaks a long path.
        let text: String = stdout(&said).split_whitespace().collect();
        assert!(text.contains(data.to_str().unwrap()), "{said:?}");
    }
    assert!(stdout(&all(USER, &["status"])).contains("only root may ask"));
    // Who names it gets the reason.
    let named = place.gaia(USER, &["status"]);
    assert!(!named.status.success() && stderr(&named).contains("only root may ask"), "{named:?}");
    assert!(stdout(&all(0, &["status"])).contains("server  process"));
    assert!(place.gaia(0, &["umount"]).status.success());
}

#[test]
fn files_of_other_users_are_used_as_the_file_system_below_allows() {
    let Some(place) = Place::new() else { return };
    let (data, reference) = (place.data(), place.dir.path().join("reference"));
    std::fs::create_dir(&reference).unwrap();
    chown(&reference, Some(USER), Some(USER)).unwrap();
    for dir in [&data, &reference] {
        for (name, mode) in [("shared", 0o666), ("private", 0o600), ("setuid", 0o4777), ("readable", 0o644)] {
            std::fs::write(dir.join(name), "old").unwrap();
            std::fs::set_permissions(dir.join(name), Permissions::from_mode(mode)).unwrap();
        }
    }
    assert!(place.gaia(USER, &["mount"]).status.success());
    let script = |dir: &str| {
        let script = "cd DIR; for file in shared private setuid readable; do
            echo $file; echo new >>$file && echo written; cat $file; touch $file && echo touched
            touch -d 2001-02-03 $file && echo set; truncate -s 5 $file && echo cut; chmod 600 $file && echo changed
            stat -c '%a %u %s' $file; done 2>&1; ln shared link 2>&1; rm -f readable; ls";
        stdout(&place.sh(USER, &script.replace("DIR", dir)))
    };
    let through = script("data");
    assert!(through.contains("written") && through.contains("Permission denied"), "{through}");
    assert_eq!(through, script("reference"));
    let begun = std::time::SystemTime::now();
    assert!(place.sh(USER, "echo newer >>data/shared; sync data/shared").status.success());
    assert!(place.gaia(USER, &["umount"]).status.success());
    // The time is that of the write, which the server may not set.
    let modified = std::fs::metadata(data.join("shared")).unwrap().modified().unwrap();
    assert!(modified + std::time::Duration::from_secs(1) > begun);
    assert_eq!(std::fs::read(data.join("shared")).unwrap(), b"oldnenewer\n");
}

#[test]
fn what_a_user_cannot_mount_is_named() {
    let Some(place) = Place::new() else { return };
    let mut bound = Command::new("setpriv");
    bound.args(["--reuid", "65534", "--regid", "65534", "--clear-groups", "--no-new-privs"]).arg(&place.program);
    let done = bound.args(["gaia", "mount"]).arg(place.data()).env("PATH", "/usr/bin:/bin").output().unwrap();
    assert!(stderr(&done).contains("NoNewPrivileges"), "{done:?}");
    chown(place.data(), Some(OTHER), None).unwrap();
    let done = place.gaia(USER, &["mount"]);
    assert!(stderr(&done).contains("another user"), "{done:?}");
    assert!(!std::fs::read_to_string("/proc/self/mountinfo").unwrap().contains(place.data().to_str().unwrap()));
}
