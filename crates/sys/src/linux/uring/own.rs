//! A ring that one thread enters itself, although no descriptor of the ring is in its table.
//!
//! ```text
//!   thread   setup ── registered: the kernel keeps the ring for this thread, under an index ──────────── close
//!            number N                      │                                                           N is free again
//!   shadow worker                          └── pidfd_getfd(N): its own descriptor, for slots
//!
//!   later    thread: read(slot) = one system call with the index; it waits there, as in pread
//! ```
//!
//! A thread of the program so reads a file whose shadow descriptor only shadow workers have, without handing the read over.
//! The number N exists for these few system calls, once in the life of a thread, with close-on-exec, and names a ring:
//! closing it drops no lock of any file. A child that is forked meanwhile and calls no `exec` keeps it, and has no slot
//! that a worker has not emptied. A thread that gets N for a file of its own in that time has closed what it did not open:
//! a ring without the file in the slot refuses the read, and such a number is not closed if it names another file by then.
//!
//! The index belongs to the thread: the kernel forgets it at the end of the thread, and a forked child has none.
//!
//! The kernel's rules are those of io_uring_register(2): IORING_REGISTER_RING_FDS since Linux 5.18.

#![expect(unsafe_code, reason = "system calls and memory shared with the Linux kernel")]

use core::sync::atomic::Ordering::{Relaxed, Release};

use rustix::io::Errno;

use super::commands::Commands;
use super::slots::{SQE_FIXED_FILE, add_slots, checked, register, set_slot};
use super::{NR_ENTER, OP_NOP, OP_READ, Params, Result, RingMemory, SETUP_CLAMP, setup, syscall};
use crate::linux::files::{Fd, close, fstat};
use crate::linux::types::FileKey;

const SETUP_COOP_TASKRUN: u32 = 1 << 8;
const REGISTER_RING_FDS: usize = 20;
const ENTER_GETEVENTS: usize = 1;
const ENTER_EXT_ARG: usize = 1 << 3;
const ENTER_REGISTERED_RING: usize = 1 << 4;

/// Commands of one read in flight.
const DEPTH: usize = 64;

/// The token of an entry that does nothing.
const FILLER: u64 = u64::MAX;

/// How long the kernel waits before the caller may look at its signals.
const WAIT_NS: i64 = 20_000_000;

/// `struct io_uring_rsrc_update`.
#[repr(C)]
struct RingFdUpdate {
    index: u32,
    reserved: u32,
    fd: u64,
}

/// `struct io_uring_getevents_arg`.
#[repr(C)]
struct WaitArg {
    signal_mask: u64,
    signal_mask_len: u32,
    min_wait_us: u32,
    timeout: u64,
}

/// A ring whose descriptor is still in the table of the thread that made it.
#[derive(Debug)]
pub struct NewOwnRing {
    fd: Fd,
    index: u32,
    memory: RingMemory,
    /// What the descriptor names.
    names: Option<FileKey>,
}

/// What a descriptor names. All rings have the same, which no file has.
fn named_by(fd: Fd) -> Option<FileKey> {
    fstat(fd).ok().map(|stat| stat.key())
}

/// Not if the program has closed the number, and opened a file as the same one: that is not ours to close.
fn close_if_named(fd: Fd, names: Option<FileKey>) {
    if names.is_some() && named_by(fd) == names {
        let _ = close(fd);
    }
}

impl NewOwnRing {
    /// A ring with so many empty slots, for reads of the calling thread.
    pub fn new(slots: u32) -> Result<NewOwnRing> {
        let mut params = Params { flags: SETUP_CLAMP | SETUP_COOP_TASKRUN, ..Params::default() };
        let fd = setup(DEPTH as u32, &mut params)?;
        let names = named_by(fd);
        let made = || {
            add_slots(fd, slots)?;
            let memory = RingMemory::map(fd, &params)?;
            let mut update = RingFdUpdate { index: u32::MAX, reserved: 0, fd: fd as u64 };
            // SAFETY: `update` lives across the call, which writes the index into it.
            let done = unsafe { register(fd, REGISTER_RING_FDS, &raw mut update as usize, 1) }?;
            if done == 1 { Ok(NewOwnRing { fd, index: update.index, memory, names }) } else { Err(Errno::NOSPC) }
        };
        made().inspect_err(|_| close_if_named(fd, names))
    }

    /// The descriptor, in the table of this thread.
    pub fn fd(&self) -> Fd {
        self.fd
    }

    /// Closes this thread's descriptor; `fd`: a duplicate in another table, for slots.
    pub fn adopt(self, fd: Fd) -> OwnRing {
        self.close();
        OwnRing { fd, index: self.index, memory: self.memory }
    }

