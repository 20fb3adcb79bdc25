//! Sockets for GPU kernels, declared in `include/spinio_net.h`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{CStr, c_char, c_int};

use spinio_device::{Device, registry};
use spinio_net::{Error, FileOptions, Handle, Net, NetAddress, Options, default_device};

use crate::ffi_guard::{self as guard, Failure};
use crate::{fill_struct, read_struct, write_text};

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Message(error.errno.raw_os_error(), error.to_string())
    }
}

/// `struct spinio_net_options`
#[derive(Clone, Copy)]
#[repr(C)]
struct RawOptions {
    size: usize,
    sockets: u32,
    connections: u32,
    ring_bytes: u32,
    idle_us: u32,
    first_position: u64,
    fault_seed: u32,
    no_upgrade: u32,
    files_root: *const c_char,
    files_write: u32,
    files: u32,
    shared_connections: u32,
    /// Padding of the struct before `threads` was there: its bits are those of any memory.
    reserved: u32,
    threads: u32,
    /// The same of the struct before `linger_ms` was there.
    reserved2: u32,
    linger_ms: u32,
    last_linger_ms: u32,
    /// Always 0: bits of padding would be those of any memory.
    reserved3: u32,
}

pub(crate) fn null(what: &str) -> Failure {
    Failure::Message(libc::EFAULT, format!("There is no {what}: the pointer is NULL"))
}

fn find_device(name: Option<&str>) -> Result<&'static dyn Device, Failure> {
    let emulated = || {
        super::memory::configure_emulated()?;
        let failed = |e| Failure::Message(libc::ENODEV, format!("Cannot start the emulated GPU: {e}"));
        registry::emulated().map(|device| device as &dyn Device).map_err(failed)
    };
    match name {
        None => default_device()?.map_or_else(emulated, Ok),
        Some("emulated") => emulated(),
        Some(other) => Err(Failure::Message(
            libc::ENODEV,
            format!("There is no device \"{other}\" for a net: NULL is that of the current CUDA context"),
        )),
    }
}

/// # Safety
/// NULL, or a net that is not closed.
unsafe fn net<'a>(net: *const Net) -> Result<&'a Net, Failure> {
    // SAFETY: guaranteed by the caller.
    unsafe { net.as_ref() }.ok_or_else(|| null("net"))
}

