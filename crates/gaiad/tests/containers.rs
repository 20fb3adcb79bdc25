//! Programs in containers, made of namespaces, that have the mount under another path.

mod common;

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use spinio_gaia::{Access, Map};

use crate::common::TestMount;
use crate::common::gpu::{Client, PAGE, client_role as client, device};

#[test]
fn server_role() {
    common::server_role();
}

#[test]
fn client_role() {
    client();
}

/// Set in the environment of a program with a map for reading, to its file.
const READER: &str = "SPINIO_GAIAD_TEST_READER";
/// Begins what it says.
const MARK: &str = "reader: ";

/// Opens all that this process has of its file once more, for writing.
#[test]
fn reader_role() {
    let Some(path) = std::env::var_os(READER) else { return };
    let file = File::open(&path).unwrap();
    let map = Map::new(file.as_raw_fd(), 0, PAGE as u64, Access::Read, device()).unwrap();
    map.acquire(0, PAGE as u64, Access::Read).unwrap();
    // The library has its descriptors in a table of a thread of its own.
    let threads = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let tables = threads.filter_map(|thread| std::fs::read_dir(thread.path().join("fd")).ok());
    for fd in tables.flatten().flatten() {
        if std::fs::read_link(fd.path()).is_ok_and(|to| to.file_name() == Path::new(&path).file_name()) {
            let opened = OpenOptions::new().read(true).write(true).open(fd.path());
            let errno = opened.err().map_or(0, |error| error.raw_os_error().unwrap());
            println!("{MARK}{} {errno}", File::open(fd.path()).unwrap().metadata().unwrap().dev());
        }
    }
    drop(map);
    std::process::exit(0);
}

/// What a container does before its program: the mount is in another directory only, and /run is empty.
const ENTER: &str = "set -eu; mount --bind \"$MOUNT\" \"$BOX\"; umount --lazy \"$MOUNT\"; mount -t tmpfs none /run; ";
/// The same, for reading only.
const READ_ONLY: &str = "mount -o remount,bind,ro \"$BOX\"; ";
/// The same, with the sockets.
const WITH_SOCKETS: &str = "mkdir \"$BOX/../gaia\"; mount --bind /run/spinio/gaia \"$BOX/../gaia\"; ";
const MOVE_SOCKETS: &str = "mkdir -p /run/spinio/gaia; mount --move \"$BOX/../gaia\" /run/spinio/gaia; ";

/// The command in a container; `place` is the mount there.
fn container(mount: &TestMount, place: &Path, before: &str, after: &str, command: &Command) -> Command {
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--pid", "--fork", "--mount-proc", "--kill-child", "sh", "-c"]);
    unshare.arg(format!("{before}{ENTER}{after}exec \"$@\"")).arg("sh");
    unshare.arg(command.get_program()).args(command.get_args());
    unshare.env("MOUNT", &mount.dir).env("BOX", place);
    unshare.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    unshare
}

/// A container has a copy of each mount, which keeps that of another test from its end.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A mount with a file, and its place in containers. `None`, and the reason is printed, where there are no namespaces.
fn mount() -> Option<(TestMount, std::path::PathBuf)> {
    let mount = TestMount::new(|dir| std::fs::write(dir.join("file"), [0; PAGE]).unwrap())?;
    let unshare = Command::new("unshare").args(["--mount", "--pid", "--fork", "--mount-proc", "true"]).status();
    if !unshare.is_ok_and(|status| status.success()) {
        eprintln!("skipped: no namespaces");
        return None;
    }
    let place = mount.dir.parent().unwrap().join("box");
    std::fs::create_dir(&place).unwrap();
    Some((mount, place))
}

#[test]
fn containers_share_a_file_of_a_mount() {
    let _alone = alone();
    let Some((mount, place)) = mount() else { return };
    let file = place.join("file");
    let mut gpu = Client::start(container(&mount, &place, WITH_SOCKETS, MOVE_SOCKETS, &Client::command(&file)));
    let mut cpu = Command::new("sh");
    cpu.args([
        "-euc",
        "while read value; do printf \"\\\\$value\" | dd of=\"$0\" bs=1 seek=2 conv=notrunc status=none
        od -An -tu1 -N3 \"$0\"; done",
    ]);
    cpu.arg(&file);
    let mut cpu = container(&mount, &place, "", "", &cpu).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut values, mut seen) = (cpu.stdin.take().unwrap(), BufReader::new(cpu.stdout.take().unwrap()).lines());
    for round in 1..6 {
        assert_eq!(gpu.says(), "open");
        // Into the same page, inside the epoch.
        writeln!(values, "10{round}").unwrap();
        let line = seen.next().unwrap().unwrap();
        let bytes: Vec<u8> = line.split_whitespace().map(|word| word.parse().unwrap()).collect();
        assert_eq!(bytes, [0, round - 1, 0o100 + round]);
        if round == 3 {
            mount.kill_server();
            gpu.go_on();
            assert_eq!((gpu.says().as_str(), gpu.says().as_str()), ("stale", "open"));
        }
        gpu.go_on();
    }
    assert_eq!(gpu.says(), "open");
    assert_eq!(std::fs::read(mount.dir.join("file")).unwrap()[..3], [0, 5, 0o105]);
    gpu.finish();
    drop(values);
    assert!(cpu.wait().unwrap().success());
    let (below, _root) = mount.unmount();
    assert_eq!(std::fs::read(below.join("file")).unwrap()[..3], [0, 5, 0o105]);
}

#[test]
fn map_in_a_container_without_the_socket_says_what_is_missing() {
    let _alone = alone();
    let Some((mount, place)) = mount() else { return };
    let mut client = Client::start(container(&mount, &place, "", "", &Client::command(&place.join("file"))));
    let words = client.says();
    let socket = mount.socket.display();
    assert!(words.contains(&format!("{socket}, is not here: a container needs")), "{words}");
    client.finish();
}

#[test]
fn program_in_a_read_only_container_gets_no_descriptor_that_can_be_opened_for_writing() {
    let _alone = alone();
    let Some((mount, place)) = mount() else { return };
    if !common::is_root() {
        return;
    }
    let mut reader = Command::new(std::env::current_exe().unwrap());
    reader.args(["--exact", "reader_role", "--nocapture", "-q"]).env(READER, place.join("file"));
    let after = format!("{MOVE_SOCKETS}{READ_ONLY}");
    let output = container(&mount, &place, WITH_SOCKETS, &after, &reader).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    let found: Vec<(u64, i32)> = said
        .lines()
        .filter_map(|line| line.split_once(MARK)?.1.split_once(' '))
        .map(|(device, errno)| (device.parse().unwrap(), errno.parse().unwrap()))
        .collect();
    // Its own, of the mount, and that of the file below.
    let devices: std::collections::HashSet<u64> = found.iter().map(|(device, _)| *device).collect();
    assert_eq!(devices.len(), 2, "{found:?}");
    assert!(found.iter().all(|(_, errno)| *errno == Errno::ROFS.raw_os_error()), "{found:?}");
}
