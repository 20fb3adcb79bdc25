//! The proxy: a thread that makes the system calls of a net's sockets.
//!
//! ```text
//!   pass:  calls of the program ─> up to 64 doorbells ─> sockets with something to do, up to 256 KiB each
//!                                         (doorbells.rs)     │   (stream.rs; I/O threads: stream_io.rs)
//!          each millisecond: what waits for room or time  <──┘
//!          events of the network, waiting as long as pace.rs allows
//! ```
//!
//! Where many streams have something to do, I/O threads make some of the system calls ([`spinio_host::io_threads`]); all that is
//! decided about sockets is decided here.
//!
//! It has a descriptor table of its own, which it shares with the workers that open, read and send files (files.rs,
//! sendfile.rs). It calls no device, reads no file and waits for nothing but the network, so one
//! socket or one kernel does not hold up another. Every word of a kernel is loaded once and checked; one that is wrong
//! resets its connection.

mod accept;
mod announced;
mod announcement;
mod caller;
mod channels;
mod closed;
mod connect;
mod control;
mod datagram;
mod device_memory;
mod doorbells;
mod events;
mod fault;
mod file_table;
mod files;
mod granule_ends;
mod handover;
mod imports;
mod index_queue;
mod lifetime;
mod linger;
mod loopback;
mod options;
mod pace;
mod publish;
mod publisher;
mod rings;
mod seen_wait;
mod sendfile;
mod sets;
mod shared;
mod sockets;
mod stream;
mod stream_io;
mod time_limits;
mod transfers;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::time::Duration;

use spinio_host::io_threads::IoThreads;
use spinio_ring::doorbell::Consumer;
use spinio_ring::layout::{Descriptor, Sizes, header};
use spinio_ring::mailbox::{Reply, Request};
use spinio_ring::{Position, Word};
use spinio_sys::Errno;
use spinio_sys::linux;
use spinio_sys::linux::socket::{self, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP, EpollEvent};

use self::announcement::Announced;
use self::caller::Caller;
use self::channels::{Shared, is_shared_event};
use self::fault::Faults;
pub(crate) use self::file_table::FileSetup;
use self::file_table::Files;
use self::imports::Imports;
use self::index_queue::IndexQueue;
pub(crate) use self::linger::LingerLimits;
pub(crate) use self::pace::MANY_PROCESSORS;
use self::pace::Pace;
use self::publisher::Publisher;
use self::rings::Rings;
use self::sets::Sets;
use self::sockets::Sockets;
use self::stream_io::StreamIo;
use crate::counters::Counters;
use crate::importer::{self, Answer};
use crate::meet::Pairs;
use crate::memory::Memory;
use crate::socket_fd::{Closer, Place, SocketFd};

/// Between two looks at what waits for room or time.
const TICK_NS: u64 = 1_000_000;

/// How long the end of a net waits until foreign descriptors are closed.
const CLOSE_PATIENCE: Duration = Duration::from_millis(100);

/// The program's calls.
pub(crate) enum Command {
    /// A call that kernels can make too.
    Call(Request, SyncSender<Reply>),
    /// The descriptor is used no more.
    Close(Descriptor),
    /// A socket of the program becomes one of kernels.
    Adopt(Place, SyncSender<Result<Descriptor, Errno>>),
    /// And back, with the bytes that no kernel has received, for which there is so much room.
    Release(Descriptor, Place, usize, SyncSender<Result<Vec<u8>, Errno>>),
    /// All calls fail from now on.
    Stop(SyncSender<()>),
    /// Memory of connections to other nets is ready, or cannot be.
    Import(Answer),
    /// The device has failed: no kernel will go on.
    Fail,
    /// The proxy ends.
    End,
}

