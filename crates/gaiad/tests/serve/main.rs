//! Maps of leased files: the daemon, and several processes that map one file.

#![expect(unsafe_code, reason = "device memory")]

mod bench;
#[path = "../../../sys/tests/fake/mod.rs"]
mod fake;
mod limits;

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use rustix::io::Errno;
use spinio_device::emulated::{Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode, registry};
use spinio_gaia::leased::Map;
use spinio_gaia::{Access, Error, FileReader, OpenFile};
use spinio_gaiad::{Daemon, query_daemon};
use spinio_sys::cuda::Driver;
use spinio_testkit::{continue_process, eventually, file, stop_process, wait_unwritten};

use self::bench::{Bench, CHUNK, Client, FILL_WITHIN, ROLE, SOCKET, hash, role, write};

/// Set in clients that map files in CUDA memory, by the fake driver.
const CUDA: &str = "SPINIO_SERVE_TEST_CUDA";

/// Reads by `pread`, slowly if asked to, or not as long as the gate is there.
struct Plain {
    delay: Duration,
    gate: Option<PathBuf>,
    bytes: Arc<AtomicU64>,
}

struct Opened {
    file: File,
    delay: Duration,
    gate: Option<PathBuf>,
    bytes: Arc<AtomicU64>,
}

impl FileReader for Plain {
    fn open(&self, _tid: u32, fd: i32) -> Result<Box<dyn OpenFile>, Error> {
        let file = File::open(format!("/proc/thread-self/fd/{fd}")).unwrap();
        let bytes = Arc::clone(&self.bytes);
        Ok(Box::new(Opened { file, delay: self.delay, gate: self.gate.clone(), bytes }))
    }
}

impl OpenFile for Opened {
    fn read(&self, offset: u64, device: &'static dyn Device, to: DeviceAddr, len: u64) -> Result<u64, Error> {
        let mut bytes = vec![0; len.min(CHUNK) as usize];
        let got = self.file.read_at(&mut bytes, offset).unwrap();
        if let Some(gate) = self.gate.as_ref().filter(|gate| gate.exists()) {
            println!("> reads");
            eventually("the gate is gone", || !gate.exists());
        }
        std::thread::sleep(self.delay);
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { device.copy_in(StreamId(0), to, bytes.as_ptr(), got) }.unwrap();
        device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        self.bytes.fetch_add(got as u64, SeqCst);
        Ok(got as u64)
    }

    fn spawn(&self, _name: &str, _body: Box<dyn FnOnce(i32) + Send>) -> bool {
        false
    }
}

fn load(device: &dyn Device, address: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: the bytes live until the device was synchronized.
    unsafe { device.copy_out(StreamId(0), bytes.as_mut_ptr(), DeviceAddr(address), len) }.unwrap();
    device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    bytes
}

/// The other processes.
#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let socket = PathBuf::from(std::env::var_os(SOCKET).unwrap());
    if let Some(limit) = role.strip_prefix("daemon ") {
        let limit: u64 = limit.parse().unwrap();
        let mut daemon = Daemon::bind(&socket, (limit > 0).then_some(limit)).unwrap();
        if let Ok(seconds) = std::env::var(FILL_WITHIN) {
            daemon.set_fill_within(Duration::from_secs(seconds.parse().unwrap()));
        }
        println!("serving");
        daemon.run(&std::io::stdin()).unwrap();
        drop(daemon);
        // Without what the test harness prints at the end.
        std::process::exit(0);
    }
    if role == "question" {
        let files = query_daemon(&socket).unwrap().unwrap().files;
        assert_eq!(files.iter().map(|file| file.user).collect::<Vec<_>>(), [65534]);
        assert!(spinio_gaiad::stop_daemon(&socket).is_err());
        std::process::exit(0);
    }
    client(&socket);
    std::process::exit(0);
}

/// A GPU of the fake driver, whose context is current now.
fn fake_gpu() -> &'static dyn Device {
    fake::open().unwrap();
    registry::hint_open(b"/dev/nvidiactl");
    let driver = Driver::loaded().unwrap();
    driver.init().unwrap();
    let context = driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { driver.set_current(context) }.unwrap();
    registry::current_device().unwrap()
}

