//! Calls of spinio.h in any order, with addresses, lengths and descriptors that nobody should pass.
//!
//! The library is opened as a program would open it (SPINIO_FUZZ_LIBRARY names it; `cargo x fuzz` builds it with counters
//! too). What is checked: no crash; a call that returns a count has put exactly these bytes of the file there; one into
//! memory that was freed, or never was, says EFAULT.
#![no_main]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::sync::OnceLock;

use arbitrary::{Arbitrary, Unstructured};
use libfuzzer_sys::fuzz_target;

const FILE: usize = 3 << 20;

type Alloc = unsafe extern "C" fn(*const c_char, usize, u32) -> *mut c_void;
type Free = unsafe extern "C" fn(*mut c_void) -> c_int;
type Copy = unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int;
type Pread = unsafe extern "C" fn(c_int, *mut c_void, usize, i64) -> isize;
type Stats = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type LastError = unsafe extern "C" fn() -> *const c_char;

struct Library {
    alloc: Alloc,
    free: Free,
    copy: Copy,
    pread: Pread,
    stats: Stats,
    last_error: LastError,
    file: c_int,
    content: Vec<u8>,
}

fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = std::env::var("SPINIO_FUZZ_LIBRARY").expect("SPINIO_FUZZ_LIBRARY names libspinio.so");
        let path = CString::new(path).unwrap();
        // SAFETY: a library of ours, opened as any program would.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "cannot open the library");
        let symbol = |name: &CStr| {
            // SAFETY: a handle that was just opened.
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            assert!(!found.is_null(), "the library lacks {name:?}");
            found
        };
        let content: Vec<u8> = (0..FILE as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        // SAFETY: the signatures are those of spinio.h; the descriptor is a new one.
        unsafe {
            let file = libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC);
            assert_eq!(libc::write(file, content.as_ptr().cast(), FILE), FILE as isize);
            Library {
                alloc: std::mem::transmute::<*mut c_void, Alloc>(symbol(c"spinio_mem_alloc")),
                free: std::mem::transmute::<*mut c_void, Free>(symbol(c"spinio_mem_free")),
                copy: std::mem::transmute::<*mut c_void, Copy>(symbol(c"spinio_mem_copy")),
                pread: std::mem::transmute::<*mut c_void, Pread>(symbol(c"spinio_pread")),
                stats: std::mem::transmute::<*mut c_void, Stats>(symbol(c"spinio_stats")),
                last_error: std::mem::transmute::<*mut c_void, LastError>(symbol(c"spinio_last_error")),
                file,
                content,
            }
        }
    })
}

#[derive(Arbitrary, Debug)]
enum Op {
    Alloc { size: u32, flags: u8, device: u8 },
    Free(Address),
    Copy { to: Address, from: Address, len: u32 },
    Pread { to: Address, len: u32, offset: i32, fd: u8 },
    Stats(u16),
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

fuzz_target!(|bytes: &[u8]| {
    let mut input = Unstructured::new(bytes);
    let lib = library();
    let mut state = State { live: Vec::new(), freed: Vec::new() };
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
                    let fd = if fd % 8 == 7 { -1 } else { lib.file };
                    let got = (lib.pread)(fd, to as *mut c_void, len, i64::from(offset));
                    if got < 0 {
                        explained(lib);
                        assert!(fd < 0 || offset < 0 || room == 0, "a read that should work: {}", errno());
                        continue;
                    }
                    let at = usize::try_from(offset).expect("a negative offset was read");
                    let expect = len.min(FILE.saturating_sub(at)).min(room.max(usize::from(len == 0)));
                    assert!(got as usize == expect || (expect > 0 && got == 0 && room == 0));
                    let mut back = vec![0u8; got as usize];
                    if got > 0 {
                        assert_eq!((lib.copy)(back.as_mut_ptr().cast(), to as *const c_void, back.len()), 0);
                        assert!(back == lib.content[at..at + back.len()], "other bytes than the file's");
                    }
                }
                Op::Stats(size) => {
                    let mut out = vec![0xffu8; usize::from(size % 2048)];
                    assert_eq!((lib.stats)(out.as_mut_ptr().cast(), out.len()), 0);
                }
            }
        }
    }
    for (at, _) in state.live {
        // SAFETY: allocated above.
        unsafe { assert_eq!((lib.free)(at as *mut c_void), 0) };
    }
});
