//! The next function in symbol order: what the program would have called without SPIN.
//!
//! Usually libc's, but another preloaded library may be in between. All are looked up in a constructor, because `dlsym`
//! takes the loader's lock and so must not run inside `read` in a signal handler or a forked child. A call that comes
//! before the constructor (from another library's constructor, while the process has one thread) looks up its own.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicPtr, Ordering::Relaxed};

use crate::{caller, disabled, errno};

/// One function, by name and type.
pub(crate) struct Next<F> {
    name: &'static CStr,
    address: AtomicPtr<c_void>,
    kind: PhantomData<F>,
}

impl<F: Copy> Next<F> {
    /// A function still to be looked up.
    ///
    /// # Safety
    /// `F` must be a function pointer type that fits what libc declares under this name.
    pub(crate) const unsafe fn new(name: &'static CStr) -> Next<F> {
        assert!(size_of::<F>() == size_of::<*mut c_void>());
        Next { name, address: AtomicPtr::new(core::ptr::null_mut()), kind: PhantomData }
    }

    /// The function.
    #[inline(always)]
    pub(crate) fn get(&self) -> F {
        let mut at = self.address.load(Relaxed);
        if at.is_null() {
            at = self.resolve();
        }
        // SAFETY: `new` was promised that the name has this type, and sizes were compared there.
        unsafe { core::mem::transmute_copy::<*mut c_void, F>(&at) }
    }

    #[cold]
    fn resolve(&self) -> *mut c_void {
        let saved = errno::get();
        // SAFETY: the name is NUL-terminated. RTLD_NEXT starts after the object that calls, which is this library.
        let mut at = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        if at.is_null() {
            at = missing_function as *mut c_void;
        }
        self.address.store(at, Relaxed);
        errno::set(saved);
        at
    }
}

/// Stands for a function that this libc does not have. A C caller cleans up its own arguments, so it fits any type.
extern "C" fn missing_function() -> isize {
    errno::set(libc::ENOSYS);
    -1
}

type Fd = c_int;
type Buffer = *mut c_void;
type Source = *const c_void;
type Vectors = *const libc::iovec;
type Path = *const std::ffi::c_char;

macro_rules! functions {
    ($($konst:ident = $name:literal: fn($($arg:ty),* $(; $($dots:tt)+)?) -> $ret:ty;)+) => {
        $(
            pub(crate) static $konst: Next<unsafe extern "C-unwind" fn($($arg),* $(, $($dots)+)?) -> $ret> = {
                // SAFETY: the type is the one of libc's manual for this name, on x86-64.
                unsafe { Next::new($name) }
            };
        )+

        extern "C" fn at_load() {
            $($konst.resolve();)+
            disabled::init();
            caller::init();
        }
    };
}

