//! Calls of a socket that shares no memory: those of Linux, with one limit of time for a call, whatever signals come.
//!
//! ```text
//!   Linux, without a wait ── all moved, the end, an error ──> result
//!       ^                 └─ a part, or nothing ── wait for the socket until the deadline ──┐
//!       └───────────────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! A call of Linux that waits itself ends half way when a signal comes, and its limit begins anew when it is made again.
//!
//! Linux tells an error of the connection once. If a part has moved before, the call returns that, and the error is kept for the
//! next call.

#![expect(unsafe_code, reason = "memory of callers")]

use std::sync::atomic::{AtomicI32, Ordering::SeqCst};

use spinio_sys::Errno;
use spinio_sys::linux::Fd;
use spinio_sys::linux::channel::{self, Until};

use super::deadline::left;
use super::flags::{MSG_DONTWAIT, MSG_PEEK, MSG_WAITALL};

type Result<T> = core::result::Result<T, Errno>;

/// An error of the connection that no call has returned yet.
#[derive(Debug, Default)]
pub(super) struct KeptError(AtomicI32);

impl KeptError {
    pub(super) fn is_there(&self) -> bool {
        self.0.load(SeqCst) != 0
    }

    fn take(&self) -> Result<()> {
        match self.0.swap(0, SeqCst) {
            0 => Ok(()),
            errno => Err(Errno::from_raw_os_error(errno)),
        }
    }

    /// Keeps an error after which some bytes are to be returned, if Linux would not tell it again.
    fn keep(&self, errno: Errno) {
        if !matches!(errno, Errno::AGAIN | Errno::PIPE | Errno::FAULT | Errno::NOMEM | Errno::NOBUFS) {
            self.0.store(errno.raw_os_error(), SeqCst);
        }
    }

    fn result(&self, done: usize, stopped: Result<()>) -> Result<usize> {
        if done > 0 {
            let _ = stopped.inspect_err(|errno| self.keep(*errno));
            return Ok(done);
        }
        stopped.map(|()| 0)
    }
}

/// `recv`. Flags: MSG_DONTWAIT, MSG_WAITALL, MSG_PEEK.
///
/// # Safety
/// The range must be writable.
pub(super) unsafe fn receive(
    fd: Fd,
    kept: &KeptError,
    to: *mut u8,
    len: usize,
    flags: u32,
    deadline: Option<u64>,
) -> Result<usize> {
    let waits_for_all = flags & MSG_WAITALL != 0 && flags & MSG_PEEK == 0;
    let mut done = 0;
    let stopped = loop {
        // SAFETY: inside the range, guaranteed by the caller.
        match unsafe { channel::receive_with(fd, to.add(done), len - done, flags & MSG_PEEK | MSG_DONTWAIT) } {
            Ok(0) => break kept.take(),
            Ok(more) => {
                done += more;
                if done == len || !waits_for_all {
                    return Ok(done);
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if let Err(errno) = kept.take().and_then(|()| wait(fd, Until::Readable, flags, deadline)) {
                    break Err(errno);
                }
            }
            Err(errno) => break Err(errno),
        }
    };
    kept.result(done, stopped)
}

/// `send`. Flags: MSG_DONTWAIT.
///
/// # Safety
/// The range must be readable.
pub(super) unsafe fn send(
    fd: Fd,
    kept: &KeptError,
    from: *const u8,
    len: usize,
    flags: u32,
    deadline: Option<u64>,
) -> Result<usize> {
    kept.take()?;
    let mut done = 0;
    let stopped = loop {
        // SAFETY: inside the range, guaranteed by the caller.
        match unsafe { channel::send_with(fd, from.add(done), len - done, MSG_DONTWAIT) } {
            Ok(more) => {
                done += more;
                if done == len {
                    return Ok(done);
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                if let Err(errno) = wait(fd, Until::Writable, flags, deadline) {
                    break Err(errno);
                }
            }
            Err(errno) => break Err(errno),
        }
    };
    kept.result(done, stopped)
}

/// Waits until the call may be tried again; EAGAIN, if it may not.
fn wait(fd: Fd, until: Until, flags: u32, deadline: Option<u64>) -> Result<()> {
    let left = left(deadline);
    if flags & MSG_DONTWAIT != 0 || left == Some(0) {
        return Err(Errno::AGAIN);
    }
    channel::wait_socket(fd, until, left).map(drop)
}