fn client(socket: &Path) {
    let device: &'static dyn Device = match std::env::var_os(CUDA) {
        None => Emulated::start(Config::default()).unwrap(),
        Some(_) => fake_gpu(),
    };
    let bytes = Arc::new(AtomicU64::new(0));
    let (mut map, mut len, mut delay, mut gate) = (None::<Map>, 0, Duration::ZERO, None);
    let answer = |text: &dyn std::fmt::Display| println!("> {text}");
    let code = |e: &Error| format!("error {} {e}", e.errno.raw_os_error());
    for line in std::io::stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            ["map", path, offset, bytes_of_map] => {
                len = bytes_of_map.parse().unwrap();
                let file = File::open(path).unwrap();
                let reader = Plain { delay, gate: gate.clone(), bytes: Arc::clone(&bytes) };
                let (offset, sockets) = (offset.parse().unwrap(), vec![socket.to_owned()]);
                match Map::new(file.as_raw_fd(), offset, len, Access::Read, device, &reader, sockets) {
                    Ok(made) => {
                        map = Some(made);
                        answer(&"ok");
                    }
                    Err(e) => answer(&code(&e)),
                }
            }
            ["slow", milliseconds] => {
                delay = Duration::from_millis(milliseconds.parse().unwrap());
                answer(&"ok");
            }
            ["hold", path] => {
                gate = Some(PathBuf::from(path));
                answer(&"ok");
            }
            ["unmap"] => {
                map = None;
                answer(&"ok");
            }
            ["acquire"] => match map.as_ref().unwrap().acquire(0, len, Access::Read) {
                Ok(got) => answer(&got),
                Err(e) => answer(&code(&e)),
            },
            ["hash"] => answer(&hash(&load(device, map.as_ref().unwrap().address(), len as usize))),
            ["bytes"] => {
                answer(&format!("{} {}", bytes.load(SeqCst), map.as_ref().map_or(0, |map| map.info().bytes_shared)));
            }
            _ => panic!("{line}"),
        }
    }
}

/// The fake driver dies where the real one would: it has its descriptors in the program's table, and a reservation is
/// freed without memory in it.
#[test]
fn processes_share_cuda_memory() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 4 * CHUNK as usize + 77, 9);
    let path = bench.file("weights", &bytes);
    let start = || {
        let mut command = role("client", &bench.socket());
        command.env(CUDA, "1");
        Client::start(command)
    };
    let (mut first, mut second) = (start(), start());
    for client in [&mut first, &mut second] {
        client.map(&path, bytes.len());
        client.has(&bytes);
    }
    assert_eq!(first.bytes(), (bytes.len() as u64, 0));
    assert_eq!(second.bytes(), (0, 5 * CHUNK));
    first.kill();
    let mut third = start();
    third.map(&path, bytes.len());
    third.has(&bytes);
    // A writer: its bytes are mapped at the same addresses.
    let other = file::bytes(0, 3 * CHUNK as usize, 10);
    write(&path, &other);
    assert_eq!(second.ask("acquire"), other.len().to_string());
    let whole = [&other[..], &vec![0; bytes.len() - other.len()]].concat();
    second.has(&whole);
    assert_eq!(second.ask("unmap"), "ok");
    // The emulated device has another UUID, so nothing is shared with it.
    let mut emulated = bench.client();
    emulated.map(&path, other.len());
    assert_eq!(emulated.bytes(), (other.len() as u64, 0));
}

#[test]
fn processes_share_one_copy() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 5 * CHUNK as usize + 1234, 1);
    let path = bench.file("weights", &bytes);
    let mut clients: Vec<_> = (0..4).map(|_| bench.client()).collect();
    for client in &mut clients {
        client.map(&path, bytes.len());
        client.has(&bytes);
    }
    let counts: Vec<_> = clients.iter_mut().map(Client::bytes).collect();
    assert_eq!(counts[0], (bytes.len() as u64, 0));
    assert_eq!(counts[1..], [(0, 6 * CHUNK); 3]);
    let status = bench.status();
    assert_eq!((status.maps, status.bytes, status.files.len()), (4, 6 * CHUNK, 1));
    assert_eq!(Path::new(&status.files[0].path), path);
    // Acquired again, by a process that has all: nothing is read.
    assert_eq!(clients[0].ask("acquire"), bytes.len().to_string());
    assert_eq!(clients[0].bytes().0, bytes.len() as u64);
    // The one that filled dies; the copy stays, for others and for later ones.
    clients.swap_remove(0).kill();
    clients.iter_mut().for_each(|client| client.has(&bytes));
    drop(clients);
    let mut late = bench.client();
    late.map(&path, bytes.len());
    late.has(&bytes);
    assert_eq!(late.bytes(), (0, 6 * CHUNK));
}

