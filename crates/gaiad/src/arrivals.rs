//! Bytes of released pages that are on their way from device memory to their slots.
//!
//! ```text
//!   keep ── list and descriptor of each chunk to the supervisor ── commit (handoff.rs) ── start
//!                    │                                                       │ device process copies chunk by chunk
//!                    │ the server is killed                                  v
//!                    └──> next server: adopt ── committed? ── starts ──────> Drop of a chunk at the supervisor, then
//!                                                   └ no: Drop               its pages are used (arriving.rs)
//! ```
//!
//! The list says which bytes of a chunk belong where in the state memory. It is a memory file that the supervisor
//! keeps, as it keeps the descriptor, so what is committed is complete there. Until the bytes of a chunk have arrived its
//! pages are used by nothing ([`File::pages_of`](crate::files::File::pages_of)), and then the supervisor has its list no more:
//! so no slot of a list has become another page's when a second server copies again.
//!
//! If the device cannot give the bytes of a chunk, they are zeros from then on: the next fsync fails with EIO, once, and the
//! log says so. What may pass is tried again for minutes before that: no memory on the device for a context, no
//! descriptors, no process, or one that does not answer.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use spinio_pagecache::PAGE;
use spinio_pagecache::messages::HandOver;
use spinio_sys::injection_point;

use crate::content::Content;
use crate::device_process::{CopyRange, DeviceChunk, DeviceProcess, Target};
use crate::files::File;
use crate::late;
use crate::link::{Link, Message, Use};
use crate::lock::lock;
use crate::nodes::Nodes;
use crate::report::report;
use crate::state::StateMemory;
use crate::threads::spawn;

/// Chunks that are copied at the same time.
const WIDTH: usize = 6;
/// How long a copy is tried again for want of memory, descriptors, processes or a context, and the pauses between.
const AGAIN_FOR: Duration = Duration::from_secs(180);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Words of a list before its ranges, and of a range.
const HEAD: usize = 6;
const RANGE: usize = 3;
/// What the supervisor keeps of an arrival: its number is that of the list, the next one that of the chunk.
const KEPT: u64 = 2;

/// A chunk, and what a release has changed in it.
pub(crate) struct Part {
    chunk: DeviceChunk,
    ranges: Vec<CopyRange>,
    /// The pages of the file from the first one to the last one.
    pages: Range<u64>,
}

/// A part of what a release has handed over: it arrives for itself.
pub(crate) struct Arrival {
    node: u64,
    device: [u8; 16],
    part: Part,
}

/// The same, once the supervisor keeps it. Dropped, it is not kept any more.
pub(crate) struct Kept {
    arrival: Arrival,
    number: u64,
    arrivals: Arc<Arrivals>,
}

/// The arrivals of a mount.
#[derive(Debug)]
pub(crate) struct Arrivals {
    devices: Arc<DeviceProcess>,
    slots: Target,
    state: OwnedFd,
    nodes: Arc<Nodes>,
    supervisor: Link,
    /// Descriptors that the supervisor keeps of them, and how many may be: a list or a chunk that it could not receive
    /// would be lost with this server.
    kept: AtomicUsize,
    most: usize,
}

impl Part {
    /// None of its pages yet.
    pub(crate) fn new(chunk: DeviceChunk) -> Part {
        Part { chunk, ranges: Vec::new(), pages: 0..0 }
    }

    /// Adds the bytes of pages of the file, after those before them.
    pub(crate) fn add(&mut self, pages: Range<u64>, range: CopyRange) {
        let first = if self.pages.is_empty() { pages.start } else { self.pages.start };
        self.pages = first..pages.end;
        match self.ranges.last_mut() {
            Some(last) if last.from + last.len == range.from && last.to + last.len == range.to => last.len += range.len,
            _ => self.ranges.push(range),
        }
    }

    pub(crate) fn pages(&self) -> &Range<u64> {
        &self.pages
    }
}

impl Arrival {
    pub(crate) fn new(node: u64, device: [u8; 16], part: Part) -> Arrival {
        Arrival { node, device, part }
    }

