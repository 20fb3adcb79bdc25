//! A net as the program sees it: open, calls on behalf of kernels, stop, close.
//!
//! Calls of the program go to the proxy through a channel, since only its thread has the descriptors. The proxy looks at it
//! in each pass, so a call takes up to its longest sleep.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use spinio_device::Device;
use spinio_host::pool::{NoIdleTask, WorkerPool};
use spinio_host::processors;
use spinio_host::settings::Settings;
use spinio_host::syscalls::LinuxSyscalls;
use spinio_ring::Position;
use spinio_ring::granule;
use spinio_ring::layout::{Descriptor, Handle, MAX_FILES, MAX_SOCKETS, PEER_RING_LOG2, QUICK_MAILBOXES, Sizes};
use spinio_ring::mailbox::{Address, Call, Reply, Request};
use spinio_sys::Errno;
use spinio_sys::linux::socket_move::{Passage, receive_descriptor};
use spinio_sys::linux::{self, FdTableRoot};

use crate::counters::Counters;
use crate::importer;
use crate::memory::{Memory, Plan};
use crate::proxy::{Command, FileSetup, LingerLimits, MANY_PROCESSORS, Proxy, Setup};
use crate::socket_fd::Place;
use crate::watch::{Failure, Watcher};
use crate::{Error, NetAddress, Result, Stats};

const SOCK_STREAM: u32 = 1;
const SMALLEST_RING: u64 = 4096;
const LARGEST_RING: u64 = 4 << 20;
/// Mailboxes for calls that wait: as many blocks can wait in accept and connect at a time.
const WAITING_MAILBOXES: u32 = 2048;
/// Bytes of device memory for the rings of connections inside a net.
const INNER_BYTES: u64 = 32 << 20;
/// Connections over memory that a program maps too, by default: at most this many, a quarter of all, and so many bytes.
const MOST_GRANULES: u32 = 32;
const GRANULES_BYTES: u64 = 16 << 20;
/// The most that may be asked for: the proxy has six descriptors for each.
const MOST_SHARED: u32 = 512;

/// Threads that wait for disks, started as calls come.
const FILE_WORKERS: usize = 8;
const DEFAULT_FILES: u32 = 64;

/// I/O threads, the proxy included: by default at most, and at all.
const DEFAULT_THREADS: usize = 4;
const MOST_THREADS: u32 = 64;

/// How long a closed socket is kept whose peer takes nothing: while the net is open, and then.
const LINGER_MS: u32 = 30_000;
const LAST_LINGER_MS: u32 = 1000;

/// How long a release waits for the network to take what kernels have sent, and how long between two looks.
const RELEASE_NS: u64 = 1_000_000_000;
const RELEASE_PAUSE: Duration = Duration::from_millis(2);

/// What a net is made for; 0 is the default.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Descriptors at a time: rounded up to a power of two, at most 65536. Default: 1024.
    pub sockets: u32,
    /// Connections at a time. Default: 256.
    pub connections: u32,
    /// Bytes of a ring, one for each direction of a connection: a power of two from 4096 to 4 MiB. Default: 65536, and 1 MiB, which is
    /// the most there, in device memory that another device maps.
    pub ring_bytes: u32,
    /// The longest sleep of the proxy in microseconds. Default: 5000.
    pub idle_us: u32,
    /// The position at which streams begin: for tests.
    pub first_position: u64,
    /// Faults of the network, from this seed: for tests. 0: none.
    pub fault_seed: u32,
    /// Connections whose both ends are in this net, or one of which is a program of this machine, go through Linux too.
    pub no_upgrade: bool,
    /// Connections at a time that others make to this net, over memory that both map: at most 512. Default: a quarter of all, at most 32, and 16 MiB.
    pub shared_connections: u32,
    /// Threads that make system calls of streams, at most 64. Default: `SPINIO_NET_THREADS`.
    pub threads: u32,
    /// A closed socket whose peer has taken nothing for so many milliseconds is given up if another one needs its rings. Default:
    /// 30000.
    pub linger_ms: u32,
    /// The same of all, once the net is closed. Default: 1000.
    pub last_linger_ms: u32,
    /// The files that kernels may open; without them, none.
    pub files: Option<FileOptions>,
}

