//! Rings of asynchronous reads (`io_uring`), without libc and without a library.
//!
//! ```text
//!   ring.rs     Ring         of one thread, which submits with a system call
//!   shared.rs   SharedRing   filled by any thread through shared memory; a kernel thread submits (SQPOLL)
//!   own.rs      OwnRing      of one thread, which enters it without a descriptor of the ring
//!   commands.rs a long read as several
//!   slots.rs    files in a ring, by number
//!   here        the kernel's structures, and the memory that a ring shares with it
//! ```

#![expect(unsafe_code, reason = "system calls and memory shared with the Linux kernel")]

mod commands;
mod own;
mod ring;
mod shared;
mod slots;

use core::sync::atomic::{
    AtomicU32,
    Ordering::{Acquire, Relaxed, Release},
};

use rustix::io::Errno;

use super::files::Fd;
use super::memory::{MADV_DONTFORK, MAP_POPULATE, MAP_SHARED, PAGE, PROT_READ, PROT_WRITE, madvise, mmap, munmap};
use super::raw::syscall;

pub use self::own::{NewOwnRing, OwnRing, RingFile};
pub use self::ring::Ring;
pub use self::shared::SharedRing;

type Result<T> = core::result::Result<T, Errno>;

const NR_SETUP: u32 = 425;
const NR_ENTER: u32 = 426;
const NR_REGISTER: u32 = 427;

const SETUP_CLAMP: u32 = 1 << 4;
const FEAT_SINGLE_MMAP: u32 = 1;
const OFF_SQES: u64 = 0x1000_0000;
const OP_NOP: u64 = 0;
const OP_READ: u64 = 22;

/// Words of a submission entry and bytes of a completion.
const SQE_WORDS: usize = 8;
const CQE_BYTES: usize = 16;

/// `struct io_uring_params`.
#[repr(C)]
#[derive(Default)]
struct Params {
    sq_entries: u32,
    cq_entries: u32,
    flags: u32,
    sq_thread_cpu: u32,
    sq_thread_idle: u32,
    features: u32,
    reserved: [u32; 4],
    // head, tail, mask, entries, flags, dropped, array, -, -, -
    sq: [u32; 10],
    // head, tail, mask, entries, overflow, cqes, flags, -, -, -
    cq: [u32; 10],
}
const _: () = assert!(size_of::<Params>() == 120);

/// Makes a ring; its descriptor.
fn setup(entries: u32, params: &mut Params) -> Result<Fd> {
    // SAFETY: `params` has the kernel's layout and lives across the call.
    unsafe { syscall(NR_SETUP, [entries as usize, core::ptr::from_mut(params) as usize, 0, 0, 0, 0]) }
        .map(|fd| fd as Fd)
}

/// Words of the submission queue and of the completion queue: offsets in the mapping.
#[derive(Debug)]
struct Offsets {
    sq_head: u32,
    sq_tail: u32,
    sq_flags: u32,
    sq_array: u32,
    cq_head: u32,
    cq_tail: u32,
    cqes: u32,
}

/// Changed before a ring is unmapped, and read after one is mapped: another ring may get its addresses, and only the kernel
/// knows in which order. ThreadSanitizer sees no system calls of ours, and reported that as a race.
static UNMAPPED: AtomicU32 = AtomicU32::new(0);

/// The two mappings that a ring shares with the kernel.
#[derive(Debug)]
struct RingMemory {
    rings: (*mut u8, usize),
    entries: (*mut u8, usize),
    offsets: Offsets,
    sq_mask: u32,
    cq_mask: u32,
}

