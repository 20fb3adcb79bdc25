//! The functions that SPIN interposes on.
//!
//! ```text
//!   pread(fd, buf, n, off)          two instructions: note the return address, go on
//!     │
//!     ├─ any device at all? ── no ──────────────┐      one load: all that a host program pays
//!     ├─ a call of the driver itself? ── yes ───┤
//!     ├─ whose is buf? ── nobody's ─────────────┤
//!     │                                         ▼
//!     │                         the next function ── EFAULT ──> ask the devices themselves
//!     ▼ a device's                                                    │ a device's after all
//!   spinio_io: any route, count or errno  <───────────────────────────┘
//! ```
//!
//! errno is noted at the entry: a call that succeeds leaves it so, though the driver was asked, or the next function
//! tried in vain, before.
//!
//! The host path holds no lock, allocates nothing, leaves errno alone and has no frame with a destructor: the next
//! function is a cancellation point, and the unwinding of `pthread_cancel` passes through us as through C.
//!
//! What a hook would have nothing to do for is not hooked; a needless hook is harm:
//! - `dup`, `fcntl`: a new number for an open file. State is found by device and inode of the descriptor that the call
//!   brings, asked from the kernel on that call, so a new number needs no news.
//! - `lseek`: the file offset is the kernel's. A read at the file's own offset asks for it there.
//! - `fork`, `vfork`, `clone`: what must not outlive a fork lies behind a word that the kernel wipes in the child
//!   (`spinio_sys::linux::word_wiped_on_fork`), which a raw system call cannot bypass.
//!
//! Known flaws:
//! - The EFAULT path repeats the call. A datagram socket has dropped its datagram by then, so the repeated `read` waits
//!   for the next one. It happens at most for the first read of a device that nobody announced.
//! - A call with device memory can be cancelled before it starts, not while it waits.
//! - A signal handler that leaves a write by `longjmp` (SIGXFSZ, SIGPIPE) leaves the write's staging memory taken.
//! - The device path takes locks and allocates, so it is not for signal handlers. Nor is, in a program with CUDA, a host
//!   read into memory that was never read into before: whose it is must be asked of the driver, which the signal may
//!   have interrupted.
//! - A `write` of up to 4 KiB out of managed memory that the CPU can load from is the kernel's, which waits for nothing
//!   that is queued on the device; as without us.
//! - `close` of a file that was read into a device waits until helpers have given back its pins and closed its twins,
//!   20 ms at most.

mod advice;
mod descriptors;
mod mappings;
mod read;
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

/// The device allocation that a call from `caller` means by `buffer`, if it is one. `want`: bytes of interest.
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

/// The same, for the source of a write. Signal handlers write short messages, out of memory that nobody was asked about
/// before, while the thread may be inside the driver; so that is not asked for these, and a device's memory is found out
/// by the kernel's EFAULT.
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

/// The same, after the next function has failed: only EFAULT is a hint, everything else is the answer.
#[cold]
fn device_owner_after_fault(buffer: *const u8, wanted: usize, caller: usize) -> Option<Allocation> {
    if errno::get() != libc::EFAULT || wanted == 0 || disabled::is_disabled() || caller::is_driver(caller) {
        return None;
    }
    let found = registry::find_after_fault(buffer, wanted);
    errno::set(libc::EFAULT);
    found
}

/// Where a call's bytes go, or come from.
fn target(allocation: Allocation, buffer: *const u8) -> Target {
    Target { allocation, addr: DeviceAddr(buffer as u64) }
}
