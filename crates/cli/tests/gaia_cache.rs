//! `spinio gaia cache`: a file in the memory that the daemon of leased files keeps.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use common::PROGRAM;

const LEN: usize = (5 << 20) + 100;

/// A daemon of its own, which ends when this is dropped.
struct Daemon(PathBuf);

impl Daemon {
    fn start(dir: &Path) -> Daemon {
        let daemon = Daemon(dir.join("serve.sock"));
        let started = daemon.gaia(&["serve"], &[]);
        assert!(started.status.success(), "{started:?}");
        daemon
    }

    fn gaia(&self, words: &[&str], files: &[&Path]) -> Output {
        let mut command = Command::new("timeout");
        command.args(["120", PROGRAM, "gaia"]).args(words).args(files).env("SPINIO_GAIA_SOCKET", &self.0);
        command.env("SPINIO_EMULATED", "size=64M").output().unwrap()
    }

    fn cache(&self, files: &[&Path]) -> Output {
        self.gaia(&["cache", "--device", "emulated"], files)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.gaia(&["serve", "--stop"], &[]);
    }
}

/// Makes a file. Not by this process: a child of another test would have it open for writing until it executes its program.
fn write(path: &Path, bytes: impl AsRef<[u8]>) {
    let source = path.with_extension("source");
    std::fs::write(&source, bytes).unwrap();
    assert!(Command::new("cp").args([&source, path]).status().unwrap().success());
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn cached_file_is_read_once_and_dropped_on_request() {
    let dir = common::folder();
    let daemon = Daemon::start(dir.path());
    let (model, other) = (dir.path().join("model"), dir.path().join("other"));
    write(&model, vec![7; LEN]);
    write(&other, vec![8; 4096]);
    let first = daemon.cache(&[&model, &other]);
    assert!(first.status.success(), "{first:?}");
    let lines: Vec<String> = text(&first.stdout).lines().map(str::to_owned).collect();
    assert!(lines[0].contains("model: 5.0 MiB on emulated:0, 5.0 MiB read in "), "{lines:?}");
    assert!(lines[1].contains("other: 4 KiB on emulated:0, 4 KiB read in "), "{lines:?}");
    // Another process: the bytes outlived the first.
    let second = text(&daemon.cache(&[&model]).stdout);
    assert!(second.ends_with("on emulated:0, was there already\n"), "{second}");
    let dropped = text(&daemon.gaia(&["drop"], &[]).stdout);
    assert!(dropped.starts_with("dropped ") && !dropped.starts_with("dropped 0 B"), "{dropped}");
    let third = text(&daemon.cache(&[&model]).stdout);
    assert!(third.contains("5.0 MiB read in "), "{third}");
}

#[test]
fn one_file_is_dropped_and_the_other_stays() {
    let dir = common::folder();
    let daemon = Daemon::start(dir.path());
    let (model, other) = (dir.path().join("model"), dir.path().join("other"));
    write(&model, vec![7; LEN]);
    write(&other, vec![8; 4096]);
    assert!(daemon.cache(&[&model, &other]).status.success());
    let dropped = text(&daemon.gaia(&["drop"], &[&other]).stdout);
    assert!(dropped.ends_with("other: dropped 2 MiB that no program has mapped\n"), "{dropped}");
    assert!(text(&daemon.cache(&[&model]).stdout).ends_with("was there already\n"));
    assert!(text(&daemon.cache(&[&other]).stdout).contains("4 KiB read in "));
    let refused = daemon.gaia(&["sync"], &[&model]);
    assert!(text(&refused.stderr).contains("is not below a mount of GAIA"), "{refused:?}");
}

#[test]
fn files_of_a_mount_are_cached_written_and_dropped() {
    let Some(mount) = common::mount::Mount::new() else { return };
    let file = mount.dir().join("file");
    std::fs::write(&file, vec![7; LEN]).unwrap();
    let none = Daemon(mount.dir().join("none.sock"));
    for (words, said) in [
        (&["sync"][..], "file: on storage after "),
        (&["cache"], "file: 5.0 MiB in the page cache of the mount"),
        (&["drop"], "file: written, and dropped from the page cache of the mount"),
    ] {
        let done = none.gaia(words, &[&file]);
        assert!(done.status.success() && text(&done.stdout).contains(said), "{done:?}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), vec![7; LEN]);
    let refused = none.gaia(&["sync"], &[&mount.dir()]);
    assert!(text(&refused.stderr).contains("is not a file"), "{refused:?}");
}

#[test]
fn what_cannot_be_cached_is_named() {
    let dir = common::folder();
    let file = dir.path().join("file");
    write(&file, [1; 100]);
    let none = Daemon(dir.path().join("none.sock"));
    let refused = none.cache(&[&file]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        text(&refused.stderr).contains("file: ") && text(&refused.stderr).contains("`spinio gaia serve` starts one")
    );
    let daemon = Daemon::start(dir.path());
    let (empty, missing) = (dir.path().join("empty"), dir.path().join("missing"));
    write(&empty, []);
    for (path, words) in [(dir.path(), "is not a file"), (&empty, "is empty"), (&missing, "No such file")] {
        let refused = daemon.cache(&[path]);
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(text(&refused.stderr).contains(words), "{refused:?}");
    }
    let writer = std::fs::OpenOptions::new().append(true).open(&file).unwrap();
    let refused = daemon.cache(&[&file]);
    assert!(text(&refused.stderr).contains("open for writing"), "{refused:?}");
    drop(writer);
    // A child of another test has a copy of the descriptor until it executes its program.
    let begun = Instant::now();
    while !daemon.cache(&[&file]).status.success() {
        assert!(begun.elapsed() < Duration::from_secs(300), "no program has the file open for writing any more");
    }
}

#[test]
fn named_pipe_is_refused_and_not_waited_for() {
    let dir = common::folder();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let none = Daemon(dir.path().join("none.sock"));
    for words in ["cache", "drop", "sync", "explain"] {
        let mut command = Command::new("timeout");
        let said = command.args(["120", PROGRAM, "gaia", words]).arg(&pipe).env("SPINIO_GAIA_SOCKET", &none.0).output();
        let said = said.unwrap();
        assert_eq!(said.status.code(), Some(1), "{words}: {said:?}");
        assert!(text(&said.stderr).contains("pipe"), "{words}: {said:?}");
    }
}
