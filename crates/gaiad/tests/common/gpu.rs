//! A program with GPU kernels, in this process and in one of its own.

#![expect(unsafe_code, reason = "device memory")]

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Lines, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::io::Errno;
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Map};

pub const PAGE: usize = 4096;
/// Set in the environment of a client process, to its file.
const CLIENT: &str = "SPINIO_GAIAD_TEST_CLIENT";
/// Begins what a client process says.
const MARK: &str = "client: ";

/// A device of its own.
pub fn device() -> &'static Emulated {
    Emulated::start(Config::parse("size=64M").unwrap()).unwrap()
}

/// Opens a file as most tests do.
pub fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// A map for writing of the first pages of a file, and its device.
pub struct Gpu(&'static Emulated, pub Map, u64);

impl Gpu {
    pub fn new(file: &File, pages: usize) -> Gpu {
        let (device, len) = (device(), (pages * PAGE) as u64);
        Gpu(device, Map::new(file.as_raw_fd(), 0, len, Access::Write, device).unwrap(), len)
    }

    /// Another map of the same pages on the same device.
    pub fn another(&self, file: &File) -> Gpu {
        Gpu(self.0, Map::new(file.as_raw_fd(), 0, self.2, Access::Write, self.0).unwrap(), self.2)
    }

    pub fn acquire(&self) {
        self.1.acquire(0, self.2, Access::Write).unwrap();
    }

    pub fn release(&self) {
        self.1.release(0, self.2).unwrap();
    }

    pub fn load(&self, at: usize) -> u8 {
        let mut byte = 0;
        let from = DeviceAddr(self.1.address() + at as u64);
        // SAFETY: the byte lives until the device was synchronized.
        unsafe { self.0.copy_out(StreamId(0), &mut byte, from, 1) }.unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
        byte
    }

    pub fn store(&self, at: usize, bytes: &[u8]) {
        let to = DeviceAddr(self.1.address() + at as u64);
        // SAFETY: as above.
        unsafe { self.0.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }

    /// One epoch that stores the same byte in the first of these pages.
    pub fn epoch(&self, pages: usize, byte: u8) {
        self.acquire();
        self.store(0, &vec![byte; pages * PAGE]);
        self.release();
    }
}

/// The client process: epochs that add 1 to byte 1. Inside each it says `open` and waits for a line. Each test file
/// that starts one has a test `client_role` that calls this.
pub fn client_role() {
    let Some(path) = std::env::var_os(CLIENT) else { return };
    let file = open(Path::new(&path));
    let device = device();
    let map = match Map::new(file.as_raw_fd(), 0, PAGE as u64, Access::Write, device) {
        Ok(map) => map,
        Err(error) => {
            println!("{MARK}{}: {error}", error.errno);
            std::process::exit(0);
        }
    };
    let gpu = Gpu(device, map, PAGE as u64);
    let mut line = String::new();
    let mut stdin = std::io::stdin().lock();
    loop {
        gpu.acquire();
        gpu.store(1, &[gpu.load(1).wrapping_add(1)]);
        println!("{MARK}open");
        line.clear();
        if stdin.read_line(&mut line).unwrap() == 0 {
            std::process::exit(0);
        }
        match gpu.1.release(0, PAGE as u64) {
            Err(error) if error.errno == Errno::STALE => println!("{MARK}stale"),
            result => drop(result.unwrap()),
        }
    }
}

/// The test's side of it.
pub struct Client {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Client {
    /// The command of one, for this file.
    pub fn command(path: &Path) -> Command {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "client_role", "--nocapture", "-q"]).env(CLIENT, path);
        command
    }

    pub fn start(mut command: Command) -> Client {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Client { child, stdin, lines: BufReader::new(stdout).lines() }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// What it says next.
    pub fn says(&mut self) -> String {
        loop {
            let line = self.lines.next().expect("the client has ended").unwrap();
            // The first one follows words of the test harness.
            if let Some((_, words)) = line.split_once(MARK) {
                return words.to_owned();
            }
        }
    }

    /// Lets it release.
    pub fn go_on(&mut self) {
        self.stdin.write_all(b"\n").unwrap();
    }

    /// Ends it inside its epoch.
    pub fn finish(self) {
        let Client { mut child, stdin, .. } = self;
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }
}
