//! A GPU program in a process of its own, which is killed or stopped at each step of its maps.
//!
//! What it had released is there, of a release that it did not see the end of all or nothing, its epochs are gone, and its
//! connection too. The programs of gpu.rs, which use the same pages, go on meanwhile.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice, Map, StreamRelease};
use spinio_sys::injection;
use spinio_testkit::continue_process;

use crate::common::gpu::{PAGE, open};
use crate::common::{TestMount, audit};
use crate::gpu::{PAGES, Programs, bytes};
use crate::{PATIENCE, Step};

/// Set in the environment of the process, to its file.
const CLIENT: &str = "SPINIO_GAIAD_TEST_INJECTED";
const DONE: &str = "client: done";
const MIB: u64 = 1 << 20;
/// Chunks of 2 MiB, of which one must be evicted for the last.
pub(crate) const FILE: u64 = 8 * MIB;
const LIMIT: u64 = 6 * MIB;
/// Of a release in two parts.
const MANY: usize = 1030;
/// Bytes of a page.
const RELEASED: usize = 6;
const DISCARDED: usize = 7;
const IN_STREAM: usize = 8;

/// The process: a script for each line.
pub(crate) fn role() {
    let Some(path) = std::env::var_os(CLIENT) else { return };
    let file = open(Path::new(&path));
    let device = Emulated::start(Config::parse("size=32M").unwrap()).unwrap();
    spinio_gaia::limit_memory(device, Some(LIMIT));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (byte, pages) = line.split_once(' ').unwrap();
        script(&file, device, byte.parse().unwrap(), pages.parse().unwrap());
        println!("\n{DONE}");
    }
    std::process::exit(0);
}

/// Sets a byte of each of the first pages, on the device.
fn set(device: &Emulated, map: &Map, pages: usize, at: usize, byte: u8, stream: StreamId) {
    let (mut all, address) = (vec![0; pages * PAGE], DeviceAddr(map.address()));
    // SAFETY: the bytes live until the device was synchronized.
    unsafe { device.copy_out(stream, all.as_mut_ptr(), address, all.len()) }.unwrap();
    device.synchronize(stream, WaitMode::Block).unwrap();
    all.chunks_mut(PAGE).for_each(|page| page[at] = byte);
    // SAFETY: as above.
    unsafe { device.copy_in(stream, address, all.as_ptr(), all.len()) }.unwrap();
    device.synchronize(stream, WaitMode::Block).unwrap();
}

fn script(file: &File, device: &'static Emulated, byte: u8, pages: usize) {
    let map = Arc::new(Map::new(file.as_raw_fd(), 0, FILE, Access::Write, device).unwrap());
    let len = (pages * PAGE) as u64;
    map.acquire(0, len, Access::Write).unwrap();
    set(device, &map, pages, RELEASED, byte, StreamId(0));
    map.release(0, len).unwrap();
    map.acquire(0, len, Access::Write).unwrap();
    set(device, &map, pages, DISCARDED, byte, StreamId(0));
    map.discard(0, len).unwrap();
    if pages > PAGES {
        return;
    }
    for at in (0..FILE).step_by(2 * MIB as usize) {
        map.acquire(at, 2 * MIB, Access::Read).unwrap();
        map.release(at, 2 * MIB).unwrap();
    }
    map.advise(0, len, Advice::DontNeed).unwrap();
    let (stream, published) = (device.new_stream().unwrap(), Arc::new(Mutex::new(None)));
    map.acquire_async(0, len, Access::Write, stream).unwrap();
    set(device, &map, pages, IN_STREAM, byte, stream);
    let report = {
        let published = Arc::clone(&published);
        move |bytes: &Result<u64, spinio_gaia::Error>| *published.lock().unwrap() = Some(bytes.clone())
    };
    map.release_async(0, len, StreamRelease::new(stream, report)).unwrap();
    map.sync(0, len).unwrap();
    assert!(published.lock().unwrap().take().unwrap().is_ok());
    assert!(map.info().chunks_evicted > 0);
}

/// The process, as the test sees it.
struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    fn start(path: &Path, control: &Path) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "client_role", "--nocapture", "-q"]).env(CLIENT, path);
        command.env(injection::VARIABLE, control).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let lines = BufReader::new(stdout).lines().map_while(Result::ok);
            lines.filter(|line| line == DONE).for_each(|line| drop(sender.send(line)));
        });
        Process { child, stdin, lines }
    }
}

/// What the process has released, and the process.
pub(crate) struct Client {
    process: Option<Process>,
    pages: usize,
    released: [u8; 2],
}

impl Client {
    /// `large`: with a release in parts, and little else.
    pub(crate) fn new(large: bool) -> Client {
        Client { process: None, pages: if large { MANY } else { PAGES }, released: [0; 2] }
    }

    pub(crate) fn run(&mut self, mount: &TestMount, programs: &mut Programs, step: &Step<'_>) {
        let path = mount.dir.join("file");
        let byte = (step.round % 250 + 1) as u8;
        let mut process = self.process.take().unwrap_or_else(|| Process::start(&path, &step.control.path));
        let before = step.control.fired();
        process.stdin.write_all(format!("{byte} {}\n", self.pages).as_bytes()).unwrap();
        let mut stopped = false;
        let begun = Instant::now();
        let done = loop {
            assert!(begun.elapsed() < PATIENCE, "the client hangs, {step}: {}", audit::stacks(process.child.id()));
            match process.lines.recv_timeout(Duration::from_millis(1)) {
                Ok(_) => break true,
                Err(RecvTimeoutError::Disconnected) => break false,
                Err(RecvTimeoutError::Timeout) => {}
            }
            if step.signal == Signal::STOP && !stopped && step.control.fired() > before {
                stopped = true;
                // It stays as it is for as long as others like.
                programs.run(step);
                continue_process(process.child.id());
            }
        };
        if done {
            self.process = Some(process);
        } else {
            let status = process.child.wait().unwrap();
            assert_eq!(status.signal(), Some(Signal::KILL.as_raw()), "{status}, {step}");
            assert!(step.control.fired() > before, "{step}");
        }
        // What a killed process had sent may still be committed.
        while audit::accepted(&mount.socket) > Programs::MAPS {
            assert!(begun.elapsed() < PATIENCE, "its connection is left, {step}: {}", audit::stacks(mount.server()));
            std::thread::sleep(Duration::from_millis(1));
        }
        programs.run(step);
        self.verify(programs, byte, done, step);
    }

    fn verify(&mut self, programs: &Programs, byte: u8, done: bool, step: &Step<'_>) {
        let seen = |at| bytes(&programs.file, self.pages, at);
        let large = self.pages > PAGES;
        for (at, old) in [RELEASED, IN_STREAM].into_iter().zip(&mut self.released).take(if large { 1 } else { 2 }) {
            let now = seen(at);
            let first = now[0];
            assert!(now.iter().all(|byte| *byte == first), "a part of a release, {step}: {now:?}");
            assert!(first == byte || !done && first == *old, "byte {at} is {first}, {step}");
            *old = first;
        }
        assert!(seen(DISCARDED).iter().all(|byte| *byte == 0), "{step}");
    }

    /// Ends the process.
    pub(crate) fn end(self) {
        let Some(Process { mut child, stdin, .. }) = self.process else { return };
        drop(stdin);
        assert!(child.wait().unwrap().success());
    }
}
