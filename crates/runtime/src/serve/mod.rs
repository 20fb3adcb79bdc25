//! The functions of the table, in the library that owns the runtime.
//!
//! Nothing unwinds out of them, and nothing here has the name of an exported symbol: the table alone determines which
//! copy of a function is called.

#![expect(unsafe_code, reason = "C functions and their arguments")]

mod counters;
mod devices;
pub(crate) mod file_reader;
mod files;
mod gaia;
mod moves;
mod net;
mod transfers;

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use spinio_device::{Allocation, Device, DeviceAddr, DeviceError, ErrorKind};
use spinio_io::{Target, device_call};

use crate::{Memory, Report, Table};

/// This library's table.
pub const TABLE: Table = Table {
    size: size_of::<Table>(),
    structs: crate::STRUCTS,
    version,
    find: devices::find,
    device_name: devices::device_name,
    thread_stream: devices::thread_stream,
    set_thread_stream: devices::set_thread_stream,
    emulated_configure: devices::emulated_configure,
    emulated_alloc: devices::emulated_alloc,
    emulated_free: devices::emulated_free,
    emulated_stream: devices::emulated_stream,
    emulated_release_stream: devices::emulated_release_stream,
    emulated_wait: devices::emulated_wait,
    emulated_pause: devices::emulated_pause,
    emulated_resume: devices::emulated_resume,
    set_cancel_poll: transfers::set_cancel_poll,
    restore_cancel_poll: transfers::restore_cancel_poll,
    read: transfers::read,
    write: transfers::write,
    copy_to_host: transfers::copy_to_host,
    copy_from_host: transfers::copy_from_host,
    read_many: transfers::read_many,
    pin_file: files::pin_file,
    unpin_file: files::unpin_file,
    is_pinned: files::is_pinned,
    map: files::map,
    map_address: files::map_address,
    map_len: files::map_len,
    map_is_own_process: files::map_is_own_process,
    map_revoke_requested: files::map_revoke_requested,
    unmap: files::unmap,
    session_begin: moves::session_begin,
    session_hint_range: moves::session_hint_range,
    session_move: moves::session_move,
    session_move_async: moves::session_move_async,
    session_flush: moves::session_flush,
    session_output: moves::session_output,
    session_report: moves::session_report,
    session_end: moves::session_end,
    session_drop: moves::session_drop,
    ticket_is_done: moves::ticket_is_done,
    ticket_wait: moves::ticket_wait,
    ticket_clone: moves::ticket_clone,
    ticket_drop: moves::ticket_drop,
    counters: counters::counters,
    gaia_map: gaia::map,
    gaia_unmap: gaia::unmap,
    gaia_acquire: gaia::acquire,
    gaia_release: gaia::release,
    gaia_info: gaia::info,
    gaia_discard: gaia::discard,
    gaia_sync: gaia::sync,
    gaia_device: gaia::device_of,
    gaia_acquire_async: gaia::acquire_async,
    gaia_release_async: gaia::release_async,
    gaia_end_reading: gaia::end_reading,
    gaia_release_handing_over: gaia::release_handing_over,
    net_open: net::open,
    net_handle: net::handle,
    net_listen: net::listen,
    net_connect: net::connect,
    net_adopt: net::adopt,
    net_release: net::release,
    net_set: net::set,
    net_add: net::add,
    net_address: net::address,
    net_stats: net::stats,
    net_stop: net::stop,
    net_close: net::close,
    gaia_begin_block: gaia::begin_block,
    gaia_end_block: gaia::end_block,
};

extern "C" fn version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

/// Why a function fails.
struct Failure {
    errno: c_int,
    text: String,
    path: Option<Vec<u8>>,
}

impl Failure {
    fn new(errno: c_int, text: impl ToString) -> Failure {
        Failure { errno, text: text.to_string(), path: None }
    }
}

impl From<spinio_io::Error> for Failure {
    fn from(error: spinio_io::Error) -> Failure {
        let path = error.path.as_ref().map(|path| path.clone().into_bytes());
        Failure { errno: error.kind.errno().raw_os_error(), text: error.to_string(), path }
    }
}

