//! A mount for a test: made below the temporary directory, and gone afterwards also if the test fails or hangs.

#![allow(clippy::allow_attributes, dead_code, missing_docs, unreachable_pub, reason = "each test file uses a part")]

pub mod audit;
pub mod both;
pub mod gpu;
#[cfg(debug_assertions)]
pub mod hold;
pub mod raw;

use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use spinio_fuse::mount;
use spinio_gaiad::{Ended, Supervisor};
use spinio_testkit::{continue_process, stop_process};

/// Set in the environment of a server process, and of a supervisor process to the directory.
const SERVER: &str = "SPINIO_GAIAD_TEST_SERVER";
const SUPERVISOR: &str = "SPINIO_GAIAD_TEST_SUPERVISOR";
/// Bytes for released pages.
pub const MEMORY: &str = "SPINIO_GAIAD_TEST_MEMORY";
/// Files that the kernel may know at a time.
pub const NODES: &str = "SPINIO_GAIAD_TEST_NODES";
/// Set in the environment of a supervisor that cannot start the second server at once.
pub const FAILURES: &str = "SPINIO_GAIAD_TEST_FAILURES";
/// Begins a line of a supervisor process.
const MARK: &str = "gaia-test:";
/// A mount that is still there after this hangs: it is aborted, so that the test fails.
const LONGEST: Duration = Duration::from_secs(600);
/// A mount that is in use for so long stays so, and a server that does not start then never does.
const PATIENCE: Duration = Duration::from_secs(300);

/// A mount. `dir` is the mount, `reference` an ordinary directory of the same file system. Its supervisor is a process
/// of its own, because this one has files of the mount open.
pub struct TestMount {
    pub dir: PathBuf,
    pub reference: PathBuf,
    pub socket: PathBuf,
    pid: Arc<AtomicU32>,
    servers: Arc<AtomicU32>,
    /// Until it is closed.
    stop: Option<ChildStdin>,
    supervisor: Child,
    unmounted: bool,
    watchdog: Arc<AtomicBool>,
    root: Option<tempfile::TempDir>,
}

/// Why a mount cannot be made here. Users who are not root have their own mounts.
pub fn unavailable() -> Option<&'static str> {
    if !Path::new("/dev/fuse").exists() {
        return Some("no /dev/fuse");
    }
    let has_helper = || Path::new("/usr/bin/fusermount3").exists() || Path::new("/bin/fusermount3").exists();
    (!rustix::process::geteuid().is_root() && !has_helper()).then_some("not root, and no fusermount3")
}

/// Whether this process is root, which some tests need for other users or limits; else says that they are skipped.
pub fn is_root() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("skipped: not root");
    }
    root
}

/// Whether this Linux kernel is as new as a test needs; else says that it is skipped, and why.
pub fn is_linux(least: (u32, u32), why: &str) -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(['.', '-']).map_while(|word| word.parse().ok());
    let is = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= least;
    if !is {
        eprintln!("skipped: {why} (before Linux {}.{})", least.0, least.1);
    }
    is
}

/// The test process in another role; each test file has a test `server_role` that calls this.
pub fn server_role() {
    if std::env::var_os(SERVER).is_some() {
        let code = spinio_gaiad::server_role();
        std::process::exit(if code == ExitCode::SUCCESS { 0 } else { 1 });
    }
    if let Some(directory) = std::env::var_os(SUPERVISOR) {
        // Few, so that tests reach the end of it.
        let memory = std::env::var(MEMORY).map_or(0, |bytes| bytes.parse().unwrap());
        let supervisor = Supervisor::mount(Path::new(&directory), memory).unwrap();
        if let Some(nodes) = std::env::var_os(NODES) {
            supervisor.limit_nodes(nodes.to_str().unwrap().parse().unwrap());
        }
        println!("{MARK} mounted {}", supervisor.socket().display());
        let mut commands = 0;
        let fails = std::env::var_os(FAILURES).is_some();
        let server = || {
            commands += 1;
            let command = role(SERVER, Path::new("1"));
            if fails && (3..6).contains(&commands) { Err(Errno::AGAIN.into()) } else { Ok(command) }
        };
        let spawned = |pid| println!("{MARK} server {pid}");
        let ended = supervisor.run(server, spawned, &std::io::stdin().as_fd()).unwrap();
        std::process::exit(if ended == Ended::Unmounted { 0 } else { 1 });
    }
}

fn role(name: &str, value: &Path) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "server_role", "--nocapture", "-q"]).current_dir("/");
    command.env_remove(SUPERVISOR).env(name, value);
    command
}

