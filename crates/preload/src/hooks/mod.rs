//! The functions that SPIN interposes on.
//!
//! ```text
//!   pread(fd, buf, n, off)          two instructions: note the return address, continue
//!     │
//!     ├─ any device at all? ── no ──────────────┐      one load: all that a host program pays
//!     ├─ a call of the driver itself? ── yes ───┤
//!     ├─ is buf memory of a device? ── no ──────┤
//!     │                                         ▼
//!     │                         the next function ── EFAULT ──> query the devices themselves
//!     ▼ yes                                                           │ it is device memory
//!   spinio_io: any route, count or errno  <───────────────────────────┘
//! ```
//!
//! errno is saved at the entry. A call that succeeds restores it, because a query of the driver or a failed attempt of
//! the next function may have changed it.
//!
//! The host path takes no lock, allocates nothing, leaves errno alone and has no frame with a destructor: the next
//! function is a cancellation point, and the unwinding of `pthread_cancel` passes through the hook as through C.
//!
//! A function for which a hook would have nothing to do is not hooked, since every hook has a cost:
//! - `dup`, `fcntl`: a new number for an open file. State is found by device and inode of the descriptor of the call,
//!   which are queried on that call, so SPIN need not know of a new number.
//! - `lseek`: the kernel keeps the file offset. A read at the file's own offset queries it.
//! - `fork`, `vfork`, `clone`: state that must not outlive a fork is guarded by a word that the kernel wipes in the
//!   child (`spinio_sys::linux::word_wiped_on_fork`), which a raw system call cannot bypass.
//!
//! Known flaws:
//! - The EFAULT path repeats the call. A datagram socket has dropped its datagram by then, so the repeated `read` waits
//!   for the next one. It happens at most for the first read into a device that SPIN has not been notified of.
//! - A call with device memory can be cancelled before it starts, not while it waits.
//! - A signal handler that leaves a write by `longjmp` (SIGXFSZ, SIGPIPE) leaks the bounce buffers of the write.
//! - The device path takes locks and allocates, so it is not for signal handlers. Nor is, in a program with CUDA, a
//!   host read into memory that was never read into before: its owner must be queried from the driver, which the signal
//!   may have interrupted.
//! - A `write` of up to 4 KiB out of managed memory that the CPU can load from is left to the kernel, which does not
//!   wait for work queued on the device; the same happens without SPIN.
//! - `close` of a file that was read into a device waits until workers have unpinned its pages and closed its shadow
//!   descriptors, 20 ms at most. In a signal handler that has interrupted `malloc` it must not allocate, and does so in
//!   one case: all shadow workers wait for servers, and one more is started.

mod advice;
mod descriptors;
mod mappings;
mod read;
mod single;
mod stdio;
mod vector;
mod write;
mod write_vector;

use spinio_device::{Allocation, DeviceAddr, registry};
use spinio_io::Target;

use crate::{caller, disabled, errno};

/// Defines an exported function: it passes its arguments on to `$body`, and its own return address after them, in
/// `$register`, the one that the calling convention gives to the next argument. There is no stack frame in between, so
/// unwinding and backtraces see the body called by the program.
macro_rules! hook {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $ret:ty, $caller:ident in $register:literal => $body:expr;)+) => {$(
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $ret {
            unsafe extern "C-unwind" fn body($($arg: $type,)* $caller: usize) -> $ret {
                // SAFETY: the arguments are the program's own, under the contract of the function it called.
                unsafe { $body }
            }
            core::arch::naked_asm!(concat!("mov ", $register, ", qword ptr [rsp]"), "jmp {}", sym body)
        }
    )+};
}
use hook;

/// The device allocation that `buffer` points into in a call from `caller`, if any. `want`: bytes of interest.
#[inline(always)]
fn device_owner(buffer: *const u8, wanted: usize, caller: usize) -> Option<Allocation> {
    if !registry::any_device() {
        return None;
    }
    if disabled::is_disabled() || caller::is_driver(caller) {
        return None;
    }
    registry::find(buffer, wanted)
}

/// The same, for the source of a write. Signal handlers write short messages, out of memory whose owner was never
/// queried, while the thread may be inside the driver. So short writes do not query the driver, and device memory is
/// detected by the EFAULT of the kernel.
#[inline(always)]
fn source_owner(buffer: *const u8, wanted: usize, caller: usize) -> Option<Allocation> {
    const MESSAGE_MAX: usize = 4096;
    if wanted > MESSAGE_MAX {
        return device_owner(buffer, wanted, caller);
    }
    if !registry::any_device() || disabled::is_disabled() {
        return None;
    }
    registry::find_without_driver(buffer, wanted)
}

/// The same, after the next function has failed. Only EFAULT is a hint; any other error is returned as it is.
#[cold]
fn device_owner_after_fault(buffer: *const u8, wanted: usize, caller: usize) -> Option<Allocation> {
    if errno::get() != libc::EFAULT || wanted == 0 || disabled::is_disabled() || caller::is_driver(caller) {
        return None;
    }
    let found = registry::find_after_fault(buffer, wanted);
    errno::set(libc::EFAULT);
    found
}

/// The destination or the source of a call.
fn target(allocation: Allocation, buffer: *const u8) -> Target {
    Target { allocation, addr: DeviceAddr(buffer as u64) }
}