    fn to_words(&self) -> Vec<u64> {
        let half = |at: usize| self.device[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
        let Part { chunk, ranges, pages } = &self.part;
        let mut words = vec![self.node, half(0), half(8), chunk.len(), pages.start, pages.end];
        words.extend(ranges.iter().flat_map(|range| [range.from, range.to, range.len]));
        words
    }
}

impl Kept {
    /// No other one has it.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The pages of the file that wait for it.
    pub(crate) fn pages(&self) -> Range<u64> {
        self.arrival.part.pages.clone()
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.arrivals.forget(self.number);
        self.arrivals.kept.fetch_sub(KEPT as usize, SeqCst);
    }
}

impl Arrivals {
    /// None yet. `supervisor`: the link to it. `fds`: descriptors that it may have, as this process.
    pub(crate) fn new(
        state: &StateMemory,
        nodes: Arc<Nodes>,
        supervisor: Link,
        fds: usize,
        devices: Arc<DeviceProcess>,
    ) -> Result<Arc<Arrivals>, Errno> {
        let clone = || state.as_fd().try_clone_to_owned().map_err(|_| Errno::MFILE);
        let slots = devices.target(clone()?);
        let (kept, most) = (AtomicUsize::new(0), fds / 8);
        Ok(Arc::new(Arrivals { devices, slots, state: clone()?, nodes, supervisor, kept, most }))
    }

    /// A release of this device will be handed over soon.
    pub(crate) fn prepare(&self, device: [u8; 16]) {
        self.devices.prepare(device);
    }

    /// The chunks of a message, if the device process can use them.
    pub(crate) fn import(&self, part: &HandOver, fds: Vec<OwnedFd>) -> Result<Vec<DeviceChunk>, Errno> {
        let last = fds.len().saturating_sub(1);
        let import = |(at, fd)| {
            let pages = if at == last { part.last_pages } else { part.chunk_pages };
            let chunk = self.devices.chunk(part.device, fd, u64::from(pages) * PAGE as u64);
            self.devices.import(&chunk).map(|()| chunk)
        };
        fds.into_iter().enumerate().map(import).collect()
    }

    /// Has the supervisor keep it. What it has got it keeps also if this server dies now.
    ///
    /// # Errors
    /// ENFILE: it keeps as many as it may.
    pub(crate) fn keep(self: &Arc<Arrivals>, arrival: Arrival) -> Result<Kept, Errno> {
        let mut number = [0; 8];
        getrandom(&mut number, GetRandomFlags::empty())?;
        let number = u64::from_ne_bytes(number) / KEPT * KEPT;
        let list = rustix::fs::memfd_create("spinio-gaia-list", MemfdFlags::CLOEXEC)?;
        let bytes: Vec<u8> = arrival.to_words().into_iter().flat_map(u64::to_ne_bytes).collect();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            rest = &rest[rustix::io::retry_on_intr(|| rustix::io::write(&list, rest))?..];
        }
        let kept = self.kept(arrival, number);
        if self.kept.load(SeqCst) > self.most {
            return Err(Errno::NFILE);
        }
        self.supervisor.send(Message::Keep(Use::Handed, number + 1), &[kept.arrival.part.chunk.fd()])?;
        // The last: it makes the chunk count.
        self.supervisor.send(Message::Keep(Use::Handed, number), &[list.as_fd()])?;
        Ok(kept)
    }

    fn kept(self: &Arc<Arrivals>, arrival: Arrival, number: u64) -> Kept {
        self.kept.fetch_add(KEPT as usize, SeqCst);
        Kept { arrival, number, arrivals: Arc::clone(self) }
    }

    /// The list first, without which the chunk does not count.
    fn forget(&self, number: u64) {
        for number in number..number + KEPT {
            // Without a supervisor there will be no other server.
            let _ = self.supervisor.send(Message::Drop(Use::Handed, number), &[]);
        }
    }

    /// Copies what was committed. [`File::begin_arrival`] was called for each.
    pub(crate) fn start(self: &Arc<Arrivals>, kept: Vec<Kept>, file: Arc<File>) {
        let waiting = Arc::new(Mutex::new(VecDeque::from(kept)));
        let (theirs, for_thread) = (Arc::clone(&waiting), Arc::clone(&file));
        if spawn("gaia-arrive", move || arrive_all(&theirs, &for_thread)).is_err() {
            arrive_all(&waiting, &file);
        }
    }