functions! {
    READ = c"read": fn(Fd, Buffer, usize) -> isize;
    READ_UNDERSCORED = c"__read": fn(Fd, Buffer, usize) -> isize;
    READ_CHK = c"__read_chk": fn(Fd, Buffer, usize, usize) -> isize;
    PREAD = c"pread": fn(Fd, Buffer, usize, i64) -> isize;
    PREAD64 = c"pread64": fn(Fd, Buffer, usize, i64) -> isize;
    PREAD64_UNDERSCORED = c"__pread64": fn(Fd, Buffer, usize, i64) -> isize;
    PREAD_CHK = c"__pread_chk": fn(Fd, Buffer, usize, i64, usize) -> isize;
    PREAD64_CHK = c"__pread64_chk": fn(Fd, Buffer, usize, i64, usize) -> isize;
    READV = c"readv": fn(Fd, Vectors, c_int) -> isize;
    PREADV = c"preadv": fn(Fd, Vectors, c_int, i64) -> isize;
    PREADV64 = c"preadv64": fn(Fd, Vectors, c_int, i64) -> isize;
    PREADV2 = c"preadv2": fn(Fd, Vectors, c_int, i64, c_int) -> isize;
    PREADV64V2 = c"preadv64v2": fn(Fd, Vectors, c_int, i64, c_int) -> isize;
    FREAD = c"fread": fn(Buffer, usize, usize, *mut libc::FILE) -> usize;
    FREAD_UNLOCKED = c"fread_unlocked": fn(Buffer, usize, usize, *mut libc::FILE) -> usize;
    FREAD_CHK = c"__fread_chk": fn(Buffer, usize, usize, usize, *mut libc::FILE) -> usize;
    FREAD_UNLOCKED_CHK = c"__fread_unlocked_chk": fn(Buffer, usize, usize, usize, *mut libc::FILE) -> usize;
    WRITE = c"write": fn(Fd, Source, usize) -> isize;
    WRITE_UNDERSCORED = c"__write": fn(Fd, Source, usize) -> isize;
    PWRITE = c"pwrite": fn(Fd, Source, usize, i64) -> isize;
    PWRITE64 = c"pwrite64": fn(Fd, Source, usize, i64) -> isize;
    PWRITE64_UNDERSCORED = c"__pwrite64": fn(Fd, Source, usize, i64) -> isize;
    WRITEV = c"writev": fn(Fd, Vectors, c_int) -> isize;
    PWRITEV = c"pwritev": fn(Fd, Vectors, c_int, i64) -> isize;
    PWRITEV64 = c"pwritev64": fn(Fd, Vectors, c_int, i64) -> isize;
    PWRITEV2 = c"pwritev2": fn(Fd, Vectors, c_int, i64, c_int) -> isize;
    PWRITEV64V2 = c"pwritev64v2": fn(Fd, Vectors, c_int, i64, c_int) -> isize;
    FWRITE = c"fwrite": fn(Source, usize, usize, *mut libc::FILE) -> usize;
    FWRITE_UNLOCKED = c"fwrite_unlocked": fn(Source, usize, usize, *mut libc::FILE) -> usize;
    OPEN = c"open": fn(Path, c_int; ...) -> c_int;
    OPEN64 = c"open64": fn(Path, c_int; ...) -> c_int;
    OPEN_UNDERSCORED = c"__open": fn(Path, c_int; ...) -> c_int;
    OPEN64_UNDERSCORED = c"__open64": fn(Path, c_int; ...) -> c_int;
    OPENAT = c"openat": fn(Fd, Path, c_int; ...) -> c_int;
    OPENAT64 = c"openat64": fn(Fd, Path, c_int; ...) -> c_int;
    OPEN_2 = c"__open_2": fn(Path, c_int) -> c_int;
    OPEN64_2 = c"__open64_2": fn(Path, c_int) -> c_int;
    OPENAT_2 = c"__openat_2": fn(Fd, Path, c_int) -> c_int;
    OPENAT64_2 = c"__openat64_2": fn(Fd, Path, c_int) -> c_int;
    CLOSE = c"close": fn(Fd) -> c_int;
    CLOSE_UNDERSCORED = c"__close": fn(Fd) -> c_int;
    CLOSE_RANGE = c"close_range": fn(c_uint, c_uint, c_int) -> c_int;
    CLOSEFROM = c"closefrom": fn(c_int) -> ();
    DUP2 = c"dup2": fn(Fd, Fd) -> c_int;
    DUP2_UNDERSCORED = c"__dup2": fn(Fd, Fd) -> c_int;
    DUP3 = c"dup3": fn(Fd, Fd, c_int) -> c_int;
    POSIX_FADVISE = c"posix_fadvise": fn(Fd, i64, i64, c_int) -> c_int;
    POSIX_FADVISE64 = c"posix_fadvise64": fn(Fd, i64, i64, c_int) -> c_int;
    MMAP = c"mmap": fn(Buffer, usize, c_int, c_int, Fd, i64) -> Buffer;
    MMAP64 = c"mmap64": fn(Buffer, usize, c_int, c_int, Fd, i64) -> Buffer;
    MUNMAP = c"munmap": fn(Buffer, usize) -> c_int;
}

#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;
