//! Calls of spinio.h and nvmmu.h in any order, with addresses, lengths and descriptors that nobody should pass.
//!
//! What is checked: no crash; a call that returns a count has put exactly these bytes of the file there, or of the memory
//! into the file; one with memory that was freed, or never was, says EFAULT.
#![no_main]

mod library;

use std::ffi::{CStr, c_int, c_void};

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;
use library::{FILE, Library, Piece, library};

/// Bytes of what is written, at most.
const OUT: i64 = 8 << 20;

#[derive(Arbitrary, Debug)]
enum Op {
    Alloc { size: u32, flags: u8, device: u8 },
    Free(Address),
    Copy { to: Address, from: Address, len: u32 },
    Pread { to: Address, len: u32, offset: i32, fd: u8 },
    Pwrite { from: Address, len: u32, offset: i32, fd: u8 },
    Batch { asked: Vec<Asked>, times: u8, apart: bool },
    Fixed { to: Address, len: u16, offsets: Vec<i32>, fd: u8 },
    Hold { fd: u8 },
    Release { fd: u8 },
    Map { fd: u8, offset: i32, len: u32, flags: u8 },
    Unmap { which: u8, known: bool },
    Begin { thread: i8, named: bool },
    Move { fd: u8, device: Address, offset: i32, len: i32, direction: u8 },
    Flush { sync: bool },
    End { thread: i8 },
    Stats(u16),
}

/// A piece of a batch.
#[derive(Arbitrary, Clone, Copy, Debug)]
struct Asked {
    to: Address,
    len: u16,
    offset: i32,
    fd: u8,
}

/// An address: inside one of the live allocations, inside a freed one, or anything that no allocation has.
#[derive(Arbitrary, Clone, Copy, Debug)]
enum Address {
    Live { which: u8, offset: u32 },
    Freed { which: u8, offset: u32 },
    Null,
}

struct State {
    live: Vec<(usize, usize)>,
    freed: Vec<(usize, usize)>,
    maps: Vec<usize>,
    /// How often the sealed file is held.
    holds: u32,
    session: Option<c_int>,
}

impl State {
    /// The address, and how many bytes of live memory there are from it on.
    fn resolve(&self, address: Address) -> (usize, usize) {
        let pick = |list: &[(usize, usize)], which: u8, offset: u32| {
            let &(at, len) = list.get(usize::from(which) % list.len().max(1))?;
            let offset = offset as usize % (len + 1);
            Some((at + offset, len - offset))
        };
        match address {
            Address::Live { which, offset } => pick(&self.live, which, offset).unwrap_or((0, 0)),
            Address::Freed { which, offset } => {
                let (at, _) = pick(&self.freed, which, offset).unwrap_or((0, 0));
                // Something new may lie there.
                let room = self.live.iter().find(|(s, l)| (*s..s + l).contains(&at)).map_or(0, |(s, l)| s + l - at);
                (at, room)
            }
            Address::Null => (0, 0),
        }
    }
}

fn errno() -> i32 {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() }
}

/// A failed call has set errno and left a sentence.
fn explained(lib: &Library) {
    assert!(errno() > 0);
    // SAFETY: a string that stays until the next failure.
    let told = unsafe { CStr::from_ptr((lib.last_error)()) };
    assert!(!told.is_empty(), "a failure without a sentence");
}

/// A descriptor to read: mostly a good one.
fn readable(lib: &Library, fd: u8) -> c_int {
    match fd % 8 {
        7 => -1,
        4..7 => lib.sealed,
        _ => lib.file,
    }
}

/// How many bytes a read at an offset finds.
fn there(offset: i64, len: usize) -> usize {
    usize::try_from(offset).map_or(0, |at| len.min(FILE.saturating_sub(at)))
}

/// The bytes at an address of a device.
fn fetch(lib: &Library, from: usize, len: usize) -> Vec<u8> {
    let mut back = vec![0u8; len];
    if len > 0 {
        // SAFETY: memory of ours, and the address of a live allocation.
        assert_eq!(unsafe { (lib.copy)(back.as_mut_ptr().cast(), from as *const c_void, len) }, 0);
    }
    back
}

