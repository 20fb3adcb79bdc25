//! A ring that any thread fills through shared memory, and a kernel thread submits (SQPOLL).
//!
//! ```text
//!   thread 1 ─┐ push: an entry, then the tail                               take_completion
//!   thread 2 ─┤        │                                                         ▲
//!   thread 3 ─┘        ▼                                                         │
//!              submission queue ──> iou-sqp (kernel thread) ──> storage ──> completion queue
//!                                        │ sleeps after `idle` without an entry
//!                                        └── wake: a system call, by a thread with the descriptor
//! ```
//!
//! No system call and no descriptor: the thread that pushes need not have the ring's descriptor table. Files are read
//! through numbered slots, which only a thread with that table sets, from descriptors that it has opened and checked.
//!
//! The kernel thread keeps the rights of the thread that made the ring, also after the program has given up its own, and
//! the queues are memory that the program can write. So the ring is restricted before it starts: it reads files in slots,
//! and refuses everything else.
//!
//! The kernel thread belongs to the process from then on: `iou-sqp-PID` is in its list of threads, polls for `idle` after
//! the last entry, and sleeps otherwise.
//!
//! The kernel's rules are those of io_uring_setup(2) and io_uring_register(2): IORING_SETUP_SQPOLL without privileges
//! since Linux 5.11, restrictions since 5.10, IORING_REGISTER_FILES with empty slots since 5.5.

#![expect(unsafe_code, reason = "system calls and memory shared with the Linux kernel")]

use core::sync::atomic::{
    Ordering::{Acquire, Relaxed, Release, SeqCst},
    fence,
};
use core::time::Duration;

use rustix::io::Errno;

use super::slots::{REGISTER_FILES_UPDATE, SQE_FIXED_FILE, add_slots, checked, register, set_slot};
use super::{NR_ENTER, OP_READ, Params, Result, RingMemory, SETUP_CLAMP, SQE_WORDS, setup, syscall};
use crate::linux::files::{Fd, close};

const SETUP_SQPOLL: u32 = 1 << 1;
/// Starts nothing before REGISTER_ENABLE_RINGS.
const SETUP_R_DISABLED: u32 = 1 << 6;
/// The kernel thread uses files of its creator's table, and reads through any descriptor: since 5.11.
const FEAT_SQPOLL_NONFIXED: u32 = 1 << 7;
const ENTER_SQ_WAKEUP: usize = 1 << 1;
const SQ_NEED_WAKEUP: u32 = 1;
const REGISTER_RESTRICTIONS: usize = 11;
const REGISTER_ENABLE_RINGS: usize = 12;
const ALLOW_REGISTER: u16 = 0;
const ALLOW_OPERATION: u16 = 1;
const REQUIRE_FLAGS: u16 = 3;

/// A ring shared by all threads of the process.
#[derive(Debug)]
pub struct SharedRing {
    fd: Fd,
    memory: RingMemory,
}

// SAFETY: what the threads share are atomic words and entries; `push` and `take_completion` demand that one thread at a
// time calls them.
unsafe impl Send for SharedRing {}
// SAFETY: as above.
unsafe impl Sync for SharedRing {}

/// `struct io_uring_restriction`.
#[repr(C)]
struct Restriction {
    kind: u16,
    value: u8,
    reserved: [u8; 13],
}
const _: () = assert!(size_of::<Restriction>() == 16);

/// Reads of files in slots, and changes of slots.
const RESTRICTIONS: [Restriction; 3] = [
    Restriction { kind: ALLOW_OPERATION, value: OP_READ as u8, reserved: [0; 13] },
    Restriction { kind: REQUIRE_FLAGS, value: (SQE_FIXED_FILE >> 8) as u8, reserved: [0; 13] },
    Restriction { kind: ALLOW_REGISTER, value: REGISTER_FILES_UPDATE as u8, reserved: [0; 13] },
];

