//! Leased files on two devices: the second one copies what the first one has, and reads the file where it cannot.

#![expect(unsafe_code, reason = "device memory")]

#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use std::ffi::c_int;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use rustix::io::Errno;
use spinio_device::emulated::{self, Config, Emulated};
use spinio_device::{Device, DeviceAddr, SharedMemory, StreamId, WaitMode, registry};
use spinio_gaia::leased::Map;
use spinio_gaia::{Access, Error, FileReader, OpenFile, PeerRefusal};
use spinio_gaiad::{Daemon, DaemonStatus, query_daemon};
use spinio_pagecache::leased_messages::{MESSAGE, Reply, Request, Source, parse_reply};
use spinio_sys::cuda::Driver;
use spinio_sys::linux::packets::{self, Wait};
use spinio_testkit::{file, wait_unwritten};

const CHUNK: usize = 2 << 20;
/// Set in other processes to `daemon LIMIT`, `client FILE` or `cuda FILE`; the socket is in the second.
const ROLE: &str = "SPINIO_PEERS_TEST_ROLE";
const SOCKET: &str = "SPINIO_PEERS_TEST_SOCKET";

/// Reads by `pread`, and counts the bytes.
#[derive(Clone, Default)]
struct Plain(Arc<AtomicU64>);

struct Opened(File, Arc<AtomicU64>);

impl FileReader for Plain {
    fn open(&self, _tid: u32, fd: i32) -> Result<Box<dyn OpenFile>, Error> {
        let file = File::open(format!("/proc/thread-self/fd/{fd}")).unwrap();
        Ok(Box::new(Opened(file, Arc::clone(&self.0))))
    }
}

impl OpenFile for Opened {
    fn read(&self, offset: u64, device: &'static dyn Device, to: DeviceAddr, len: u64) -> Result<u64, Error> {
        let mut bytes = vec![0; (len as usize).min(CHUNK)];
        let got = self.0.read_at(&mut bytes, offset).unwrap();
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device.copy_in(StreamId(0), to, bytes.as_ptr(), got) }.unwrap();
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        self.1.fetch_add(got as u64, SeqCst);
        Ok(got as u64)
    }

    fn spawn(&self, _name: &str, _body: Box<dyn FnOnce(i32) + Send>) -> bool {
        false
    }
}

/// `emulated:0` or `emulated:1` of every process here.
fn device(ordinal: u32) -> &'static Emulated {
    emulated::configure("devices=2,size=64M").unwrap();
    emulated::device(ordinal).unwrap()
}

fn other_device(text: &str) -> &'static Emulated {
    Emulated::start(Config::parse(text).unwrap()).unwrap()
}

/// A map of a whole file, and what was read of the file for it.
struct Mapped {
    map: Map,
    device: &'static dyn Device,
    len: usize,
    read: Plain,
}

impl Mapped {
    fn new(path: &Path, len: usize, device: &'static dyn Device, socket: &Path) -> Mapped {
        let (file, read) = (File::open(path).unwrap(), Plain::default());
        let sockets = vec![socket.to_owned()];
        let map = Map::new(file.as_raw_fd(), 0, len as u64, Access::Read, device, &read, sockets).unwrap();
        Mapped { map, device, len, read }
    }

    fn acquire(&self) -> Result<u64, Error> {
        self.map.acquire(0, self.len as u64, Access::Read)
    }

    fn has(&self, wanted: &[u8]) -> bool {
        let mut bytes = vec![0; self.len];
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.device.copy_out(StreamId(0), bytes.as_mut_ptr(), DeviceAddr(self.map.address()), self.len) }
            .unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        bytes == wanted
    }

    /// Bytes that it read from the file, and copied from another device.
    fn bytes(&self) -> (u64, u64) {
        let info = self.map.info();
        assert_eq!(info.bytes_from_file, self.read.0.load(SeqCst));
        (info.bytes_from_file, info.bytes_from_peer)
    }

    fn refusal(&self) -> Option<PeerRefusal> {
        PeerRefusal::of_number(self.map.info().peer_refused)
    }
}

