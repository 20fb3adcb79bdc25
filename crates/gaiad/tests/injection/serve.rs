//! Maps of leased files, while their daemon is killed at a step.
//!
//! ```text
//!   map, another map, one on another device ── acquired ── the file is written ── acquired again
//!   ── unmapped ── another file needs their room ── acquired ── the daemon is told to end
//! ```
//!
//! A call fails only if the daemon was killed, and does what it should with the next daemon. What an acquire returned is
//! the file's, and stays while there is no daemon. A writer waits for no daemon that is dead.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::Signal;
use spinio_device::emulated::Emulated;
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::leased::Map;
use spinio_gaia::{Access, Error, FileReader, OpenFile};
use spinio_gaiad::{Daemon, query_daemon, stop_daemon};
use spinio_sys::injection;

use crate::common::gpu;
use crate::control::Control;
use crate::{PASSES, PATIENCE, Part, Step, TRIES, chosen};

const CHUNK: usize = 2 << 20;
/// Chunks that the daemon may hold on a device: those of the first file and one more.
const LIMIT: u64 = 3 * CHUNK as u64;
const FIRST: usize = CHUNK + 1000;
const SECOND: usize = 2 * CHUNK;
/// Set in the environment of the daemon, to its socket.
const SOCKET: &str = "SPINIO_GAIAD_TEST_LEASES";

/// The daemon.
pub(crate) fn role() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let daemon = Daemon::bind(Path::new(&socket), Some(LIMIT)).unwrap();
    println!("serving");
    // Until it is told to end, or the test has ended.
    daemon.run(&std::io::stdin()).unwrap();
    drop(daemon);
    std::process::exit(0);
}

/// Kills it at its points. Without a mount.
pub(crate) fn part() -> Part {
    let control = tempfile::Builder::new().prefix("spinio-points-").tempdir().unwrap();
    let control = Control::new(&control.keep().join("words"));
    let mut programs = Programs::new(&control);
    programs.run(&Step::new(&control, 0, None, Signal::KILL));
    let (mut hit, mut hits, mut round) = (BTreeSet::new(), 0, 0);
    for (point, passes) in control.passes() {
        for pass in chosen(passes, PASSES) {
            // A client that has gone may be noticed after the daemon was told to end.
            for _ in 0..TRIES {
                round += 1;
                let (step, before) = (Step::new(&control, round, Some((&point, pass)), Signal::KILL), control.fired());
                step.arm();
                programs.run(&step);
                control.disarm();
                if control.fired() > before {
                    hit.insert(point.clone());
                    hits += 1;
                    break;
                }
            }
        }
    }
    drop(programs);
    control.remove();
    Some((hit, hits))
}

/// Reads a file for a map.
struct Plain;

struct Opened(File);

impl FileReader for Plain {
    fn open(&self, _tid: u32, fd: i32) -> Result<Box<dyn OpenFile>, Error> {
        Ok(Box::new(Opened(File::open(format!("/proc/thread-self/fd/{fd}")).unwrap())))
    }
}

impl OpenFile for Opened {
    fn read(&self, offset: u64, device: &'static dyn Device, to: DeviceAddr, len: u64) -> Result<u64, Error> {
        let mut bytes = vec![0; (len as usize).min(CHUNK)];
        let got = self.0.read_at(&mut bytes, offset).unwrap();
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device.copy_in(StreamId(0), to, bytes.as_ptr(), got) }.unwrap();
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        Ok(got as u64)
    }

    fn spawn(&self, _name: &str, _body: Box<dyn FnOnce(i32) + Send>) -> bool {
        false
    }
}

