//! Unmounting where the file system is mounted elsewhere too: the daemon goes on there, and the user learns where.
//!
//! Each waits for 3 s without work, as `umount` does before it reports that.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};

use common::{TestMount, is_root};
use spinio_gaiad::{connection_of, unmount};
use spinio_testkit::deadline::TIMEOUT;

#[test]
fn server_role() {
    common::server_role();
}

/// A shell in a mount namespace of its own, which begins with a copy of each mount.
struct Namespace(Child);

impl Namespace {
    fn new() -> Namespace {
        let mut command = Command::new("unshare");
        command.args([
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-euc",
            "echo ready; read -r order; eval \"$order\"",
        ]);
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Namespace(process)
    }

    /// How messages name it.
    fn name(&self) -> String {
        format!("process {} (sh) has it in another mount namespace", self.0.id())
    }

    /// Its last command.
    fn end(mut self, command: &str) {
        writeln!(self.0.stdin.take().unwrap(), "{command}").unwrap();
        assert!(self.0.wait().unwrap().success());
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A namespace has copies of the mounts of all tests.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn mount(change: impl FnOnce(&mut Command)) -> Option<(TestMount, PathBuf)> {
    if !is_root() {
        return None;
    }
    if !Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success()) {
        eprintln!("skipped: no mount namespaces");
        return None;
    }
    let mount = TestMount::with_supervisor(|dir| std::fs::write(dir.join("file"), "before").unwrap(), change)?;
    let file = mount.dir.join("file");
    Some((mount, file))
}

/// The next mount is another connection: a daemon that has ended leaves nothing.
fn mounts_again(directory: &Path) {
    let mut again = TestMount::over(directory);
    assert_eq!(std::fs::read_to_string(directory.join("file")).unwrap(), "after");
    again.unmount_directory();
}

#[test]
fn daemon_goes_on_in_another_mount_namespace_and_umount_says_in_which() {
    let _alone = alone();
    let Some((mut mount, file)) = mount(|_| ()) else { return };
    let other = Namespace::new();
    std::fs::write(&file, "middle").unwrap();
    let error = unmount(&mount.dir).unwrap_err().to_string();
    assert!(error.contains(&format!("unmounted here, but {}, at {}", other.name(), mount.dir.display())), "{error}");
    assert_eq!(connection_of(&mount.dir).unwrap(), None);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "middle", "all that was written is below the mount");
    mount.kill_server();
    let path = file.display();
    other.end(&format!("test \"$(cat {path})\" = middle; printf after > {path}"));
    mount.ended();
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "after");
    mounts_again(&mount.dir);
}

#[test]
fn daemon_goes_on_at_a_bind_mount_and_umount_says_where() {
    let _alone = alone();
    let Some((mut mount, _)) = mount(|_| ()) else { return };
    let other = mount.dir.parent().unwrap().join("other");
    std::fs::create_dir(&other).unwrap();
    assert!(Command::new("mount").arg("--bind").args([&mount.dir, &other]).status().unwrap().success());
    let unmounted = unmount(&mount.dir);
    let written = std::fs::write(other.join("file"), "after");
    assert!(Command::new("umount").arg(&other).status().unwrap().success());
    let error = unmounted.unwrap_err().to_string();
    assert!(error.contains(&format!("unmounted here, but it is also mounted at {}", other.display())), "{error}");
    written.unwrap();
    mount.ended();
    mounts_again(&mount.dir);
}

#[test]
fn supervisor_that_is_stopped_reports_who_has_the_mount() {
    let (reader, writer) = std::io::pipe().unwrap();
    let _alone = alone();
    let Some((mut mount, file)) = mount(|command| _ = command.stderr(writer)) else { return };
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || BufReader::new(reader).lines().map_while(Result::ok).try_for_each(|l| sender.send(l)));
    let other = Namespace::new();
    mount.stop();
    let report = lines.recv_timeout(TIMEOUT).unwrap();
    assert!(report.contains(&other.name()) && report.contains("serving it there"), "{report}");
    other.end(&format!("printf after > {}", file.display()));
    mount.ended();
    mounts_again(&mount.dir);
}
