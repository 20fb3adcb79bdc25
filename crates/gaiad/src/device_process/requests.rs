//! The server's side: starts the process, sends requests, waits for the answers.
//!
//! ```text
//!   any thread ── request, id ──> socket ──> process        not there: it is started
//!        └ waits ··············· answers <── reader thread <── socket
//!                                              └ end of the socket: all who wait try again; after IDLE: shuts it down
//! ```
//!
//! What the process has imported is known by the life of that process, so that a request to a new one imports it again.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown};
use rustix::process::{Pid, Signal, kill_process};
use spinio_sys::linux::packets::{self, Wait};

use super::messages::{ANSWER, CopyRange, RANGES, Request, parse_answer};
use super::{IDLE, WITHIN};
use crate::link::{Link, Message};
use crate::lock::lock;
use crate::report::report;

/// How often a request is repeated whose process has died.
const ATTEMPTS: u32 = 4;
/// Bytes of one request at most, so that short requests are not long behind others.
const PIECE: u64 = 32 << 20;

type NewCommand = Box<dyn Fn() -> Command + Send + Sync>;

/// The process, if it runs.
pub(crate) struct DeviceProcess {
    command: NewCommand,
    running: Mutex<Option<Arc<Running>>>,
    numbers: AtomicU64,
    /// Processes that were started.
    starts: AtomicU64,
    idle: Duration,
    /// How long a request may take.
    within: Duration,
}

/// One life of the process.
struct Running {
    pid: Pid,
    socket: OwnedFd,
    answers: Mutex<Answers>,
    answered: Condvar,
    /// Chunks and files that it has. Held while it gets one.
    has: Mutex<HashSet<u64>>,
    within: Duration,
}

struct Answers {
    has_ended: bool,
    used: Instant,
    /// By id; the errno once it is there.
    waiting: HashMap<u64, Option<i32>>,
}

/// A chunk of device memory of a program; forgotten by the process when dropped.
pub(crate) struct DeviceChunk {
    process: Arc<DeviceProcess>,
    number: u64,
    device: [u8; 16],
    fd: OwnedFd,
    len: u64,
}

/// A memory file that is copied to, of a length that does not change.
pub(crate) struct Target {
    number: u64,
    fd: OwnedFd,
}

impl fmt::Debug for DeviceProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceProcess").field("starts", &self.starts).finish_non_exhaustive()
    }
}

impl fmt::Debug for DeviceChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceChunk").field("number", &self.number).field("len", &self.len).finish_non_exhaustive()
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target").field("number", &self.number).finish_non_exhaustive()
    }
}

impl DeviceChunk {
    /// Its bytes.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for DeviceChunk {
    fn drop(&mut self) {
        let Some(running) = lock(&self.process.running).clone() else { return };
        if lock(&running.has).remove(&self.number) {
            let id = self.process.number();
            // No thread waits for its answer.
            let _ = running.send(&Request::Forget { chunk: self.number }, id, None);
        }
    }
}

impl DeviceProcess {
    /// None runs yet. The program of this process is started in the role of [`crate::server_role`].
    pub(crate) fn new() -> Arc<DeviceProcess> {
        let command = || {
            let mut command = Command::new("/proc/self/exe");
            command.args(std::env::args_os().skip(1));
            command
        };
        DeviceProcess::with(Box::new(command), IDLE, WITHIN)
    }