#[test]
fn processes_that_map_at_the_same_time_share_the_work() {
    let mut bench = Bench::new(0);
    bench.kill();
    let mut command = role("daemon 0", &bench.socket());
    command.env(FILL_WITHIN, "600");
    bench.start_with(command);
    let bytes = file::bytes(0, 16 * CHUNK as usize, 2);
    let path = bench.file("weights", &bytes);
    let (mut clients, gate): (Vec<_>, _) = ((0..3).map(|_| bench.client()).collect(), bench.gate());
    // Each has four chunks to fill, and the one that is ready first fills the last four.
    clients.iter_mut().for_each(|client| client.hold(&gate, &path, 0, bytes.len() as u64));
    std::fs::remove_file(gate).unwrap();
    clients.iter_mut().for_each(|client| assert_eq!(client.answer(), bytes.len().to_string()));
    let counts: Vec<_> = clients.iter_mut().map(|client| client.bytes().0).collect();
    assert_eq!(counts.iter().sum::<u64>(), bytes.len() as u64, "each byte was read once");
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    clients.iter_mut().for_each(|client| client.has(&bytes));
    assert_eq!(bench.status().bytes, bytes.len() as u64);
}

#[test]
fn others_take_over_from_a_client_that_is_killed_while_it_fills() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 8 * CHUNK as usize, 3);
    let path = bench.file("weights", &bytes);
    let (mut dying, mut waiting) = (bench.client(), bench.client());
    assert_eq!(waiting.ask(&format!("map {} 0 {}", path.display(), bytes.len())), "ok");
    dying.hold(&bench.gate(), &path, 0, bytes.len() as u64);
    // Fills the other half, and then waits for the first.
    waiting.order("acquire");
    eventually("the other half is filled", || bench.status().bytes >= bytes.len() as u64 / 2);
    dying.kill();
    assert_eq!(waiting.answer(), bytes.len().to_string());
    waiting.has(&bytes);
    assert_eq!(waiting.bytes(), (bytes.len() as u64, 0));
}

#[test]
fn others_take_over_from_a_client_that_is_stopped_and_it_uses_their_chunks() {
    let mut bench = Bench::new(0);
    bench.kill();
    let mut command = role("daemon 0", &bench.socket());
    command.env(FILL_WITHIN, "1");
    bench.start_with(command);
    let bytes = file::bytes(0, 4 * CHUNK as usize, 14);
    let path = bench.file("weights", &bytes);
    let (mut stopped, mut waiting) = (bench.client(), bench.client());
    let gate = bench.gate();
    stopped.hold(&gate, &path, 0, bytes.len() as u64);
    stop_process(stopped.child.id());
    waiting.map(&path, bytes.len());
    waiting.has(&bytes);
    assert_eq!(waiting.bytes(), (bytes.len() as u64, 0));
    std::fs::remove_file(gate).unwrap();
    continue_process(stopped.child.id());
    assert_eq!(stopped.answer(), bytes.len().to_string());
    stopped.has(&bytes);
    assert_eq!(stopped.bytes().1, bytes.len() as u64);
    assert_eq!(bench.status().bytes, bytes.len() as u64);
}

/// Each takes longer than a client may: the first to come is taken, the slowest too. Else they would fill for each
/// other for ever.
#[test]
fn clients_that_all_fill_too_slowly_finish() {
    let mut bench = Bench::new(0);
    bench.kill();
    let mut command = role("daemon 0", &bench.socket());
    command.env(FILL_WITHIN, "1");
    bench.start_with(command);
    let bytes = file::bytes(0, 3 * CHUNK as usize, 15);
    let path = bench.file("weights", &bytes);
    let mut clients = [bench.client(), bench.client()];
    for client in &mut clients {
        assert_eq!(client.ask("slow 700"), "ok");
        assert_eq!(client.ask(&format!("map {} 0 {}", path.display(), bytes.len())), "ok");
        client.order("acquire");
    }
    for client in &mut clients {
        assert_eq!(client.answer(), bytes.len().to_string());
        client.has(&bytes);
        assert!(client.bytes().0 <= 2 * bytes.len() as u64);
    }
    assert_eq!(bench.status().bytes, bytes.len() as u64);
}