    /// What an earlier server has left with the supervisor. Called before a file is used.
    pub(crate) fn adopt(self: &Arc<Arrivals>, handed: Vec<(u64, OwnedFd)>, content: &Content) {
        let mut pairs: BTreeMap<u64, [Option<OwnedFd>; KEPT as usize]> = BTreeMap::new();
        for (number, fd) in handed {
            pairs.entry(number / KEPT * KEPT).or_default()[(number % KEPT) as usize] = Some(fd);
        }
        let mut of_files: BTreeMap<u64, (Arc<File>, Vec<Kept>)> = BTreeMap::new();
        for (number, [list, chunk]) in pairs {
            let arrival = list.zip(chunk).and_then(|(list, chunk)| self.parse(&list, chunk));
            let files = content.files();
            // The slots say it: those of a release that was not committed have no header any more. Its record may be
            // another release's by now.
            let is_committed = |arrival: &Arrival| {
                arrival.part.ranges.iter().all(|range| {
                    let end = range.to.checked_add(range.len);
                    end.is_some_and(|end| content.has_snapshots(range.to..end, arrival.node))
                })
            };
            let committed = arrival.filter(is_committed);
            let file = committed.as_ref().and_then(|arrival| files.hold_now(arrival.node).file().cloned());
            let (Some(arrival), Some(file)) = (committed, file) else {
                self.forget(number);
                continue;
            };
            let kept = self.kept(arrival, number);
            file.begin_arrival(number, kept.pages());
            of_files.entry(file.node).or_insert_with(|| (file, Vec::new())).1.push(kept);
        }
        of_files.into_values().for_each(|(file, kept)| self.start(kept, file));
    }

    /// A list and its chunk; `None`: it is not complete.
    fn parse(&self, list: &OwnedFd, fd: OwnedFd) -> Option<Arrival> {
        let len = rustix::fs::fstat(list).ok()?.st_size as usize;
        let mut bytes = vec![0; len];
        let mut done = 0;
        while done < len {
            match rustix::io::retry_on_intr(|| rustix::io::pread(list, &mut bytes[done..], done as u64)) {
                Ok(got @ 1..) => done += got,
                _ => return None,
            }
        }
        let words: Vec<u64> = bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        let (head, rest) = words.split_first_chunk::<HEAD>()?;
        let [node, low, high, len, first, end] = *head;
        let mut device = [0; 16];
        device[..8].copy_from_slice(&low.to_ne_bytes());
        device[8..].copy_from_slice(&high.to_ne_bytes());
        let chunk = self.devices.chunk(device, fd, len);
        let ranges = rest.as_chunks::<RANGE>().0.iter();
        let ranges = ranges.map(|[from, to, len]| CopyRange { from: *from, to: *to, len: *len }).collect();
        Some(Arrival { node, device, part: Part { chunk, ranges, pages: first..end } })
    }