/// A daemon in a process of its own, and a directory.
struct Bench {
    dir: tempfile::TempDir,
    daemon: Option<Child>,
}

impl Bench {
    fn new(limit: usize) -> Bench {
        let dir = tempfile::Builder::new().prefix("spinio-peers-").tempdir_in("/tmp").unwrap();
        let mut bench = Bench { dir, daemon: None };
        bench.start(limit);
        bench
    }

    fn start(&mut self, limit: usize) {
        self.daemon = Some(self.process(&format!("daemon {limit}")));
    }

    fn kill(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    /// Another process, after it has said `ready`. It ends when its input does.
    fn process(&self, role: &str) -> Child {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "other_process", "--nocapture", "-q"]).current_dir("/");
        command.env(ROLE, role).env(SOCKET, self.socket()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
        assert!(lines.by_ref().map_while(Result::ok).any(|line| line.ends_with("ready")), "{role}");
        child
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("serve.sock")
    }

    fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        // What this process had open, a child of another test has too until it executes its program.
        wait_unwritten(&path);
        path
    }

    fn map(&self, path: &Path, len: usize, device: &'static dyn Device) -> Mapped {
        Mapped::new(path, len, device, &self.socket())
    }

    fn status(&self) -> DaemonStatus {
        query_daemon(&self.socket()).unwrap().unwrap()
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

fn say_ready_and_wait() {
    println!("ready");
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// The other processes.
#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = PathBuf::from(std::env::var_os(SOCKET).unwrap());
    match role.split_once(' ').unwrap() {
        ("daemon", limit) => {
            let limit: u64 = limit.parse().unwrap();
            let daemon = Daemon::bind(&socket, (limit > 0).then_some(limit)).unwrap();
            println!("ready");
            daemon.run(&std::io::stdin()).unwrap();
        }
        // Has the file on the first device.
        ("client", path) => {
            let len = std::fs::metadata(path).unwrap().len() as usize;
            let mapped = Mapped::new(Path::new(path), len, device(0), &socket);
            mapped.acquire().unwrap();
            say_ready_and_wait();
        }
        (_, path) => cuda_process(Path::new(path), &socket),
    }
    std::process::exit(0);
}

#[test]
fn second_device_copies_what_the_first_has() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 5 * CHUNK + 1234, 1);
    let path = bench.file("weights", &bytes);
    let first = bench.map(&path, bytes.len(), device(0));
    assert_eq!(first.acquire().unwrap(), bytes.len() as u64);
    assert_eq!(first.bytes(), (bytes.len() as u64, 0));
    let second = bench.map(&path, bytes.len(), device(1));
    assert_eq!(second.acquire().unwrap(), bytes.len() as u64);
    assert!(first.has(&bytes) && second.has(&bytes));
    assert_eq!((second.bytes(), second.refusal()), ((0, bytes.len() as u64), None));
    // A third map shares what the second has.
    let third = bench.map(&path, bytes.len(), device(1));
    third.acquire().unwrap();
    assert!(third.has(&bytes) && third.bytes() == (0, 0) && third.map.info().bytes_shared == 6 * CHUNK as u64);
    let files = bench.status().files;
    let held: Vec<_> = files.iter().map(|file| (file.maps, file.bytes, file.peer_bytes, file.refused)).collect();
    let all = 6 * CHUNK as u64;
    assert_eq!(held, [(1, all, 0, None), (2, all, all, None)]);
    // Another process has it on the first device: it is one device with this process's.
    let mut other = bench.process(&format!("client {}", path.display()));
    assert_eq!(bench.status().files[0].maps, 2);
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
}

#[test]
fn each_device_copies_what_it_lacks() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 4 * CHUNK, 2);
    let path = bench.file("weights", &bytes);
    let maps = [0, 1].map(|ordinal| bench.map(&path, bytes.len(), device(ordinal)));
    let half = 2 * CHUNK as u64;
    maps[0].map.acquire(0, half, Access::Read).unwrap();
    maps[1].map.acquire(half, half, Access::Read).unwrap();
    assert_eq!(maps.each_ref().map(Mapped::bytes), [(half, 0); 2]);
    for mapped in &maps {
        mapped.acquire().unwrap();
        assert!(mapped.has(&bytes));
        assert_eq!(mapped.bytes(), (half, half));
    }
}

