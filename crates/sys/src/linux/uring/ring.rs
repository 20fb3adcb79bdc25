//! A ring that one thread makes, uses and drops.
//!
//! ```text
//!   read() read() read()      submit(wait)            next() next()
//!      │ entries                 │ one system call        ▲ completions
//!      ▼                         ▼                        │
//!   submission queue ──────> kernel, all at once ──> completion queue
//! ```
//!
//! Its descriptor is in the table of that thread, so a ring is for shadow threads. Probed, never inferred: where the
//! Linux kernel or a sysctl refuses, [`Ring::new`] returns the error.
//!
//! A read in flight writes into the memory given by the caller that added it, and continues after the ring is closed.
//! So before that memory is reused a ring is drained ([`Ring::drain`]), and dropping one that is not drained waits for
//! its reads.
//!
//! Known flaws:
//! - Reads only. No other part of SPIN has enough operations in flight to need a ring.
//! - Where the Linux kernel no longer allows any wait (a seccomp filter that a program installs in all its threads
//!   meanwhile), the end of a read is not observable. Its memory is leaked then; `settle` reports that.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use core::sync::atomic::Ordering::{Relaxed, Release};

use rustix::io::Errno;

use super::{NR_ENTER, OP_READ, Params, Result, RingMemory, SETUP_CLAMP, setup, syscall};
use crate::linux::files::{Fd, close};

const SETUP_COOP_TASKRUN: u32 = 1 << 8;
const SETUP_SINGLE_ISSUER: u32 = 1 << 12;
const SETUP_DEFER_TASKRUN: u32 = 1 << 13;
const ENTER_GETEVENTS: usize = 1;

/// A ring of one thread.
#[derive(Debug)]
pub struct Ring {
    fd: Fd,
    memory: RingMemory,
    /// Entries written and not yet submitted.
    unsubmitted: u32,
    /// Submitted, with completions not yet taken.
    in_flight: u32,
    tail: u32,
}

impl Ring {
    /// A ring for up to `entries` reads in flight, a power of two.
    pub fn new(entries: u32) -> Result<Ring> {
        // These flags avoid interrupts of this thread; they came with 6.1 and 5.19, and older versions refuse them.
        let flag_sets = [SETUP_SINGLE_ISSUER | SETUP_DEFER_TASKRUN, SETUP_COOP_TASKRUN, 0];
        let mut last = Errno::INVAL;
        for flags in flag_sets {
            let mut params = Params { flags: SETUP_CLAMP | flags, ..Params::default() };
            match setup(entries, &mut params) {
                Ok(fd) => {
                    let memory = RingMemory::map(fd, &params).inspect_err(|_| {
                        let _ = close(fd);
                    })?;
                    let tail = memory.word(memory.offsets.sq_tail).load(Relaxed);
                    return Ok(Ring { fd, memory, unsubmitted: 0, in_flight: 0, tail });
                }
                Err(Errno::INVAL) => {}
                Err(errno) => {
                    last = errno;
                    break;
                }
            }
        }
        Err(last)
    }

    /// The number of reads that may still be added.
    pub fn free_slots(&self) -> u32 {
        (self.memory.sq_mask + 1).saturating_sub(self.unsubmitted + self.in_flight)
    }

    /// Reads added or in flight.
    pub fn outstanding(&self) -> u32 {
        self.unsubmitted + self.in_flight
    }

    /// Adds a read; false if the ring is full. Begins with the next [`Ring::submit`].
    ///
    /// # Safety
    /// `buf` must be memory that the Linux kernel may write until the completion with `token` was taken, or
    /// [`Ring::drain`] returned that no read is in flight, or an address that it may refuse.
    pub unsafe fn read(&mut self, fd: Fd, buf: *mut u8, len: u32, offset: u64, user_data: u64) -> bool {
        if self.free_slots() == 0 {
            return false;
        }
        let entry = [OP_READ | (fd as u32 as u64) << 32, offset, buf as u64, u64::from(len), user_data, 0, 0, 0];
        // SAFETY: the Linux kernel has taken the entry that was there: those it has not taken are counted.
        unsafe { self.memory.write_entry(self.tail, entry) };
        self.tail = self.tail.wrapping_add(1);
        self.memory.word(self.memory.offsets.sq_tail).store(self.tail, Release);
        self.unsubmitted += 1;
        true
    }

