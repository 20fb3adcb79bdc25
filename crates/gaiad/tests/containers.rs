//! Programs in containers, made of namespaces, that have the mount under another path.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::common::TestMount;
use crate::common::gpu::{Client, PAGE, client_role as client};

#[test]
fn server_role() {
    common::server_role();
}

#[test]
fn client_role() {
    client();
}

/// What a container does before its program: the mount is in another directory only, and /run is empty.
const ENTER: &str = "set -eu; mount --bind \"$MOUNT\" \"$BOX\"; umount --lazy \"$MOUNT\"; mount -t tmpfs none /run; ";
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
