//! Sockets of CPU programs that may share memory with kernels, declared in `include/spinio_net.h`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_char, c_int, c_void};

use spinio_net::{Poll, PollSource, Socket, SocketOptions};

use crate::ffi_guard::{self as guard, Failure};
use crate::net::{null, parse_address};
use crate::{read_struct, write_text};

/// `struct spinio_socket_options`
#[derive(Clone, Copy)]
#[repr(C)]
struct RawOptions {
    size: usize,
    no_upgrade: u32,
    receive_timeout_ms: u32,
    send_timeout_ms: u32,
}

/// `struct spinio_socket_poll_entry`
#[repr(C)]
struct RawPoll {
    socket: *const Socket,
    fd: c_int,
    events: u16,
    revents: u16,
}

/// # Safety
/// NULL, or a socket that is not closed.
unsafe fn socket<'a>(this: *const Socket) -> Result<&'a Socket, Failure> {
    // SAFETY: guaranteed by the caller.
    unsafe { this.as_ref() }.ok_or_else(|| null("socket"))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_socket_connect(address: *const c_char, options: *const RawOptions) -> *mut Socket {
    guard::cancellation_point();
    let connected = guard::run(|| {
        // SAFETY: the header asks for NULL or a struct that begins with its own size; it has integers.
        let given = unsafe { read_struct(options, "socket") }?;
        let options = SocketOptions {
            no_upgrade: given.no_upgrade != 0,
            receive_timeout_ms: given.receive_timeout_ms,
            send_timeout_ms: given.send_timeout_ms,
        };
        // SAFETY: the header asks for a string.
        let address = unsafe { parse_address(address) }?;
        Ok(Box::into_raw(Box::new(Socket::connect(&address, options)?)))
    });
    connected.unwrap_or(core::ptr::null_mut())
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_socket_send(
    this: *const Socket,
    from: *const c_void,
    bytes: usize,
    flags: c_int,
) -> isize {
    guard::cancellation_point();
    // SAFETY: the header asks for an open socket and for readable memory.
    guard::run(|| Ok(unsafe { socket(this)?.send(from.cast(), bytes, flags as u32) }? as isize)).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_socket_recv(
    this: *const Socket,
    to: *mut c_void,
    bytes: usize,
    flags: c_int,
) -> isize {
    guard::cancellation_point();
    // SAFETY: the header asks for an open socket and for writable memory.
    guard::run(|| Ok(unsafe { socket(this)?.recv(to.cast(), bytes, flags as u32) }? as isize)).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_socket_reserve(
    this: *const Socket,
    bytes: *mut *mut c_void,
    most: usize,
    flags: c_int,
) -> isize {
    guard::cancellation_point();
    // SAFETY: the header asks for an open socket and for a pointer to write to.
    guard::run(|| unsafe { span(bytes, || Ok(socket(this)?.reserve(most, flags as u32)?)) }).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_socket_commit(this: *const Socket, bytes: usize) -> c_int {
    guard::cancellation_point();
    // SAFETY: the header asks for an open socket.
    guard::status(|| Ok(unsafe { socket(this) }?.commit(bytes)?))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_socket_borrow(
    this: *const Socket,
    bytes: *mut *mut c_void,
    most: usize,
    flags: c_int,
) -> isize {
    guard::cancellation_point();
    // SAFETY: the header asks for an open socket and for a pointer to write to.
    guard::run(|| unsafe { span(bytes, || Ok(socket(this)?.borrow(most, flags as u32)?)) }).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_socket_give_back(this: *const Socket, bytes: usize) -> c_int {
    // SAFETY: the header asks for an open socket.
    guard::status(|| Ok(unsafe { socket(this) }?.give_back(bytes)?))
}

/// Takes a span; stores where it is, and returns its length.
///
/// # Safety
/// `to` is NULL or may be written.
unsafe fn span(
    to: *mut *mut c_void,
    take: impl FnOnce() -> Result<(*mut u8, usize), Failure>,
) -> Result<isize, Failure> {
    if to.is_null() {
        return Err(null("pointer to the bytes"));
    }
    let (at, len) = take()?;
    // SAFETY: guaranteed by the caller.
    unsafe { to.write(at.cast()) };
    Ok(len as isize)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_socket_shutdown(this: *const Socket, how: c_int) -> c_int {
    // SAFETY: the header asks for an open socket.
    guard::status(|| Ok(unsafe { socket(this) }?.shutdown(how as u32)?))
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_socket_poll(entries: *mut RawPoll, count: usize, timeout_ms: c_int) -> c_int {
    guard::cancellation_point();
    let polled = guard::run(|| {
        if entries.is_null() && count > 0 {
            return Err(null("entries"));
        }
        // SAFETY: the header asks for so many entries, which no other thread uses.
        let entries = if count == 0 { &mut [] } else { unsafe { core::slice::from_raw_parts_mut(entries, count) } };
        let source = |entry: &RawPoll| {
            // SAFETY: the header asks for an open socket, or for NULL.
            let socket = unsafe { entry.socket.as_ref() };
            socket.map_or(PollSource::Fd(entry.fd), PollSource::Socket)
        };
        let poll = |entry: &RawPoll| Poll { source: source(entry), events: entry.events, ready: 0 };
        let mut polls: Vec<Poll<'_>> = entries.iter().map(poll).collect();
        let timeout = u64::try_from(timeout_ms).ok().map(|ms| ms * 1_000_000);
        let ready = spinio_net::poll(&mut polls, timeout)?;
        let events: Vec<u16> = polls.iter().map(|poll| poll.ready).collect();
        entries.iter_mut().zip(events).for_each(|(entry, events)| entry.revents = events);
        Ok(ready as c_int)
    });
    polled.unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_socket_fd(this: *const Socket) -> c_int {
    // SAFETY: the header asks for an open socket.
    guard::run(|| Ok(unsafe { socket(this) }?.anchor())).unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_socket_transport(this: *const Socket, text: *mut c_char, size: usize) -> c_int {
    let done = guard::run(|| {
        // SAFETY: the header asks for an open socket.
        let (transport, reason) = unsafe { socket(this) }?.transport();
        // SAFETY: the header asks for `size` bytes at `text`.
        unsafe { write_text(text, size, &format!("{transport}: {reason}"), "transport") }?;
        Ok(c_int::from(transport == "shared"))
    });
    done.unwrap_or(-1)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_socket_close(this: *mut Socket) -> c_int {
    guard::status(|| {
        // SAFETY: the header asks for an open socket, of `spinio_socket_connect`.
        unsafe {
            socket(this)?;
            drop(Box::from_raw(this));
        }
        Ok(())
    })
}
