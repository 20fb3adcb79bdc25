//! Room for chunks: the device memory that the maps of a process use together, and eviction.
//!
//! ```text
//!   acquire ── hold ── all chunks mapped: go on
//!                └─ else: within the limit, and the device has memory: map them
//!                         else unmap the least recently acquired chunks of any map, of which no page is in use
//!           └ grant access ── of the device to those that it may not access yet
//! ```
//!
//! **In use** is a page that is in an epoch for writing, or was acquired for reading and not given up, and all that a call
//! holds which runs or is queued. Nothing is written: what was released is at the server or in the file. The pages of an
//! evicted chunk are forgotten by the map, and the server is told so before they are acquired again.
//!
//! **Locks**: room > state of a map > table of its chunks. A call has no map's state locked when it asks for room, and
//! jobs of a lane never do ([`crate::lane`]): their chunks are held and accessible since they were queued. So who has room
//! locked may wait for states, and for stopped streams, while no chunk can be mapped or unmapped beside one. A call may grant
//! access with the state of its map locked: it has the map's turn, so no stop that it waits for is of a call on that map.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use spinio_device::{Device, ReplicaMemory, SharedMemory};
use spinio_host::{Settings, lock, try_lock};
use spinio_sys::{Errno, injection_point};

use crate::call_checks::captured;
use crate::chunks::{Chunks, Hold};
use crate::lane::between_stops;
use crate::state::State;
use crate::{Error, Result};

static ROOMS: Mutex<Vec<&'static Room>> = Mutex::new(Vec::new());
const NO_LIMIT: u64 = u64::MAX;
/// How long eviction waits for calls on other maps. One may wait for a server that never comes, and who waits for it has the
/// room locked, which all maps of the device need. Longer than a release may take that waits for another program's lease on
/// its file (45 s), and then for a server (30 s).
const BUSY: Duration = Duration::from_secs(90);
/// Between two looks.
const PAUSE: Duration = Duration::from_micros(100);

/// The memory of a device. It lives as long as the process.
pub(crate) struct Room {
    device: &'static dyn ReplicaMemory,
    limit: AtomicU64,
    /// Counts acquires.
    clock: AtomicU64,
    used: Mutex<Used>,
}

struct Used {
    bytes: u64,
    maps: Vec<Member>,
    /// [`BUSY`].
    busy: Duration,
}

struct Member {
    memory: Arc<Chunks>,
    state: Weak<Mutex<State>>,
}