#[test]
fn writer_does_not_wait_and_later_acquires_see_what_it_wrote() {
    let bench = Bench::new(0);
    let old = file::bytes(0, 3 * CHUNK as usize, 4);
    let path = bench.file("weights", &old);
    let (mut one, mut two) = (bench.client(), bench.client());
    one.map(&path, old.len());
    two.map(&path, old.len());
    let mut writer = OpenOptions::new().write(true).open(&path).unwrap();
    let mut new = file::bytes(0, 3 * CHUNK as usize, 5);
    writer.write_all(&new).unwrap();
    let refused = one.ask("acquire");
    assert!(refused.starts_with(&format!("error {} ", Errno::TXTBSY.raw_os_error())), "{refused}");
    one.has(&old);
    assert_eq!(bench.status().bytes, 0, "old chunks are dropped");
    drop(writer);
    wait_unwritten(&path);
    for client in [&mut one, &mut two] {
        assert_eq!(client.ask("acquire"), new.len().to_string());
        client.has(&new);
    }
    assert_eq!(bench.status().bytes, 3 * CHUNK);
    // Shorter, then longer than the map.
    new.truncate(CHUNK as usize + 10);
    write(&path, &new);
    assert_eq!(one.ask("acquire"), new.len().to_string());
    let mut padded = new.clone();
    padded.resize(old.len(), 0);
    one.has(&padded);
    let longer = file::bytes(0, 4 * CHUNK as usize, 6);
    write(&path, &longer);
    assert_eq!(one.ask("acquire"), old.len().to_string());
    one.has(&longer[..old.len()]);
    two.has(&file::bytes(0, 3 * CHUNK as usize, 5));
    // Breaks no lease.
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC;
    drop(rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap());
    wait_unwritten(&path);
    assert_eq!(one.ask("acquire"), "0");
    one.has(&vec![0; old.len()]);
}

#[test]
fn chunks_that_are_filled_while_a_writer_comes_do_not_count() {
    let bench = Bench::new(0);
    let old = file::bytes(0, 2 * CHUNK as usize, 7);
    let path = bench.file("weights", &old);
    let mut client = bench.client();
    let gate = bench.gate();
    client.hold(&gate, &path, 0, old.len() as u64);
    let new = file::bytes(0, 2 * CHUNK as usize, 8);
    let writer = OpenOptions::new().write(true).open(&path).unwrap();
    writer.write_all_at(&new, 0).unwrap();
    drop(writer);
    wait_unwritten(&path);
    std::fs::remove_file(gate).unwrap();
    assert_eq!(client.answer(), new.len().to_string());
    client.has(&new);
}

/// Leases are granted on it to root, its owner; its size is not that of its bytes.
#[test]
fn file_that_ends_before_its_size_is_refused() {
    let path = Path::new("/sys/kernel/mm/transparent_hugepage/enabled");
    if !rustix::process::geteuid().is_root() || !std::fs::metadata(path).is_ok_and(|file| file.len() == 4096) {
        println!("skipped: not root, or {} is not there", path.display());
        return;
    }
    let bench = Bench::new(0);
    let mut client = bench.client();
    assert_eq!(client.ask(&format!("map {} 0 4096", path.display())), "ok");
    let refused = client.ask("acquire");
    assert!(refused.starts_with(&format!("error {} ", Errno::IO.raw_os_error())), "{refused}");
}

#[test]
fn map_survives_its_daemon_and_uses_the_next_one() {
    let mut bench = Bench::new(0);
    let bytes = file::bytes(0, 2 * CHUNK as usize + 5, 9);
    let path = bench.file("weights", &bytes);
    let mut client = bench.client();
    client.map(&path, bytes.len());
    bench.kill();
    client.has(&bytes);
    let refused = client.ask("acquire");
    assert!(refused.starts_with(&format!("error {} ", Errno::IO.raw_os_error())), "{refused}");
    assert!(refused.contains("spinio gaia serve"), "{refused}");
    let new = file::bytes(0, 2 * CHUNK as usize + 5, 10);
    write(&path, &new);
    client.has(&bytes);
    bench.start(0);
    assert_eq!(client.ask("acquire"), new.len().to_string());
    client.has(&new);
    assert!(spinio_gaiad::stop_daemon(&bench.socket()).unwrap());
    assert_eq!(query_daemon(&bench.socket()).unwrap(), None);
    let refused = bench.client().ask(&format!("map {} 0 4096", path.display()));
    assert!(refused.starts_with(&format!("error {} ", Errno::NOTSUP.raw_os_error())), "{refused}");
}

