//! Moves of own files in the order of a queue: asked for now, made when the queue gets there.
//!
//! ```text
//!   queue     ... work │ host function 0 │ copy 0 │ host function 1 │ copy 1 │ ... │ last host function │ later work
//!   keepers   fill piece 0 .. n at once      └ piece 0's block is free: fill piece n with it
//! ```
//!
//! An upload reads the file while the queue is still busy with what was there before. Each copy has a host function
//! before it, which waits until a keeper has filled its block, so that nothing queued behind the upload can run before
//! its bytes are there. After the call nothing is asked of the device any more, except by the queue itself: a program
//! that waits for its device waits for files too, but never for somebody who waits for it.
//!
//! The program may queue any number, and let the queue wait for itself: so nothing here waits for a block. An upload takes what
//! the ring of queued moves has, up to 16, but leaves others half of what is left. Where it has none, it uses the blocks of
//! the upload before it in the same queue, which is over when its own turn comes; the file is read only then. The first
//! of a queue gets a block beyond the bound, as does one that comes while another thread is queueing there.
//!
//! A download is [`Writer::write_async`] (write/later.rs).
//!
//! Known flaws: the driver runs host functions of all queues on one thread, so uploads in two queues wait for each other's
//! files. An upload behind one of a stream that was destroyed meanwhile, in a new stream of the same number, may find that its
//! memory is in use still: it fails with EIO. Bytes that the file loses between the question for its size and the read arrive as zeros; the result tells.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicIsize, Ordering::AcqRel, Ordering::Acquire, Ordering::Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use spinio_device::{Device, QueueId, Wait};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;

use crate::ctx::Writer;
use spinio_files::OwnFile;
use spinio_host::lock;
use spinio_transfer::bounce::{BLOCK, Block, Staging, owner};
use spinio_stats::{Direction, Watch};
use spinio_device::Target;
use spinio_transfer::Error;

/// No result yet.
const PENDING: isize = isize::MIN;

/// Blocks of an upload: so many pieces are read ahead of the queue.
const AHEAD: usize = 16;

/// The word that a result is stored in.
#[derive(Debug)]
struct Word {
    value: AtomicIsize,
    /// Somebody who stores it has been given the word without owning it.
    lent: AtomicBool,
}

/// A move on its way.
#[derive(Clone, Debug)]
pub struct OnItsWay(Arc<Word>);

impl OnItsWay {
    fn new() -> OnItsWay {
        OnItsWay::over_as(PENDING)
    }

    fn over_as(value: isize) -> OnItsWay {
        OnItsWay(Arc::new(Word { value: AtomicIsize::new(value), lent: AtomicBool::new(false) }))
    }

    /// One that is over.
    pub fn over(moved: usize) -> OnItsWay {
        OnItsWay::over_as(moved as isize)
    }

    /// Lets the word live until its result has been seen.
    fn lend(&self) -> *const AtomicIsize {
        self.0.lent.store(true, Release);
        // SAFETY: the pointer is an Arc's own; `take_back` undoes this.
        unsafe { Arc::increment_strong_count(Arc::as_ptr(&self.0)) };
        &raw const self.0.value
    }

    fn take_back(&self) {
        if self.0.lent.swap(false, AcqRel) {
            // SAFETY: counted by `lend`, once; `self` still holds one.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(&self.0)) };
        }
    }

    /// The bytes moved, or why not; `None` while it is on its way.
    pub fn result(&self) -> Option<core::result::Result<usize, Errno>> {
        match self.0.value.load(Acquire) {
            PENDING => None,
            moved => {
                self.take_back();
                Some(usize::try_from(moved).map_err(|_| Errno::from_raw_os_error(-moved as i32)))
            }
        }
    }

