//! The fake driver, compiled on the spot and opened under the real driver's name.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ffi::{CString, c_int, c_void};
use std::path::PathBuf;
use std::process::Command;

/// The fake driver's own controls.
pub(crate) struct Fake {
    library: *mut c_void,
}

/// Builds `libcuda.so.1` and opens it, as a program that uses CUDA would. `None`, with the reason printed, without a C
/// compiler or where a real driver is loaded already.
pub(crate) fn open() -> Option<Fake> {
    let dir = std::env::temp_dir().join(format!("spinio-fake-driver-{}", std::process::id()));
    let library = dir.join("libcuda.so.1");
    std::fs::create_dir_all(&dir).expect("a temporary directory");
    let source = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../sys/tests/fake/libcuda.c"));
    let built = Command::new("cc")
        .args(["-O1", "-g", "-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", "-o"])
        .args([&library, &source])
        .status();
    match built {
        Err(e) => {
            println!("skipped: no C compiler for the fake driver: {e}");
            return None;
        }
        Ok(status) => assert!(status.success(), "the fake driver does not compile"),
    }
    let path = CString::new(library.to_str().expect("a path in UTF-8")).expect("a path without NUL");
    // SAFETY: our own library, whose constructors do nothing.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    assert!(!library.is_null(), "the fake driver does not load");
    let _ = std::fs::remove_dir_all(&dir);
    Some(Fake { library })
}

macro_rules! controls {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident: $type:ty),*) $(-> $ret:ty)?;)+) => {
        #[allow(dead_code, clippy::allow_attributes, reason = "each test file uses its own part")]
        impl Fake {
            $($(#[$doc])* pub(crate) fn $name(&self, $($arg: $type),*) $(-> $ret)? {
                let name = concat!("fake_", stringify!($name), "\0");
                // SAFETY: the library is open, the name ends in NUL.
                let at = unsafe { libc::dlsym(self.library, name.as_ptr().cast()) };
                assert!(!at.is_null(), "{name}");
                // SAFETY: the fake driver's function of this name has this prototype.
                let f: unsafe extern "C" fn($($type),*) $(-> $ret)? = unsafe { core::mem::transmute(at) };
                // SAFETY: the tests pass addresses of the fake driver's own memory.
                unsafe { f($($arg),*) }
            })+
        }
    };
}

controls! {
    /// After so many allocations of chunks there is no memory for one.
    fn limit_creates(most: c_int);
    /// A blocking stream begins (1) or ends (0) a capture.
    fn capture(on: c_int);
    /// Calls that would have invalidated the capture.
    fn invalidated() -> c_int;
    /// A kernel has failed: all calls fail with this code from now on.
    fn trap(code: c_int);
    /// Registering fails with this code from now on.
    fn fail_register(code: c_int);
    /// The most bytes that one call registers (0: any).
    fn limit_register(most: u64);
    /// Calls that register do not return (1), or go on (0).
    fn hold_register(on: c_int);
    /// How many do not return.
    fn in_register() -> c_int;
    /// Copies fail with this code from now on.
    fn fail_copy(code: c_int);
    /// Copies between device addresses fail with this code from now on.
    fn fail_copy_within(code: c_int);
    /// Memory cannot be made accessible after some more calls that can, with this code; 0: all can.
    fn fail_access(code: c_int, after: c_int);
    /// Memory cannot be unmapped from now on, with this code.
    fn fail_unmap(code: c_int);
    /// Code cannot be loaded from now on, with this code.
    fn fail_module(code: c_int);
    /// Streams never come to host functions from now on.
    fn hang(on: c_int);
    /// Streams cannot wait for words from now on.
    fn no_stream_wait(on: c_int);
    /// Kernels access memory of the process: 0 not, 1 by page faults, 2 by its page tables.
    fn pageable(how: c_int);
    /// Pointer queries so far.
    fn queries() -> c_int;
    /// Copies and launches so far.
    fn calls() -> c_int;
    /// Calls of virtual memory management so far, but for handles made and released.
    fn vmm_calls() -> c_int;
    /// How contexts wait.
    fn schedule(flags: c_int);
    /// Registrations alive.
    fn live_pins() -> c_int;
    /// Streams alive.
    fn live_streams() -> c_int;
    /// Events alive.
    fn live_events() -> c_int;
    /// Memory: kind 0 of the current context, 1 of a pool, 2 managed; `near` non-zero: exactly there.
    fn alloc(kind: c_int, len: u64, near: u64) -> u64;
    /// 2 MiB mappings in one reservation of `mib` MiB, one for each bit.
    fn vmm(mib: u64, map: u32) -> u64;
    /// Frees any of these.
    fn free(addr: u64);
    /// Reads device memory without a driver call.
    fn peek(addr: u64, to: *mut u8, len: u64);
    /// A context of its own.
    fn context(device: c_int) -> usize;
    /// Destroys it.
    fn destroy(context: usize);
    /// cudaDeviceReset: the primary context dies; its successor has the same address.
    fn reset(device: c_int);
}
