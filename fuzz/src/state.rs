//! The state that the calls have created so far, and checks common to all calls.

use std::ffi::{CStr, c_int, c_void};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

use arbitrary::Arbitrary;

use crate::batches::PendingBatch;
use crate::library::{FILE, Library};

/// No result yet.
const UNSET: isize = isize::MAX;

/// An address: inside one of the live allocations, inside a freed one, or null.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub enum Address {
    Live { which: u8, offset: u32 },
    Freed { which: u8, offset: u32 },
    Null,
}

/// An offset in a file: usually inside it, or just past the end.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Offset(i32);

impl Offset {
    pub fn get(self) -> i64 {
        match self.0 % 8 {
            0 => i64::from(self.0),
            _ => i64::from(self.0).rem_euclid(FILE as i64 + 9000),
        }
    }
}

/// The objects that a program which makes these calls would keep.
#[derive(Default)]
pub struct State {
    pub live: Vec<(usize, usize)>,
    pub freed: Vec<(usize, usize)>,
    pub maps: Vec<usize>,
    /// The pin count of the sealed file.
    pub pins: u32,
    pub session: Option<c_int>,
    /// Batches in flight.
    pub pending_batches: Vec<PendingBatch>,
    /// Results of writes in flight, and the expected length of each.
    pub writes: Vec<(Box<AtomicIsize>, usize)>,
    /// Counts calls that may have changed device memory.
    pub changes: u64,
}

impl State {
    /// The address, and the length of live memory from it on.
    pub fn resolve(&self, address: Address) -> (usize, usize) {
        let pick = |list: &[(usize, usize)], which: u8, offset: u32| {
            let &(at, len) = list.get(usize::from(which) % list.len().max(1))?;
            let offset = offset as usize % (len + 1);
            Some((at + offset, len - offset))
        };
        match address {
            Address::Live { which, offset } => pick(&self.live, which, offset).unwrap_or((0, 0)),
            // Before the first free, another valid address.
            Address::Freed { which, offset } if self.freed.is_empty() => {
                pick(&self.live, which, offset).unwrap_or((0, 0))
            }
            Address::Freed { which, offset } => {
                let (at, _) = pick(&self.freed, which, offset).unwrap_or((0, 0));
                // It may have been allocated again.
                let room = self.live.iter().find(|(s, l)| (*s..s + l).contains(&at)).map_or(0, |(s, l)| s + l - at);
                (at, room)
            }
            Address::Null => (0, 0),
        }
    }
}

impl State {
    /// Enqueues a write of device memory on the default stream.
    pub fn write_async(
        &mut self,
        lib: &Library,
        (from, len): (Address, usize),
        offset: i64,
        fd: c_int,
        with_result: bool,
    ) {
        let (from, room) = self.resolve(from);
        let result = Box::new(AtomicIsize::new(UNSET));
        let word = if with_result { result.as_ptr() } else { std::ptr::null_mut() };
        // SAFETY: the result and the memory live until the write was waited for.
        let queued = unsafe { (lib.pwrite_async)(fd, from as *const c_void, len, offset, std::ptr::null_mut(), word) };
        if queued == -1 {
            check_last_error(lib);
            assert!(fd < 0 || offset < 0 || room == 0 || len == 0, "a valid write was refused: {}", errno());
        } else {
            assert!(queued == 0 && fd >= 0 && offset >= 0 && room > 0 && len > 0);
            if with_result {
                self.writes.push((result, if fd == lib.out { len.min(room) } else { 0 }));
            }
        }
    }

    /// Waits for all writes in flight, and checks their results.
    pub fn await_writes(&mut self, lib: &Library) {
        // SAFETY: null means all streams.
        assert_eq!(unsafe { (lib.emulated_wait)(std::ptr::null_mut()) }, 0);
        for (result, most) in self.writes.drain(..) {
            let result = result.load(Relaxed);
            let right = if most > 0 { result == most as isize } else { result != UNSET && result < 0 };
            assert!(right, "an enqueued write of {most} bytes returned {result}");
        }
    }
}

pub fn errno() -> i32 {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() }
}

/// Checks that a failed call has set errno and an error message.
pub fn check_last_error(lib: &Library) {
    assert!(errno() > 0);
    // SAFETY: a string that is valid until the next failure.
    let message = unsafe { CStr::from_ptr((lib.last_error)()) };
    assert!(!message.is_empty(), "a failure without a message");
}

/// A descriptor to read: usually a valid one.
pub fn readable(lib: &Library, fd: u8) -> c_int {
    match fd % 8 {
        7 => -1,
        4..7 => lib.sealed,
        _ => lib.file,
    }
}

/// The number of bytes in the file from an offset on, at most `len`.
pub fn readable_len(offset: i64, len: usize) -> usize {
    usize::try_from(offset).map_or(0, |at| len.min(FILE.saturating_sub(at)))
}

/// The bytes at an address of a device.
pub fn fetch(lib: &Library, from: usize, len: usize) -> Vec<u8> {
    let mut back = vec![0u8; len];
    if len > 0 {
        // SAFETY: memory of ours, and the address of a live allocation.
        assert_eq!(unsafe { (lib.copy)(back.as_mut_ptr().cast(), from as *const c_void, len) }, 0);
    }
    back
}

/// Bytes of the output file.
pub fn written(lib: &Library, offset: i64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    // SAFETY: memory of ours.
    let got = unsafe { libc::pread(lib.out, bytes.as_mut_ptr().cast(), len, offset) };
    assert_eq!(got, len as isize, "the file is shorter than the write");
    bytes
}