    pub(super) fn with(command: NewCommand, idle: Duration, within: Duration) -> Arc<DeviceProcess> {
        let (running, numbers, starts) = (Mutex::default(), AtomicU64::new(1), AtomicU64::new(0));
        Arc::new(DeviceProcess { command, running, numbers, starts, idle, within })
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Relaxed)
    }

    /// A chunk that a program has given: `len` bytes of the device with this UUID. Nothing is verified yet.
    pub(crate) fn chunk(self: &Arc<DeviceProcess>, device: [u8; 16], fd: OwnedFd, len: u64) -> DeviceChunk {
        DeviceChunk { process: Arc::clone(self), number: self.number(), device, fd, len }
    }

    /// A memory file to copy to.
    pub(crate) fn target(&self, fd: OwnedFd) -> Target {
        Target { number: self.number(), fd }
    }

    /// A device will be needed soon: starts the process, and does not wait.
    pub(crate) fn prepare(self: &Arc<DeviceProcess>, device: [u8; 16]) {
        if let Ok(running) = self.started() {
            lock(&running.answers).used = Instant::now();
            // No thread waits for its answer.
            let _ = running.send(&Request::Open { device }, self.number(), None);
        }
    }

    /// Imports a chunk, so that a copy is not the first to find that this cannot be done.
    ///
    /// # Errors
    /// ENODEV: there is no such device. EIO and others: the device's.
    pub(crate) fn import(self: &Arc<DeviceProcess>, chunk: &DeviceChunk) -> Result<(), Errno> {
        self.repeat(|running| self.ensure_chunk(running, chunk))
    }

    /// Whether a process runs that has imported the chunk.
    pub(crate) fn has(&self, chunk: &DeviceChunk) -> bool {
        let running = lock(&self.running).clone();
        running.is_some_and(|running| !lock(&running.answers).has_ended && lock(&running.has).contains(&chunk.number))
    }

    /// Copies ranges of a chunk, whose bytes are in the file when this returns.
    ///
    /// # Errors
    /// EINVAL: a range is outside. EIO and others: the device's.
    pub(crate) fn copy(
        self: &Arc<DeviceProcess>,
        chunk: &DeviceChunk,
        target: &Target,
        ranges: &[CopyRange],
    ) -> Result<(), Errno> {
        for ranges in split(ranges) {
            self.repeat(|running| {
                self.ensure_chunk(running, chunk)?;
                let file = Request::File { file: target.number };
                self.ensure(running, target.number, &file, target.fd.as_fd())?;
                let ranges = ranges.clone();
                running.ask(&Request::Copy { chunk: chunk.number, file: target.number, ranges }, self.number(), None)
            })?;
        }
        Ok(())
    }

    fn ensure_chunk(&self, running: &Running, chunk: &DeviceChunk) -> Result<(), Errno> {
        let import = Request::Import { chunk: chunk.number, device: chunk.device, len: chunk.len };
        self.ensure(running, chunk.number, &import, chunk.fd.as_fd())
    }

    /// Gives the process a chunk or a file, unless it has it.
    fn ensure(&self, running: &Running, number: u64, request: &Request, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        let mut has = lock(&running.has);
        if !has.contains(&number) {
            running.ask(request, self.number(), Some(fd))?;
            has.insert(number);
        }
        Ok(())
    }

    /// Asks the process; again if it dies. EAGAIN: so did some after it, which may pass.
    fn repeat(self: &Arc<DeviceProcess>, ask: impl Fn(&Running) -> Result<(), Errno>) -> Result<(), Errno> {
        for _ in 0..ATTEMPTS {
            let done = self.started().and_then(|running| ask(&running));
            if done != Err(Errno::PIPE) {
                return done;
            }
        }
        Err(Errno::AGAIN)
    }

    /// The process, started now if there is none.
    fn started(self: &Arc<DeviceProcess>) -> Result<Arc<Running>, Errno> {
        let mut slot = lock(&self.running);
        if let Some(running) = slot.as_ref().filter(|running| !lock(&running.answers).has_ended) {
            return Ok(Arc::clone(running));
        }
        let (link, theirs) = Link::pair()?;
        // In a group of its own, as the server.
        let child = (self.command)().process_group(0).stdin(Stdio::from(theirs.into_fd())).spawn();
        let mut child = child.map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN))?;
        let running = Arc::new(Running {
            pid: Pid::from_child(&child),
            socket: link.as_fd().try_clone_to_owned().map_err(|_| Errno::MFILE)?,
            answers: Mutex::new(Answers { has_ended: false, used: Instant::now(), waiting: HashMap::new() }),
            answered: Condvar::new(),
            has: Mutex::default(),
            within: self.within,
        });
        // A process that has died already is found by the reader.
        let _ = link.send(Message::Devices, &[]);
        drop(link);
        let (process, read) = (Arc::clone(self), Arc::clone(&running));
        let reader = std::thread::Builder::new().name("gaia-devices".to_owned()).spawn(move || {
            process.read(&read, &mut child);
        });
        if let Err(error) = reader {
            // The child ends when the socket does.
            return Err(Errno::from_io_error(&error).unwrap_or(Errno::AGAIN));
        }
        self.starts.fetch_add(1, Relaxed);
        *slot = Some(Arc::clone(&running));
        Ok(running)
    }

    /// Takes answers until the process ends, or was idle for long enough.
    fn read(&self, running: &Arc<Running>, child: &mut Child) {
        while running.receive(self.idle) {}
        let _ = rustix::net::shutdown(&running.socket, Shutdown::Both);
        match child.wait() {
            Ok(status) if !status.success() => report!("the device process has ended ({status})"),
            _ => {}
        }
        // Not before: who waits must not use memory that it may still write to.
        running.end();
        let mut slot = lock(&self.running);
        if slot.as_ref().is_some_and(|now| Arc::ptr_eq(now, running)) {
            *slot = None;
        }
    }
}

impl Running {
    /// Sends a request.
    fn send(&self, request: &Request, id: u64, fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        match packets::send(&self.socket, &request.to_bytes(id), fd.as_slice(), Wait::Yes) {
            Err(Errno::CONNRESET) => Err(Errno::PIPE),
            sent => sent,
        }
    }