impl Room {
    /// The room of a device.
    pub(crate) fn of(device: &'static dyn ReplicaMemory) -> &'static Room {
        let mut rooms = lock(&ROOMS);
        if let Some(room) = rooms.iter().find(|room| core::ptr::addr_eq(room.device, device)) {
            return room;
        }
        let limit = Settings::of_process().gaia_memory.unwrap_or(NO_LIMIT);
        let used = Mutex::new(Used { bytes: 0, maps: Vec::new(), busy: BUSY });
        let (limit, clock) = (AtomicU64::new(limit), AtomicU64::new(0));
        let room: &Room = Box::leak(Box::new(Room { device, limit, clock, used }));
        rooms.push(room);
        room
    }

    /// Bytes that chunks may have.
    pub(crate) fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Relaxed)).filter(|limit| *limit != NO_LIMIT)
    }

    /// How long eviction waits for calls that run, in tests.
    #[cfg(test)]
    pub(crate) fn wait_for_calls(&self, limit: Duration) {
        lock(&self.used).busy = limit;
    }

    /// For chunks that are created from now on.
    pub(crate) fn set_limit(&self, limit: Option<u64>) {
        self.limit.store(limit.unwrap_or(NO_LIMIT), Relaxed);
    }

    /// Reserves addresses for a map. `None`: the device has no memory in chunks.
    pub(crate) fn reserve(
        &self,
        device: &'static dyn SharedMemory,
        pages: usize,
        state: &Arc<Mutex<State>>,
    ) -> Result<Option<Arc<Chunks>>> {
        let Some(chunks) = Chunks::reserve(device, pages, self.limit())? else { return Ok(None) };
        let memory = Arc::new(chunks);
        lock(&self.used).maps.push(Member { memory: Arc::clone(&memory), state: Arc::downgrade(state) });
        Ok(Some(memory))
    }

    /// Frees the memory of a map, and whatever `more` does, when no stream is stopped.
    pub(crate) fn free(&self, memory: &Arc<Chunks>, more: impl FnOnce()) {
        let mut used = lock(&self.used);
        used.maps.retain(|map| !Arc::ptr_eq(&map.memory, memory));
        between_stops(self.device, || {
            used.bytes -= memory.free();
            more();
        });
    }

    /// They are acquired now.
    pub(crate) fn touch(&self, memory: &Chunks, chunks: Range<usize>) {
        memory.touch(chunks, self.clock.fetch_add(1, Relaxed) + 1);
    }

    /// Maps the chunks of a range that are not mapped, and holds all. Those that it maps are without access.
    pub(crate) fn hold(&self, memory: &Arc<Chunks>, chunks: Range<usize>) -> Result<Hold> {
        // First, so that room for one is not made by evicting another.
        let hold = memory.hold(chunks.clone(), self.clock.fetch_add(1, Relaxed) + 1);
        if !memory.missing(chunks.clone()).is_empty() {
            if self.device.app_stream().is_capturing() {
                return Err(captured());
            }
            self.map(&mut lock(&self.used), memory, chunks)?;
        }
        Ok(hold)
    }

    /// Lets kernels and copies use chunks that are held. It waits for stops, if some are without access: for a call in stream
    /// order it is done before that is queued.
    pub(crate) fn grant_access(&self, memory: &Chunks, chunks: Range<usize>) -> Result<()> {
        let chunks = memory.without_access(chunks);
        if chunks.is_empty() {
            return Ok(());
        }
        let granted = between_stops(self.device, || memory.grant_access(&chunks));
        injection_point!("client: chunks accessible");
        granted.map_err(|e| Error::device(e, "make the memory of a map accessible"))
    }

    /// Runs work that grants access to chunks by parts: when no stream is stopped, if some of these are without.
    pub(crate) fn while_granting<T>(&self, memory: &Chunks, chunks: Range<usize>, work: impl FnOnce() -> T) -> T {
        if memory.without_access(chunks).is_empty() { work() } else { between_stops(self.device, work) }
    }

    /// Holds a chunk if it is mapped.
    pub(crate) fn hold_mapped(&self, memory: &Arc<Chunks>, chunk: usize) -> Option<Hold> {
        let hold = memory.hold(chunk..chunk + 1, self.clock.fetch_add(1, Relaxed) + 1);
        memory.missing(chunk..chunk + 1).is_empty().then_some(hold)
    }

    fn map(&self, used: &mut Used, memory: &Arc<Chunks>, chunks: Range<usize>) -> Result<()> {
        let (limit, whole) = (self.limit.load(Relaxed), memory.bytes_of(chunks.clone()));
        if whole > limit {
            let sentence = format!(
                "The range takes {whole} bytes of device memory in chunks, and SPINIO_GAIA_MEMORY allows {limit}: \
                 acquire parts of it, and release each before the next"
            );
            return Err(Error::new(Errno::NOMEM, sentence));
        }
        loop {
            let missing = memory.missing(chunks.clone());
            let Some(first) = missing.first().copied() else { return Ok(()) };
            let wanted = memory.bytes_of(missing.iter().copied());
            let over = (used.bytes + wanted).saturating_sub(limit);
            if over > 0 {
                self.evict(used, over, &format!("SPINIO_GAIA_MEMORY ({limit} bytes) is used up"))?;
                continue;
            }
            let run = first..first + missing.iter().zip(first..).take_while(|(chunk, next)| **chunk == *next).count();
            let mapped = between_stops(self.device, || memory.map(run.clone()));
            injection_point!("client: chunks mapped");
            let mapped = mapped.map_err(|e| Error::device(e, "allocate device memory for a map"))?;
            used.bytes += memory.bytes_of(run.start..run.start + mapped);
            if mapped < run.len() {
                let more = memory.bytes_of(run.start + mapped..run.end);
                self.evict(used, more, "The device has no memory left")?;
            }
        }
    }

    /// Evicts chunks of so many bytes; fewer, but one at least, if there are no more.
    fn evict(&self, used: &mut Used, bytes: u64, why: &str) -> Result<()> {
        let deadline = Instant::now() + used.busy;
        let (mut taken, mut is_busy) = Room::take_oldest(used, bytes, deadline);
        let freed: u64 = between_stops(self.device, || {
            if taken.is_empty() {
                // The calls that were queued have ended, which may have taken longer.
                let deadline = if is_busy { deadline } else { Instant::now() + used.busy };
                (taken, is_busy) = Room::take_oldest(used, bytes, deadline);
            }
            injection_point!("client: chunks chosen for eviction");
            taken.iter().map(|(memory, chunk)| memory.unmap(*chunk, true)).sum()
        });
        injection_point!("client: chunks evicted");
        used.bytes -= freed;
        if freed > 0 {
            return Ok(());
        }
        if is_busy {
            let sentence = format!(
                "{why}, and other chunks are of maps whose calls have not ended for {} s, as if their GAIA mount does not \
                 answer",
                used.busy.as_secs()
            );
            return Err(Error::new(Errno::NOMEM, sentence));
        }
        let sentence = format!(
            "{why}, and all chunks of maps are in use: release ranges that kernels no longer use, also those that were \
             acquired for reading, or acquire a smaller one"
        );
        Err(Error::new(Errno::NOMEM, sentence))
    }

    /// Takes the chunks out of use that were acquired least recently, and of which no page is in use; and whether there
    /// may be more, of maps with calls that run until the deadline.
    fn take_oldest(used: &Used, bytes: u64, deadline: Instant) -> (Vec<(Arc<Chunks>, usize)>, bool) {
        let idle = used.maps.iter().flat_map(|map| map.memory.idle().into_iter().map(move |(at, n)| (at, n, map)));
        let mut idle: Vec<_> = idle.collect();
        idle.sort_unstable_by_key(|(at, number, _)| (*at, *number));
        let (mut taken, mut found) = (Vec::new(), 0);
        // A map whose state is locked has a call that runs: its chunks are asked for last.
        for until in [None, Some(deadline)] {
            idle.retain(|(_, number, map)| {
                if found >= bytes {
                    return false;
                }
                let Some(state) = map.state.upgrade() else { return false };
                let Some(mut state) = lock_state(&state, until) else { return true };
                if take(&map.memory, *number, &mut state) {
                    found += map.memory.len(*number);
                    taken.push((Arc::clone(&map.memory), *number));
                }
                false
            });
        }
        (taken, !idle.is_empty() && found < bytes)
    }

    /// Gives memory back: chunks of which no page is in use.
    pub(crate) fn give_back(&self, memory: &Arc<Chunks>, chunks: Range<usize>) {
        let mut used = lock(&self.used);
        let Some(state) = used.maps.iter().find(|map| Arc::ptr_eq(&map.memory, memory)).map(|map| &map.state) else {
            return;
        };
        let Some(state) = state.upgrade() else { return };
        let Some(mut state) = lock_state(&state, Some(Instant::now() + used.busy)) else { return };
        let taken: Vec<_> = chunks.filter(|chunk| take(memory, *chunk, &mut state)).collect();
        drop(state);
        if !taken.is_empty() {
            let unmap = || taken.iter().map(|chunk| memory.unmap(*chunk, false)).sum::<u64>();
            used.bytes -= between_stops(self.device, unmap);
        }
    }
}

/// Limits the memory of maps on a device in this process, as `SPINIO_GAIA_MEMORY` does.
pub fn limit_memory(device: &'static dyn Device, limit: Option<u64>) {
    if let Some(memory) = device.replica_memory() {
        Room::of(memory).set_limit(limit);
    }
}

/// Locks a state now, or once that is possible before a deadline.
fn lock_state(state: &Mutex<State>, until: Option<Instant>) -> Option<MutexGuard<'_, State>> {
    loop {
        let locked = try_lock(state);
        if locked.is_some() || until.is_none_or(|until| Instant::now() >= until) {
            return locked;
        }
        std::thread::sleep(PAUSE);
    }
}

/// Takes a chunk out of use, of which no page is.
fn take(memory: &Chunks, chunk: usize, state: &mut State) -> bool {
    let pages = memory.pages(chunk);
    let taken = !state.pages.is_in_use(pages.clone()) && memory.take(chunk);
    if taken {
        state.current.forget();
        state.pages.lose_memory(pages);
    }
    taken
}