/// What the proxy is made of.
pub(crate) struct Setup {
    pub(crate) memory: Arc<Memory>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) commands: Receiver<Command>,
    pub(crate) sizes: Sizes,
    pub(crate) ring_pairs: u32,
    pub(crate) ring_bytes: u64,
    /// Of rings in device memory that another device maps.
    pub(crate) peer_ring_bytes: u64,
    pub(crate) inner_pairs: u32,
    /// Descriptors of the granules, in the table of the thread that makes the net.
    pub(crate) granules: Vec<Place>,
    /// Why there are not more of them.
    pub(crate) granule_failed: Option<Errno>,
    /// Registers those of other nets.
    pub(crate) importer: Option<Sender<importer::Request>>,
    /// Device memory can be mapped for connections to other devices.
    pub(crate) has_window: bool,
    pub(crate) first: Position,
    /// The one before the first one of its descriptors.
    pub(crate) epoch: u32,
    pub(crate) fault_seed: u32,
    /// Name of the device, for the tools.
    pub(crate) device: String,
    pub(crate) longest_sleep_ns: u64,
    pub(crate) linger: LingerLimits,
    pub(crate) processors: usize,
    /// Threads that make system calls of streams, the proxy included.
    pub(crate) threads: usize,
    pub(crate) files: Option<FileSetup>,
}

pub(crate) struct Proxy {
    memory: Arc<Memory>,
    counters: Arc<Counters>,
    commands: Receiver<Command>,
    epoll: SocketFd,
    closer: Closer,
    /// Disconnected once all foreign descriptors are closed.
    closed: Option<Receiver<()>>,
    doorbells: Consumer,
    sockets: Sockets,
    first: Position,
    sets: Sets,
    /// Pairs of rings for connections inside the net, and the sockets that may become ends of one.
    pairs: Pairs,
    /// Connections over shared memory.
    shared: Shared,
    /// Sockets that are connected to other nets or about to be, and the granules that these have offered.
    announced: Vec<Option<Announced>>,
    imports: Imports,
    /// Device memory of connections to other nets.
    rings: Rings,
    /// Armed sockets over shared memory that no doorbell tells of.
    looked_at: IndexQueue,
    listeners: IndexQueue,
    clients: IndexQueue,
    /// Sockets with calls of accept that have a time limit, and when the first one has to end, at the earliest.
    limited: IndexQueue,
    next_deadline: u64,
    faults: Faults,
    /// The files of kernels, if they may open some.
    files: Option<Files>,
    publisher: Publisher,
    /// Mailboxes with a call that waits.
    waiting: Vec<bool>,
    /// Sockets with something to do.
    hot: IndexQueue,
    io_threads: IoThreads<StreamIo>,
    /// Empty between two passes; it keeps its memory.
    stream_ios: Vec<StreamIo>,
    hot_streams: Vec<u32>,
    /// Sockets that wait for room or time: listeners without room, full rings, refused connects, closed ones with datagrams.
    later: IndexQueue,
    /// Closed sockets whose peers have not taken everything, or had not; the one that was closed first is the first.
    closing: IndexQueue,
    /// Sockets with a sendfile that was cancelled while a worker sends.
    cancelled: IndexQueue,
    linger: LingerLimits,
    last_tick: u64,
    last_search: u64,
    /// Since when the doorbell queue is blocked.
    blocked: Option<u64>,
    pace: Pace,
    stopped: bool,
    /// What calls of the program fail with once it is stopped.
    refusal: Errno,
    /// Since when it ends.
    ending: Option<u64>,
}