/// Which files kernels may open.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    /// They are below this directory; `/`: all that the process may open.
    pub root: CString,
    /// They may also be written, created and cut.
    pub write: bool,
    /// At a time, at most 256. Default: 64.
    pub count: u32,
}

/// A net.
pub struct Net {
    memory: Arc<Memory>,
    counters: Arc<Counters>,
    commands: Sender<Command>,
    /// Disconnected once the proxy has ended.
    ended: std::sync::Mutex<Receiver<()>>,
    handle: Handle,
    failure: Arc<Failure>,
    watcher: Watcher,
    /// Disconnected once no granule of another net is registered any more.
    imports_ended: Option<std::sync::Mutex<Receiver<()>>>,
    pid: u32,
}

impl Net {
    /// Makes the memory and starts the proxy. No kernel of the net runs yet.
    pub fn open(device: &'static dyn Device, options: Options) -> Result<Net> {
        let or = |value: u32, default: u32| if value == 0 { default } else { value };
        let ring_bytes = u64::from(or(options.ring_bytes, 64 << 10));
        if !ring_bytes.is_power_of_two() || !(SMALLEST_RING..=LARGEST_RING).contains(&ring_bytes) {
            let sentence = format!("A ring of {ring_bytes} bytes: it has to be a power of two from 4 KiB to 4 MiB");
            return Err(Error::new(Errno::INVAL, sentence));
        }
        let (sockets, ring_pairs) = (or(options.sockets, 1024), or(options.connections, 256));
        if sockets > MAX_SOCKETS || ring_pairs > MAX_SOCKETS {
            let sentence = format!("{} sockets: a net has at most {MAX_SOCKETS}", sockets.max(ring_pairs));
            return Err(Error::new(Errno::INVAL, sentence));
        }
        if options.shared_connections > MOST_SHARED {
            let sentence =
                format!("{} shared connections: a net has at most {MOST_SHARED}", options.shared_connections);
            return Err(Error::new(Errno::INVAL, sentence));
        }
        if options.threads > MOST_THREADS {
            let sentence = format!("{} threads: a net has at most {MOST_THREADS}", options.threads);
            return Err(Error::new(Errno::INVAL, sentence));
        }
        let sizes = Sizes { sockets: sockets.next_power_of_two(), mailboxes: QUICK_MAILBOXES + WAITING_MAILBOXES };
        let files = options.files;
        if let Some(files) = &files
            && files.count > MAX_FILES
        {
            let sentence = format!("{} files: kernels of a net have at most {MAX_FILES}", files.count);
            return Err(Error::new(Errno::INVAL, sentence));
        }
        if !options.first_position.is_multiple_of(8) {
            let sentence = format!("Streams begin at {}: it has to be a multiple of 8", options.first_position);
            return Err(Error::new(Errno::INVAL, sentence));
        }
        let first = Position::of(options.first_position);
        // A connection inside the net has two sockets.
        let inner_pairs = ring_pairs.div_ceil(2).min((INNER_BYTES / (2 * ring_bytes)) as u32);
        let most = (GRANULES_BYTES / granule::bytes(ring_bytes)) as u32;
        let granules =
            or(options.shared_connections, ring_pairs.div_ceil(4).min(MOST_GRANULES).min(most)).min(ring_pairs);
        let upgrades = !options.no_upgrade && Settings::of_process().net_upgrade;
        let (inner_pairs, granules) = if upgrades { (inner_pairs, granules) } else { (0, 0) };
        let has_files = files.is_some();
        let plan = Plan { sizes, ring_bytes, ring_pairs, inner_pairs, granules, has_files, first };
        let (memory, granules) = Memory::new(device, plan)?;
        let memory = Arc::new(memory);
        let counters = Arc::new(Counters::default());
        let (commands, receiver) = mpsc::channel();
        let answers = commands.clone();
        // It fails, once the proxy has ended.
        let tell = move |answer| drop(answers.send(Command::Import(answer)));
        let importer = device.shared_memory().filter(|_| upgrades);
        let importer = importer.and_then(|device| importer::start(device, memory.window(), tell));
        let (importer, imports_ended) = importer.unzip();
        let processors = processors::usable();
        let setup = Setup {
            memory: Arc::clone(&memory),
            counters: Arc::clone(&counters),
            commands: receiver,
            sizes,
            ring_pairs,
            ring_bytes,
            peer_ring_bytes: u64::from(or(options.ring_bytes, u32::MAX)).min(1 << PEER_RING_LOG2.end()),
            inner_pairs,
            importer,
            has_window: memory.window().is_some(),
            granules: granules.files.iter().map(|file| Place { tid: linux::gettid(), fd: file.0 }).collect(),
            granule_failed: granules.failed,
            first,
            epoch: next_first_epoch(),
            fault_seed: options.fault_seed,
            device: device.id().to_string(),
            longest_sleep_ns: u64::from(or(options.idle_us, 5000)) * 1000,
            linger: LingerLimits {
                open: u64::from(or(options.linger_ms, LINGER_MS)) * 1_000_000,
                ending: u64::from(or(options.last_linger_ms, LAST_LINGER_MS)) * 1_000_000,
            },
            processors,
            threads: io_threads(options.threads, processors),
            files: None,
        };
        let started = memory.handle().and_then(|handle| Ok((handle, start(setup, files)?)));
        let (handle, ended) = started.inspect_err(|_| {
            let _ = memory.free();
        })?;
        let failure = Arc::new(Failure::new());
        let watcher = Watcher::start(device, Arc::clone(&failure), commands.clone());
        let (ended, pid) = (std::sync::Mutex::new(ended), linux::getpid());
        let imports_ended = imports_ended.map(std::sync::Mutex::new);
        Ok(Net { memory, counters, commands, ended, handle, failure, watcher, imports_ended, pid })
    }

