//! Files of kernels: open, pread, pwrite, fstat, close.
//!
//! ```text
//!   kernel ── path, or bytes to write, in a file buffer ── request ──> proxy ── job ──> worker: openat2, pread, pwrite
//!          <── bytes of the file in the buffer ── reply <──────────── proxy <── result ──┘ (same descriptor table)
//! ```
//!
//! A kernel copies between its memory and a buffer in pinned memory by itself, as it does with rings. So no call of a file
//! calls the device: whatever the driver makes wait for a running kernel, no file waits for it. It also reads into any
//! memory that the kernel can store to, shared memory too, and a wrong address is the kernel's fault alone.
//!
//! The proxy only keeps the table of files and hands jobs to workers, which have its descriptor table: the program cannot
//! close these descriptors, and a forked child has none of them. A file system that does not answer holds at most half of
//! the workers.
//!
//! Which files: those below the directory that the program names when it opens the net; without one, none. Regular files
//! only: others may wait without end.
//!
//! Known flaws: a read passes through the page cache and one more copy than the fastest routes of SPIN need. A kernel that
//! ends with an error inside a call keeps its buffer.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use spinio_host::pool::WorkerPool;
use spinio_host::shadow_fd::ShadowFd;
use spinio_host::shares::{OPENED_BY_NAME, ShareKey};
use spinio_ring::layout::{Descriptor, FIRST_FILE, MAX_FILES};
use spinio_ring::mailbox::{Call, Reply, Request};
use spinio_sys::Errno;
use spinio_sys::linux::socket::{self, EPOLLET, EPOLLIN};
use spinio_sys::linux::{self, Fd, FileKind, Resolve};

use super::Proxy;
use super::sockets::{Caller, SocketFd};
use super::transfer::{FileRef, Sent};
use crate::memory::Memory;

/// Tries to open a file of which a lease is being broken, or whose path is being renamed.
const OPEN_ATTEMPTS: u32 = 500;
const ATTEMPT_PAUSE: Duration = Duration::from_millis(2);

/// Which files kernels may open.
pub(crate) struct FileSetup {
    pub(crate) pool: Arc<WorkerPool>,
    /// They are below this directory.
    pub(crate) root: CString,
    /// They may be written and created.
    pub(crate) write: bool,
    /// At a time.
    pub(crate) count: u32,
}

/// What a worker returns.
pub(super) enum Outcome {
    /// The descriptor of a new file, for the place that was kept for it.
    Opened(u32, Result<(Fd, ShareKey), Errno>),
    Done(Reply),
    Sent(Sent),
}

enum Place {
    Free,
    /// A worker opens it.
    Opening,
    Open(FileRef),
}

/// All of them.
pub(super) struct Files {
    pool: Arc<WorkerPool>,
    root: Arc<SocketFd>,
    resolve: Resolve,
    write: bool,
    /// Each with the epoch of its last use.
    places: Vec<(u32, Place)>,
    results: Receiver<(u64, Outcome)>,
    sender: Sender<(u64, Outcome)>,
    /// Wakes the proxy.
    event: Arc<SocketFd>,
    /// Calls that wait for a worker.
    calls: HashMap<u64, Caller>,
    next_call: u64,
    working: usize,
}

impl Files {
    /// On the proxy's thread, whose descriptor table it uses.
    pub(super) fn new(setup: FileSetup, epoll: Fd) -> Result<Files, Errno> {
        let root = SocketFd(linux::open(&setup.root, (linux::O_PATH | linux::O_DIRECTORY) as i32, 0)?);
        let event = SocketFd(socket::event_fd()?);
        // No socket has this descriptor: the event wakes the proxy, which then looks at the results.
        socket::epoll_add(epoll, event.0, EPOLLIN | EPOLLET, u64::MAX)?;
        let (sender, results) = mpsc::channel();
        Ok(Files {
            pool: setup.pool,
            root: Arc::new(root),
            resolve: if setup.root.as_bytes() == b"/" { Resolve::InRoot } else { Resolve::Beneath },
            write: setup.write,
            places: (0..setup.count.min(MAX_FILES)).map(|_| (0, Place::Free)).collect(),
            results,
            sender,
            event: Arc::new(event),
            calls: HashMap::new(),
            next_call: 0,
            working: 0,
        })
    }