#[test]
fn part_of_a_file_is_mapped_from_any_page() {
    let bench = Bench::new(0);
    let bytes = file::bytes(0, 3 * CHUNK as usize, 11);
    let path = bench.file("weights", &bytes);
    let mut client = bench.client();
    let (offset, len) = (CHUNK as usize - 4096, 8192);
    assert_eq!(client.ask(&format!("map {} {offset} {len}", path.display())), "ok");
    assert_eq!(client.ask("acquire"), len.to_string());
    client.has(&bytes[offset..offset + len]);
    assert_eq!(bench.status().bytes, 2 * CHUNK, "only the chunks of the range");
    // Past the end of the file: zeros.
    let (offset, len) = (3 * CHUNK as usize - 4096, 2 * CHUNK as usize);
    assert_eq!(client.ask(&format!("map {} {offset} {len}", path.display())), "ok");
    assert_eq!(client.ask("acquire"), "4096");
    let mut wanted = bytes[offset..].to_vec();
    wanted.resize(len, 0);
    client.has(&wanted);
    assert!(client.ask(&format!("map {} 5 10", path.display())).starts_with("error 22 "));
}

#[test]
fn users_share_nothing() {
    if !rustix::process::geteuid().is_root() {
        return eprintln!("skipped: not root");
    }
    let bench = Bench::new(0);
    std::fs::set_permissions(bench.dir.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let bytes = file::bytes(0, CHUNK as usize, 12);
    let path = bench.file("weights", &bytes);
    let mut own = bench.client();
    own.map(&path, bytes.len());
    let exe = bench.dir.path().join("client");
    std::fs::copy("/proc/self/exe", &exe).unwrap();
    let mut command = Command::new(&exe);
    command.args(["--exact", "other_process", "--nocapture", "-q"]).current_dir("/").uid(65534).gid(65534);
    command.env(ROLE, "client").env(SOCKET, bench.socket()).stdout(Stdio::piped());
    let mut other = Client::start(command);
    other.map(&path, bytes.len());
    other.has(&bytes);
    assert_eq!(other.bytes(), (bytes.len() as u64, 0), "it has read the file itself");
    let users: Vec<_> = bench.status().files.iter().map(|file| (file.user, file.bytes)).collect();
    assert_eq!(users, [(0, CHUNK), (65534, CHUNK)]);
    // What it may see, and not do.
    let mut command = Command::new(&exe);
    command.args(["--exact", "other_process", "--nocapture", "-q"]).current_dir("/").uid(65534).gid(65534);
    command.env(ROLE, "question").env(SOCKET, bench.socket());
    assert!(command.status().unwrap().success());
    own.has(&bytes);
    assert_eq!(bench.status().maps, 2);
}

#[test]
fn garbage_harms_only_its_sender() {
    use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
    let bench = Bench::new(0);
    let bytes = file::bytes(0, CHUNK as usize, 13);
    let path = bench.file("weights", &bytes);
    let mut client = bench.client();
    client.map(&path, bytes.len());
    let address = SocketAddrUnix::new(bench.socket()).unwrap();
    for n in 0..200u64 {
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        let mut garbage = file::bytes(0, (n as usize * 7) % 200, n as u8);
        if n % 2 == 0 && garbage.len() > 8 {
            // A header that fits.
            garbage[..8].copy_from_slice(&[
                [0x21, 0x22, 0x23, 0x24, 0x28, 0xa2][(n % 6) as usize],
                0,
                1,
                0,
                (n % 3) as u8,
                0,
                0,
                0,
            ]);
            garbage.resize(64, 0);
        }
        let _ = rustix::net::send(&socket, &garbage, SendFlags::NOSIGNAL);
    }

    {
        assert_eq!(client.ask("acquire"), bytes.len().to_string());
    }
    client.has(&bytes);
}
