//! Calls of spinio.h and nvmmu.h in any order, with addresses, lengths and descriptors that no correct program passes.
//!
//! Checks: no crash; a call that returns a count has transferred exactly these bytes from the file to the memory, or
//! from the memory to the file; a call with memory that was freed, or never allocated, returns EFAULT.
#![no_main]

mod batches;
mod library;
mod state;

use std::ffi::{c_int, c_void};

use arbitrary::{Arbitrary, Unstructured};
use batches::OpSpec;
use libfuzzer_sys::fuzz_target;
use library::{FILE, library};
use state::{Address, Offset, State, check_last_error, errno, fetch, readable, readable_len, written};

/// Bytes of the initial allocation.
const START: usize = 1 << 20;

/// Limit of the output file's length.
const OUT: i64 = 8 << 20;

#[derive(Arbitrary, Debug)]
enum Op {
    Alloc { size: u32, flags: u8, device: u8 },
    Free(Address),
    Copy { to: Address, from: Address, len: u32 },
    Pread { to: Address, len: u32, offset: Offset, fd: u8 },
    Pwrite { from: Address, len: u32, offset: Offset, fd: u8 },
    Batch { specs: Vec<OpSpec>, times: u8, with_submit: bool },
    Fixed { to: Address, len: u16, offsets: Vec<Offset>, fd: u8 },
    Arrays { specs: Vec<OpSpec>, fd: u8, with_results: bool, null_array: u8 },
    Submit { specs: Vec<OpSpec>, times: u8 },
    Poll { which: u8 },
    Wait { which: u8 },
    WriteAsync { from: Address, len: u32, offset: Offset, fd: u8, with_results: bool, now: bool },
    PinFile { fd: u8 },
    UnpinFile { fd: u8 },
    Map { fd: u8, offset: Offset, len: u32, flags: u8 },
    Unmap { which: u8, is_mapped: bool },
    Begin { thread: i8, named: bool },
    Move { fd: u8, device: Address, offset: Offset, len: i32, direction: u8 },
    Flush { sync: bool },
    End { thread: i8 },
    Stats(u16),
}