    /// Whether a worker has a job.
    pub(super) fn is_working(&self) -> bool {
        self.working > 0
    }

    /// Has a worker do a job for a call.
    pub(super) fn submit(
        &mut self,
        key: ShareKey,
        caller: Option<Caller>,
        job: impl FnOnce() -> Outcome + Send + 'static,
    ) {
        self.next_call += 1;
        let call = self.next_call;
        if let Some(caller) = caller {
            self.calls.insert(call, caller);
        }
        self.working += 1;
        let (sender, event) = (self.sender.clone(), Arc::clone(&self.event));
        self.pool.for_key(key).spawn(move || {
            // What the job has is given back before its result is known.
            let outcome = job();
            let _ = sender.send((call, outcome));
            let _ = socket::signal_event(event.0);
        });
    }

    fn find(&self, number: u32) -> Option<usize> {
        let file = Descriptor::of(number);
        let place = file.index.checked_sub(FIRST_FILE)? as usize;
        self.places.get(place).filter(|(epoch, _)| *epoch == file.epoch).map(|_| place)
    }

    fn get(&self, number: u32) -> Option<FileRef> {
        match &self.places[self.find(number)?].1 {
            Place::Open(file) => Some(file.clone()),
            _ => None,
        }
    }

    fn open(&mut self, request: &Request, caller: Caller, memory: &Arc<Memory>) -> Result<(), (Caller, Errno)> {
        let (flags, [mode, ..]) = (request.argument, request.address.words());
        let access = flags & linux::O_ACCMODE;
        let writes = access != linux::O_RDONLY || flags & (linux::O_CREAT | linux::O_TRUNC) != 0;
        let known = linux::O_ACCMODE | linux::O_CREAT | linux::O_EXCL | linux::O_TRUNC | linux::O_APPEND;
        if flags & !known != 0 || access == linux::O_ACCMODE {
            return Err((caller, Errno::INVAL));
        }
        if writes && !self.write {
            return Err((caller, Errno::ROFS));
        }
        let Some(place) = self.places.iter().position(|(_, place)| matches!(place, Place::Free)) else {
            return Err((caller, Errno::MFILE));
        };
        self.places[place].1 = Place::Opening;
        let (memory, buffer, resolve) = (Arc::clone(memory), request.descriptor, self.resolve);
        let (root, mode) = (Arc::clone(&self.root), if flags & linux::O_CREAT != 0 { mode as u32 & 0o777 } else { 0 });
        self.submit(OPENED_BY_NAME, Some(caller), move || {
            let opened = memory.path(buffer).and_then(|path| open_regular(root.0, &path, flags, mode, resolve));
            Outcome::Opened(place as u32, opened)
        });
        Ok(())
    }

    /// The new file's number, or why there is none.
    fn opened(&mut self, place: u32, opened: Result<(Fd, ShareKey), Errno>) -> Reply {
        let kept = &mut self.places[place as usize];
        let (fd, key) = match opened {
            Ok(opened) => opened,
            Err(errno) => {
                kept.1 = Place::Free;
                return Reply::new(-errno.raw_os_error());
            }
        };
        kept.0 = Descriptor::next_epoch(kept.0);
        kept.1 = Place::Open(FileRef(Arc::new(ShadowFd::new(fd, self.pool.for_key(key).close_queue()))));
        Reply::new(Descriptor { index: FIRST_FILE + place, epoch: kept.0 }.number())
    }

    /// Frees a place. A worker closes the descriptor, once none uses it.
    fn close(&mut self, number: u32) -> Result<(), Errno> {
        let place = self.find(number).ok_or(Errno::BADF)?;
        match &mut self.places[place].1 {
            open @ Place::Open(_) => *open = Place::Free,
            _ => return Err(Errno::BADF),
        }
        Ok(())
    }
}

impl Proxy {
    /// The file of a number that is not stale.
    pub(super) fn file(&self, number: u32) -> Option<FileRef> {
        self.files.as_ref()?.get(number)
    }

    /// A call for a file, which a worker answers, but for close.
    pub(super) fn file_call(&mut self, call: Call, request: &Request, caller: Caller) {
        let refused = match self.begin_file_call(call, request, caller) {
            Ok(()) => return,
            Err(refused) => refused,
        };
        let (caller, errno) = refused;
        self.answer(caller, Reply::new(errno.map_or(0, |errno| -errno.raw_os_error())));
    }

