//! Sockets of kernels.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{CString, c_int, c_void};

use spinio_device::Device;
use spinio_net::{FileOptions, Handle, Net, NetAddress, Options, Stats, default_device};

use super::{Failure, answer, boxed, count, devices};
use crate::{NetOptions, Report};

/// # Safety
/// It must have been made by `open`, and not be closed before the result is dropped.
unsafe fn net<'a>(net: *const c_void) -> &'a Net {
    // SAFETY: the caller's promise.
    unsafe { &*net.cast::<Net>() }
}

/// # Safety
/// The caller must have `len` bytes there.
unsafe fn bytes<'a>(at: *const u8, len: usize) -> &'a [u8] {
    // SAFETY: the caller's promise.
    unsafe { core::slice::from_raw_parts(at, len) }
}

/// # Safety
/// As of [`bytes`].
unsafe fn parse_address(at: *const u8, len: usize) -> Result<NetAddress, Failure> {
    // SAFETY: the caller's promise.
    Ok(NetAddress::parse(&String::from_utf8_lossy(unsafe { bytes(at, len) }))?)
}

/// The device of a name; without one the device in use, else the emulated one, unless there is a GPU.
fn device(name: Option<&str>) -> Result<&'static dyn Device, Failure> {
    match name {
        Some(name) => devices::of_name(name),
        None => default_device()?.map_or_else(|| devices::of_name("emulated"), Ok),
    }
}

pub(super) unsafe extern "C" fn open(
    name: *const u8,
    name_len: usize,
    options: *const NetOptions,
    report: Report,
) -> *mut c_void {
    let open = || {
        // SAFETY: unless it is null, the caller has `name_len` bytes there.
        let name = (!name.is_null()).then(|| unsafe { bytes(name, name_len) }).map(String::from_utf8_lossy);
        // SAFETY: the caller passes options.
        let given = unsafe { *options };
        let files = match given.files_root.is_null() {
            true => None,
            false => {
                // SAFETY: the caller has as many bytes there.
                let root = CString::new(unsafe { bytes(given.files_root, given.files_root_len) })
                    .map_err(|_| Failure::new(libc::EINVAL, "A path has no NUL"))?;
                Some(FileOptions { root, write: given.files_write != 0, count: given.files })
            }
        };
        let options = Options {
            sockets: given.sockets,
            connections: given.connections,
            ring_bytes: given.ring_bytes,
            idle_us: given.idle_us,
            no_upgrade: given.no_upgrade != 0,
            shared_connections: given.shared_connections,
            threads: given.threads,
            files,
            ..Options::default()
        };
        Ok(Net::open(device(name.as_deref())?, options)?)
    };
    // SAFETY: the report is the caller's.
    boxed(unsafe { answer(report, open) })
}

pub(super) unsafe extern "C" fn handle(this: *const c_void, out: *mut Handle) {
    // SAFETY: the net and the place are the caller's.
    unsafe { out.write(net(this).handle()) }
}

pub(super) unsafe extern "C" fn listen(
    this: *const c_void,
    address: *const u8,
    len: usize,
    backlog: u32,
    report: Report,
) -> i64 {
    // SAFETY: the net, the text and the report are the caller's.
    unsafe { count(report, || Ok(net(this).listen(&parse_address(address, len)?, backlog)? as u64)) }
}

pub(super) unsafe extern "C" fn connect(this: *const c_void, address: *const u8, len: usize, report: Report) -> i64 {
    // SAFETY: the net, the text and the report are the caller's.
    unsafe { count(report, || Ok(net(this).connect(&parse_address(address, len)?)? as u64)) }
}

pub(super) unsafe extern "C" fn adopt(this: *const c_void, fd: c_int, report: Report) -> i64 {
    // SAFETY: the net and the report are the caller's.
    unsafe { count(report, || Ok(net(this).adopt(fd)? as u64)) }
}

pub(super) unsafe extern "C" fn release(
    this: *const c_void,
    socket: i32,
    unread: *mut u8,
    size: usize,
    unread_count: *mut usize,
    report: Report,
) -> i64 {
    let release = || {
        // SAFETY: the net is the caller's.
        let (fd, bytes) = unsafe { net(this) }.release(socket, size)?;
        // SAFETY: the caller has `size` bytes at `unread`, which are no fewer, and a place for the count.
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), unread, bytes.len());
            unread_count.write(bytes.len());
        }
        Ok(fd as u64)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, release) }
}

pub(super) unsafe extern "C" fn set(this: *const c_void, report: Report) -> i64 {
    // SAFETY: the net and the report are the caller's.
    unsafe { count(report, || Ok(net(this).set()? as u64)) }
}

pub(super) unsafe extern "C" fn add(this: *const c_void, set: i32, socket: i32, events: u32, report: Report) -> i64 {
    let add = || {
        let events = u16::try_from(events)
            .map_err(|_| Failure::new(libc::EINVAL, format!("{events:#x} are no events of a socket")))?;
        // SAFETY: the net is the caller's.
        Ok(unsafe { net(this) }.add(set, socket, events).map(|()| 0)?)
    };
    // SAFETY: the report is the caller's.
    unsafe { count(report, add) }
}

pub(super) unsafe extern "C" fn address(this: *const c_void, socket: i32, report: Report) -> i64 {
    // SAFETY: the net and the report are the caller's.
    let Some(address) = (unsafe { answer(report, || Ok(net(this).address(socket)?)) }) else { return -1 };
    // SAFETY: the report is the caller's.
    unsafe { report.send(0, &address.to_string(), None) };
    0
}

pub(super) unsafe extern "C" fn stats(this: *const c_void, out: *mut Stats) {
    // SAFETY: the net and the place are the caller's.
    unsafe { out.write(net(this).stats()) }
}

pub(super) unsafe extern "C" fn stop(this: *const c_void, report: Report) -> i64 {
    // SAFETY: the net and the report are the caller's.
    unsafe { count(report, || Ok(net(this).stop().map(|()| 0)?)) }
}

pub(super) unsafe extern "C" fn close(this: *mut c_void, report: Report) -> i64 {
    // SAFETY: made by `open`, and the caller does not use it again; the report is the caller's.
    unsafe { count(report, || Ok(Box::from_raw(this.cast::<Net>()).close().map(|()| 0)?)) }
}
