//! This process, its threads, and the machine.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::raw::syscall;

/// `getpid`, as a system call each time.
pub fn getpid() -> u32 {
    // SAFETY: no memory is involved, and the call cannot fail.
    unsafe { syscall(k::__NR_getpid, [0; 6]) }.unwrap_or(0) as u32
}

/// `gettid`.
pub fn gettid() -> u32 {
    // SAFETY: no memory is involved, and the call cannot fail.
    unsafe { syscall(k::__NR_gettid, [0; 6]) }.unwrap_or(0) as u32
}

/// Whether a thread of this process has this TID now.
pub fn is_thread(tid: u32) -> bool {
    // SAFETY: no memory is involved, and signal 0 is none.
    unsafe { syscall(k::__NR_tgkill, [getpid() as usize, tid as usize, 0, 0, 0, 0]) }.is_ok()
}

/// Whether no thread of this process has this TID now, as confirmed by the Linux kernel. False where a sandbox refuses
/// the query.
pub fn is_no_thread(tid: u32) -> bool {
    // SAFETY: no memory is involved, and signal 0 is none.
    let result = unsafe { syscall(k::__NR_tgkill, [getpid() as usize, tid as usize, 0, 0, 0, 0]) };
    result == Err(Errno::SRCH)
}

/// Sends a signal to this thread. SIGKILL and SIGSTOP end and stop the whole process, this thread at once.
pub fn kill_this_thread(signal: u32) {
    let args = [getpid() as usize, gettid() as usize, signal as usize, 0, 0, 0];
    // SAFETY: no memory is involved.
    let _ = unsafe { syscall(k::__NR_tgkill, args) };
}

/// The alternate signal stack of this thread, and whether the thread runs on it now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct AltStack {
    start: usize,
    flags: i32,
    len: usize,
}

/// `sigaltstack`, query only.
pub fn alternate_stack() -> AltStack {
    let mut stack = AltStack::default();
    // SAFETY: the Linux kernel fills in a `stack_t`, whose layout `AltStack` has. Without it the result is always the
    // same.
    let _ = unsafe { syscall(k::__NR_sigaltstack, [0, (&raw mut stack) as usize, 0, 0, 0, 0]) };
    stack
}

/// Whether two threads of this process share one descriptor table. EPERM where a sandbox refuses the query, ENOSYS on
/// kernels without `kcmp`, ESRCH where one of them has exited.
pub fn same_fd_table(tid: u32, other_tid: u32) -> Result<bool, Errno> {
    const KCMP_FILES: usize = 2;
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_kcmp, [tid as usize, other_tid as usize, KCMP_FILES, 0, 0, 0]) }.map(|order| order == 0)
}

/// Effective user of this thread.
pub fn geteuid() -> u32 {
    // SAFETY: no memory is involved, and the call cannot fail.
    unsafe { syscall(k::__NR_geteuid, [0; 6]) }.unwrap_or(0) as u32
}

/// Whether this program has gained privileges by being executed (setuid, setgid, file capabilities).
pub fn is_secure_exec() -> bool {
    // SAFETY: reads a vector that the Linux kernel has written before the program began.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}

/// RLIMIT_FSIZE: the largest file length allowed to this process; `u64::MAX` for any.
pub fn file_size_limit() -> u64 {
    const RLIMIT_FSIZE: usize = 1;
    let mut limits = [0u64; 2];
    // SAFETY: `limits` has the layout of `struct rlimit64` and lives across the call.
    let result = unsafe { syscall(k::__NR_prlimit64, [0, RLIMIT_FSIZE, 0, limits.as_mut_ptr() as usize, 0, 0]) };
    if result.is_ok() { limits[0] } else { u64::MAX }
}

/// The processor this thread runs on now.
pub fn cpu() -> usize {
    // SAFETY: no memory is involved; libc reads the vDSO's memory, without a system call.
    usize::try_from(unsafe { libc::sched_getcpu() }).unwrap_or(0)
}

/// Processors that this thread may run on.
pub fn available_cpus() -> usize {
    // SAFETY: all-zero is a valid set.
    let mut set: libc::cpu_set_t = unsafe { core::mem::zeroed() };
    let bytes = size_of::<libc::cpu_set_t>();
    // SAFETY: `set` is alive across the call and `bytes` long.
    let got = unsafe { syscall(k::__NR_sched_getaffinity, [0, bytes, &raw mut set as usize, 0, 0, 0]) };
    // SAFETY: only counts the bits of a set that was initialised above.
    if got.is_ok() { (unsafe { libc::CPU_COUNT(&set) } as usize).max(1) } else { 1 }
}

/// Bytes of memory of this machine.
pub fn total_memory() -> u64 {
    // SAFETY: all-zero is a valid `struct sysinfo`.
    let mut info: libc::sysinfo = unsafe { core::mem::zeroed() };
    // SAFETY: `info` is alive across the call and has the kernel's layout.
    match unsafe { syscall(k::__NR_sysinfo, [&raw mut info as usize, 0, 0, 0, 0, 0]) } {
        Ok(_) => info.totalram * u64::from(info.mem_unit),
        Err(_) => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_with_unshared_table_is_detected() {
        let first = gettid();
        std::thread::scope(|scope| {
            scope.spawn(move || match same_fd_table(first, gettid()) {
                Ok(one) => {
                    assert!(one);
                    // SAFETY: the table of this thread, which ends here.
                    assert_eq!(unsafe { libc::unshare(libc::CLONE_FILES) }, 0);
                    assert_eq!(same_fd_table(first, gettid()), Ok(false));
                }
                Err(why) => println!("skipped: kcmp: {why}"),
            });
        });
    }
}
