//! A pass over all pieces of a batch, shared among threads.
//!
//! ```text
//!   caller   chunk 0   chunk 3   chunk 4          whoever has time takes the next chunk;
//!   reader   chunk 1   chunk 5                    the caller goes on when all are done
//!   reader   chunk 2   chunk 6
//! ```
//!
//! A pass over a million pieces takes one thread 10 to 15 ms, most of it for memory that nobody has touched before, and
//! no piece moves meanwhile. Passes touch memory, and neither a device nor a descriptor, so the readers can help, who will
//! be wanted for the batch anyway. Where they are busy the caller does it alone.

use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::pool::{Task, WorkerPool};
use crate::task_scope::TaskScope;

/// Pieces that a thread is woken for.
const CHUNK: usize = 16 << 10;

/// Pieces from which on a pass is shared.
pub const SHARE_MIN: usize = 4 * CHUNK;

/// A pass under way.
struct Pass {
    next: AtomicUsize,
    chunks: usize,
    scope: TaskScope,
    /// Called only by who is inside the gate.
    body: *const (dyn Fn(usize) + Sync),
}

// SAFETY: what the pointer leads to may be called by any thread (it is `Sync`), and is there as long as the gate is open.
unsafe impl Send for Pass {}
// SAFETY: as above.
unsafe impl Sync for Pass {}

impl Pass {
    fn run_chunks(&self) {
        loop {
            let chunk = self.next.fetch_add(1, Relaxed);
            if chunk >= self.chunks {
                return;
            }
            // SAFETY: only from inside the gate, which `share` closes before the closure goes.
            unsafe { (*self.body)(chunk) };
        }
    }
}

impl Task for Pass {
    fn execute(&self) {
        if let Some(_inside) = self.scope.enter() {
            self.run_chunks();
        }
    }
}

/// How many chunks there are of so many pieces.
pub fn chunk_count(ops: usize) -> usize {
    ops.div_ceil(CHUNK)
}

/// The pieces of a chunk.
pub fn chunk_range(index: usize, ops: usize) -> std::ops::Range<usize> {
    index * CHUNK..ops.min((index + 1) * CHUNK)
}

/// Runs a pass over every chunk of so many pieces, each once, by this thread and up to `most` of a pool's that have time.
pub fn share<'a>(crew: impl FnOnce() -> Option<&'a WorkerPool>, most: usize, ops: usize, run: impl Fn(usize) + Sync) {
    let chunks = chunk_count(ops);
    let workers = most.min(chunks.saturating_sub(1));
    let Some(pool) = (workers > 0 && ops >= SHARE_MIN).then(crew).flatten() else {
        return (0..chunks).for_each(run);
    };
    let run: &(dyn Fn(usize) + Sync) = &run;
    // SAFETY: only the lifetime is another: nobody calls it once the gate is closed, which it is below.
    let run: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run) };
    let pass = Arc::new(Pass { next: AtomicUsize::new(0), chunks, scope: TaskScope::new(), body: run });
    pool.submit(Arc::clone(&pass) as Arc<dyn Task>, workers);
    // Whatever happens here, the others are out before the closure goes.
    let outcome = catch_unwind(AssertUnwindSafe(|| pass.run_chunks()));
    let poisoned = pass.scope.close_and_wait();
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
    assert!(!poisoned, "a helper of this batch panicked");
}

/// Room at the end of a vector that threads fill, each its own part.
pub struct UninitSlots<T> {
    ptr: *mut MaybeUninit<T>,
    len: usize,
}

// SAFETY: a place is written by one thread (the contract of `put`), and values may go to another one.
unsafe impl<T: Send> Send for UninitSlots<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for UninitSlots<T> {}

impl<T: Copy> UninitSlots<T> {
    /// Behind what the vector has. It must not be touched until the room is no longer used.
    pub fn spare_of(vec: &mut Vec<T>) -> UninitSlots<T> {
        let spare = vec.spare_capacity_mut();
        UninitSlots { ptr: spare.as_mut_ptr(), len: spare.len() }
    }

    /// Fills a place.
    ///
    /// # Safety
    /// By one thread at a time for each place, while the vector stays as it was.
    #[inline(always)]
    pub unsafe fn write(&self, index: usize, value: T) {
        assert!(index < self.len);
        // SAFETY: inside the spare part of the vector, and this thread's alone, by the contract.
        unsafe { (*self.ptr.add(index)).write(value) };
    }
}
