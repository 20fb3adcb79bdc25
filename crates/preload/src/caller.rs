//! Whether a hook was called by the program or by the accelerator's driver.
//!
//! The driver reads files too, and may do so while it holds its own locks. Such a call must not make SPIN query the
//! driver for the owner of the buffer: that would wait for the very lock that the caller holds. So a hook passes on its
//! return address, and calls out of the driver's libraries go straight to the next function.
//!
//! ```text
//!   return address ──> CALLER_CACHE      ── known: one load
//!                           └ new: which object is it in? ── libcuda.so.1, libnvidia-*.so... ──> the driver
//! ```
//!
//! The lookup is done for each new address, not once for all libraries, so it covers the libraries that the driver
//! loads late, such as its compiler. glibc 2.35 answers without a lock.
//!
//! Known flaws: an entry outlives the object it was made for, so code that is later loaded at the same address inherits
//! it (drivers stay loaded). A file that the driver reads through another vendor's library counts as the program's.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering::Relaxed};

const SLOTS: usize = 256;

/// Address and result in one word, so that a reader never sees one without the other.
static CALLER_CACHE: [AtomicU64; SLOTS] = [const { AtomicU64::new(0) }; SLOTS];

/// Whether the code at this return address belongs to a driver.
#[inline]
pub(crate) fn is_driver(return_address: usize) -> bool {
    // Calls are at least five bytes long, so neighbours rarely share a slot.
    let slot = &CALLER_CACHE[(return_address >> 2 ^ return_address >> 10) % SLOTS];
    let known = slot.load(Relaxed);
    if known >> 1 == return_address as u64 { known & 1 != 0 } else { resolve_caller(return_address, slot) }
}

#[cold]
fn resolve_caller(return_address: usize, slot: &AtomicU64) -> bool {
    let driver = object_name(return_address).is_some_and(is_driver_name);
    slot.store((return_address as u64) << 1 | u64::from(driver), Relaxed);
    driver
}

fn is_driver_name(path: &[u8]) -> bool {
    let name = path.rsplit(|&b| b == b'/').next().unwrap_or(path);
    [&b"libcuda.so"[..], b"libcudadebugger", b"libnvidia-", b"libnvcu"].iter().any(|p| name.starts_with(p))
}

/// `struct dl_find_object` of glibc on x86-64.
#[repr(C)]
struct DlFindObject {
    flags: u64,
    start: *mut c_void,
    end: *mut c_void,
    map: *const LinkMap,
    frames: *mut c_void,
    reserved: [u64; 7],
}

/// The public head of the loader's `struct link_map`.
#[repr(C)]
struct LinkMap {
    base: usize,
    name: *const c_char,
}

static FIND_OBJECT: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// Looks up glibc's lock-free query; for the constructor.
pub(crate) fn init() {
    // SAFETY: the name is NUL-terminated.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"_dl_find_object".as_ptr()) };
    FIND_OBJECT.store(found, Relaxed);
}

/// The path of the object that contains `at`. Loaded objects keep their names, and the caller runs in this one.
fn object_name(at: usize) -> Option<&'static [u8]> {
    let find = FIND_OBJECT.load(Relaxed);
    let name = if find.is_null() {
        // SAFETY: all-zero is a valid Dl_info.
        let mut info: libc::Dl_info = unsafe { core::mem::zeroed() };
        // SAFETY: `info` lives across the call.
        (unsafe { libc::dladdr(at as *const c_void, &mut info) } != 0).then_some(info.dli_fname)?
    } else {
        // SAFETY: all-zero is a valid `Found`.
        let mut found: DlFindObject = unsafe { core::mem::zeroed() };
        // SAFETY: the pointer is glibc's `_dl_find_object`, which has this type.
        let query: unsafe extern "C" fn(*mut c_void, *mut DlFindObject) -> c_int =
            unsafe { core::mem::transmute(find) };
        // SAFETY: `found` lives across the call and is as large as glibc's structure.
        if unsafe { query(at as *mut c_void, &mut found) } != 0 || found.map.is_null() {
            return None;
        }
        // SAFETY: the link map of a loaded object, whose head has been public and unchanged for decades.
        unsafe { (*found.map).name }
    };
    // SAFETY: the loader's names are NUL-terminated.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_bytes())
}