/// Bytes of the file that is written.
fn written(lib: &Library, offset: i64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0u8; len];
    // SAFETY: memory of ours.
    let got = unsafe { libc::pread(lib.out, bytes.as_mut_ptr().cast(), len, offset) };
    assert_eq!(got, len as isize, "the file ends before what was written");
    bytes
}

/// A batch: each piece must end as the read that it stands for.
fn batch(lib: &Library, state: &State, asked: &[Asked], times: u8, apart: bool) {
    let mut pieces = Vec::new();
    let mut rooms = Vec::new();
    for _ in 0..1 + times % 8 {
        for one in &asked[..asked.len().min(32)] {
            let (to, room) = state.resolve(one.to);
            let (fd, offset) = (readable(lib, one.fd), i64::from(one.offset) as u64);
            pieces.push(Piece { fd, reserved: 0, offset, size: u64::from(one.len), buffer: to, result: 1 << 40 });
            rooms.push(room);
        }
    }
    let n = pieces.len();
    // SAFETY: pieces of ours, which nobody touches until the batch is over; the memory stays as long.
    let all = unsafe {
        if apart {
            let ticket = (lib.submit)(pieces.as_mut_ptr(), n);
            assert!(!ticket.is_null() && (0..=1).contains(&(lib.poll)(ticket)));
            (lib.wait)(ticket)
        } else {
            (lib.batch)(pieces.as_mut_ptr(), n)
        }
    };
    assert_eq!(all, pieces.iter().map(|p| p.result.max(0)).sum::<i64>() as isize, "the sum of the results");
    for (i, (p, &room)) in pieces.iter().zip(&rooms).enumerate() {
        let expect = there(p.offset as i64, p.size as usize).min(room);
        if p.result < 0 {
            assert!(p.fd < 0 || p.offset > i64::MAX as u64 || room == 0, "a piece that should work: {p:?}");
            continue;
        }
        assert!(p.fd >= 0 && p.result as usize == expect, "{p:?}, {expect} are there");
        // Two that go to the same bytes arrive in any order.
        let alone = |(j, o): (usize, &Piece)| {
            j == i || o.buffer + o.size as usize <= p.buffer || p.buffer + p.size as usize <= o.buffer
        };
        let at = p.offset as usize;
        if expect > 0 && pieces.iter().enumerate().all(alone) {
            assert!(fetch(lib, p.buffer, expect) == lib.content[at..at + expect], "other bytes than the file's: {p:?}");
        }
    }
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Unstructured::new(bytes);
    let lib = library();
    let mut state = State { live: Vec::new(), freed: Vec::new(), maps: Vec::new(), holds: 0, session: None };
    // SAFETY: a file of ours.
    assert_eq!(unsafe { libc::ftruncate(lib.out, 0) }, 0);
    for _ in 0..24 {
        let Ok(op) = Op::arbitrary(&mut input) else { break };
        // SAFETY: every address is device memory of ours, freed, or null: what the library must tell apart. Host memory
        // is only passed with its true length.
        unsafe {
            match op {
                Op::Alloc { size, flags, device } => {
                    let name = [c"emulated", c"emulated:0", c"emulated:9", c"gpu", c""][usize::from(device % 5)];
                    let size = size as usize % (5 << 20);
                    let at = (lib.alloc)(name.as_ptr(), size, u32::from(flags % 3)) as usize;
                    if at == 0 {
                        explained(lib);
                    } else {
                        assert!(size > 0 && state.live.len() < 64);
                        assert!(state.live.iter().all(|(s, l)| at + size <= *s || s + l <= at), "two share an address");
                        state.live.push((at, size));
                    }
                }
                Op::Free(address) => {
                    let (at, _) = state.resolve(address);
                    let known = state.live.iter().position(|(s, _)| *s == at);
                    let freed = (lib.free)(at as *mut c_void);
                    match known {
                        Some(i) => {
                            assert_eq!(freed, 0);
                            state.freed.push(state.live.swap_remove(i));
                        }
                        None => assert!(at == 0 || freed == -1, "what was never allocated was freed"),
                    }
                }
                Op::Copy { to, from, len } => {
                    let ((to, room), (from, there)) = (state.resolve(to), state.resolve(from));
                    if to == 0 || from == 0 || (room == 0 && there == 0) {
                        continue; // both would be host memory to the library
                    }
                    let len = len as usize % (1 << 20);
                    let done = (lib.copy)(to as *mut c_void, from as *const c_void, len);
                    if room > 0 && there > 0 {
                        assert_eq!(done == 0, len <= room && len <= there, "copy of {len}, {room} and {there} left");
                    }
                }
                Op::Pread { to, len, offset, fd } => {
                    let (to, room) = state.resolve(to);
                    let len = len as usize % (4 << 20);
                    let fd = readable(lib, fd);
                    let got = (lib.pread)(fd, to as *mut c_void, len, i64::from(offset));
                    if got < 0 {
                        explained(lib);
                        assert!(fd < 0 || offset < 0 || room == 0, "a read that should work: {}", errno());
                        continue;
                    }
                    let at = usize::try_from(offset).expect("a negative offset was read");
                    let expect = len.min(FILE.saturating_sub(at)).min(room.max(usize::from(len == 0)));
                    assert!(got as usize == expect || (expect > 0 && got == 0 && room == 0));
                    let back = fetch(lib, to, got as usize);
                    assert!(back.is_empty() || back == lib.content[at..at + back.len()], "other bytes than the file's");
                }
                Op::Pwrite { from, len, offset, fd } => {
                    let (from, room) = state.resolve(from);
                    let (len, offset) = (len as usize % (4 << 20), i64::from(offset) % OUT);
                    let fd = if fd % 8 == 7 { lib.sealed } else { lib.out };
                    let got = (lib.pwrite)(fd, from as *const c_void, len, offset);
                    if got < 0 {
                        explained(lib);
                        assert!(fd != lib.out || offset < 0 || room == 0, "a write that should work: {}", errno());
                        continue;
                    }
                    let got = got as usize;
                    assert!(len == 0 || (fd == lib.out && got == len.min(room)), "{got} of {len}, {room} are there");
                    assert!(written(lib, offset, got) == fetch(lib, from, got), "other bytes than the device's");
                }
                Op::Batch { asked, times, apart } => batch(lib, &state, &asked, times, apart),
                Op::Fixed { to, len, offsets, fd } => {
                    let (to, room) = state.resolve(to);
                    let (fd, len) = (readable(lib, fd), usize::from(len));
                    let offsets: Vec<u64> = offsets.iter().map(|&o| i64::from(o) as u64).collect();
                    let (n, buffer) = (offsets.len(), to as *mut c_void);
                    let mut results = vec![1i64 << 40; n];
                    let got = (lib.batch_fixed)(fd, offsets.as_ptr(), len, buffer, results.as_mut_ptr(), n);
                    if got < 0 {
                        explained(lib);
                        continue;
                    }
                    for (i, (&offset, &result)) in offsets.iter().zip(&results).enumerate() {
                        // One behind the other, the last ones perhaps behind the end of the memory.
                        let expect = there(offset as i64, len).min(room.saturating_sub(i * len));
                        if result < 0 {
                            let behind = room <= i * len;
                            assert!(fd < 0 || offset > i64::MAX as u64 || behind, "a piece that should work: {result}");
                            continue;
                        }
                        let at = offset as usize;
                        if expect > 0 || result > 0 {
                            assert_eq!(result as usize, expect);
                            assert!(fetch(lib, to + i * len, expect) == lib.content[at..at + expect]);
                        }
                    }
                }
                Op::Hold { fd } => {
                    let fd = readable(lib, fd);
                    let held = (lib.hold)(fd);
                    if held == 0 {
                        assert_eq!(fd, lib.sealed, "a file that anybody may write is held");
                        state.holds += 1;
                        assert_eq!((lib.is_held)(fd), 1);
                    } else {
                        explained(lib);
                    }
                }
                Op::Release { fd } => {
                    let fd = readable(lib, fd);
                    // While it is mapped the last one must not let it go: maps come and go with it.
                    if fd == lib.sealed && !state.maps.is_empty() && state.holds <= 1 {
                        continue;
                    }
                    if (lib.release)(fd) == 0 {
                        assert_eq!(fd, lib.sealed);
                        state.holds = state.holds.saturating_sub(1);
                    } else {
                        explained(lib);
                        assert!(fd != lib.sealed || state.holds == 0);
                    }
                }
                Op::Map { fd, offset, len, flags } => {
                    let fd = readable(lib, fd);
                    let len = len as usize % (FILE + 4096);
                    let flags = u32::from(flags % 16 == 15);
                    let at = (lib.map)(fd, i64::from(offset), len, flags) as usize;
                    if at == 0 {
                        explained(lib);
                        continue;
                    }
                    assert!(fd == lib.sealed && flags == 0 && len > 0 && there(i64::from(offset), len) == len);
                    assert_eq!((lib.map_wanted)(at as *const c_void), 0);
                    state.maps.push(at);
                }
                Op::Unmap { which, known } => {
                    let which = usize::from(which) % state.maps.len().max(1);
                    if known && which < state.maps.len() {
                        assert_eq!((lib.unmap)(state.maps.swap_remove(which) as *const c_void), 0);
                    } else if !state.maps.contains(&which) {
                        assert_eq!((lib.unmap)(which as *const c_void), -1, "what was never mapped was unmapped");
                    }
                }
                Op::Begin { thread, named } => {
                    let thread = c_int::from(thread % 4);
                    let name = if named { lib.paths[2].as_ptr() } else { std::ptr::null() };
                    if (lib.begin)(thread, name) == 0 {
                        assert!(state.session.is_none(), "two sessions of a thread");
                        state.session = Some(thread);
                    } else {
                        explained(lib);
                        assert!(state.session.is_some(), "no session can be begun: {}", errno());
                    }
                }
                Op::Move { fd, device, offset, len, direction } => {
                    let (at, room) = state.resolve(device);
                    let (which, direction) = (usize::from(fd % 3), c_int::from(direction % 4));
                    let (offset, len) = (i64::from(offset) % OUT, i64::from(len) % (4 << 20));
                    // Only one of them may be changed.
                    if which != 2 && direction == 2 {
                        continue;
                    }
                    let name = lib.paths[which].as_ptr();
                    let got = (lib.move_)(name, at as *mut c_void, offset, len, direction);
                    if got < 0 {
                        explained(lib);
                        let fits = offset >= 0 && (0..=room as i64).contains(&len) && room > 0;
                        let sane = state.session.is_some() && (1..=2).contains(&direction) && fits;
                        assert!(!sane, "a move that should work: {}", errno());
                        continue;
                    }
                    assert!(state.session.is_some() && offset >= 0 && got <= len && got as usize <= room.max(0));
                    let got = got as usize;
                    if direction == 2 {
                        assert_eq!(got as i64, len);
                        assert_eq!((lib.flush)(0), 0);
                        assert!(written(lib, offset, got) == fetch(lib, at, got), "other bytes than the device's");
                    } else if which != 2 {
                        assert_eq!(got, there(offset, len as usize));
                        let from = (offset as usize).min(FILE);
                        assert!(fetch(lib, at, got) == lib.content[from..from + got], "other bytes than the file's");
                    }
                }
                Op::Flush { sync } => {
                    let flushed = (lib.flush)(c_int::from(sync));
                    assert_eq!(flushed == 0, state.session.is_some());
                }
                Op::End { thread } => {
                    let thread = c_int::from(thread % 4);
                    let ended = (lib.end)(thread, std::ptr::null_mut(), 0);
                    assert_eq!(ended == 0, state.session == Some(thread), "session {thread}: {}", errno());
                    if ended == 0 {
                        state.session = None;
                    }
                }
                Op::Stats(size) => {
                    let mut out = vec![0xffu8; usize::from(size % 2048)];
                    assert_eq!((lib.stats)(out.as_mut_ptr().cast(), out.len()), 0);
                }
            }
        }
    }
    // SAFETY: what was begun above, and not ended.
    unsafe {
        if let Some(thread) = state.session {
            assert_eq!((lib.end)(thread, std::ptr::null_mut(), 0), 0);
        }
        for at in state.maps {
            assert_eq!((lib.unmap)(at as *const c_void), 0);
        }
        for _ in 0..state.holds {
            (lib.release)(lib.sealed);
        }
    }
    for (at, _) in state.live {
        // SAFETY: allocated above.
        unsafe { assert_eq!((lib.free)(at as *mut c_void), 0) };
    }
});