    /// Copies the bytes, as soon as that can be done. `give_up`: for all chunks of a release, from the first failure on.
    fn copy(&self, arrival: &Arrival, give_up: &OnceLock<Instant>) -> Result<(), Errno> {
        let Arrival { node, part: Part { chunk, ranges, .. }, .. } = arrival;
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.devices.copy(chunk, &self.slots, ranges) {
                Err(error) if may_pass(error) => error,
                done => return done,
            };
            if Instant::now() >= *give_up.get_or_init(|| Instant::now() + AGAIN_FOR) {
                return Err(error);
            }
            if pause == FIRST_PAUSE {
                report!("released bytes of node {node} wait, since they cannot be copied now: {error}");
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The bytes are lost: what slots had before must not be seen.
    fn clear(&self, arrival: &Arrival) {
        for range in &arrival.part.ranges {
            let (mut at, end) = (range.to, range.to + range.len);
            while at < end {
                let zeros = &[0; 64 * PAGE][..(end - at).min(64 * PAGE as u64) as usize];
                match rustix::io::retry_on_intr(|| rustix::io::pwrite(&self.state, zeros, at)) {
                    Ok(written @ 1..) => at += written as u64,
                    // The slots cannot be written: no program may see them. The next server tries it again.
                    _ => std::process::exit(1),
                }
            }
        }
    }
}

/// Whether a copy that fails so may succeed later. ENODEV: the device cannot be opened, which it could when the chunk came.
/// ETIMEDOUT: its process did not answer, as one that is stopped or gets no processor; the chunk is still here, and another
/// process may copy it.
fn may_pass(error: Errno) -> bool {
    late::may_pass(error) || matches!(error, Errno::NODEV | Errno::TOOMANYREFS | Errno::TIMEDOUT)
}

/// By as many threads as work at the same time: one after the other, the first ones first.
fn arrive_all(waiting: &Mutex<VecDeque<Kept>>, file: &File) {
    let next = || lock(waiting).pop_front();
    let give_up = OnceLock::new();
    let work = || std::iter::from_fn(next).for_each(|kept| arrive(kept, file, &give_up));
    let width = lock(waiting).len().min(WIDTH);
    std::thread::scope(|scope| {
        for _ in 1..width {
            // Without it the others do its part.
            let _ = std::thread::Builder::new().name("gaia-arrive".to_owned()).spawn_scoped(scope, work);
        }
        work();
    });
}

fn arrive(kept: Kept, file: &File, give_up: &OnceLock<Instant>) {
    injection_point!("server: bytes begin to arrive");
    let (arrivals, number) = (Arc::clone(&kept.arrivals), kept.number);
    if let Err(error) = arrivals.copy(&kept.arrival, give_up) {
        let node = kept.arrival.node;
        report!("released bytes of node {node} are lost, since the device cannot give them: {error}");
        arrivals.clear(&kept.arrival);
        // Before the next server has nothing left of it that could fail again.
        arrivals.nodes.set_lost(node);
    }
    injection_point!("server: bytes arrived");
    // Before the slots can become other pages'.
    drop(kept);
    file.end_arrival(number);
}

#[cfg(test)]
mod tests {
    use rustix::process::{Signal, kill_process};
    use spinio_sys::linux::packets::Wait;

    use super::*;
    use crate::device_process::tests::{CHUNK, bytes, chunk_with, impatient_process};

    /// The copy gives up on a process that is stopped; the bytes are still on the device, so another one copies them.
    #[test]
    fn bytes_arrive_although_the_device_process_does_not_answer() {
        let devices = impatient_process(Duration::from_secs(2));
        let (ours, _supervisor) = Link::pair().unwrap();
        let state = Arc::new(StateMemory::small());
        let nodes = Arc::new(Nodes::attach(state.clone()));
        let arrivals = Arrivals::new(&state, nodes, ours, 1024, Arc::clone(&devices)).unwrap();
        let (uuid, fd) = chunk_with(&bytes());
        let chunk = devices.chunk(uuid, fd, CHUNK);
        // A slow machine may need longer to start it.
        while devices.import(&chunk) == Err(Errno::TIMEDOUT) {}
        kill_process(devices.pid().unwrap(), Signal::STOP).unwrap();
        let to = state.pages_offset();
        let mut part = Part::new(chunk);
        part.add(0..1, CopyRange { from: PAGE as u64, to, len: PAGE as u64 });
        assert_eq!(arrivals.copy(&Arrival::new(1, uuid, part), &OnceLock::new()), Ok(()));
        let mut arrived = [0; PAGE];
        rustix::io::pread(state.as_fd(), &mut arrived, to).unwrap();
        assert!(arrived[..] == bytes()[PAGE..2 * PAGE]);
        assert!(devices.starts() > 1);
    }

    #[test]
    fn supervisor_keeps_no_more_than_its_share_of_descriptors() {
        let (ours, supervisor) = Link::pair().unwrap();
        let state = Arc::new(StateMemory::small());
        let nodes = Arc::new(Nodes::attach(state.clone()));
        let arrivals = Arrivals::new(&state, nodes, ours, 8 * 4, DeviceProcess::new()).unwrap();
        let fd = std::fs::File::open("/dev/null").unwrap();
        let keep = || {
            let chunk = arrivals.devices.chunk([0; 16], fd.try_clone().unwrap().into(), PAGE as u64);
            arrivals.keep(Arrival::new(1, [0; 16], Part::new(chunk))).map_err(|error| (error, count(&supervisor)))
        };
        fn count(supervisor: &Link) -> usize {
            std::iter::from_fn(|| supervisor.receive(Wait::No).ok().flatten()).map(|got| got.fds.len()).sum()
        }
        let first = keep().ok().unwrap();
        let second = keep().ok().unwrap();
        assert_eq!(keep().err(), Some((Errno::NFILE, 4)));
        assert_eq!(keep().err(), Some((Errno::NFILE, 0)));
        drop(first);
        let third = keep().ok().unwrap();
        assert_eq!(keep().err(), Some((Errno::NFILE, 2)));
        drop((second, third));
        assert!(keep().is_ok());
    }
}