impl SharedRing {
    /// A ring for up to `entries` reads in flight, a power of two, of files in `slots` slots. Its kernel thread sleeps
    /// after `idle` without work. The descriptor is in the table of the calling thread, and is the caller's to close: the
    /// kernel thread has the table too, so that the table's end does not close it.
    pub fn new(entries: u32, slots: u32, idle: Duration) -> Result<SharedRing> {
        let idle = u32::try_from(idle.as_millis()).unwrap_or(u32::MAX).max(1);
        let flags = SETUP_CLAMP | SETUP_SQPOLL | SETUP_R_DISABLED;
        let mut params = Params { flags, sq_thread_idle: idle, ..Params::default() };
        let fd = setup(entries, &mut params)?;
        let ring = || {
            if params.features & FEAT_SQPOLL_NONFIXED == 0 {
                return Err(Errno::NOSYS);
            }
            add_slots(fd, slots)?;
            // SAFETY: an array of as many restrictions as said; the kernel copies it.
            unsafe { register(fd, REGISTER_RESTRICTIONS, RESTRICTIONS.as_ptr() as usize, RESTRICTIONS.len() as u32) }?;
            // SAFETY: no memory is involved.
            unsafe { register(fd, REGISTER_ENABLE_RINGS, 0, 0) }?;
            Ok(SharedRing { fd, memory: RingMemory::map(fd, &params)? })
        };
        ring().and_then(|ring| checked(fd, ring)).inspect_err(|_| {
            let _ = close(fd);
        })
    }

    /// The descriptor, in the table of the thread that made it.
    pub fn fd(&self) -> Fd {
        self.fd
    }

    /// Puts a file into a slot, or none: then the ring keeps the file open no longer than its reads in flight. On a
    /// thread with the ring's descriptor table.
    pub fn set_slot(&self, slot: u32, file: Option<Fd>) -> Result<()> {
        set_slot(self.fd, slot, file)
    }

    /// Adds a read of the file in a slot; false if the ring is full. It begins at once if the kernel thread is awake.
    ///
    /// # Safety
    /// One thread at a time may call this. `buf` must be memory that the Linux kernel may write until the completion
    /// with this token was taken, or an address that it may refuse. No more than `entries` reads may be in flight.
    pub unsafe fn push(&self, slot: u32, buf: *mut u8, len: u32, offset: u64, user_data: u64) -> bool {
        let operation = OP_READ | SQE_FIXED_FILE | u64::from(slot) << 32;
        // SAFETY: passed on.
        unsafe { self.push_entry([operation, offset, buf as u64, u64::from(len), user_data, 0, 0, 0]) }
    }

    /// # Safety
    /// As [`SharedRing::push`].
    unsafe fn push_entry(&self, entry: [u64; SQE_WORDS]) -> bool {
        let word = |at| self.memory.word(at);
        let tail = word(self.memory.offsets.sq_tail).load(Relaxed);
        let taken = word(self.memory.offsets.sq_head).load(Acquire);
        if tail.wrapping_sub(taken) > self.memory.sq_mask {
            return false;
        }
        // SAFETY: the head has passed this entry.
        unsafe { self.memory.write_entry(tail, entry) };
        word(self.memory.offsets.sq_tail).store(tail.wrapping_add(1), Release);
        true
    }

    /// Whether the kernel thread sleeps, so that what was pushed before waits for [`SharedRing::wake`].
    pub fn is_asleep(&self) -> bool {
        // The kernel thread sets the flag, then looks at the tail once more: one of the two sees the other.
        fence(SeqCst);
        self.memory.word(self.memory.offsets.sq_flags).load(Relaxed) & SQ_NEED_WAKEUP != 0
    }

    /// Wakes the kernel thread. On a thread with the ring's descriptor table.
    pub fn wake(&self) -> Result<()> {
        // SAFETY: no memory is involved.
        unsafe { syscall(NR_ENTER, [self.fd as usize, 0, 0, ENTER_SQ_WAKEUP, 0, 0]) }.map(drop)
    }

    /// Whether there is a completion to take: any thread may ask.
    pub fn has_completion(&self) -> bool {
        self.memory.has_completion()
    }