    /// Submits the added reads and waits for at least `wait` completions; fewer may come. After an error reads
    /// submitted before may still be in flight: see [`Ring::drain`].
    pub fn submit(&mut self, wait: u32) -> Result<()> {
        match self.io_uring_enter(self.unsubmitted, wait.min(self.outstanding())) {
            Ok(taken) => {
                self.unsubmitted -= taken;
                self.in_flight += taken;
                Ok(())
            }
            Err(Errno::INTR) => Ok(()),
            // No memory for requests. Completed reads free some; retried with the next call. Without reads in flight
            // nothing would.
            Err(Errno::AGAIN | Errno::BUSY) if self.in_flight > 0 => {
                match self.io_uring_enter(0, wait.min(self.in_flight)) {
                    Ok(_) | Err(Errno::INTR) => Ok(()),
                    Err(errno) => Err(errno),
                }
            }
            Err(errno) => Err(errno),
        }
    }

    /// Waits until every submitted read has completed; the others never begin. The completions are
    /// lost. False if the Linux kernel allows no wait: reads in flight may write at any time from now on.
    #[must_use]
    pub fn drain(&mut self) -> bool {
        // The Linux kernel reads the queue in `enter` only, and only as many entries as given.
        self.tail = self.tail.wrapping_sub(core::mem::take(&mut self.unsubmitted));
        self.memory.word(self.memory.offsets.sq_tail).store(self.tail, Release);
        loop {
            while self.next_completion().is_some() {}
            if self.in_flight == 0 {
                return true;
            }
            match self.io_uring_enter(0, 1) {
                Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
                Err(_) => return false,
            }
        }
    }

    fn io_uring_enter(&self, submit: u32, wait: u32) -> Result<u32> {
        let args = [self.fd as usize, submit as usize, wait as usize, ENTER_GETEVENTS, 0, 0];
        // SAFETY: the caller that added each read guarantees its memory.
        unsafe { syscall(NR_ENTER, args) }.map(|taken| taken as u32)
    }