    /// Gives the ring up.
    pub fn discard(self) {
        self.close();
    }

    fn close(&self) {
        close_if_named(self.fd, self.names);
    }
}

/// A file that a ring reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingFile {
    /// Its slot.
    pub slot: u32,
    /// Bytes of a command at most. The kernel leaves what is longer than the storage takes to a thread of its own (io-wq).
    pub max_command: usize,
}

/// A ring of one thread. Its slots are set by threads of another descriptor table.
#[derive(Debug)]
pub struct OwnRing {
    fd: Fd,
    index: u32,
    memory: RingMemory,
}

// SAFETY: `read` demands the thread that made it, alone; everything else is system calls on the descriptor.
unsafe impl Send for OwnRing {}
// SAFETY: as above.
unsafe impl Sync for OwnRing {}

impl OwnRing {
    /// Bytes of one read at most.
    pub const MAX_READ: usize = 16 << 20;

    /// Whether the kernel closes files at once that leave a slot of the ring with this descriptor of the calling thread.
    pub fn check_slots(fd: Fd) -> Result<()> {
        checked(fd, ())
    }

    /// Puts a file into a slot, or none. On a thread with the table of the adopted descriptor.
    pub fn set_slot(&self, slot: u32, file: Option<Fd>) -> Result<()> {
        set_slot(self.fd, slot, file)
    }

    /// Reads a file, at most [`OwnRing::MAX_READ`] bytes, and waits; the bytes of the unbroken prefix, or the error of the
    /// first command. `on_wait` is called while it lasts, after 20 ms or a signal.
    ///
    /// # Safety
    /// Only the thread that made the ring may call this, and not from a signal handler that interrupted a call. `buf` must
    /// be memory that the Linux kernel may write until this returns, or an address that it may refuse.
    pub unsafe fn read(
        &self,
        file: RingFile,
        buf: *mut u8,
        len: usize,
        offset: u64,
        mut on_wait: impl FnMut(),
    ) -> Result<usize> {
        let operation = OP_READ | SQE_FIXED_FILE | u64::from(file.slot) << 32;
        let mut commands = Commands::new(len.min(Self::MAX_READ), file.max_command);
        let tail_word = self.memory.word(self.memory.offsets.sq_tail);
        let mut tail = tail_word.load(Relaxed);
        let (mut unsubmitted, mut in_flight) = (0, 0);
        // Entries that do nothing and are not over.
        let mut fillers = 0;
        loop {
            while (unsubmitted + in_flight) < DEPTH as u32
                && let Some((at, bytes)) = commands.next()
            {
                let entry = [operation, offset + at as u64, buf as u64 + at as u64, bytes as u64, at as u64, 0, 0, 0];
                // SAFETY: as many entries are in use as commands are not over, fewer than there are: the kernel has taken
                // this one, or it was taken back below.
                unsafe { self.memory.write_entry(tail, entry) };
                tail = tail.wrapping_add(1);
                unsubmitted += 1;
            }
            if unsubmitted + in_flight + fillers == 0 {
                return commands.result();
            }
            // The kernel collects the commands of three entries or more for the disk, and hands over those of two one by one.
            let filler = u32::from(unsubmitted == 2 && in_flight == 0);
            if filler == 1 {
                // SAFETY: there are more than three entries, and the kernel has taken all before these.
                unsafe { self.memory.write_entry(tail, [OP_NOP, 0, 0, 0, FILLER, 0, 0, 0]) };
            }
            tail_word.store(tail.wrapping_add(filler), Release);
            // Half of them, where more follow: storage is not left without work.
            let wait = (unsubmitted + in_flight).div_ceil(1 + u32::from(commands.has_next()));
            match self.enter(unsubmitted + filler, wait + fillers + filler) {
                Ok(taken) => {
                    // The filler is the last one: what is not taken of two commands is followed by another one.
                    let begun = taken.min(unsubmitted);
                    unsubmitted -= begun;
                    in_flight += begun;
                    fillers += taken - begun;
                    tail = tail.wrapping_add(taken - begun);
                }
                Err(Errno::INTR | Errno::TIME) => on_wait(),
                Err(errno) => {
                    // The kernel takes no more: what it has not taken never begins.
                    tail = tail.wrapping_sub(unsubmitted);
                    tail_word.store(tail, Release);
                    commands.refused(unsubmitted as usize, errno);
                    unsubmitted = 0;
                    // It may refuse to wait as well, as a filter of system calls can that the program has just set.
                    std::thread::sleep(core::time::Duration::from_micros(if in_flight > 0 { 100 } else { 0 }));
                }
            }
            while let Some((at, result)) = self.memory.take_completion() {
                if at == FILLER {
                    fillers -= 1;
                    continue;
                }
                commands.ended(at as usize, result);
                in_flight -= 1;
            }
        }
    }