/// A file of several groups of copies.
const LONG: usize = 30 * CHUNK;

#[test]
fn groups_of_chunks_are_copied_and_others_map_them() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, LONG - 99, 12);
    let path = bench.file("weights", &bytes);
    let first = bench.map(&path, bytes.len(), device(0));
    first.acquire().unwrap();
    let target = other_device("size=64M,peer_gbps=0.2");
    let [filler, other] = [(); 2].map(|()| bench.map(&path, bytes.len(), target));
    std::thread::scope(|scope| {
        for acquired in [&filler, &other].map(|map| scope.spawn(|| map.acquire())) {
            acquired.join().unwrap().unwrap();
        }
    });
    assert!(filler.has(&bytes) && other.has(&bytes));
    let [one, two] = [&filler, &other].map(|map| (map.bytes().1, map.map.info().bytes_shared));
    assert!(one == (bytes.len() as u64, 0) || two == (bytes.len() as u64, 0), "{one:?}, {two:?}");
    assert_eq!((one.0 + two.0, one.1 + two.1), (bytes.len() as u64, LONG as u64));
    let held = bench.status().files.iter().map(|file| file.peer_bytes).max();
    assert_eq!(held, Some(LONG as u64));
    // The imports are unmapped, and their handles given back: what is there are the chunks of both maps.
    assert_eq!(target.resources_in_use().chunks, 2 * (1 + LONG / CHUNK));
}

#[test]
fn device_without_access_to_the_peer_reads_the_file() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 6 * CHUNK, 3);
    let path = bench.file("weights", &bytes);
    let first = bench.map(&path, bytes.len(), device(0));
    first.acquire().unwrap();
    let apart = bench.map(&path, bytes.len(), other_device("size=64M,peer=0"));
    apart.acquire().unwrap();
    assert!(apart.has(&bytes));
    assert_eq!((apart.bytes(), apart.refusal()), ((bytes.len() as u64, 0), Some(PeerRefusal::NoAccess)));
    let refused: Vec<_> = bench.status().files.iter().map(|file| (file.peer_bytes, file.refused)).collect();
    assert_eq!(refused, [(0, None), (0, Some(PeerRefusal::NoAccess))]);
}

#[test]
fn copy_outlives_the_process_that_filled_it_killed_meanwhile_or_before() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 4 * CHUNK, 4);
    let path = bench.file("weights", &bytes);
    let mut other = bench.process(&format!("client {}", path.display()));
    // 0.2 s for all of it.
    let slow = bench.map(&path, bytes.len(), other_device("size=64M,peer_gbps=0.04"));
    std::thread::scope(|scope| {
        let acquired = scope.spawn(|| slow.acquire());
        std::thread::sleep(std::time::Duration::from_millis(60));
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(acquired.join().unwrap().unwrap(), bytes.len() as u64);
    });
    assert!(slow.has(&bytes));
    assert_eq!(slow.bytes(), (0, bytes.len() as u64));
    let later = bench.map(&path, bytes.len(), device(1));
    later.acquire().unwrap();
    assert!(later.has(&bytes) && later.bytes() == (0, bytes.len() as u64));
}

#[test]
fn daemon_that_ends_during_the_copy_is_replaced_and_bytes_are_right() {
    let mut bench = Bench::new(0);
    let bytes = file::bytes(0, 4 * CHUNK, 5);
    let path = bench.file("weights", &bytes);
    let first = bench.map(&path, bytes.len(), device(0));
    first.acquire().unwrap();
    let slow = bench.map(&path, bytes.len(), other_device("size=64M,peer_gbps=0.04"));
    let acquired = std::thread::scope(|scope| {
        let acquired = scope.spawn(|| slow.acquire());
        std::thread::sleep(std::time::Duration::from_millis(60));
        bench.kill();
        acquired.join().unwrap()
    });
    // It may have been done just before.
    if let Err(error) = acquired {
        assert_eq!(error.errno, Errno::IO, "{error}");
    }
    bench.start(0);
    for mapped in [&slow, &first] {
        assert_eq!(mapped.acquire().unwrap(), bytes.len() as u64);
        assert!(mapped.has(&bytes));
    }
}

