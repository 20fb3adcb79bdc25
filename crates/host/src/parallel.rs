//! A pass over all operations of a batch, shared among threads.
//!
//! ```text
//!   caller   chunk 0   chunk 3   chunk 4          each thread takes the next chunk;
//!   reader   chunk 1   chunk 5                    the caller continues when all are done
//!   reader   chunk 2   chunk 6
//! ```
//!
//! A pass over a million operations takes one thread 10 to 15 ms, most of it for page faults of fresh memory, and no
//! data moves meanwhile. Passes access memory, but neither a device nor a descriptor, so the batch readers, which the
//! batch needs anyway, can take part. If they are busy the caller makes the pass alone.

#![expect(unsafe_code, reason = "threads, shared words and descriptors of other tables")]

use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use spinio_sys::linux::SignalGuard;

use crate::pool::{Task, WorkerPool};
use crate::task_scope::TaskScope;

/// Operations per woken thread.
const CHUNK: usize = 16 << 10;

/// Operations from which on a pass is shared.
pub const SHARE_MIN: usize = 4 * CHUNK;

/// A pass in progress.
struct Pass {
    next: AtomicUsize,
    chunks: usize,
    scope: TaskScope,
    /// Called only by threads inside the scope.
    body: *const (dyn Fn(usize) + Sync),
}

// SAFETY: the pointer is to a closure that any thread may call (it is `Sync`), and that lives as long as the scope is
// open.
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
            // SAFETY: only from inside the scope, which `share` closes before the closure is dropped.
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

/// The number of chunks for this number of operations.
pub fn chunk_count(ops: usize) -> usize {
    ops.div_ceil(CHUNK)
}

/// The operations of a chunk.
pub fn chunk_range(index: usize, ops: usize) -> std::ops::Range<usize> {
    index * CHUNK..ops.min((index + 1) * CHUNK)
}

/// Runs a pass over every chunk of `ops` operations, each once, on this thread and up to `max_workers` idle ones of a
/// pool.
pub fn share<'a>(
    pool: impl FnOnce() -> Option<&'a WorkerPool>,
    max_workers: usize,
    ops: usize,
    run: impl Fn(usize) + Sync,
) {
    let chunks = chunk_count(ops);
    let workers = max_workers.min(chunks.saturating_sub(1));
    let Some(pool) = (workers > 0 && ops >= SHARE_MIN).then(pool).flatten() else {
        return (0..chunks).for_each(run);
    };
    let run: &(dyn Fn(usize) + Sync) = &run;
    // A handler that jumps away would leave the other threads a closure whose stack is gone. It takes milliseconds.
    let _held = SignalGuard::block_asynchronous();
    // SAFETY: only the lifetime changes: no thread calls it once the scope is closed, which is done below.
    let run: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(run) };
    let pass = Arc::new(Pass { next: AtomicUsize::new(0), chunks, scope: TaskScope::new(), body: run });
    pool.submit(Arc::clone(&pass) as Arc<dyn Task>, workers);
    // After a panic here too, the other threads have left before the closure is dropped.
    let outcome = catch_unwind(AssertUnwindSafe(|| pass.run_chunks()));
    let poisoned = pass.scope.close_and_wait();
    if let Err(panic) = outcome {
        resume_unwind(panic);
    }
    assert!(!poisoned, "a worker of this batch panicked");
}

/// Spare capacity of a vector that threads fill, each its own part.
pub struct UninitSlots<T> {
    ptr: *mut MaybeUninit<T>,
    len: usize,
}

// SAFETY: a slot is written by one thread (the contract of `write`), and values may go to another one.
unsafe impl<T: Send> Send for UninitSlots<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for UninitSlots<T> {}

impl<T: Copy> UninitSlots<T> {
    /// The capacity past the end of the vector, which must not be touched until this is no longer used.
    pub fn spare_of(vec: &mut Vec<T>) -> UninitSlots<T> {
        let spare = vec.spare_capacity_mut();
        UninitSlots { ptr: spare.as_mut_ptr(), len: spare.len() }
    }

    /// Fills a slot.
    ///
    /// # Safety
    /// By one thread at a time for each slot, while the vector stays as it was.
    #[inline(always)]
    pub unsafe fn write(&self, index: usize, value: T) {
        assert!(index < self.len);
        // SAFETY: inside the spare part of the vector, and this thread's alone, by the contract.
        unsafe { (*self.ptr.add(index)).write(value) };
    }
}