/// The device process of a server, if there is one.
pub fn device_process(server: u32) -> Option<Pid> {
    let threads = std::fs::read_dir(format!("/proc/{server}/task")).ok()?;
    let children = threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("children")).ok());
    let all: String = children.collect();
    all.split_whitespace().find_map(|pid| Pid::from_raw(pid.parse().ok()?))
}

/// Changes the command of a supervisor, so that its processes do not die of a write past a limit of theirs (RLIMIT_FSIZE).
pub fn survive_file_limit(command: &mut Command) {
    let mut shell = Command::new("sh");
    shell.args(["-c", "trap '' XFSZ; exec \"$0\" \"$@\""]).arg(std::env::current_exe().unwrap());
    shell.args(command.get_args()).current_dir("/");
    shell.envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    *command = shell;
}

impl TestMount {
    /// Mounts, or prints why not. `fill` makes content before.
    pub fn new(fill: impl FnOnce(&Path)) -> Option<TestMount> {
        TestMount::with_supervisor(fill, |_| ())
    }

    /// With changes to the command of the supervisor.
    pub fn with_supervisor(fill: impl FnOnce(&Path), change: impl FnOnce(&mut Command)) -> Option<TestMount> {
        if let Some(reason) = unavailable() {
            eprintln!("skipped: {reason}");
            return None;
        }
        let root = tempfile::Builder::new().prefix("spinio-gaia-").tempdir().unwrap();
        let (dir, reference) = (root.path().join("mount"), root.path().join("reference"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::create_dir(&reference).unwrap();
        fill(&dir);
        Some(TestMount::start(dir, reference, Some(root), change))
    }

    /// Mounts over a directory of the caller, who has asked whether that is [`unavailable`].
    pub fn over(dir: &Path) -> TestMount {
        TestMount::start(dir.to_owned(), PathBuf::new(), None, |_| ())
    }

    fn start(
        dir: PathBuf,
        reference: PathBuf,
        root: Option<tempfile::TempDir>,
        change: impl FnOnce(&mut Command),
    ) -> TestMount {
        let mut supervisor = role(SUPERVISOR, &dir);
        change(&mut supervisor);
        let mut supervisor = supervisor.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (pid, servers) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let lines = BufReader::new(supervisor.stdout.take().unwrap()).lines();
        let (sender, ready) = mpsc::channel();
        {
            let (pid, servers) = (pid.clone(), servers.clone());
            std::thread::spawn(move || {
                for line in lines.map_while(Result::ok) {
                    let words = line.strip_prefix(MARK).map(|l| l.split_whitespace().collect::<Vec<_>>());
                    match words.as_deref() {
                        Some(["mounted", socket]) => sender.send(PathBuf::from(socket)).unwrap(),
                        Some(["server", number]) => {
                            pid.store(number.parse().unwrap(), SeqCst);
                            servers.fetch_add(1, SeqCst);
                        }
                        _ => {}
                    }
                }
            });
        }
        let socket = ready.recv_timeout(PATIENCE).expect("mounted");
        // Else a test that kills the server kills none.
        let begun = Instant::now();
        while servers.load(SeqCst) == 0 {
            assert!(begun.elapsed() < PATIENCE, "no server has started");
            std::thread::sleep(Duration::from_millis(1));
        }
        let watchdog = Arc::new(AtomicBool::new(true));
        {
            let (watchdog, dir) = (watchdog.clone(), dir.clone());
            std::thread::spawn(move || {
                for _ in 0..LONGEST.as_millis() / 100 {
                    std::thread::sleep(Duration::from_millis(100));
                    if !watchdog.load(SeqCst) {
                        return;
                    }
                }
                eprintln!("the mount hangs: aborting its connection");
                let _ = mount::abort(&dir);
            });
        }
        let stop = supervisor.stdin.take();
        TestMount { dir, reference, socket, pid, servers, stop, supervisor, unmounted: false, watchdog, root }
    }

    /// The supervisor's process.
    pub fn supervisor(&self) -> u32 {
        self.supervisor.id()
    }

    /// The server process.
    pub fn server(&self) -> u32 {
        self.pid.load(SeqCst)
    }

    /// Limits the descriptors of the supervisor and of a new server.
    pub fn limit_descriptors(&self, most: u64) {
        let limit = Rlimit { current: Some(most), maximum: Some(most) };
        prlimit(Pid::from_raw(self.supervisor.id() as i32), Resource::Nofile, limit).unwrap();
        self.kill_server();
    }

    /// Servers so far.
    pub fn servers(&self) -> u32 {
        self.servers.load(SeqCst)
    }

    /// The process that invalidates pages: the supervisor's other child.
    pub fn invalidator(&self) -> u32 {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.supervisor.id())).unwrap();
        let children = threads.map(|thread| std::fs::read_to_string(thread.unwrap().path().join("children")).unwrap());
        let all: String = children.collect();
        all.split_whitespace().map(|pid| pid.parse().unwrap()).find(|pid| *pid != self.server()).unwrap()
    }