fuzz_target!(|bytes: &[u8]| {
    let mut input = Unstructured::new(bytes);
    let lib = library();
    let mut state = State::default();
    // SAFETY: a file of ours.
    assert_eq!(unsafe { libc::ftruncate(lib.out, 0) }, 0);
    // Without memory most calls fail early, so most inputs begin with an allocation.
    if input.arbitrary::<u8>().unwrap_or(0) % 8 > 0 {
        // SAFETY: a name, and numbers.
        let at = unsafe { (lib.alloc)(c"emulated".as_ptr(), START, 0) } as usize;
        assert_ne!(at, 0);
        state.live.push((at, START));
    }
    for _ in 0..24 {
        let Ok(op) = Op::arbitrary(&mut input) else { break };
        // A batch in flight may change any memory.
        let memory_unchanged = state.pending_batches.is_empty();
        // SAFETY: every address is device memory of ours, freed, or null, which the library must distinguish. Host
        // memory is only passed with its true length.
        unsafe {
            match op {
                Op::Alloc { size, flags, device } => {
                    let name = [c"emulated", c"emulated:0", c"emulated:9", c"gpu", c""][usize::from(device % 5)];
                    let size = size as usize % (5 << 20);
                    let at = (lib.alloc)(name.as_ptr(), size, u32::from(flags % 3)) as usize;
                    if at == 0 {
                        check_last_error(lib);
                    } else {
                        assert!(size > 0 && state.live.len() < 64);
                        assert!(
                            state.live.iter().all(|(s, l)| at + size <= *s || s + l <= at),
                            "two allocations overlap"
                        );
                        state.live.push((at, size));
                    }
                }
                Op::Free(address) => {
                    let (at, _) = state.resolve(address);
                    // Batches in flight need their memory.
                    if !state.pending_batches.is_empty() {
                        continue;
                    }
                    state.await_writes(lib);
                    let known = state.live.iter().position(|(s, _)| *s == at);
                    let freed = (lib.free)(at as *mut c_void);
                    match known {
                        Some(i) => {
                            assert_eq!(freed, 0);
                            state.freed.push(state.live.swap_remove(i));
                        }
                        None => assert!(at == 0 || freed == -1, "an address that was never allocated was freed"),
                    }
                }
                Op::Copy { to, from, len } => {
                    state.changes += 1;
                    let ((to, room), (from, from_len)) = (state.resolve(to), state.resolve(from));
                    if to == 0 || from == 0 || (room == 0 && from_len == 0) {
                        continue; // both would be host memory to the library
                    }
                    let len = len as usize % (1 << 20);
                    let done = (lib.copy)(to as *mut c_void, from as *const c_void, len);
                    if room > 0 && from_len > 0 {
                        assert_eq!(
                            done == 0,
                            len <= room && len <= from_len,
                            "copy of {len}, {room} and {from_len} left"
                        );
                    }
                }
                Op::Pread { to, len, offset, fd } => {
                    let offset = offset.get();
                    state.changes += 1;
                    let (to, room) = state.resolve(to);
                    let len = len as usize % (4 << 20);
                    let fd = readable(lib, fd);
                    let got = (lib.pread)(fd, to as *mut c_void, len, offset);
                    if got < 0 {
                        check_last_error(lib);
                        assert!(fd < 0 || offset < 0 || room == 0, "a valid read failed: {}", errno());
                        continue;
                    }
                    let at = usize::try_from(offset).expect("a negative offset was read");
                    let expect = len.min(FILE.saturating_sub(at)).min(room.max(usize::from(len == 0)));
                    assert!(got as usize == expect || (expect > 0 && got == 0 && room == 0));
                    let back = fetch(lib, to, got as usize);
                    let same = back.is_empty() || back == lib.content[at..at + back.len()];
                    assert!(same || !memory_unchanged, "other bytes than the file's");
                }
                Op::Pwrite { from, len, offset, fd } => {
                    state.await_writes(lib);
                    let (from, room) = state.resolve(from);
                    let (len, offset) = (len as usize % (4 << 20), offset.get() % OUT);
                    let fd = if fd % 8 == 7 { lib.sealed } else { lib.out };
                    let got = (lib.pwrite)(fd, from as *const c_void, len, offset);
                    if got < 0 {
                        check_last_error(lib);
                        assert!(fd != lib.out || offset < 0 || room == 0, "a valid write failed: {}", errno());
                        continue;
                    }
                    let got = got as usize;
                    assert!(len == 0 || (fd == lib.out && got == len.min(room)), "{got} of {len}, {room} allocated");
                    let same = written(lib, offset, got) == fetch(lib, from, got);
                    assert!(same || !memory_unchanged, "other bytes than the device's");
                }
                Op::Batch { specs, times, with_submit } => state.batch(lib, &specs, times, with_submit),
                Op::Arrays { specs, fd, with_results, null_array } => {
                    state.arrays(lib, &specs, fd, with_results, null_array)
                }
                Op::Submit { specs, times } => state.submit(lib, &specs, times),
                Op::Poll { which } => state.poll(lib, which),
                Op::Wait { which } => state.wait(lib, which),
                Op::WriteAsync { from, len, offset, fd, with_results, now } => {
                    let fd = [lib.out, lib.out, lib.out, lib.sealed, -1][usize::from(fd % 5)];
                    state.write_async(lib, (from, len as usize % (4 << 20)), offset.get() % OUT, fd, with_results);
                    if now {
                        state.await_writes(lib);
                    }
                }
                Op::Fixed { to, len, offsets, fd } => {
                    state.changes += 1;
                    let (to, room) = state.resolve(to);
                    let (fd, len) = (readable(lib, fd), usize::from(len));
                    let offsets: Vec<u64> = offsets.iter().map(|o| o.get() as u64).collect();
                    let (n, buffer) = (offsets.len(), to as *mut c_void);
                    let mut results = vec![1i64 << 40; n];
                    let got = (lib.batch_fixed)(fd, offsets.as_ptr(), len, buffer, results.as_mut_ptr(), n);
                    if got < 0 {
                        check_last_error(lib);
                        continue;
                    }
                    for (i, (&offset, &result)) in offsets.iter().zip(&results).enumerate() {
                        // Consecutive destinations, the last ones possibly past the end of the memory.
                        let expect = readable_len(offset as i64, len).min(room.saturating_sub(i * len));
                        if result < 0 {
                            let past_end = room <= i * len;
                            assert!(fd < 0 || offset > i64::MAX as u64 || past_end, "a valid op failed: {result}");
                            continue;
                        }
                        let at = offset as usize;
                        if expect > 0 || result > 0 {
                            assert_eq!(result as usize, expect);
                            let same = fetch(lib, to + i * len, expect) == lib.content[at..at + expect];
                            assert!(same || !memory_unchanged, "other bytes than the file's");
                        }
                    }
                }
                Op::PinFile { fd } => {
                    let fd = readable(lib, fd);
                    let pinned = (lib.pin_file)(fd);
                    if pinned == 0 {
                        assert_eq!(fd, lib.sealed, "a writable file was pinned");
                        state.pins += 1;
                        assert_eq!((lib.is_pinned)(fd), 1);
                    } else {
                        check_last_error(lib);
                    }
                }
                Op::UnpinFile { fd } => {
                    let fd = readable(lib, fd);
                    // The last unpin must not happen while it is mapped: it would remove the mappings.
                    if fd == lib.sealed && !state.maps.is_empty() && state.pins <= 1 {
                        continue;
                    }
                    if (lib.unpin_file)(fd) == 0 {
                        assert_eq!(fd, lib.sealed);
                        state.pins = state.pins.saturating_sub(1);
                    } else {
                        check_last_error(lib);
                        assert!(fd != lib.sealed || state.pins == 0);
                    }
                }
                Op::Map { fd, offset, len, flags } => {
                    let offset = offset.get();
                    let fd = readable(lib, fd);
                    let len = len as usize % (FILE + 4096);
                    let flags = u32::from(flags % 16 == 15);
                    let at = (lib.map)(fd, offset, len, flags) as usize;
                    if at == 0 {
                        check_last_error(lib);
                        continue;
                    }
                    assert!(fd == lib.sealed && flags == 0 && len > 0 && readable_len(offset, len) == len);
                    assert_eq!((lib.map_revoked)(at as *const c_void), 0);
                    state.maps.push(at);
                }
                Op::Unmap { which, is_mapped } => {
                    let which = usize::from(which) % state.maps.len().max(1);
                    if is_mapped && which < state.maps.len() {
                        assert_eq!((lib.unmap)(state.maps.swap_remove(which) as *const c_void), 0);
                    } else if !state.maps.contains(&which) {
                        assert_eq!(
                            (lib.unmap)(which as *const c_void),
                            -1,
                            "an address that was never mapped was unmapped"
                        );
                    }
                }
                Op::Begin { thread, named } => {
                    let thread = c_int::from(thread % 4);
                    let name = if named { lib.paths[2].as_ptr() } else { std::ptr::null() };
                    if (lib.begin)(thread, name) == 0 {
                        assert!(state.session.is_none(), "two sessions of a thread");
                        state.session = Some(thread);
                    } else {
                        check_last_error(lib);
                        assert!(state.session.is_some(), "a valid begin failed: {}", errno());
                    }
                }
                Op::Move { fd, device, offset, len, direction } => {
                    state.changes += 1;
                    state.await_writes(lib);
                    let (at, room) = state.resolve(device);
                    let (which, direction) = (usize::from(fd % 3), c_int::from(direction % 4));
                    let (offset, len) = (offset.get() % OUT, i64::from(len) % (4 << 20));
                    // Only the output file may be changed.
                    if which != 2 && direction == 2 {
                        continue;
                    }
                    let name = lib.paths[which].as_ptr();
                    let got = (lib.move_)(name, at as *mut c_void, offset, len, direction);
                    if got < 0 {
                        check_last_error(lib);
                        let fits = offset >= 0 && (0..=room as i64).contains(&len) && room > 0;
                        let sane = state.session.is_some() && (1..=2).contains(&direction) && fits;
                        assert!(!sane, "a valid move failed: {}", errno());
                        continue;
                    }
                    assert!(state.session.is_some() && offset >= 0 && got <= len && got as usize <= room.max(0));
                    let got = got as usize;
                    if direction == 2 {
                        assert_eq!(got as i64, len);
                        assert_eq!((lib.flush)(0), 0);
                        let same = written(lib, offset, got) == fetch(lib, at, got);
                        assert!(same || !memory_unchanged, "other bytes than the device's");
                    } else if which != 2 {
                        assert_eq!(got, readable_len(offset, len as usize));
                        let from = (offset as usize).min(FILE);
                        let same = fetch(lib, at, got) == lib.content[from..from + got];
                        assert!(same || !memory_unchanged, "other bytes than the file's");
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
    while !state.pending_batches.is_empty() {
        state.wait(lib, 0);
    }
    state.await_writes(lib);
    // SAFETY: the session and mappings created above.
    unsafe {
        if let Some(thread) = state.session {
            assert_eq!((lib.end)(thread, std::ptr::null_mut(), 0), 0);
        }
        for at in state.maps {
            assert_eq!((lib.unmap)(at as *const c_void), 0);
        }
        for _ in 0..state.pins {
            (lib.unpin_file)(lib.sealed);
        }
    }
    for (at, _) in state.live {
        // SAFETY: allocated above.
        unsafe { assert_eq!((lib.free)(at as *mut c_void), 0) };
    }
});