    /// The argument of kernels.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// A listening socket, for kernels to accept on.
    pub fn listen(&self, address: &NetAddress, backlog: u32) -> Result<i32> {
        let socket = self.socket(address)?;
        let done = self
            .call(Call::Bind, socket, 0, address.bytes(), &format!("bind to {address}"))
            .and_then(|_| self.call(Call::Listen, socket, backlog, &[], &format!("listen on {address}")));
        self.close_unless(done.map(drop), socket)
    }

    /// A connected socket, for kernels.
    pub fn connect(&self, address: &NetAddress) -> Result<i32> {
        let socket = self.socket(address)?;
        let done = self.call(Call::Connect, socket, 0, address.bytes(), &format!("connect to {address}"));
        self.close_unless(done.map(drop), socket)
    }

    /// Moves a socket of the program to the kernels: its number there. On success the program's descriptor is closed; the
    /// open socket is the proxy's.
    pub fn adopt(&self, fd: linux::Fd) -> Result<i32> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.send(Command::Adopt(Place { tid: linux::gettid(), fd }, sender))?;
        let done = receiver.recv().map_err(|_| ended())?;
        let descriptor = done.map_err(|errno| Error::of(errno, &format!("adopt the descriptor {fd}")))?;
        let _ = linux::close(fd);
        Ok(descriptor.number())
    }

    /// Gives a socket back to the program: a descriptor, and the bytes that arrived and no kernel has received, at most
    /// `room` of them. It waits a second for what kernels have sent and the network has not taken. No kernel may use it.
    pub fn release(&self, socket: i32, room: usize) -> Result<(linux::Fd, Vec<u8>)> {
        let what = |errno| Error::of(errno, &format!("give the socket {socket} back"));
        let mut passage = Passage::new().map_err(what)?;
        let place = Place { tid: linux::gettid(), fd: passage.outer };
        let (begun, descriptor) = (linux::monotonic_ns(), Descriptor::of(socket as u32));
        loop {
            let (sender, receiver) = mpsc::sync_channel(1);
            self.send(Command::Release(descriptor, place, room, sender))?;
            match receiver.recv().map_err(|_| ended())? {
                Ok(unread) => {
                    // The number that the socket gets: there may be no other one.
                    passage.close_outer();
                    return receive_descriptor(passage.inner).map(|fd| (fd, unread)).map_err(what);
                }
                Err(Errno::BUSY) if linux::monotonic_ns() - begun < RELEASE_NS => std::thread::sleep(RELEASE_PAUSE),
                Err(Errno::BUSY) => {
                    let sentence = "The socket has bytes that its peer does not take, or datagrams that no kernel has \
                                    received";
                    return Err(Error::new(Errno::BUSY, sentence));
                }
                Err(Errno::MSGSIZE) => {
                    let sentence = format!("More than {room} bytes have arrived and were not received by a kernel");
                    return Err(Error::new(Errno::MSGSIZE, sentence));
                }
                Err(errno) => return Err(what(errno)),
            }
        }
    }

    /// A new event set, for kernels to wait on: its number. Sets live as long as the net.
    pub fn set(&self) -> Result<i32> {
        Ok(self.call(Call::Set, 0, 0, &[], "make an event set")?.result)
    }

    /// Puts a socket into an event set; without events, takes it out.
    pub fn add(&self, set: i32, socket: i32, events: u16) -> Result<()> {
        let set = u16::try_from(set).map_err(|_| Error::of(Errno::BADF, "find an event set"))?;
        let argument = u32::from(set) << 16 | u32::from(events);
        self.call(Call::Add, socket, argument, &[], "put a socket into an event set").map(drop)
    }

    /// The address to which a socket is bound.
    pub fn address(&self, socket: i32) -> Result<NetAddress> {
        let reply = self.call(Call::SocketName, socket, 0, &[], "find the address of a socket")?;
        let (bytes, len) = reply.address.bytes();
        Ok(NetAddress::of(&bytes[..len]))
    }

    /// Closes a socket that no kernel uses.
    pub fn close_socket(&self, socket: i32) -> Result<()> {
        self.send(Command::Close(Descriptor::of(socket as u32)))
    }

    /// What it has done.
    pub fn stats(&self) -> Stats {
        self.counters.stats()
    }

    /// All calls of kernels fail with ESHUTDOWN from now on, also those that wait.
    pub fn stop(&self) -> Result<()> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.send(Command::Stop(sender))?;
        receiver.recv().map_err(|_| ended())
    }

    /// Stops it, sends what is left, until peers have taken nothing for a second (30 at most), and gives its memory back. No kernel of the net may run.
    pub fn close(self) -> Result<()> {
        self.check_process()?;
        drop(self.watcher);
        // It fails if the proxy has ended before.
        let _ = self.commands.send(Command::End);
        let ended = self.ended.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        // It fails, once the proxy has dropped its end.
        let _ = ended.recv();
        if let Some(ended) = self.imports_ended {
            let _ = ended.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).recv();
        }
        if Arc::strong_count(&self.memory) > 1 {
            // A worker waits for a file system: what it reads goes there.
            return Err(Error::new(
                Errno::BUSY,
                "A file system does not answer a read of a kernel: its memory is kept",
            ));
        }
        self.memory.free()
    }

    fn socket(&self, address: &NetAddress) -> Result<i32> {
        let argument = u32::from(address.family()) << 16 | SOCK_STREAM;
        Ok(self.call(Call::Socket, 0, argument, &[], "make a socket")?.result)
    }

    fn close_unless(&self, done: Result<()>, socket: i32) -> Result<i32> {
        if done.is_err() {
            let _ = self.close_socket(socket);
        }
        done.map(|()| socket)
    }

    fn call(&self, call: Call, socket: i32, argument: u32, address: &[u8], what: &str) -> Result<Reply> {
        let (sender, receiver) = mpsc::sync_channel(1);
        let request = Request {
            call: Ok(call),
            flags: 0,
            number: 0,
            descriptor: socket as u32,
            argument,
            address: Address::new(address),
            time_limit: 0,
        };
        self.send(Command::Call(request, sender))?;
        let reply = receiver.recv().map_err(|_| ended())?;
        match (reply.result, self.failure.get()) {
            (0.., _) => Ok(reply),
            (_, Some(error)) if reply.result == -Errno::NODEV.raw_os_error() => {
                Err(Error::new(Errno::NODEV, format!("Cannot {what}: the device has failed: {error}")))
            }
            _ => Err(Error::of(Errno::from_raw_os_error(-reply.result), what)),
        }
    }

    fn send(&self, command: Command) -> Result<()> {
        self.check_process()?;
        self.commands.send(command).map_err(|_| ended())
    }

    fn check_process(&self) -> Result<()> {
        if linux::getpid() == self.pid {
            return Ok(());
        }
        Err(Error::new(Errno::NODEV, "A forked child does not have the net of its parent"))
    }
}