fn loaded(map: &Map, device: &Emulated) -> Vec<u8> {
    let mut bytes = vec![0; map.bytes() as usize];
    let (to, from, len) = (bytes.as_mut_ptr(), DeviceAddr(map.address()), bytes.len());
    // SAFETY: the bytes live until the device was synchronized.
    unsafe { device.copy_out(StreamId(0), to, from, len) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    bytes
}

struct Programs<'a> {
    control: &'a Control,
    dir: tempfile::TempDir,
    devices: [&'static Emulated; 2],
    daemon: Option<Child>,
}

impl Drop for Programs<'_> {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

impl<'a> Programs<'a> {
    fn new(control: &'a Control) -> Programs<'a> {
        let dir = tempfile::Builder::new().prefix("spinio-leases-").tempdir_in("/tmp").unwrap();
        Programs { control, dir, devices: [gpu::device(), gpu::device()], daemon: None }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("socket")
    }

    fn run(&mut self, step: &Step<'_>) {
        let killed = self.control.fired();
        let byte = (step.round % 200 + 1) as u8;
        let [first, second] = [("first", FIRST, byte), ("second", SECOND, byte + 2)].map(|(name, len, byte)| {
            let path = self.dir.path().join(name);
            std::fs::write(&path, vec![byte; len]).unwrap();
            path
        });
        self.start(killed, step);
        let mut maps = Vec::new();
        for device in [0, 0, 1] {
            let map = self.until_done(killed, step, |programs| programs.map(&first, FIRST, device));
            self.acquire(&map, device, byte, killed, step);
            maps.push((map, device));
        }
        let begun = Instant::now();
        std::fs::write(&first, vec![byte + 1; FIRST]).unwrap();
        // The Linux kernel ends a lease that a process keeps after 45 s.
        assert!(begun.elapsed() < Duration::from_secs(40), "a writer waited, {step}");
        for (map, device) in &maps {
            assert!(loaded(map, self.devices[*device]) == vec![byte; FIRST], "it has the old bytes, {step}");
            self.acquire(map, *device, byte + 1, killed, step);
        }
        drop(maps);
        self.await_no_maps(killed, step);
        let map = self.until_done(killed, step, |programs| programs.map(&second, SECOND, 0));
        self.acquire(&map, 0, byte + 2, killed, step);
        drop(map);
        self.end(killed, step);
    }

    /// Starts a daemon; again, if it is killed before it serves.
    fn start(&mut self, killed: u64, step: &Step<'_>) {
        while self.daemon.is_none() {
            let mut command = Command::new("/proc/self/exe");
            command.args(["--exact", "leases_role", "--nocapture", "-q"]).current_dir("/");
            command.env(SOCKET, self.socket()).env(injection::VARIABLE, &self.control.path);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
            if lines.any(|line| line.ends_with("serving")) {
                self.daemon = Some(child);
            } else {
                assert!(self.control.fired() > killed, "a daemon does not serve, {step}");
                child.wait().unwrap();
            }
        }
    }

    /// Another daemon, if it was killed; else it may not have failed.
    fn replace(&mut self, killed: u64, why: &dyn std::fmt::Display, step: &Step<'_>) {
        assert!(self.control.fired() > killed, "{why}, {step}");
        if let Some(mut daemon) = self.daemon.take() {
            assert!(!daemon.wait().unwrap().success(), "{why}, {step}");
        }
        self.start(killed, step);
    }

    fn until_done<T>(&mut self, killed: u64, step: &Step<'_>, what: impl Fn(&Self) -> Result<T, Error>) -> T {
        let begun = Instant::now();
        loop {
            match what(self) {
                Ok(done) => return done,
                Err(error) => {
                    let is_daemons = [Errno::IO, Errno::NOTSUP].contains(&error.errno);
                    assert!(is_daemons && begun.elapsed() < PATIENCE, "{error}, {step}");
                    self.replace(killed, &error, step);
                }
            }
        }
    }

    fn map(&self, path: &Path, len: usize, device: usize) -> Result<Map, Error> {
        let file = File::open(path).unwrap();
        let sockets = vec![self.socket()];
        Map::new(file.as_raw_fd(), 0, len as u64, Access::Read, self.devices[device], &Plain, sockets)
    }

    fn acquire(&mut self, map: &Map, device: usize, byte: u8, killed: u64, step: &Step<'_>) {
        let len = map.bytes();
        assert_eq!(self.until_done(killed, step, |_| map.acquire(0, len, Access::Read)), len, "{step}");
        assert!(loaded(map, self.devices[device]) == vec![byte; len as usize], "other bytes, {step}");
    }

    /// Until the daemon has seen that clients have gone.
    fn await_no_maps(&mut self, killed: u64, step: &Step<'_>) {
        let begun = Instant::now();
        loop {
            match query_daemon(&self.socket()) {
                Ok(Some(status)) if status.maps == 0 => return,
                Ok(Some(_)) => std::thread::sleep(Duration::from_millis(1)),
                Ok(None) => self.replace(killed, &"there is no daemon", step),
                Err(error) => self.replace(killed, &error, step),
            }
            assert!(begun.elapsed() < PATIENCE, "maps are left, {step}");
        }
    }

    /// It ends as it is told to, or was killed: then the next one takes its place.
    fn end(&mut self, killed: u64, step: &Step<'_>) {
        let stopped = stop_daemon(&self.socket());
        let ended = self.daemon.take().unwrap().wait().unwrap();
        let hit = self.control.fired() > killed;
        assert!(hit || matches!(stopped, Ok(true)) && ended.success(), "{stopped:?}, {ended}, {step}");
        // Killed at the end, it may have left its socket.
        assert_eq!(query_daemon(&self.socket()).unwrap(), None, "{step}");
        assert!(hit || !self.socket().exists(), "a socket is left, {step}");
    }
}