    fn enter(&self, submit: u32, wait: u32) -> Result<u32> {
        let timeout = [0, WAIT_NS];
        let arg =
            WaitArg { signal_mask: 0, signal_mask_len: 0, min_wait_us: 0, timeout: timeout.as_ptr() as usize as u64 };
        let flags = ENTER_GETEVENTS | ENTER_EXT_ARG | ENTER_REGISTERED_RING;
        let args =
            [self.index as usize, submit as usize, wait as usize, flags, &raw const arg as usize, size_of::<WaitArg>()];
        // SAFETY: `arg` and `timeout` live across the call. The caller of `read` has promised the memory of the entries.
        unsafe { syscall(NR_ENTER, args) }.map(|taken| taken as u32)
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsRawFd;

    use super::super::memfd_file;
    use super::*;

    const SIZE: usize = 3 << 20;

    fn in_slot(slot: u32) -> RingFile {
        RingFile { slot, max_command: 1 << 20 }
    }

    fn byte(at: usize) -> u8 {
        (at / 4096 + at % 251) as u8
    }

    fn file() -> File {
        let mut file = memfd_file();
        file.write_all(&(0..SIZE).map(byte).collect::<Vec<u8>>()).unwrap();
        file
    }

    /// A ring whose descriptor only another thread of this table has.
    fn ring() -> Option<OwnRing> {
        let new = match NewOwnRing::new(4) {
            Ok(new) => new,
            Err(e) => {
                eprintln!("skipped: no ring of a thread: {e}");
                return None;
            }
        };
        let other = crate::linux::dup_from_thread(crate::linux::gettid(), new.fd());
        match other {
            Ok(fd) => Some(new.adopt(fd)),
            Err(e) => {
                new.discard();
                eprintln!("skipped: no pidfd_getfd: {e}");
                None
            }
        }
    }

    #[test]
    fn reads_are_whole_short_at_the_end_and_refused_from_empty_slots() {
        let Some(ring) = ring() else { return };
        let (file, mut out) = (file(), vec![0_u8; SIZE + 4096]);
        ring.set_slot(2, Some(file.as_raw_fd())).unwrap();
        // The shortest makes more commands than can be in flight.
        for max_command in [8 << 10, 100_000, 512 << 10, OwnRing::MAX_READ] {
            for (offset, len, expected) in [
                (0, SIZE, SIZE),
                (4096, 100, 100),
                (777, 2 << 20, 2 << 20),
                (4096, 1 << 20, 1 << 20),
                (SIZE - (600 << 10), 1 << 20, 600 << 10),
                (0, SIZE + 4096, SIZE),
                (SIZE - 5, 2 << 20, 5),
                (SIZE, 4096, 0),
            ] {
                out.fill(0);
                let file = RingFile { slot: 2, max_command };
                // SAFETY: this thread made the ring; `out` is long enough.
                let got = unsafe { ring.read(file, out.as_mut_ptr(), len, offset as u64, || ()) };
                assert_eq!(got, Ok(expected), "{len} bytes at {offset} by {max_command}");
                let right = (0..expected).all(|at| out[at] == byte(offset + at));
                assert!(right && out[expected..].iter().all(|&b| b == 0), "{len} bytes at {offset} by {max_command}");
            }
        }
        ring.set_slot(2, None).unwrap();
        for slot in [1, 2, 99] {
            // SAFETY: as above.
            assert_eq!(unsafe { ring.read(in_slot(slot), out.as_mut_ptr(), 1 << 20, 0, || ()) }, Err(Errno::BADF));
        }
        close(ring.fd).unwrap();
    }

    /// The index is of the thread that made the ring: elsewhere it names nothing, and the ring goes on working.
    #[test]
    fn other_threads_are_refused_and_leave_nothing_queued() {
        let Some(ring) = ring() else { return };
        let (file, mut out) = (file(), vec![0_u8; 4096]);
        ring.set_slot(0, Some(file.as_raw_fd())).unwrap();
        let elsewhere = std::thread::scope(|scope| {
            // SAFETY: the maker of the ring waits.
            scope
                .spawn(|| unsafe { ring.read(in_slot(0), vec![0_u8; 4096].as_mut_ptr(), 4096, 0, || ()) })
                .join()
                .unwrap()
        });
        assert!(elsewhere.is_err(), "{elsewhere:?}");
        // SAFETY: this thread made the ring; `out` has as many bytes.
        assert_eq!(unsafe { ring.read(in_slot(0), out.as_mut_ptr(), 4096, 8192, || ()) }, Ok(4096));
        assert!((0..4096).all(|at| out[at] == byte(8192 + at)));
        close(ring.fd).unwrap();
    }
}
