//! The units of systemd (packaging/systemd): what systemd itself says of them, and their commands, as it would run them.
//!
//! Known limit: no systemd runs them, so what they order and restrict has no effect here.

mod common;

use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use common::{PROGRAM, mount};
use rustix::process::{Pid, Signal, kill_process};

const MOUNT: [&str; 2] = ["spinio-gaia@.service", "user/spinio-gaia@.service"];
const SERVE: &str = "spinio-gaia-serve.service";
const WITHIN: Duration = Duration::from_secs(300);

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd")
}

fn text(unit: &str) -> String {
    std::fs::read_to_string(folder().join(unit)).unwrap()
}

/// The value of a key.
fn value(unit: &str, key: &str) -> String {
    let text = text(unit);
    let mut values = text.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix('='));
    let (first, second) = (values.next(), values.next());
    assert!(first.is_some() && second.is_none(), "{key} of {unit}: {first:?}, {second:?}");
    first.unwrap().to_owned()
}

/// A command of a unit, of the program under test; `instance`: the path of the instance.
fn command(unit: &str, key: &str, instance: &Path) -> Command {
    let line = value(unit, key);
    let mut words = line.split_whitespace();
    assert_eq!(words.next(), Some("spinio"), "{line}");
    let mut command = Command::new("timeout");
    command.args(["--foreground", "300", PROGRAM]);
    command.args(words.map(|word| if word == "%f" { instance.as_os_str() } else { word.as_ref() }));
    command.current_dir("/").stdin(Stdio::null());
    command
}

/// What systemd says of a unit with this text.
fn verify(dir: &Path, unit: &str, text: &str) -> Option<Output> {
    let name = Path::new(unit).file_name().unwrap();
    let path = dir.join(name);
    // Installed, it is in a directory that systemd searches.
    std::fs::write(&path, text.replace("=spinio ", &format!("={PROGRAM} "))).unwrap();
    let mut analyze = Command::new("systemd-analyze");
    if unit.starts_with("user/") {
        analyze.arg("--user");
    }
    analyze.args(["--man=no", "verify"]).arg(path).env("XDG_RUNTIME_DIR", dir).output().ok()
}

#[test]
fn systemd_finds_nothing_wrong_in_a_unit() {
    let dir = tempfile::tempdir().unwrap();
    for unit in MOUNT.into_iter().chain([SERVE]) {
        let text = text(unit);
        let complaints = |text: &str| {
            let output = verify(dir.path(), unit, text)?;
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            Some(words.lines().filter(|line| line.contains("spinio-gaia")).map(str::to_owned).collect::<Vec<_>>())
        };
        // Whether it would say so: an older one, or one that does not work here, says nothing.
        let wrong = complaints(&text.replace("[Service]\n", "[Service]\nTypo=yes\n"));
        if wrong.is_none_or(|lines| !lines.iter().any(|line| line.contains("Typo"))) {
            eprintln!("skipped: no systemd-analyze here that verifies {unit}");
            continue;
        }
        assert_eq!(complaints(&text).unwrap(), [""; 0], "{unit}");
    }
}

#[test]
fn commands_of_the_units_mount_a_directory_and_unmount_it() {
    if let Some(why) = mount::unavailable() {
        return eprintln!("skipped: {why}");
    }
    for unit in MOUNT {
        let root = tempfile::Builder::new().prefix("spinio-gaia-unit-").tempdir().unwrap();
        // As a path may be.
        let dir = root.path().join("data of \\ a user");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("below"), "before").unwrap();
        // The command returns, since the unit has no main process: with pipes, which the daemon must not keep open.
        assert_eq!((value(unit, "Type").as_str(), value(unit, "RemainAfterExit").as_str()), ("oneshot", "yes"));
        let started = command(unit, "ExecStart", &dir).output().unwrap();
        assert!(started.status.success() && started.stderr.is_empty(), "{started:?}");
        let mounts = spinio_gaiad::mounts().unwrap();
        let is_mounted = mounts.iter().any(|mount| mount.point == dir);
        let written = std::fs::write(dir.join("below"), "after");
        let stopped = command(unit, "ExecStop", &dir).output().unwrap();
        assert!(stopped.status.success() && stopped.stderr.is_empty(), "{stopped:?}");
        assert!(is_mounted, "{mounts:?}");
        written.unwrap();
        assert!(spinio_gaiad::mounts().unwrap().iter().all(|mount| mount.point != dir));
        assert_eq!(std::fs::read_to_string(dir.join("below")).unwrap(), "after");
    }
}

/// A process that says when it is ready, to a socket that is a path, or has an abstract name.
struct Service(Child);

impl Service {
    fn start(mut command: Command, socket: &UnixDatagram, name: &str) -> Service {
        socket.set_read_timeout(Some(WITHIN)).unwrap();
        let service = Service(command.env("NOTIFY_SOCKET", name).stdout(Stdio::null()).spawn().unwrap());
        let mut message = [0; 64];
        let got = socket.recv(&mut message).unwrap();
        assert_eq!(&message[..got], b"READY=1\n");
        service
    }

    /// As systemd ends it.
    fn end(mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        let ended = self.0.wait().unwrap();
        assert!(ended.success(), "a failure, after which systemd would start it again: {ended}");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}

#[test]
fn daemon_of_leased_files_serves_when_it_says_so() {
    assert_eq!(value(SERVE, "Type"), "notify");
    let dir = tempfile::tempdir().unwrap();
    let (notified, serving) = (dir.path().join("notify"), dir.path().join("serve.sock"));
    let socket = UnixDatagram::bind(&notified).unwrap();
    let mut start = command(SERVE, "ExecStart", Path::new(""));
    start.env("SPINIO_GAIA_SOCKET", &serving);
    let service = Service::start(start, &socket, notified.to_str().unwrap());
    assert!(spinio_gaiad::query_daemon(&serving).unwrap().is_some());
    service.end();
    assert!(!serving.exists());
}

#[test]
fn mount_in_the_foreground_is_there_when_it_says_so() {
    if let Some(why) = mount::unavailable() {
        return eprintln!("skipped: {why}");
    }
    let dir = tempfile::Builder::new().prefix("spinio-gaia-unit-").tempdir().unwrap();
    let name = format!("spinio-gaia-unit-{}", std::process::id());
    let socket = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let mut start = Command::new(PROGRAM);
    start.args(["gaia", "mount", "--foreground"]).arg(dir.path());
    let service = Service::start(start, &socket, &format!("@{name}"));
    let mounts = spinio_gaiad::mounts().unwrap();
    assert!(mounts.iter().any(|mount| mount.point == dir.path()), "{mounts:?}");
    std::fs::write(dir.path().join("file"), "bytes").unwrap();
    service.end();
    assert_eq!(std::fs::read_to_string(dir.path().join("file")).unwrap(), "bytes");
}
