//! What the processes of `spinio gaia mount` and `spinio gaia serve` may do while they serve.

mod common;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::mount::unavailable;
use common::{PROGRAM, is_root};
use rustix::process::{Pid, Signal, kill_process};

const CHOWN: u32 = 0;
const DAC_OVERRIDE: u32 = 1;
const DAC_READ_SEARCH: u32 = 2;
const FOWNER: u32 = 3;
const FSETID: u32 = 4;
const SETGID: u32 = 6;
const SETUID: u32 = 7;
const SYS_ADMIN: u32 = 21;
const SYS_RESOURCE: u32 = 24;
const MKNOD: u32 = 27;
const LEASE: u32 = 28;
const SETFCAP: u32 = 31;

const SERVER: [u32; 10] =
    [CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID, SETGID, SETUID, SYS_RESOURCE, MKNOD, SETFCAP];

/// A process in the foreground, ended by its own signal.
struct Foreground {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Foreground {
    fn start(options: &[&str], path: &Path) -> Foreground {
        let mut command = Command::new(PROGRAM);
        command.args(["gaia"]).args(options).arg(path).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Foreground { child, lines }
    }

    fn line(&mut self) -> String {
        self.lines.next().unwrap().unwrap()
    }

    /// The next server.
    fn server(&mut self) -> u32 {
        self.line().strip_prefix("server ").unwrap().parse().unwrap()
    }

    fn end(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory that is not mounted over at the end, whatever happens.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::Builder::new().prefix("spinio-gaia-p-").tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let lazy: (&str, &[&str]) = if is_root() { ("umount", &["-l"]) } else { ("fusermount3", &["-uzq"]) };
        let _ = Command::new(lazy.0).args(lazy.1).arg(self.path("mount")).stderr(Stdio::null()).status();
    }
}

/// Of each thread of a process: the value of a line of its status.
fn of_threads(pid: u32, line: &str) -> BTreeSet<u64> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    // One may end meanwhile.
    let status = threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("status")).ok());
    let value = |status: String| {
        let value = status.lines().find_map(|l| l.strip_prefix(line)).unwrap().trim().to_owned();
        u64::from_str_radix(&value, 16).unwrap()
    };
    status.map(value).collect()
}

/// What all threads of this process must have, of what this test has itself.
fn assert_capabilities(pid: u32, always: &[u32], at_most: &[u32]) {
    let own = *of_threads(std::process::id(), "CapPrm:").first().unwrap();
    let bits = |list: &[u32]| list.iter().fold(0, |bits, capability| bits | 1u64 << capability) & own;
    let found = ["CapEff:", "CapPrm:", "CapInh:"].map(|line| of_threads(pid, line));
    assert_eq!(found, [bits(always), bits(at_most), 0].map(|value| BTreeSet::from([value])), "process {pid}");
}

fn no_new_privileges(pid: u32) -> bool {
    of_threads(pid, "NoNewPrivs:") == BTreeSet::from([1])
}

fn children(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().map(|pid| pid.parse().unwrap()).collect::<Vec<_>>()).collect()
}

#[test]
fn processes_of_a_mount_keep_what_they_need() {
    if let Some(why) = unavailable() {
        eprintln!("skipped: {why}");
        return;
    }
    let place = Place::new();
    let point = place.path("mount");
    std::fs::create_dir(&point).unwrap();
    let mut mount = Foreground::start(&["mount", "--foreground"], &point);
    assert!(mount.line().starts_with("mounted on"));
    let with_admin = [&SERVER[..], &[SYS_ADMIN]].concat();
    let supervisor = mount.child.id();
    let mut server = mount.server();
    // A server answers only after it has given up the rest.
    for round in 0..2 {
        std::fs::write(point.join("file"), [round]).unwrap();
        assert_capabilities(supervisor, &[DAC_OVERRIDE, SYS_ADMIN, SYS_RESOURCE], &with_admin);
        assert_capabilities(server, &SERVER, &with_admin);
        assert!(no_new_privileges(server));
        let others: Vec<u32> = children(supervisor).into_iter().filter(|child| *child != server).collect();
        let [invalidator] = others[..] else { panic!("children of the supervisor: {others:?}, and {server}") };
        // It need not have begun.
        let (begun, none) = (Instant::now(), BTreeSet::from([0]));
        while !no_new_privileges(invalidator) || of_threads(invalidator, "CapPrm:") != none {
            assert!(begun.elapsed() < Duration::from_secs(300), "the invalidator has privileges");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_capabilities(invalidator, &[], &[]);
        // A user's supervisor must be able to start fusermount3.
        assert_eq!(no_new_privileges(supervisor), is_root());
        if round == 0 {
            kill_process(Pid::from_raw(server as i32).unwrap(), Signal::KILL).unwrap();
            server = mount.server();
        }
        assert_eq!(std::fs::read(point.join("file")).unwrap(), [round]);
    }
    // With what is left it unmounts.
    mount.end();
    assert_eq!(std::fs::read(point.join("file")).unwrap(), [1]);
}

#[test]
fn daemon_of_leased_files_keeps_what_it_needs() {
    let place = Place::new();
    let socket = place.path("socket");
    let mut daemon = Foreground::start(&["serve", "--foreground", "--socket"], &socket);
    assert!(daemon.line().starts_with("serving at"));
    let pid = daemon.child.id();
    let status = Command::new(PROGRAM).args(["gaia", "status", "--socket"]).arg(&socket).output().unwrap();
    assert!(status.status.success(), "{status:?}");
    let always = [DAC_READ_SEARCH, SYS_RESOURCE, LEASE];
    assert_capabilities(pid, &always, &[&always[..], &[DAC_OVERRIDE]].concat());
    assert!(no_new_privileges(pid));
    daemon.end();
    assert!(!socket.exists());
}