    /// Stops the server (SIGSTOP) until [`TestMount::continue_server`].
    pub fn stop_server(&self) {
        stop_process(self.server());
    }

    /// Lets it go on.
    pub fn continue_server(&self) {
        continue_process(self.server());
    }

    /// Kills the server and waits for the next one.
    pub fn kill_server(&self) {
        let before = self.servers();
        kill(&self.pid);
        while self.servers() == before {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Kills servers at random until dropped. Every other one has answered a call before its time begins: on a machine
    /// where it takes longer to start than to be killed, nothing would ever be served.
    pub fn killer(&self, seed: u64, pauses_ms: std::ops::Range<u64>) -> Killer {
        let go_on = Arc::new(AtomicBool::new(true));
        let (pid, dir, flag) = (self.pid.clone(), self.dir.clone(), go_on.clone());
        let thread = std::thread::spawn(move || {
            let mut random = both::Random::new(seed);
            while flag.load(SeqCst) {
                if random.range(0, 2) == 0 {
                    // The Linux kernel answers it from no cache.
                    let _ = rustix::fs::statfs(&dir);
                }
                std::thread::sleep(Duration::from_millis(random.range(pauses_ms.start, pauses_ms.end)));
                kill(&pid);
            }
        });
        Killer { go_on, thread: Some(thread) }
    }

    /// Unmounts as `spinio gaia umount` does, and returns what was mounted over, which is still there.
    pub fn unmount(mut self) -> (PathBuf, tempfile::TempDir) {
        self.unmount_directory();
        (self.dir.clone(), self.root.take().unwrap())
    }

    /// The same where the caller has the directory.
    pub fn unmount_directory(&mut self) {
        // A child of another test may have its files open, until it executes its program.
        let begun = Instant::now();
        while let Err(error) = spinio_gaiad::unmount(&self.dir) {
            // It is unmounted, and its daemon ends so slowly that the mount of another test has its number, and is taken for
            // one of it; or another program has a copy of the mount for a moment.
            if error.to_string().contains(": unmounted here, but ") {
                break;
            }
            let is_mounted = spinio_gaiad::connection_of(&self.dir).unwrap().is_some();
            assert!(is_mounted && begun.elapsed() < PATIENCE, "{error}");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.ended();
        self.unmounted = true;
    }

    /// Stops the supervisor as a signal would.
    pub fn stop(&mut self) {
        drop(self.stop.take());
    }

    /// Kills supervisor and server, as a crash of the daemon would.
    pub fn kill_supervisor(&mut self) {
        self.supervisor.kill().unwrap();
        self.supervisor.wait().unwrap();
        kill(&self.pid);
        // The mount is dead when the last descriptor of /dev/fuse is closed.
        while rustix::fs::statfs(&self.dir).is_ok() {
            // One that was just started.
            kill(&self.pid);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits for the end of the supervisor, whatever its mount has come to.
    pub fn await_supervisor(&mut self) {
        self.supervisor.wait().unwrap();
    }

    /// Waits for the end of the supervisor after an unmount.
    pub fn ended(&mut self) {
        assert!(self.supervisor.wait().unwrap().success());
    }
}

fn kill(pid: &AtomicU32) {
    if let Some(pid) = Pid::from_raw(pid.load(SeqCst) as i32) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        self.watchdog.store(false, SeqCst);
        if !self.unmounted {
            let is_mounted = spinio_gaiad::connection_of(&self.dir).is_ok_and(|mount| mount.is_some());
            let _ = mount::abort(&self.dir);
            self.stop();
            if !is_mounted {
                // It may serve another mount of the file system for as long as that likes.
                let _ = self.supervisor.kill();
                kill(&self.pid);
            }
            let _ = self.supervisor.wait();
        }
    }
}

/// See [`TestMount::killer`].
pub struct Killer {
    go_on: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Killer {
    fn drop(&mut self) {
        self.go_on.store(false, SeqCst);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}