/// Threads that make system calls of streams: as the options say, or the setting, or by default. Those without work look for
/// some for a while, which needs free processors.
fn io_threads(wanted: u32, processors: usize) -> usize {
    match (wanted as usize, Settings::of_process().net_threads) {
        (0, 0) if processors < MANY_PROCESSORS => 1,
        (0, 0) => (processors / 4).min(DEFAULT_THREADS),
        (0, set) => set,
        (wanted, _) => wanted,
    }
}

/// Epochs of each net of a process begin elsewhere, so that the number of a descriptor is seldom one of another net too.
fn next_first_epoch() -> u32 {
    static NETS: AtomicU32 = AtomicU32::new(0);
    // Far from those of all recent nets: the golden section of all epochs.
    const STEP: u32 = 20_251;
    NETS.fetch_add(1, Relaxed).wrapping_mul(STEP) & 0x7fff
}

fn ended() -> Error {
    Error::new(Errno::SHUTDOWN, "The proxy of the net has ended")
}

/// Starts the proxy; what it returns is disconnected once the proxy has ended.
fn start(mut setup: Setup, files: Option<FileOptions>) -> Result<Receiver<()>> {
    let no_thread = |why: &str| Error::new(Errno::AGAIN, format!("Cannot start the proxy of a net: {why}"));
    let pool = match &files {
        None => None,
        // Shadow workers, whose descriptor table the proxy shares.
        Some(_) => Some(
            WorkerPool::shadow_workers(&LinuxSyscalls, FILE_WORKERS, Duration::ZERO, NoIdleTask)
                .map(Arc::new)
                .ok_or_else(|| no_thread("no workers for files"))?,
        ),
    };
    let root = files.as_ref().map(|files| files.root.to_string_lossy().into_owned());
    setup.files = files.zip(pool.clone()).map(|(files, pool)| FileSetup {
        pool,
        root: files.root,
        write: files.write,
        count: if files.count == 0 { DEFAULT_FILES } else { files.count },
    });
    let (ready, made) = mpsc::sync_channel(1);
    let (alive, ended) = mpsc::sync_channel::<()>(1);
    let body = move || {
        // Dropped last, after the proxy.
        let _alive = alive;
        // Its shortest sleeps are as long as the usual slack.
        linux::set_timer_slack(1000);
        match Proxy::new(setup) {
            Ok(proxy) => {
                let _ = ready.send(Ok(()));
                drop(ready);
                proxy.run();
            }
            Err(errno) => drop(ready.send(Err(errno))),
        }
    };
    let spawned = match pool {
        Some(pool) => pool.spawn_dedicated("spinio-net", body),
        None => FdTableRoot::new()
            .map_err(|e| no_thread(&format!("no descriptor table of its own ({e:?})")))?
            .spawn("spinio-net", body),
    };
    if !spawned {
        return Err(no_thread("no thread"));
    }
    match made.recv() {
        Ok(Ok(())) => Ok(ended),
        Ok(Err(errno)) => {
            let files = root.map_or_else(String::new, |root| format!(" with files below {root}"));
            Err(Error::of(errno, &format!("start the proxy of a net{files}")))
        }
        Err(_) => Err(no_thread("it ended")),
    }
}