    /// The next completion: its token, and bytes or an errno.
    ///
    /// # Safety
    /// One thread at a time may call this.
    pub unsafe fn take_completion(&self) -> Option<(u64, Result<usize>)> {
        self.memory.take_completion()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::time::Instant;

    use super::super::memfd_file;
    use super::super::slots::REGISTER_FILES;
    use super::*;

    const SIZE: usize = 256 << 10;

    fn file() -> File {
        let mut file = memfd_file();
        let bytes: Vec<u8> = (0..SIZE).map(|at| (at / 4096 + at % 251) as u8).collect();
        file.write_all(&bytes).unwrap();
        file
    }

    fn ring(idle: Duration) -> Option<SharedRing> {
        match SharedRing::new(16, 4, idle) {
            Ok(ring) => Some(ring),
            Err(e) => {
                eprintln!("skipped: no io_uring with SQPOLL: {e}");
                None
            }
        }
    }

    /// Waits for `count` completions; wakes the kernel thread where it sleeps.
    fn completions(ring: &SharedRing, count: usize) -> Vec<(u64, Result<usize>)> {
        let (begun, mut all) = (Instant::now(), Vec::new());
        while all.len() < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "{all:?}");
            if ring.is_asleep() {
                ring.wake().unwrap();
            }
            // SAFETY: there is one thread.
            all.extend(std::iter::from_fn(|| unsafe { ring.take_completion() }));
            std::thread::sleep(Duration::from_micros(50));
        }
        all.sort_by_key(|completion| completion.0);
        all
    }

    #[test]
    fn pushed_reads_complete_and_empty_slots_are_refused() {
        let Some(ring) = ring(Duration::from_millis(1)) else { return };
        let file = file();
        ring.set_slot(2, Some(file.as_raw_fd())).unwrap();
        let mut out = vec![0_u8; SIZE];
        for round in 0..5 {
            out.fill(0);
            for part in 0..16_usize {
                let at = part * SIZE / 16;
                // SAFETY: one thread; `out` lives until all completions were taken.
                let room = unsafe {
                    ring.push(2, out.as_mut_ptr().wrapping_add(at), (SIZE / 16) as u32, at as u64, part as u64)
                };
                assert!(room);
            }
            let all = completions(&ring, 16);
            assert!(all.iter().enumerate().all(|(at, &done)| done == (at as u64, Ok(SIZE / 16))), "{all:?}");
            assert!(out.iter().enumerate().all(|(at, &byte)| byte == (at / 4096 + at % 251) as u8), "round {round}");
            // So that it falls asleep before the next round.
            std::thread::sleep(Duration::from_millis(5 * (round % 2)));
        }
        ring.set_slot(2, None).unwrap();
        // SAFETY: as above.
        assert!(unsafe { ring.push(2, out.as_mut_ptr(), 1, 0, 7) && ring.push(1, out.as_mut_ptr(), 1, 0, 8) });
        assert_eq!(completions(&ring, 2), [(7, Err(Errno::BADF)), (8, Err(Errno::BADF))]);
        close(ring.fd()).unwrap();
    }

    /// What a program that has given up its rights could misuse.
    #[test]
    fn everything_but_reads_of_slots_is_refused() {
        const OPENAT: u64 = 18;
        let Some(ring) = ring(Duration::from_millis(1)) else { return };
        let (file, mut out) = (file(), [0_u8; 8]);
        let plain_fd = OP_READ | (file.as_raw_fd() as u64) << 32;
        let openat = OPENAT | (libc::AT_FDCWD as u32 as u64) << 32;
        for (token, entry) in [
            [plain_fd, 0, out.as_mut_ptr() as u64, 8, 0, 0, 0, 0],
            [openat, 0, c"/etc/passwd".as_ptr() as u64, 0, 0, 0, 0, 0],
            [openat | SQE_FIXED_FILE, 0, c"/etc/passwd".as_ptr() as u64, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
        ]
        .into_iter()
        .enumerate()
        {
            let mut entry: [u64; SQE_WORDS] = entry;
            entry[4] = token as u64;
            // SAFETY: one thread; `out` lives until the completion was taken.
            assert!(unsafe { ring.push_entry(entry) });
            assert_eq!(completions(&ring, 1), [(token as u64, Err(Errno::ACCESS))]);
        }
        // SAFETY: an empty array: nothing is read.
        assert_eq!(unsafe { register(ring.fd(), REGISTER_FILES, 0, 0) }, Err(Errno::ACCESS));
        close(ring.fd()).unwrap();
    }

    #[test]
    fn kernel_thread_sleeps_when_idle() {
        let Some(ring) = ring(Duration::from_millis(1)) else { return };
        let begun = Instant::now();
        while !ring.is_asleep() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it polls");
            std::thread::sleep(Duration::from_millis(1));
        }
        close(ring.fd()).unwrap();
    }
}