#[test]
fn file_that_is_written_during_the_copy_has_its_new_bytes() {
    let bench = Bench::new(0);
    let (old, new) = (file::bytes(0, 4 * CHUNK, 6), file::bytes(0, 4 * CHUNK, 7));
    let path = bench.file("weights", &old);
    let first = bench.map(&path, old.len(), device(0));
    first.acquire().unwrap();
    let slow = bench.map(&path, old.len(), other_device("size=64M,peer_gbps=0.04"));
    std::thread::scope(|scope| {
        let acquired = scope.spawn(|| slow.acquire());
        std::thread::sleep(std::time::Duration::from_millis(60));
        File::options().write(true).open(&path).unwrap().write_all_at(&new, 0).unwrap();
        // Unless it was done before the writer came: then it has the old bytes, until the next one. It may also have asked
        // while the writer had the file open.
        let _ = acquired.join().unwrap();
    });
    wait_unwritten(&path);
    slow.acquire().unwrap();
    assert!(slow.has(&new) && first.has(&old));
    first.acquire().unwrap();
    assert!(first.has(&new));
}

#[test]
fn limit_is_that_of_each_device() {
    let bench = Bench::new(3 * CHUNK);
    let (bytes, more) = (file::bytes(0, 3 * CHUNK, 8), file::bytes(0, CHUNK, 9));
    let (path, other) = (bench.file("weights", &bytes), bench.file("other", &more));
    let maps = [0, 1].map(|ordinal| bench.map(&path, bytes.len(), device(ordinal)));
    for mapped in &maps {
        mapped.acquire().unwrap();
    }
    assert_eq!(maps[1].bytes(), (0, bytes.len() as u64));
    let full = bench.map(&other, more.len(), device(1));
    assert_eq!(full.acquire().unwrap_err().errno, Errno::NOMEM);
    // Room on the second device, not on the first.
    let [first, second] = maps;
    drop(second);
    while bench.status().maps != 2 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!(full.acquire().unwrap(), more.len() as u64);
    assert!(full.has(&more) && first.has(&bytes));
}

/// A client of the protocol itself, which hands over a descriptor that is no chunk.
struct Liar(OwnedFd);

impl Liar {
    fn send(&self, request: Request, fd: Option<&dyn AsFd>) {
        let mut bytes = Vec::new();
        request.encode(&mut bytes);
        let fds: Vec<_> = fd.iter().map(|fd| fd.as_fd()).collect();
        packets::send(&self.0, &bytes, &fds, Wait::Yes).unwrap();
    }

    fn reply<T>(&self, take: impl FnOnce(Reply<'_>) -> T) -> T {
        let mut bytes = [0; MESSAGE];
        let got = rustix::io::read(&self.0, &mut bytes).unwrap();
        take(parse_reply(&bytes[..got]).unwrap())
    }
}

/// A client of the protocol that has a file on the first device; `chunk` is the descriptor of each chunk.
fn lie(bench: &Bench, path: &Path, len: usize, chunk: impl Fn(u64) -> OwnedFd) -> Liar {
    let liar = Liar(packets::connect(&bench.socket()).unwrap());
    liar.send(Request::Hello { device: device(0).uuid().unwrap() }, Some(&File::open(path).unwrap()));
    liar.reply(|reply| assert_eq!(reply, Reply::Opened));
    loop {
        liar.send(Request::Acquire { offset: 0, len: len as u64 }, None);
        let fill = liar.reply(|reply| match reply {
            Reply::Fill { content, first, count } => Some((content.id, first..first + u64::from(count))),
            Reply::Ready { .. } => None,
            other => panic!("{other:?}"),
        });
        let Some((content, chunks)) = fill else { return liar };
        for at in chunks {
            liar.send(Request::Filled { content, chunk: at, source: Source::File }, Some(&chunk(at)));
            liar.reply(|reply| assert_eq!(reply, Reply::Kept { kept: true }));
        }
    }
}

#[test]
fn descriptor_that_is_no_chunk_is_refused_and_the_file_is_read() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 2 * CHUNK, 10);
    let path = bench.file("weights", &bytes);
    let _liar = lie(&bench, &path, bytes.len(), |_| File::open(&path).unwrap().into());
    let mapped = bench.map(&path, bytes.len(), device(1));
    mapped.acquire().unwrap();
    assert!(mapped.has(&bytes));
    assert_eq!((mapped.bytes(), mapped.refusal()), ((bytes.len() as u64, 0), Some(PeerRefusal::Import)));
}