impl RingMemory {
    fn map(fd: Fd, params: &Params) -> Result<RingMemory> {
        if params.features & FEAT_SINGLE_MMAP == 0 {
            return Err(Errno::NOSYS);
        }
        let sq = params.sq[6] as usize + params.sq_entries as usize * 4;
        let cq = params.cq[5] as usize + params.cq_entries as usize * CQE_BYTES;
        let rings = sq.max(cq).next_multiple_of(PAGE);
        let entries = (params.sq_entries as usize * SQE_WORDS * 8).next_multiple_of(PAGE);
        let flags = MAP_SHARED | MAP_POPULATE;
        let null = core::ptr::null_mut();
        // SAFETY: a new mapping at an address of the kernel's choice replaces nothing.
        let first = unsafe { mmap(null, rings, PROT_READ | PROT_WRITE, flags, fd, 0) }?;
        // SAFETY: as above.
        let second = match unsafe { mmap(null, entries, PROT_READ | PROT_WRITE, flags, fd, OFF_SQES) } {
            Ok(second) => second,
            Err(errno) => {
                // SAFETY: mapped above, and not published yet.
                let _ = unsafe { munmap(first, rings) };
                return Err(errno);
            }
        };
        UNMAPPED.load(Acquire);
        // SAFETY: advice on our own mappings. A forked child cannot use them.
        unsafe {
            let _ = madvise(first, rings, MADV_DONTFORK);
            let _ = madvise(second, entries, MADV_DONTFORK);
        }
        let (sq, cq) = (&params.sq, &params.cq);
        let offsets = Offsets {
            sq_head: sq[0],
            sq_tail: sq[1],
            sq_flags: sq[4],
            sq_array: sq[6],
            cq_head: cq[0],
            cq_tail: cq[1],
            cqes: cq[5],
        };
        Ok(RingMemory {
            rings: (first, rings),
            entries: (second, entries),
            offsets,
            sq_mask: params.sq_entries - 1,
            cq_mask: params.cq_entries - 1,
        })
    }

    /// A word that the kernel or this process changes.
    fn word(&self, offset: u32) -> &AtomicU32 {
        // SAFETY: the Linux kernel reported this word's offset; it is aligned, mapped as long as `self`, and only ever
        // accessed atomically.
        unsafe { &*self.rings.0.add(offset as usize).cast::<AtomicU32>() }
    }

    /// Writes the submission entry of a tail, and its index into the array.
    ///
    /// # Safety
    /// The kernel must have taken the entry that was there before.
    unsafe fn write_entry(&self, tail: u32, entry: [u64; SQE_WORDS]) {
        let at = tail & self.sq_mask;
        // SAFETY: `at` is below the number of entries, and the caller promises that it is free. The array has as many
        // words.
        unsafe {
            self.entries.0.cast::<[u64; SQE_WORDS]>().add(at as usize).write(entry);
            let array = self.rings.0.add(self.offsets.sq_array as usize).cast::<u32>();
            array.add(at as usize).write(at);
        }
    }

    /// Whether there is a completion to take.
    fn has_completion(&self) -> bool {
        self.word(self.offsets.cq_head).load(Relaxed) != self.word(self.offsets.cq_tail).load(Acquire)
    }

    /// Takes the next completion: its token, and bytes or an errno. One thread at a time.
    fn take_completion(&self) -> Option<(u64, Result<usize>)> {
        let head = self.word(self.offsets.cq_head).load(Relaxed);
        if head == self.word(self.offsets.cq_tail).load(Acquire) {
            return None;
        }
        // SAFETY: the index is below the number of completions; the kernel wrote this one before it moved the tail.
        let (user_data, result) = unsafe {
            let at = self.rings.0.add(self.offsets.cqes as usize + (head & self.cq_mask) as usize * CQE_BYTES);
            (at.cast::<u64>().read(), at.add(8).cast::<i32>().read())
        };
        self.word(self.offsets.cq_head).store(head.wrapping_add(1), Release);
        Some((user_data, usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))))
    }
}

impl Drop for RingMemory {
    fn drop(&mut self) {
        UNMAPPED.fetch_add(1, Release);
        // SAFETY: our own mappings, not used elsewhere.
        unsafe {
            let _ = munmap(self.entries.0, self.entries.1);
            let _ = munmap(self.rings.0, self.rings.1);
        }
    }
}

#[cfg(test)]
fn memfd_file() -> std::fs::File {
    let fd = super::memfd(c"ring").unwrap();
    // SAFETY: made in the line above, for this alone.
    unsafe { std::os::fd::FromRawFd::from_raw_fd(fd) }
}