/// # Safety
/// NULL, or a string.
pub(crate) unsafe fn parse_address(text: *const c_char) -> Result<NetAddress, Failure> {
    if text.is_null() {
        return Err(null("address"));
    }
    // SAFETY: guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(text) };
    // Other bytes would become another name, at which no program listens.
    let valid = text.to_str().map_err(|_| Failure::Message(libc::EINVAL, format!("{text:?} is not UTF-8")))?;
    Ok(NetAddress::parse(valid)?)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_net_open(device: *const c_char, options: *const RawOptions) -> *mut Net {
    let opened = guard::run(|| {
        // SAFETY: the header asks for a string or NULL.
        let name = (!device.is_null()).then(|| unsafe { CStr::from_ptr(device) }.to_string_lossy());
        // SAFETY: the header asks for NULL or a struct that begins with its own size; it has integers and a pointer.
        let given = unsafe { read_struct(options, "net") }?;
        let options = Options {
            sockets: given.sockets,
            connections: given.connections,
            ring_bytes: given.ring_bytes,
            idle_us: given.idle_us,
            first_position: given.first_position,
            fault_seed: given.fault_seed,
            files: (!given.files_root.is_null()).then(|| FileOptions {
                // SAFETY: the header asks for a string or NULL.
                root: unsafe { CStr::from_ptr(given.files_root) }.to_owned(),
                write: given.files_write != 0,
                count: given.files,
            }),
            no_upgrade: given.no_upgrade != 0,
            shared_connections: given.shared_connections,
            threads: given.threads,
            linger_ms: given.linger_ms,
            last_linger_ms: given.last_linger_ms,
        };
        Ok(Box::into_raw(Box::new(Net::open(find_device(name.as_deref())?, options)?)))
    });
    opened.unwrap_or(core::ptr::null_mut())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_net_handle(this: *const Net, out: *mut Handle) -> c_int {
    guard::status(|| {
        if out.is_null() {
            return Err(null("memory for the handle"));
        }
        // SAFETY: the header asks for an open net, and for memory of the handle's size.
        unsafe { out.write_unaligned(net(this)?.handle()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_listen(this: *const Net, address: *const c_char, backlog: c_int) -> c_int {
    guard::cancellation_point();
    // SAFETY: the header asks for an open net and a string.
    guard::run(|| unsafe { Ok(net(this)?.listen(&parse_address(address)?, backlog as u32)?) }).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_connect(this: *const Net, address: *const c_char) -> c_int {
    guard::cancellation_point();
    // SAFETY: the header asks for an open net and a string.
    guard::run(|| unsafe { Ok(net(this)?.connect(&parse_address(address)?)?) }).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_adopt(this: *const Net, fd: c_int) -> c_int {
    guard::cancellation_point();
    // SAFETY: the header asks for an open net.
    guard::run(|| Ok(unsafe { net(this) }?.adopt(fd)?)).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_release(
    this: *const Net,
    socket: c_int,
    unread: *mut u8,
    size: usize,
    count: *mut usize,
) -> c_int {
    guard::cancellation_point();
    let done = guard::run(|| {
        if count.is_null() || unread.is_null() && size > 0 {
            return Err(null("memory for the unread bytes and their count"));
        }
        // SAFETY: the header asks for an open net.
        let (fd, bytes) = unsafe { net(this) }?.release(socket, size)?;
        // SAFETY: the header asks for `size` bytes at `unread`, which are no fewer, and for a size at `count`.
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), unread, bytes.len());
            count.write_unaligned(bytes.len());
        }
        Ok(fd)
    });
    done.unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_set(this: *const Net) -> c_int {
    guard::cancellation_point();
    // SAFETY: the header asks for an open net.
    guard::run(|| Ok(unsafe { net(this) }?.set()?)).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_add(this: *const Net, set: c_int, socket: c_int, events: c_int) -> c_int {
    guard::cancellation_point();
    guard::status(|| {
        let events = u16::try_from(events)
            .map_err(|_| Failure::Message(libc::EINVAL, format!("{events:#x} are no events of a socket")))?;
        // SAFETY: the header asks for an open net.
        Ok(unsafe { net(this) }?.add(set, socket, events)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_address(
    this: *const Net,
    socket: c_int,
    text: *mut c_char,
    size: usize,
) -> c_int {
    guard::cancellation_point();
    guard::status(|| {
        // SAFETY: the header asks for an open net.
        let address = unsafe { net(this) }?.address(socket)?;
        // SAFETY: the header asks for `size` bytes at `text`.
        unsafe { write_text(text, size, &address.to_string(), "address") }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_stop(this: *const Net) -> c_int {
    guard::cancellation_point();
    // SAFETY: the header asks for an open net.
    guard::status(|| Ok(unsafe { net(this) }?.stop()?))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_net_close(this: *mut Net) -> c_int {
    guard::cancellation_point();
    guard::status(|| {
        if this.is_null() {
            return Err(null("net"));
        }
        // SAFETY: made by `spinio_net_open`, and the header forbids its use from now on.
        Ok(unsafe { Box::from_raw(this) }.close()?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_net_stats(this: *const Net, out: *mut u8, size: usize) -> c_int {
    guard::status(|| {
        if out.is_null() {
            return Err(null("memory for the result"));
        }
        // SAFETY: the header asks for an open net.
        let stats = unsafe { net(this) }?.stats();
        // SAFETY: the header asks for `size` bytes at `out`; the struct has no padding.
        unsafe { fill_struct(out, size, &stats) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_are_not_utf8_are_einval() {
        for text in [c"unix:///tmp/\xff", c"unix:@\xc3", c"tcp://127.0.0.1:80\xff"] {
            // SAFETY: a string.
            let refused = unsafe { parse_address(text.as_ptr()) };
            assert!(matches!(refused, Err(Failure::Message(libc::EINVAL, sentence)) if sentence.contains("UTF-8")));
        }
        // SAFETY: as above.
        let address = unsafe { parse_address(c"unix:///tmp/\u{fffd}".as_ptr()) };
        assert!(address.is_ok_and(|address| address.to_string().ends_with('\u{fffd}')));
    }
}
