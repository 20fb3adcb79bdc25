//! The `syscall` instruction and nothing else.
//!
//! No cancellation point, no errno in thread-local storage, no signal restart:
//! the caller gets exactly the Linux kernel's result.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use rustix::io::Errno;

#[cfg(not(target_arch = "x86_64"))]
compile_error!("spinio-sys supports the system call convention of x86-64 only");

/// Makes system call `nr` with up to six arguments.
///
/// # Safety
/// The arguments must be valid for that system call.
#[inline(always)]
pub(super) unsafe fn syscall(nr: u32, args: [usize; 6]) -> Result<usize, Errno> {
    let ret: isize;
    // SAFETY: the Linux kernel clobbers rcx and r11 only; the caller guarantees the arguments.
    unsafe {
        core::arch::asm!(
            "syscall",
            inlateout("rax") nr as isize => ret,
            in("rdi") args[0],
            in("rsi") args[1],
            in("rdx") args[2],
            in("r10") args[3],
            in("r8") args[4],
            in("r9") args[5],
            lateout("rcx") _,
            lateout("r11") _,
            options(nostack),
        );
    }
    if (-4095..0).contains(&ret) { Err(Errno::from_raw_os_error(-ret as i32)) } else { Ok(ret as usize) }
}
