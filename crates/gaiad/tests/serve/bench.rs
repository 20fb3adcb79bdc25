//! A daemon and its clients, each a process of its own.

use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use spinio_gaiad::{DaemonStatus, query_daemon};
use spinio_testkit::{eventually, wait_unwritten};

pub(crate) const CHUNK: u64 = 2 << 20;
/// Set in other processes to `daemon LIMIT` or `client`; the socket is in the second.
pub(crate) const ROLE: &str = "SPINIO_SERVE_TEST_ROLE";
pub(crate) const SOCKET: &str = "SPINIO_SERVE_TEST_SOCKET";
/// Seconds within which a client of the daemon has to fill a chunk, if not the default.
pub(crate) const FILL_WITHIN: &str = "SPINIO_SERVE_TEST_FILL_WITHIN";

pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
}

/// Writes a file that no process has open for writing afterwards.
pub(crate) fn write(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
    wait_unwritten(path);
}

/// A daemon in a process of its own, and a directory.
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) daemon: Option<Child>,
}

impl Bench {
    pub(crate) fn new(limit: u64) -> Bench {
        let dir = tempfile::Builder::new().prefix("spinio-serve-").tempdir_in("/tmp").unwrap();
        let mut bench = Bench { dir, daemon: None };
        bench.start(limit);
        bench
    }

    pub(crate) fn start(&mut self, limit: u64) {
        self.start_with(role(&format!("daemon {limit}"), &self.socket()));
    }

    pub(crate) fn start_with(&mut self, mut command: Command) {
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.map_while(Result::ok).any(|line| line.ends_with("serving")));
        self.daemon = Some(child);
    }

    pub(crate) fn kill(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.dir.path().join("serve.sock")
    }

    pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        write(&path, bytes);
        path
    }

    /// While it exists, clients that were told to `hold` read nothing.
    pub(crate) fn gate(&self) -> PathBuf {
        let path = self.dir.path().join("gate");
        File::create(&path).unwrap();
        path
    }

    pub(crate) fn status(&self) -> DaemonStatus {
        query_daemon(&self.socket()).unwrap().unwrap()
    }

    /// Waits until the daemon has seen that clients have gone.
    pub(crate) fn wait_for_maps(&self, maps: u64) {
        eventually("the daemon has seen which clients have gone", || self.status().maps == maps);
    }

    pub(crate) fn client(&self) -> Client {
        Client::start(role("client", &self.socket()))
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

pub(crate) fn role(role: &str, socket: &Path) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "other_process", "--nocapture", "-q"]).current_dir("/");
    command.env(ROLE, role).env(SOCKET, socket).stdout(Stdio::piped());
    command
}

/// A process with at most one map, that does what it is told, line by line.
pub(crate) struct Client {
    pub(crate) child: Child,
    pub(crate) orders: ChildStdin,
    pub(crate) answers: Lines<BufReader<ChildStdout>>,
}

impl Client {
    pub(crate) fn start(mut command: Command) -> Client {
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()).lines());
        Client { child, orders, answers }
    }

    pub(crate) fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    pub(crate) fn answer(&mut self) -> String {
        let mut answers = self.answers.by_ref().map_while(Result::ok);
        // What the test harness prints is before it, also in the line.
        let line = answers.find_map(|line| line.split_once("> ").map(|(_, answer)| answer.to_owned()));
        line.expect("the client has ended")
    }

    pub(crate) fn ask(&mut self, order: &str) -> String {
        self.order(order);
        self.answer()
    }

    /// Maps a file and begins to acquire all of it, but reads no byte as long as the gate is there.
    pub(crate) fn hold(&mut self, gate: &Path, path: &Path, offset: u64, len: u64) {
        assert_eq!(self.ask(&format!("hold {}", gate.display())), "ok");
        assert_eq!(self.ask(&format!("map {} {offset} {len}", path.display())), "ok");
        self.order("acquire");
        assert_eq!(self.answer(), "reads");
    }

    /// Maps a file and acquires all of it.
    pub(crate) fn map(&mut self, path: &Path, len: usize) {
        assert_eq!(self.ask(&format!("map {} 0 {len}", path.display())), "ok");
        assert_eq!(self.ask("acquire"), format!("{len}"));
    }

    /// Bytes that it read from the file, and bytes of others.
    pub(crate) fn bytes(&mut self) -> (u64, u64) {
        let answer = self.ask("bytes");
        let (read, shared) = answer.split_once(' ').unwrap();
        (read.parse().unwrap(), shared.parse().unwrap())
    }

    pub(crate) fn has(&mut self, wanted: &[u8]) {
        assert_eq!(self.ask("hash"), hash(wanted).to_string());
    }

    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}