    /// Waits for the result.
    pub fn wait(&self) -> core::result::Result<usize, Errno> {
        let begun = Instant::now();
        loop {
            if let Some(result) = self.result() {
                return result;
            }
            // What is nearly there is not slept for.
            match begun.elapsed() < Duration::from_micros(100) {
                true => std::thread::yield_now(),
                false => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

/// Blocks of one upload, or of several that follow each other in a queue. They go back with the last.
struct Lot {
    staging: Arc<Staging>,
    blocks: Mutex<Vec<Block>>,
    /// The device may use them still.
    lost: AtomicBool,
}

impl Drop for Lot {
    fn drop(&mut self) {
        for block in lock(&self.blocks).drain(..) {
            match self.lost.load(Acquire) {
                true => self.staging.lose(block),
                false => self.staging.give_back(block),
            }
        }
    }
}

/// The last upload of each queue that is queued to its end and not over, as far as anybody has looked.
#[derive(Default)]
pub(crate) struct Uploads(Mutex<Vec<Last>>);

/// Of which queue, and whose it is.
type Last = ((QueueId, u32), Weak<Upload>);

impl Uploads {
    /// The memory of the upload before, in the same queue of the same device, and how one knows that it is over. One takes
    /// it: what another thread queues meanwhile may come to lie before, behind or between its turns.
    fn take_before(&self, device: &dyn Device, queue: QueueId) -> Option<(Arc<Lot>, OnItsWay)> {
        let (mut last, queue) = (lock(&self.0), (queue, owner(queue)));
        let at = last.iter().position(|(of, upload)| {
            let on = |upload: Arc<Upload>| core::ptr::addr_eq(upload.device, device);
            *of == queue && upload.upgrade().is_some_and(on)
        })?;
        let upload = last.swap_remove(at).1.upgrade()?;
        let lot = lock(&upload.lot).clone()?;
        Some((lot, upload.result.clone()))
    }

    /// All turns of an upload are queued: what is queued from now on is behind it.
    fn note(&self, queue: QueueId, upload: &Arc<Upload>) {
        let (mut last, queue) = (lock(&self.0), (queue, owner(queue)));
        last.retain(|(of, other)| {
            let other = other.upgrade().filter(|other| lock(&other.lot).is_some());
            other.is_some_and(|other| *of != queue || !core::ptr::addr_eq(other.device, upload.device))
        });
        last.push((queue, Arc::downgrade(upload)));
    }
}

/// What keepers and host functions share.
struct Upload {
    file: Arc<OwnFile>,
    at: u64,
    len: usize,
    device: &'static dyn Device,
    /// `None`: it is over.
    lot: Mutex<Option<Arc<Lot>>>,
    /// Whose memory it takes over, when its turn has come.
    before: Option<OnItsWay>,
    memory: Vec<usize>,
    state: Mutex<State>,
    changed: Condvar,
    result: OnItsWay,
    watch: Watch,
    begun: Instant,
}

struct State {
    filled: Vec<bool>,
    /// Pieces that keepers are filling, or will.
    running: usize,
    /// Bytes of the unbroken front, as far as the file had them.
    good: usize,
    error: Option<Errno>,
    /// The memory is not its own: nothing is read into it.
    barred: bool,
}

impl Upload {
    fn pieces(&self) -> usize {
        self.len.div_ceil(BLOCK)
    }

    fn piece_len(&self, piece: usize) -> usize {
        (self.len - piece * BLOCK).min(BLOCK)
    }

    /// Has a keeper fill the block of a piece.
    fn start(self: &Arc<Self>, piece: usize) {
        lock(&self.state).running += 1;
        let upload = Arc::clone(self);
        // Whatever happens, the piece counts as filled: the queue waits for it.
        let fill = move |_| {
            if catch_unwind(AssertUnwindSafe(|| upload.fill(piece))).is_err() {
                upload.filled(piece, 0, Some(Errno::IO));
            }
        };
        if !self.file.start(fill) {
            self.filled(piece, 0, Some(Errno::IO));
        }
    }

    fn fill(&self, piece: usize) {
        let kernel = self.file.files().ctx.sys;
        let (memory, len) = (self.memory[piece % self.memory.len()], self.piece_len(piece));
        let offset = self.at + (piece * BLOCK) as u64;
        let (mut got, mut error) = (0, None);
        while got < len {
            let into = (memory + got) as *mut u8;
            // SAFETY: the block is this upload's until its last host function, and no copy from it is queued that may
            // run before this piece counts as filled.
            let read = unsafe { kernel.pread(Route::Copy, self.file.fd(), into, len - got, offset + got as u64, 0) };
            match read {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(Errno::INTR) => {}
                Err(e) => {
                    error = Some(e);
                    break;
                }
            }
        }
        // SAFETY: as above.
        unsafe { core::ptr::write_bytes((memory + got) as *mut u8, 0, len - got) };
        self.filled(piece, got, error);
    }

    fn filled(&self, piece: usize, got: usize, error: Option<Errno>) {
        let mut state = lock(&self.state);
        state.filled[piece] = true;
        state.running -= 1;
        let end = piece * BLOCK + got;
        if got < self.piece_len(piece) && end < state.good {
            state.good = end;
            state.error = error;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The queue has come to a piece: what it needs is waited for.
    fn reached(self: &Arc<Self>, piece: usize) {
        if piece == 0 && self.before.is_some() {
            self.take_over();
        }
        if lock(&self.state).barred {
            return;
        }
        if let Some(free) = piece.checked_sub(1)
            && free + self.memory.len() < self.pieces()
        {
            self.start(free + self.memory.len());
        }
        let mut state = lock(&self.state);
        while !state.filled[piece] {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Has the first pieces filled.
    fn begin(self: &Arc<Self>) {
        (0..self.memory.len().min(self.pieces())).for_each(|piece| self.start(piece));
    }

    /// The queue has come to the beginning: the upload before is over, or else it was another queue's of this number.
    fn take_over(self: &Arc<Self>) {
        if self.before.as_ref().is_none_or(|before| before.0.value.load(Acquire) != PENDING) {
            return self.begin();
        }
        let mut state = lock(&self.state);
        (state.barred, state.good, state.error) = (true, 0, Some(Errno::IO));
    }

    /// The queue has come to the end.
    fn over(&self) {
        drop(lock(&self.lot).take());
        let state = lock(&self.state);
        let result = match state.error {
            Some(error) if state.good == 0 => Err(error),
            _ => Ok(state.good),
        };
        let stats = self.file.files().ctx.stats();
        stats.piece(&self.watch, Route::Copy, Reason::Forced, 0, state.good as u64, self.begun);
        let told = result.map_err(|e| Error::kernel(e, "read", self.at, self.len as u64));
        stats.end(&self.watch, &Error::outcome(&told));
        let value = result.map_or_else(|e| -(e.raw_os_error() as isize), |good| good as isize);
        self.result.0.value.store(value, Release);
    }
}

impl Upload {
    /// It cannot be queued to its end: waits until nobody uses its blocks.
    fn give_up(&self, device: &dyn Device, queue: QueueId) {
        if device.drain(queue, Wait::Context).is_err() {
            // It cannot say that it is done: the blocks are nobody's from now on.
            if let Some(lot) = &*lock(&self.lot) {
                lot.lost.store(true, Release);
            }
        }
        let mut state = lock(&self.state);
        // Not all pieces: where the device is lost, nobody begins those whose turn has not come.
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        (state.good, state.error) = (0, Some(Errno::IO));
        drop(state);
        self.over();
    }
}

/// A host function's argument: an upload, and which piece; behind the last one is the end.
struct Turn(Arc<Upload>, usize);

/// # Safety
/// `turn` must come from `Box::into_raw`, once.
unsafe extern "C" fn take_turn(turn: *mut c_void) {
    // SAFETY: the caller's promise.
    let Turn(upload, piece) = *unsafe { Box::from_raw(turn.cast::<Turn>()) };
    let turn = || match piece < upload.pieces() {
        true => upload.reached(piece),
        false => upload.over(),
    };
    // Nothing may unwind into the driver. Whoever waits hears of it: a later turn cannot make it right.
    if catch_unwind(AssertUnwindSafe(turn)).is_err() {
        lock(&upload.state).good = 0;
        lock(&upload.state).error = Some(Errno::IO);
        if piece == upload.pieces() {
            upload.result.0.value.store(-(Errno::IO.raw_os_error() as isize), Release);
        }
    }
}

/// Queues a turn; `false`: the device does not take it.
fn queue_turn(device: &dyn Device, queue: QueueId, upload: &Arc<Upload>, piece: usize) -> bool {
    let turn = Box::into_raw(Box::new(Turn(Arc::clone(upload), piece)));
    // SAFETY: `take_turn` takes the box, once.
    let taken = unsafe { device.call_host(queue, take_turn, turn.cast()) }.is_ok();
    if !taken {
        // SAFETY: the device did not take it.
        drop(unsafe { Box::from_raw(turn) });
    }
    taken
}

/// Stream-ordered moves of shadow files, of one runtime.
pub struct StreamMoves {
    writer: Arc<Writer>,
    uploads: Uploads,
}

impl StreamMoves {
    /// None under way.
    pub(crate) fn new(writer: Arc<Writer>) -> StreamMoves {
        StreamMoves { writer, uploads: Uploads::default() }
    }

    /// Reads a file into device memory in the order of a queue (CUDA: a stream). What is queued behind it finds the
    /// bytes. A device that calls no host functions has them when this returns.
    pub fn upload_later(
        &self,
        file: &Arc<OwnFile>,
        at: u64,
        to: Target,
        len: usize,
        queue: QueueId,
    ) -> Result<OnItsWay, Error> {
        let device = to.allocation.device;
        let fail = |e| Error::kernel(e, "read", at, len as u64);
        let device_fail = |e| Error::device(e, "read", at, len as u64);
        let size = self.writer.files.sys().fstat(file.fd()).map_err(fail)?.size;
        let len = (len as u64).min(size.saturating_sub(at)).min(to.allocation.room(to.addr)) as usize;
        if device.is_captured(queue) {
            return Err(fail(Errno::BUSY));
        }
        if len == 0 {
            return Ok(OnItsWay::over(0));
        }
        let uploads = &self.uploads;
        let staging = self.writer.bounce.stream(device);
        let pieces = len.div_ceil(BLOCK);
        let mut blocks = staging.take_many(pieces.min(AHEAD).min(staging.left().div_ceil(2)), Duration::ZERO);
        let shared = if blocks.is_empty() { uploads.take_before(device, queue) } else { None };
        let (lot, before) = match shared {
            Some((lot, before)) => (lot, Some(before)),
            None => {
                if blocks.is_empty() {
                    blocks.push(staging.beyond_bound().or_else(|_| staging.take()).map_err(device_fail)?);
                }
                (Arc::new(Lot { staging, blocks: Mutex::new(blocks), lost: AtomicBool::new(false) }), None)
            }
        };
        let memory: Vec<usize> = lock(&lot.blocks).iter().map(|b| b.ptr() as usize).collect();
        // Memory that is not pinned is read by the driver when the copy is queued, not when it runs.
        let pinned = lock(&lot.blocks).iter().all(|b| b.pinned);
        let upload = Arc::new(Upload {
            file: Arc::clone(file),
            at,
            len,
            device,
            lot: Mutex::new(Some(lot)),
            before,
            memory,
            state: Mutex::new(State { filled: vec![false; pieces], running: 0, good: len, error: None, barred: false }),
            changed: Condvar::new(),
            result: OnItsWay::new(),
            watch: self.writer.files.stats().begin(Direction::Read, file.fd(), Some(at), len as u64).on(device),
            begun: Instant::now(),
        });
        if upload.before.is_none() {
            upload.begin();
        }
        let queue_piece = |piece: usize| {
            if !(pinned && queue_turn(device, queue, &upload, piece)) {
                // The device calls nobody, or not any more: here, and now.
                device.drain(queue, Wait::Context)?;
                upload.reached(piece);
            }
            let from = upload.memory[piece % upload.memory.len()] as *const u8;
            let dst = to.addr.offset((piece * BLOCK) as u64);
            // SAFETY: the block is the upload's until the last turn; the bytes lie inside the allocation. It is filled
            // when the copy runs: the turn before it sees to that, or it has been waited for.
            unsafe { device.copy_in(queue, dst, from, upload.piece_len(piece)) }
        };
        let queue_end = || {
            if !queue_turn(device, queue, &upload, pieces) {
                device.drain(queue, Wait::Context)?;
                upload.over();
            }
            Ok(())
        };
        if let Err(error) = (0..pieces).try_for_each(queue_piece).and_then(|()| queue_end()) {
            upload.give_up(device, queue);
            return Err(device_fail(error));
        }
        uploads.note(queue, &upload);
        Ok(upload.result.clone())
    }

    /// Writes device memory to a file in the order of a queue. What is queued behind it may use the memory again.
    pub fn download_later(
        &self,
        file: &Arc<OwnFile>,
        at: u64,
        from: Target,
        len: usize,
        queue: QueueId,
    ) -> Result<OnItsWay, Error> {
        let on_its_way = OnItsWay::new();
        let result = on_its_way.lend();
        // SAFETY: the word is lent, so it stays until its result has been seen.
        if let Err(error) = unsafe { self.writer.write_async(file.fd(), at, from, len, queue, result) } {
            // Nothing is queued, so nobody stores into it any more.
            on_its_way.take_back();
            return Err(error);
        }
        Ok(on_its_way)
    }
}