    /// Hands the job to a worker; else the caller, and why.
    fn begin_file_call(
        &mut self,
        call: Call,
        request: &Request,
        caller: Caller,
    ) -> Result<(), (Caller, Option<Errno>)> {
        let memory = Arc::clone(&self.memory);
        let Some(files) = &mut self.files else { return Err((caller, Some(Errno::ACCESS))) };
        if call == Call::OpenFile {
            return files.open(request, caller, &memory).map_err(|(caller, errno)| (caller, Some(errno)));
        }
        if call == Call::CloseFile {
            let closed = files.close(request.descriptor);
            return Err((caller, closed.err()));
        }
        let Some(file) = files.get(request.descriptor) else { return Err((caller, Some(Errno::BADF))) };
        let (buffer, [at, bytes, ..]) = (request.argument, request.address.words());
        files.submit(file.0.share_key(), Some(caller), move || {
            let fd = file.0.get();
            let done = match call {
                Call::StatFile => stat(fd),
                _ if at > i64::MAX as u64 => Err(Errno::INVAL),
                Call::ReadFile => again(|| memory.read_file(fd, buffer, bytes as usize, at)),
                Call::WriteFile => again(|| memory.write_file(fd, buffer, bytes as usize, at)),
                _ => Err(Errno::NOSYS),
            };
            Outcome::Done(done.unwrap_or_else(|errno| Reply::new(-errno.raw_os_error())))
        });
        Ok(())
    }

    /// Takes what workers have done; whether there was anything.
    pub(super) fn take_results(&mut self, now: u64) -> bool {
        let mut worked = false;
        while let Some(files) = &mut self.files
            && let Ok((call, outcome)) = files.results.try_recv()
        {
            worked = true;
            files.working -= 1;
            let caller = files.calls.remove(&call);
            let reply = match outcome {
                Outcome::Opened(place, opened) => files.opened(place, opened),
                Outcome::Done(reply) => reply,
                Outcome::Sent(sent) => {
                    self.take_sent(sent, now);
                    continue;
                }
            };
            if let Some(caller) = caller {
                self.answer(caller, reply);
                self.pace.gave(now);
            }
        }
        worked
    }

    /// Answers the calls that wait for workers, which go on.
    pub(super) fn cancel_file_calls(&mut self, errno: Errno) {
        let calls = self.files.as_mut().map(|files| std::mem::take(&mut files.calls)).unwrap_or_default();
        for caller in calls.into_values() {
            self.answer(caller, Reply::new(-errno.raw_os_error()));
        }
    }
}

/// Opens a file, on a worker: its descriptor, and the share that its file system has.
fn open_regular(root: Fd, path: &CString, flags: u32, mode: u32, resolve: Resolve) -> Result<(Fd, ShareKey), Errno> {
    // A pipe without a writer does not hold up the worker.
    let careful = (flags | linux::O_NONBLOCK | linux::O_NOCTTY) as i32;
    let mut attempts = 0;
    let fd = loop {
        match linux::openat2(root, path, careful, mode, resolve) {
            Err(Errno::AGAIN) if attempts < OPEN_ATTEMPTS => std::thread::sleep(ATTEMPT_PAUSE),
            Err(Errno::INTR) => {}
            other => break SocketFd(other?),
        }
        attempts += 1;
    };
    let stat = linux::fstat(fd.0)?;
    if stat.kind != FileKind::Regular {
        let is_directory = stat.mode & 0o170_000 == 0o040_000;
        return Err(if is_directory { Errno::ISDIR } else { Errno::INVAL });
    }
    linux::set_status_flags(fd.0, linux::status_flags(fd.0)? & !(linux::O_NONBLOCK as i32))?;
    let fd = std::mem::ManuallyDrop::new(fd);
    Ok((fd.0, stat.dev))
}

fn again(call: impl Fn() -> Result<usize, Errno>) -> Result<Reply, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done.map(|bytes| Reply::new(bytes as i32)),
        }
    }
}

fn stat(fd: Fd) -> Result<Reply, Errno> {
    let stat = linux::fstat(fd)?;
    let numbers = [stat.size, stat.mode.into(), stat.mtime_ns as u64, stat.ino, stat.dev];
    Ok(Reply::with_numbers(0, numbers))
}