#[test]
fn chunks_that_were_copied_before_one_is_refused_stay_and_the_others_are_read() {
    let bench = Bench::new(0);
    let mut bytes = file::bytes(0, LONG, 14);
    // As chunks are at birth.
    bytes[..25 * CHUNK].fill(0);
    let path = bench.file("weights", &bytes);
    let chunk = |at| match at {
        25 => File::open(&path).unwrap().into(),
        _ => device(0).create_chunk(CHUNK as u64).unwrap().1,
    };
    let _liar = lie(&bench, &path, LONG, chunk);
    let mapped = bench.map(&path, LONG, other_device("size=64M"));
    mapped.acquire().unwrap();
    assert!(mapped.has(&bytes));
    let (from_file, from_peer) = mapped.bytes();
    assert!(from_peer > 0 && from_file + from_peer == LONG as u64, "{from_file}, {from_peer}");
    assert_eq!(mapped.refusal(), Some(PeerRefusal::Import));
}

/// Two GPUs of the fake driver.
#[test]
fn second_gpu_copies_what_the_first_has() {
    let bench = Bench::new(0);
    let path = bench.file("weights", &file::bytes(0, 3 * CHUNK + 77, 11));
    let mut other = bench.process(&format!("cuda {}", path.display()));
    drop(other.stdin.take());
    assert!(other.wait().unwrap().success());
    let mut held: Vec<_> =
        bench.status().files.iter().map(|file| (file.bytes, file.peer_bytes, file.refused)).collect();
    held.sort_by_key(|(_, from_peer, _)| *from_peer);
    let all = 4 * CHUNK as u64;
    assert_eq!(held, [(all, 0, None), (all, all, None)]);
}

fn cuda_process(path: &Path, socket: &Path) {
    let fake = fake::open().unwrap();
    registry::hint_open(b"/dev/nvidiactl");
    let driver = Driver::loaded().unwrap();
    driver.init().unwrap();
    let bytes = std::fs::read(path).unwrap();
    let gpu = |ordinal| {
        let context = driver.primary_retain(ordinal).unwrap();
        // SAFETY: the fake driver frees no context.
        unsafe { driver.set_current(context) }.unwrap();
        Mapped::new(path, bytes.len(), registry::current_device().unwrap(), socket)
    };
    let first = gpu(0);
    first.acquire().unwrap();
    let second = gpu(1);
    // What it has memory for stays.
    fake.limit_creates(2);
    assert_eq!(second.acquire().unwrap_err().errno, Errno::NOMEM);
    assert_eq!(second.bytes(), (0, 2 * CHUNK as u64));
    fake.limit_creates(c_int::MAX);
    second.acquire().unwrap();
    assert_eq!((second.bytes(), second.refusal()), ((0, bytes.len() as u64), None));
    assert!(second.has(&bytes) && first.has(&bytes));
    // An emulated device cannot copy from a GPU.
    let emulated = Mapped::new(path, bytes.len(), device(0), socket);
    emulated.acquire().unwrap();
    assert!(emulated.has(&bytes));
    assert_eq!((emulated.bytes(), emulated.refusal()), ((bytes.len() as u64, 0), Some(PeerRefusal::NoDevice)));
    drop(emulated);
    // The emulated device has the file too: drop it, so that the status has the GPUs only.
    while query_daemon(socket).unwrap().unwrap().maps != 2 {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    spinio_gaiad::drop_unused(socket, None).unwrap();
    say_ready_and_wait();
}
