//! Host memory for reads that may wait without bound.
//!
//! ```text
//!   read(socket) ── acquire ──> buffer ── the kernel waits, then fills it ──> copied ── release ──> idle
//!                                 │
//!                                 └ a signal handler leaves by longjmp: still marked as in use by that thread
//! ```
//!
//! A peer decides how long such a read waits, so it must hold nothing that other reads need: neither a bounce
//! buffer nor a stream of the device. Its bytes go to ordinary memory, one buffer a waiting read.
//!
//! A handler that leaves the read by `longjmp` leaves the buffer marked. The next such read of the same thread takes
//! it: a frame at the same stack address or below the present one is gone. A handler that reads itself runs below the
//! read that it has interrupted, or on another stack (`sigaltstack`), and so gets a buffer of its own. Buffers of
//! threads that have ended are freed when a new one is made. So jumps cost a thread one buffer for each call depth at
//! most, and a program its idle ones.
//!
//! Known flaw: a signal handler that switches to another user-level stack (`swapcontext`) in the middle of such a read,
//! and reads from a pipe there, at a higher address, gets the same buffer.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::sync::Mutex;

use spinio_sys::linux::{self, AltStack};

use spinio_host::lock;
use spinio_transfer::bounce::BUFFER_SIZE;

/// Bytes of idle buffers that are kept.
const KEPT: usize = 4 * BUFFER_SIZE;

/// Where a read stands: enough to know later whether it can still be under way.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Frame {
    tid: u32,
    stack: AltStack,
    address: usize,
}

impl Frame {
    /// Of the caller; the address is that of a local of this function, which every caller reaches at the same depth.
    #[inline(never)]
    fn here() -> Frame {
        let local = 0u8;
        Frame { tid: linux::gettid(), stack: linux::alternate_stack(), address: (&raw const local) as usize }
    }

    /// Whether `earlier` has been left, as seen from here.
    fn has_left(&self, earlier: &Frame) -> bool {
        (self.tid, self.stack) == (earlier.tid, earlier.stack) && self.address >= earlier.address
    }
}

struct Entry {
    memory: Memory,
    user: Option<Frame>,
}

/// An anonymous mapping.
struct Memory {
    ptr: *mut u8,
    len: usize,
}

// SAFETY: plain memory with one owner at a time.
unsafe impl Send for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: mapped below; no read is under way into it.
        let _ = unsafe { linux::munmap(self.ptr, self.len) };
    }
}

/// The buffers of a runtime.
#[derive(Default)]
pub(crate) struct WaitBuffers {
    entries: Mutex<Vec<Entry>>,
}

/// A buffer while one read has it.
pub(super) struct WaitBuffer<'a> {
    buffers: &'a WaitBuffers,
    ptr: *mut u8,
}

impl WaitBuffers {
    /// At least `len` bytes, page-aligned; `None` without memory.
    pub(super) fn acquire(&self, len: usize) -> Option<WaitBuffer<'_>> {
        let here = Frame::here();
        let mut entries = lock(&self.entries);
        for entry in entries.iter_mut() {
            if entry.user.is_some_and(|earlier| here.has_left(&earlier)) {
                entry.user = None;
            }
        }
        let fits = |e: &Entry| e.user.is_none() && e.memory.len >= len;
        let found = entries.iter_mut().filter(|e| fits(e)).min_by_key(|e| e.memory.len);
        let ptr = match found {
            Some(entry) => {
                entry.user = Some(here);
                entry.memory.ptr
            }
            None => {
                entries.retain(|e| e.user.is_none_or(|user| !linux::is_no_thread(user.tid)));
                let len = len.next_power_of_two().max(linux::PAGE);
                let (protection, kind) =
                    (linux::PROT_READ | linux::PROT_WRITE, linux::MAP_PRIVATE | linux::MAP_ANONYMOUS);
                // SAFETY: a new anonymous mapping replaces nothing.
                let ptr = unsafe { linux::mmap(core::ptr::null_mut(), len, protection, kind, -1, 0) }.ok()?;
                entries.push(Entry { memory: Memory { ptr, len }, user: Some(here) });
                ptr
            }
        };
        Some(WaitBuffer { buffers: self, ptr })
    }
}

impl WaitBuffer<'_> {
    pub(super) fn ptr(&self) -> *mut u8 {
        self.ptr
    }

    /// Never uses it again: the device may still read it.
    pub(super) fn leak(self) {
        let mut entries = lock(&self.buffers.entries);
        if let Some(at) = entries.iter().position(|e| e.memory.ptr == self.ptr) {
            std::mem::forget(entries.swap_remove(at));
        }
    }
}

impl Drop for WaitBuffer<'_> {
    fn drop(&mut self) {
        let mut entries = lock(&self.buffers.entries);
        if let Some(entry) = entries.iter_mut().find(|e| e.memory.ptr == self.ptr) {
            entry.user = None;
        }
        let mut idle = 0;
        entries.retain(|e| {
            idle += if e.user.is_none() { e.memory.len } else { 0 };
            e.user.is_some() || idle <= KEPT
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(buffers: &WaitBuffers) -> usize {
        lock(&buffers.entries).len()
    }

    #[test]
    fn released_buffers_are_reused() {
        let buffers = WaitBuffers::default();
        let first = buffers.acquire(1000).unwrap().ptr();
        let again = buffers.acquire(4000).unwrap();
        assert!(again.ptr() == first && count(&buffers) == 1);
    }

    #[test]
    fn idle_memory_is_bounded() {
        let buffers = WaitBuffers::default();
        let barrier = std::sync::Barrier::new(16);
        std::thread::scope(|scope| {
            for _ in 0..16 {
                scope.spawn(|| {
                    let _buffer = buffers.acquire(BUFFER_SIZE).unwrap();
                    barrier.wait();
                });
            }
        });
        assert!(count(&buffers) * BUFFER_SIZE <= KEPT, "{} buffers", count(&buffers));
    }

    #[test]
    fn abandoned_buffers_of_ended_threads_are_freed() {
        let buffers = WaitBuffers::default();
        for _ in 0..20 {
            std::thread::scope(|scope| {
                scope.spawn(|| std::mem::forget(buffers.acquire(BUFFER_SIZE))).join().unwrap();
            });
        }
        // The kernel may still end the last one or two.
        assert!(count(&buffers) < 10, "{} buffers", count(&buffers));
    }

    #[inline(never)]
    fn abandon(buffers: &WaitBuffers, depth: usize) -> usize {
        let frame = [0u8; 256];
        std::hint::black_box(&frame);
        if depth > 0 {
            return abandon(buffers, depth - 1) + frame.len() / 512;
        }
        let buffer = buffers.acquire(BUFFER_SIZE).unwrap();
        let at = buffer.ptr() as usize;
        std::mem::forget(buffer);
        at
    }

    #[test]
    fn abandoned_buffer_is_taken_over_by_same_thread() {
        let buffers = WaitBuffers::default();
        for _ in 0..64 {
            abandon(&buffers, 3);
        }
        assert_eq!(count(&buffers), 1);
    }

    #[test]
    fn deeper_read_gets_another_buffer() {
        let buffers = WaitBuffers::default();
        let outer = buffers.acquire(BUFFER_SIZE).unwrap();
        assert_ne!(abandon(&buffers, 10), outer.ptr() as usize);
        drop(outer);
    }
}