impl Proxy {
    /// On the proxy's thread, whose descriptor table it uses.
    pub(crate) fn new(setup: Setup) -> Result<Proxy, Errno> {
        let sizes = setup.sizes;
        let rings = sizes.rings() as u64;
        let epoll = SocketFd(socket::epoll_create()?);
        let for_rings = setup.importer.clone().filter(|_| setup.has_window);
        let files = setup.files.map(|files| Files::new(files, epoll.0, setup.epoch)).transpose()?;
        let (closer, closed) = Closer::start()?;
        let (mut granules, mut granule_failed) = (Vec::new(), setup.granule_failed);
        for file in setup.granules {
            match file.duplicate() {
                Ok(file) => granules.push(file),
                Err(errno) => {
                    granule_failed = Some(errno);
                    break;
                }
            }
        }
        Ok(Proxy {
            epoll,
            closer,
            closed: Some(closed),
            files,
            doorbells: Consumer::default(),
            sockets: Sockets::new(sizes.sockets, rings, setup.ring_pairs, setup.ring_bytes, setup.first, setup.epoch),
            first: setup.first,
            sets: Sets::default(),
            pairs: Pairs::new(setup.inner_pairs, setup.ring_bytes),
            shared: Shared::new(granules, granule_failed, setup.ring_bytes, setup.peer_ring_bytes),
            announced: Vec::new(),
            imports: Imports::new(setup.importer),
            rings: Rings::new(for_rings, linux::monotonic_ns()),
            looked_at: IndexQueue::default(),
            listeners: IndexQueue::default(),
            clients: IndexQueue::default(),
            limited: IndexQueue::default(),
            next_deadline: u64::MAX,
            faults: Faults::new(setup.fault_seed),
            publisher: Publisher::new(setup.device),
            waiting: vec![false; sizes.mailboxes as usize],
            hot: IndexQueue::default(),
            io_threads: IoThreads::new("spinio-net-io", setup.threads.saturating_sub(1), {
                let memory = Arc::clone(&setup.memory);
                move |io: &mut StreamIo| io.run(&memory)
            }),
            stream_ios: Vec::new(),
            hot_streams: Vec::new(),
            later: IndexQueue::default(),
            closing: IndexQueue::default(),
            cancelled: IndexQueue::default(),
            linger: setup.linger,
            last_tick: 0,
            last_search: 0,
            blocked: None,
            pace: Pace::new(setup.processors, setup.longest_sleep_ns),
            stopped: false,
            refusal: Errno::SHUTDOWN,
            ending: None,
            memory: setup.memory,
            counters: setup.counters,
            commands: setup.commands,
        })
    }

    /// Until the net is closed.
    pub(crate) fn run(mut self) {
        loop {
            let now = linux::monotonic_ns();
            let mut worked = self.take_commands(now);
            worked |= self.take_doorbells(now);
            worked |= self.take_results(now);
            worked |= self.pump_hot(now);
            worked |= self.end_late_calls(now);
            worked |= self.look_at_granules();
            self.notify_held();
            if now.saturating_sub(self.last_tick) >= TICK_NS {
                self.last_tick = now;
                self.tick(now);
            }
            if self.is_done(now) {
                break;
            }
            if worked {
                self.pace.worked(now);
            }
            // The wait of this call is the only one of the proxy.
            let sleep = if self.hot.is_empty() { self.pace.sleep(now) } else { 0 };
            self.take_events(sleep.min(self.next_deadline.saturating_sub(now)));
        }
        let closed = self.closed.take();
        drop(self);
        // Those whose close waits are left to their thread.
        let _ = closed.map(|closed| closed.recv_timeout(CLOSE_PATIENCE));
    }

    fn is_done(&self, now: u64) -> bool {
        let Some(since) = self.ending else { return false };
        let took = now.saturating_sub(since);
        let working = self.files.as_ref().is_some_and(Files::is_working) && took <= self.linger.ending;
        let sent = self.hot.is_empty() && self.later.is_empty() && self.closing.is_empty();
        // A peer that takes a little now and then does not keep the net.
        sent && !working || took > self.linger.ending.max(self.linger.open)
    }

    fn take_commands(&mut self, now: u64) -> bool {
        let mut worked = false;
        while let Ok(command) = self.commands.try_recv() {
            worked = true;
            match command {
                Command::Call(request, sender) => self.call(request, Caller::Host(sender), now),
                Command::Close(descriptor) => {
                    self.take_all_doorbells(now);
                    self.close(descriptor, now);
                }
                Command::Adopt(place, sender) => drop(sender.try_send(self.adopt(place, now))),
                Command::Release(descriptor, passage, room, sender) => {
                    let _ = sender.try_send(self.release(descriptor, passage, room, now));
                }
                Command::Stop(sender) => {
                    self.end_calls(Errno::SHUTDOWN);
                    let _ = sender.try_send(());
                }
                Command::Import(Answer::Registered(granule, address)) => self.imported(granule, address, now),
                Command::Import(Answer::Made(place, fd)) => {
                    self.made(place, fd.and_then(|fd| fd.duplicate().ok()), now);
                }
                Command::Import(Answer::Wants(place, passage)) => {
                    self.rings.give_far(place, passage.duplicate().ok());
                }
                Command::Import(Answer::Mapped(place, mapped)) => self.mapped(place, mapped, now),
                Command::Fail => self.fail(),
                Command::End => {
                    // What kernels have sent before they ended is sent.
                    self.take_all_doorbells(now);
                    self.end_calls(Errno::SHUTDOWN);
                    self.close_all(now);
                }
            }
        }
        worked
    }

