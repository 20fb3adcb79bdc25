//! The library, opened as a program would open it, and the test files.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// Bytes of the files that are read.
pub const FILE: usize = 3 << 20;

/// `struct spinio_read_op`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ReadOp {
    pub fd: c_int,
    pub reserved: c_uint,
    pub offset: u64,
    pub size: u64,
    pub buffer: usize,
    pub result: i64,
}

macro_rules! calls {
    ($($name:ident: $symbol:literal, $type:ty;)*) => {
        /// Functions of spinio.h and nvmmu.h, and the files.
        pub struct Library {
            $(pub $name: $type,)*
            /// Open for reading and writing.
            pub file: c_int,
            /// The same content; sealed against writes, so it can be pinned.
            pub sealed: c_int,
            /// The output file.
            pub out: c_int,
            /// Paths of these three.
            pub paths: [CString; 3],
            pub content: Vec<u8>,
        }

        impl Library {
            fn open(handle: *mut c_void, files: [c_int; 3], content: Vec<u8>) -> Library {
                let symbol = |name: &CStr| {
                    // SAFETY: a handle that was just opened.
                    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
                    assert!(!found.is_null(), "the library lacks {name:?}");
                    found
                };
                let [file, sealed, out] = files;
                let name = |fd: c_int| CString::new(format!("/proc/{}/fd/{fd}", std::process::id())).unwrap();
                Library {
                    // SAFETY: the signatures are those of the headers.
                    $($name: unsafe { std::mem::transmute::<*mut c_void, $type>(symbol($symbol)) },)*
                    file, sealed, out, paths: files.map(name), content,
                }
            }
        }
    };
}

calls! {
    alloc: c"spinio_mem_alloc", unsafe extern "C" fn(*const c_char, usize, c_uint) -> *mut c_void;
    free: c"spinio_mem_free", unsafe extern "C" fn(*mut c_void) -> c_int;
    copy: c"spinio_mem_copy", unsafe extern "C" fn(*mut c_void, *const c_void, usize) -> c_int;
    pread: c"spinio_pread", unsafe extern "C" fn(c_int, *mut c_void, usize, i64) -> isize;
    pwrite: c"spinio_pwrite", unsafe extern "C" fn(c_int, *const c_void, usize, i64) -> isize;
    batch: c"spinio_batch", unsafe extern "C" fn(*mut ReadOp, usize) -> isize;
    pwrite_async: c"spinio_pwrite_async",
        unsafe extern "C" fn(c_int, *const c_void, usize, i64, *mut c_void, *mut isize) -> c_int;
    emulated_wait: c"spinio_emulated_wait", unsafe extern "C" fn(*mut c_void) -> c_int;
    batch_file: c"spinio_batch_file",
        unsafe extern "C" fn(c_int, *const u64, *const u64, *const *mut c_void, *mut i64, usize) -> isize;
    batch_fixed: c"spinio_batch_fixed",
        unsafe extern "C" fn(c_int, *const u64, usize, *mut c_void, *mut i64, usize) -> isize;
    submit: c"spinio_batch_submit", unsafe extern "C" fn(*mut ReadOp, usize) -> *mut c_void;
    poll: c"spinio_batch_poll", unsafe extern "C" fn(*const c_void) -> c_int;
    wait: c"spinio_batch_wait", unsafe extern "C" fn(*mut c_void) -> isize;
    pin_file: c"spinio_pin_file", unsafe extern "C" fn(c_int) -> c_int;
    unpin_file: c"spinio_unpin_file", unsafe extern "C" fn(c_int) -> c_int;
    is_pinned: c"spinio_is_pinned", unsafe extern "C" fn(c_int) -> c_int;
    map: c"spinio_map", unsafe extern "C" fn(c_int, i64, usize, c_uint) -> *mut c_void;
    map_revoked: c"spinio_map_revoked", unsafe extern "C" fn(*const c_void) -> c_int;
    unmap: c"spinio_unmap", unsafe extern "C" fn(*const c_void) -> c_int;
    begin: c"nvmmu_begin", unsafe extern "C" fn(c_int, *const c_char) -> c_int;
    move_: c"nvmmu_move", unsafe extern "C" fn(*const c_char, *mut c_void, i64, i64, c_int) -> i64;
    flush: c"nvmmu_flush", unsafe extern "C" fn(c_int) -> c_int;
    end: c"nvmmu_end", unsafe extern "C" fn(c_int, *mut c_void, usize) -> c_int;
    stats: c"spinio_stats", unsafe extern "C" fn(*mut c_void, usize) -> c_int;
    last_error: c"spinio_last_error", unsafe extern "C" fn() -> *const c_char;
}

/// The library that SPINIO_FUZZ_LIBRARY names; `cargo x fuzz` builds it with counters of coverage too.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let path = std::env::var("SPINIO_FUZZ_LIBRARY").expect("SPINIO_FUZZ_LIBRARY names libspinio.so");
        let path = CString::new(path).unwrap();
        // SAFETY: a library of ours, opened as any program would.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "cannot open the library");
        let content: Vec<u8> = (0..FILE as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        // SAFETY: new descriptors, and memory of ours.
        let files = unsafe {
            let new = || libc::memfd_create(c"fuzz".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
            let (file, sealed, out) = (new(), new(), new());
            for fd in [file, sealed] {
                assert_eq!(libc::write(fd, content.as_ptr().cast(), FILE), FILE as isize);
            }
            let seals = libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;
            assert_eq!(libc::fcntl(sealed, libc::F_ADD_SEALS, seals), 0);
            [file, sealed, out]
        };
        Library::open(handle, files, content)
    })
}