    /// The next completion: its token, and bytes or an errno.
    pub fn next_completion(&mut self) -> Option<(u64, Result<usize>)> {
        let completion = self.memory.take_completion()?;
        self.in_flight = self.in_flight.saturating_sub(1);
        Some(completion)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Reads in flight write into memory of callers: wait for them. If that is impossible, the caller that added
        // them got an error, or never took its completions.
        let _ = self.drain();
        let _ = close(self.fd);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::super::memfd_file;
    use super::*;

    #[test]
    fn reads_complete_with_their_user_data_and_bytes() {
        let mut ring = match Ring::new(8) {
            Ok(ring) => ring,
            Err(e) => return eprintln!("skipped: no io_uring: {e}"),
        };
        let mut file = memfd_file();
        let bytes: Vec<u8> = (0..64 * 1024u32).map(|i| (i / 7) as u8).collect();
        file.write_all(&bytes).unwrap();
        let mut out = vec![0u8; bytes.len()];
        let (mut next, mut done) = (0usize, 0usize);
        while done < 64 {
            while next < 64 {
                let at = next * 1024;
                // SAFETY: `out` outlives the ring's work, which is awaited below.
                if !unsafe { ring.read(file.as_raw_fd(), out.as_mut_ptr().add(at), 1024, at as u64, next as u64) } {
                    break;
                }
                next += 1;
            }
            assert!(ring.outstanding() <= 8);
            ring.submit(1).unwrap();
            while let Some((token, got)) = ring.next_completion() {
                assert!(token < 64);
                assert_eq!(got, Ok(1024));
                done += 1;
            }
        }
        assert_eq!(out, bytes);
        assert_eq!(ring.outstanding(), 0);
    }

    /// A ring, and a pipe: a read of it is in flight until a writer writes.
    fn with_pipe() -> Option<(Ring, Fd, Fd)> {
        let (out, into) = crate::linux::pipe().unwrap();
        match Ring::new(4) {
            Ok(ring) => Some((ring, out, into)),
            Err(e) => {
                eprintln!("skipped: no io_uring: {e}");
                None
            }
        }
    }

    fn write(write_end: Fd, bytes: &[u8]) {
        // SAFETY: a live slice.
        assert_eq!(unsafe { libc::write(write_end, bytes.as_ptr().cast(), bytes.len()) }, bytes.len() as isize);
    }

    #[test]
    fn drop_waits_for_in_flight_reads_and_discards_unsubmitted() {
        for dropped in [false, true] {
            let Some((mut ring, out, into)) = with_pipe() else { return };
            let mut landed_bytes = [0u8; 4];
            let mut untouched = [0u8; 4];
            // SAFETY: both live until the ring is settled or gone.
            unsafe {
                assert!(ring.read(out, landed_bytes.as_mut_ptr(), 4, u64::MAX, 1));
                ring.submit(0).unwrap();
                assert!(ring.read(out, untouched.as_mut_ptr(), 4, u64::MAX, 2));
            }
            assert_eq!(ring.outstanding(), 2);
            let writer = std::thread::spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                write(into, b"landmore");
            });
            if dropped {
                drop(ring);
            } else {
                assert!(ring.drain());
                assert_eq!(ring.outstanding(), 0);
                // The ring is usable again.
                // SAFETY: as above.
                unsafe { assert!(ring.read(-1, untouched.as_mut_ptr(), 4, 0, 3)) };
                ring.submit(1).unwrap();
                assert_eq!(ring.next_completion(), Some((3, Err(Errno::BADF))));
            }
            writer.join().unwrap();
            assert_eq!((&landed_bytes, &untouched), (b"land", &[0; 4]));
            let mut rest = [0u8; 8];
            // SAFETY: `rest` is as long as said.
            assert_eq!(unsafe { crate::linux::read(out, rest.as_mut_ptr(), 8) }, Ok(4));
            assert!(rest.starts_with(b"more"));
            close(out).and(close(into)).unwrap();
        }
    }

    #[test]
    fn drain_reports_ring_that_cannot_be_waited_for() {
        let Some((mut ring, out, into)) = with_pipe() else { return };
        // Leaked: that is what the result requires.
        let memory: &'static mut [u8; 4] = Box::leak(Box::new([0; 4]));
        // SAFETY: it lives forever.
        unsafe { assert!(ring.read(out, memory.as_mut_ptr(), 4, u64::MAX, 1)) };
        ring.submit(0).unwrap();
        // From here on its number names another file, which refuses.
        let null = File::open("/dev/null").unwrap();
        // SAFETY: no memory is involved; the number is the ring's own.
        assert_eq!(unsafe { libc::dup2(null.as_raw_fd(), ring.fd) }, ring.fd);
        assert!(ring.submit(1).is_err());
        assert!(!ring.drain());
        assert_eq!(ring.outstanding(), 1);
        drop(ring);
        close(out).and(close(into)).unwrap();
    }

    #[test]
    fn bad_fd_and_eof_are_reported_per_read() {
        let mut ring = match Ring::new(4) {
            Ok(ring) => ring,
            Err(e) => return eprintln!("skipped: no io_uring: {e}"),
        };
        let file = memfd_file();
        let mut out = [0u8; 16];
        // SAFETY: `out` lives until both completions were taken.
        unsafe {
            assert!(ring.read(-1, out.as_mut_ptr(), 8, 0, 1));
            assert!(ring.read(file.as_raw_fd(), out.as_mut_ptr().add(8), 8, 100, 2));
        }
        let mut seen = Vec::new();
        while seen.len() < 2 {
            ring.submit(1).unwrap();
            seen.extend(std::iter::from_fn(|| ring.next_completion()));
        }
        seen.sort_by_key(|s| s.0);
        assert_eq!(seen, [(1, Err(Errno::BADF)), (2, Ok(0))]);
    }
}