    /// The socket has something to do.
    fn heat(&mut self, index: u32) {
        if self.sockets.at(index).is_some() {
            self.hot.push(index);
        }
    }

    /// The socket has something to do later, whose time no event tells.
    fn postpone(&mut self, index: u32) {
        self.later.push(index);
    }

    fn pump_hot(&mut self, now: u64) -> bool {
        let mut worked = false;
        let mut streams = std::mem::take(&mut self.hot_streams);
        for _ in 0..self.hot.len() {
            let Some(index) = self.hot.pop() else { break };
            match self.sockets.at(index) {
                Some(socket) if socket.is_stream() => streams.push(index),
                _ => worked |= self.pump(index, now),
            }
        }
        worked |= self.pump_streams(&streams, now);
        streams.clear();
        self.hot_streams = streams;
        worked
    }

    /// What waits for room or time.
    fn tick(&mut self, now: u64) {
        self.count_processor_time();
        self.publish(now);
        self.retry_doors(now);
        self.end_late_channels(now);
        self.end_late_announced(now);
        self.end_cancelled(now);
        if self.ending.is_some() {
            self.end_closed(now);
        }
        for index in self.later.take_all() {
            if self.has_lingered(index, now) {
                self.abandon(index);
            } else if self.sockets.at(index).is_some() {
                self.pump(index, now);
            }
        }
    }

    fn count_processor_time(&self) {
        self.counters.proxy_ns.set(linux::thread_cpu_time().as_nanos() as u64 + self.io_threads.cpu_ns());
    }

    fn take_events(&mut self, sleep_ns: u64) {
        let mut events = [EpollEvent::default(); 64];
        let count = socket::epoll_wait(self.epoll.0, &mut events, sleep_ns).unwrap_or(0);
        for event in &events[..count] {
            let (events, data) = (event.events, event.data);
            if is_shared_event(data) {
                self.take_shared_event(data, linux::monotonic_ns());
                continue;
            }
            let descriptor = Descriptor { index: data as u32, epoch: (data >> 32) as u32 };
            let Some(socket) = self.sockets.get(descriptor) else { continue };
            socket.readable |= events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR) != 0;
            socket.writable |= events & (EPOLLOUT | EPOLLHUP | EPOLLERR) != 0;
            self.heat(descriptor.index);
        }
        if count > 0 {
            self.pace.worked(linux::monotonic_ns());
        }
    }

    /// The device has failed: peers learn that no kernel will answer, and new ones are refused.
    fn fail(&mut self) {
        self.refusal = Errno::NODEV;
        self.end_calls(Errno::NODEV);
        for index in self.sockets.indices() {
            self.abandon(index);
        }
    }

    /// All calls of kernels and of the program fail from now on.
    fn end_calls(&mut self, errno: Errno) {
        if std::mem::replace(&mut self.stopped, true) {
            return;
        }
        for index in self.sockets.indices() {
            self.set_error(index, errno.raw_os_error() as u16);
            self.cancel_calls(index, errno);
        }
        self.cancel_file_calls(errno);
        self.memory.header()[header::STOP].store_release(1);
    }
}

impl Drop for Proxy {
    /// Also when it panics: kernels must not wait for it.
    fn drop(&mut self) {
        for index in self.sockets.indices() {
            self.end_with_proxy(index);
        }
        self.count_processor_time();
        self.memory.header()[header::STOP].store_release(2);
    }
}