impl From<spinio_io::PinError> for Failure {
    fn from(why: spinio_io::PinError) -> Failure {
        Failure::new(why.errno().raw_os_error(), why)
    }
}

impl From<spinio_nvmmu::Error> for Failure {
    fn from(error: spinio_nvmmu::Error) -> Failure {
        use std::os::unix::ffi::OsStrExt;
        let path = error.path.as_ref().map(|path| path.as_os_str().as_bytes().to_vec());
        Failure { errno: error.kind.errno().raw_os_error(), text: error.to_string(), path }
    }
}

impl From<spinio_gaia::Error> for Failure {
    fn from(error: spinio_gaia::Error) -> Failure {
        Failure::new(error.errno.raw_os_error(), error)
    }
}

impl From<spinio_net::Error> for Failure {
    fn from(error: spinio_net::Error) -> Failure {
        Failure::new(error.errno.raw_os_error(), error)
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Failure {
        let errno = match error.kind {
            ErrorKind::NoMemory => libc::ENOMEM,
            ErrorKind::BadAddress => libc::EFAULT,
            _ => libc::EIO,
        };
        Failure::new(errno, error)
    }
}

impl Report {
    /// # Safety
    /// The report must be one that the caller of the table's function has passed.
    unsafe fn send(self, errno: c_int, text: &str, path: Option<&[u8]>) {
        let (path, len) = path.map_or((core::ptr::null(), 0), |path| (path.as_ptr(), path.len()));
        // SAFETY: the caller's promise; text and path live across the call.
        unsafe { (self.callback)(self.context, errno, text.as_ptr(), text.len(), path, len) }
    }
}

/// Runs a call; `None` after its error was reported.
///
/// # Safety
/// As of [`Report::send`].
unsafe fn answer<T>(report: Report, call: impl FnOnce() -> Result<T, Failure>) -> Option<T> {
    let failed = match device_call(|| catch_unwind(AssertUnwindSafe(call))) {
        Ok(Ok(done)) => return Some(done),
        Ok(Err(failed)) => failed,
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Failure::new(libc::EIO, format!("SPIN failed: {}", said.unwrap_or("a panic")))
        }
    };
    // SAFETY: the caller's promise.
    unsafe { report.send(failed.errno, &failed.text, failed.path.as_deref()) };
    None
}

/// The same, for a count.
///
/// # Safety
/// As of [`Report::send`].
unsafe fn count(report: Report, call: impl FnOnce() -> Result<u64, Failure>) -> i64 {
    // SAFETY: the caller's promise.
    unsafe { answer(report, call) }.map_or(-1, |n| i64::try_from(n).unwrap_or(i64::MAX))
}

/// A new object for a caller that sees only its address.
fn boxed<T>(made: Option<T>) -> *mut c_void {
    made.map_or(core::ptr::null_mut(), |made| Box::into_raw(Box::new(made)).cast())
}

impl Memory {
    fn of(allocation: &Allocation) -> Memory {
        Memory {
            start: allocation.start.0,
            len: allocation.len,
            host_mapped: allocation.host_mapped.into(),
            p2p_mapped: allocation.p2p_mapped.into(),
            // SAFETY: a reference to a trait object is two words.
            device: unsafe { core::mem::transmute::<&'static dyn Device, [usize; 2]>(allocation.device) },
        }
    }

    /// # Safety
    /// It must have been made by this library's `find`.
    unsafe fn allocation(&self) -> Allocation {
        Allocation {
            // SAFETY: the caller's promise: these are the words of a reference that lives forever.
            device: unsafe { core::mem::transmute::<[usize; 2], &'static dyn Device>(self.device) },
            start: DeviceAddr(self.start),
            len: self.len,
            host_mapped: self.host_mapped != 0,
            p2p_mapped: self.p2p_mapped != 0,
        }
    }

    /// # Safety
    /// As of [`Memory::allocation`].
    unsafe fn target(&self, address: u64) -> Target {
        // SAFETY: the caller's promise.
        Target { allocation: unsafe { self.allocation() }, addr: DeviceAddr(address) }
    }
}