    /// Sends a request, and waits for its answer. EPIPE: the process has ended. ETIMEDOUT: it did not answer in time, was
    /// killed, and has ended.
    fn ask(&self, request: &Request, id: u64, fd: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
        let mut answers = lock(&self.answers);
        if answers.has_ended {
            return Err(Errno::PIPE);
        }
        answers.waiting.insert(id, None);
        answers.used = Instant::now();
        drop(answers);
        let sent = self.send(request, id, fd);
        let mut answers = lock(&self.answers);
        let give_up = Instant::now() + self.within;
        let mut is_killed = false;
        let done = loop {
            // With EPIPE the process has closed the socket, but it may not have ended: a repetition would find the same one.
            if let Err(error) = sent
                && error != Errno::PIPE
            {
                break Err(error);
            }
            if let Some(Some(errno)) = answers.waiting.get(&id) {
                break if *errno == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(*errno)) };
            }
            if answers.has_ended {
                break Err(if is_killed { Errno::TIMEDOUT } else { Errno::PIPE });
            }
            let left = give_up.saturating_duration_since(Instant::now());
            if left.is_zero() && !is_killed {
                is_killed = true;
                let _ = kill_process(self.pid, Signal::KILL);
            }
            answers = self
                .answered
                .wait_timeout(answers, if is_killed { self.within } else { left })
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        };
        answers.waiting.remove(&id);
        answers.used = Instant::now();
        done
    }

    /// Takes the next answer; false if there will be none.
    fn receive(&self, idle: Duration) -> bool {
        let mut waited = [PollFd::new(&self.socket, PollFlags::IN)];
        let wait = Timespec::try_from(idle).ok();
        match poll(&mut waited, wait.as_ref()) {
            Ok(0) => {
                let mut answers = lock(&self.answers);
                // From now on requests start another one.
                answers.has_ended = answers.waiting.is_empty() && answers.used.elapsed() >= idle;
                return !answers.has_ended;
            }
            Ok(_) => {}
            Err(Errno::INTR) => return true,
            Err(_) => return false,
        }
        let mut bytes = [0; ANSWER + 1];
        let received = rustix::net::recv(&self.socket, &mut bytes, RecvFlags::DONTWAIT);
        let answer = match received {
            Ok((0, _)) => return false,
            Ok((got, _)) => parse_answer(&bytes[..got.min(bytes.len())]),
            Err(Errno::INTR | Errno::AGAIN) => return true,
            Err(_) => return false,
        };
        let Some((id, errno)) = answer else { return false };
        if let Some(place) = lock(&self.answers).waiting.get_mut(&id) {
            *place = Some(errno);
            self.answered.notify_all();
        }
        true
    }

    fn end(&self) {
        lock(&self.answers).has_ended = true;
        self.answered.notify_all();
    }
}

/// Ranges for each request.
fn split(ranges: &[CopyRange]) -> Vec<Vec<CopyRange>> {
    let (mut requests, mut bytes) = (vec![Vec::new()], 0);
    for range in ranges {
        let CopyRange { mut from, mut to, mut len } = *range;
        while len > 0 {
            if bytes == PIECE || requests.last().is_some_and(|request| request.len() == RANGES) {
                requests.push(Vec::new());
                bytes = 0;
            }
            let part = len.min(PIECE - bytes);
            if let Some(request) = requests.last_mut() {
                request.push(CopyRange { from, to, len: part });
            }
            (from, to, len, bytes) = (from.wrapping_add(part), to.wrapping_add(part), len - part, bytes + part);
        }
    }
    requests.retain(|request| !request.is_empty());
    requests
}

#[cfg(test)]
impl DeviceProcess {
    /// The number of the process that runs.
    pub(crate) fn pid(&self) -> Option<Pid> {
        lock(&self.running).as_ref().map(|running| running.pid)
    }

    /// Processes that were started.
    pub(crate) fn starts(&self) -> u64 {
        self.starts.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_as_many_bytes_and_ranges_as_they_may() {
        let range = |from, to, len| CopyRange { from, to, len };
        assert!(split(&[]).is_empty() && split(&[range(1, 2, 0)]).is_empty());
        let large = split(&[range(0, 100, 10), range(1000, 5000, 2 * PIECE)]);
        let sizes: Vec<u64> = large.iter().map(|request| request.iter().map(|range| range.len).sum()).collect();
        assert_eq!(sizes, [PIECE, PIECE, 10]);
        assert_eq!(large[1], [range(1000 + PIECE - 10, 5000 + PIECE - 10, PIECE)]);
        let many = split(&[range(0, 0, 1); 2 * RANGES + 1]);
        assert_eq!(many.iter().map(Vec::len).collect::<Vec<_>>(), [RANGES, RANGES, 1]);
    }
}
