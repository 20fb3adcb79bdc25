//! The files that kernels have open, and the jobs of workers for them. What the proxy does with both: files.rs.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use spinio_host::pool::WorkerPool;
use spinio_host::shadow_fd::ShadowFd;
use spinio_host::shares::{OPENED_BY_NAME, ShareKey};
use spinio_ring::layout::{Descriptor, FIRST_FILE, MAX_FILES};
use spinio_ring::mailbox::{Reply, Request};
use spinio_sys::Errno;
use spinio_sys::linux::socket::{self, EPOLLET, EPOLLIN};
use spinio_sys::linux::{self, Fd, FileKind, Resolve};

use super::caller::{Caller, failed};
use super::transfers::{FileRef, Sent};
use crate::memory::Memory;
use crate::socket_fd::SocketFd;

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
    pub(super) results: Receiver<(u64, Outcome)>,
    sender: Sender<(u64, Outcome)>,
    /// Wakes the proxy.
    event: Arc<SocketFd>,
    /// Calls that wait for a worker.
    pub(super) calls: HashMap<u64, Caller>,
    next_call: u64,
    pub(super) working: usize,
}

impl Files {
    /// On the proxy's thread, whose descriptor table it uses.
    pub(super) fn new(setup: FileSetup, epoll: Fd, epoch: u32) -> Result<Files, Errno> {
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
            places: (0..setup.count.min(MAX_FILES)).map(|_| (epoch, Place::Free)).collect(),
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

    pub(super) fn get(&self, number: u32) -> Option<FileRef> {
        match &self.places[self.find(number)?].1 {
            Place::Open(file) => Some(file.clone()),
            _ => None,
        }
    }

    pub(super) fn open(
        &mut self,
        request: &Request,
        caller: Caller,
        memory: &Arc<Memory>,
    ) -> Result<(), (Caller, Errno)> {
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
    pub(super) fn opened(&mut self, place: u32, opened: Result<(Fd, ShareKey), Errno>) -> Reply {
        let kept = &mut self.places[place as usize];
        let (fd, key) = match opened {
            Ok(opened) => opened,
            Err(errno) => {
                kept.1 = Place::Free;
                return failed(errno);
            }
        };
        kept.0 = Descriptor::next_epoch(kept.0);
        kept.1 = Place::Open(FileRef(Arc::new(ShadowFd::new(fd, self.pool.for_key(key).close_queue()))));
        Reply::new(Descriptor { index: FIRST_FILE + place, epoch: kept.0 }.number())
    }

    /// Frees a place. A worker closes the descriptor, once none uses it.
    pub(super) fn close(&mut self, number: u32) -> Result<(), Errno> {
        let place = self.find(number).ok_or(Errno::BADF)?;
        match &mut self.places[place].1 {
            open @ Place::Open(_) => *open = Place::Free,
            _ => return Err(Errno::BADF),
        }
        Ok(())
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
