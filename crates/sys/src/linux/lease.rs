//! Read leases, and the other ways to exclude writers of a file.
//!
//! A read lease (`F_SETLEASE`) is granted only while no descriptor has the file open for writing. A process that then
//! opens it for writing, or truncates it, waits in that very call until the lease is released, or for
//! `/proc/sys/fs/lease-break-time` seconds. The lease's owner is notified by a signal; here it goes to one thread that
//! has it blocked and fetches it, so that no handler of the program ever runs for it.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::{Fd, close, open, read};
use super::raw::syscall;

type Result<T> = core::result::Result<T, Errno>;

const F_SETSIG: usize = 10;
const F_SETOWN_EX: usize = 15;
const F_SETLEASE: usize = 1024;
const F_GETLEASE: usize = 1025;
const F_GET_SEALS: usize = 1034;
const F_RDLCK: usize = 0;
const F_WRLCK: usize = 1;
const F_UNLCK: usize = 2;
const F_OWNER_TID: i32 = 0;
const SIGIO: usize = 29;

fn fcntl(fd: Fd, command: usize, argument: usize) -> Result<usize> {
    // SAFETY: of the commands used here only F_SETOWN_EX takes memory, which lives across the call.
    unsafe { syscall(k::__NR_fcntl, [fd as usize, command, argument, 0, 0, 0]) }
}

/// The receiver of a descriptor's signal: a thread, see [`wait_lease_break`].
pub(super) fn set_signal_owner(fd: Fd, tid: u32) -> Result<()> {
    let owner = [F_OWNER_TID, tid as i32];
    fcntl(fd, F_SETOWN_EX, owner.as_ptr() as usize)?;
    fcntl(fd, F_SETSIG, SIGIO).map(drop)
}

/// Takes a read lease on a read-only descriptor; thread `tid` is notified of its break, see [`wait_lease_break`].
/// EAGAIN: the file is open for writing. EACCES: not the owner's. EINVAL: no leases on this file system.
pub fn take_read_lease(fd: Fd, tid: u32) -> Result<()> {
    set_signal_owner(fd, tid)?;
    fcntl(fd, F_SETLEASE, F_RDLCK).map(drop)
}

/// Takes a write lease: granted only while no other open file description of the file exists. A process that opens it
/// then waits as for a read lease. No thread is notified of a break: the signal stays pending on thread `tid`, which
/// has it blocked, and [`has_write_lease`] is polled instead.
pub fn take_write_lease(fd: Fd, tid: u32) -> Result<()> {
    set_signal_owner(fd, tid)?;
    fcntl(fd, F_SETLEASE, F_WRLCK).map(drop)
}

/// Whether the write lease exists and is not being broken.
pub fn has_write_lease(fd: Fd) -> bool {
    fcntl(fd, F_GETLEASE, 0) == Ok(F_WRLCK)
}

/// Whether there is a lease, of either kind, that need not be released.
pub fn has_lease(fd: Fd) -> bool {
    fcntl(fd, F_GETLEASE, 0).is_ok_and(|held| held != F_UNLCK)
}

/// Releases a lease: waiting processes continue.
pub fn release_lease(fd: Fd) -> Result<()> {
    fcntl(fd, F_SETLEASE, F_UNLCK).map(drop)
}

/// Whether the read lease exists and is not being broken.
pub fn has_read_lease(fd: Fd) -> bool {
    fcntl(fd, F_GETLEASE, 0) == Ok(F_RDLCK)
}

/// Seconds after which the Linux kernel breaks a lease by force; `None`: never.
pub fn lease_break_time() -> Option<u64> {
    // An unreadable value counts as 0.
    let Ok(fd) = open(c"/proc/sys/fs/lease-break-time", k::O_RDONLY as i32, 0) else { return Some(0) };
    let mut text = [0u8; 24];
    // SAFETY: `text` has the given length.
    let got = unsafe { read(fd, text.as_mut_ptr(), text.len()) }.unwrap_or(0);
    let _ = close(fd);
    let seconds = core::str::from_utf8(&text[..got]).ok().and_then(|t| t.trim().parse::<i64>().ok());
    match seconds {
        Some(0) => None,
        Some(seconds) if seconds > 0 => Some(seconds as u64),
        _ => Some(0),
    }
}

/// The set with SIGIO in it.
const SIGIO_SET: u64 = 1 << (SIGIO - 1);

/// Waits for a break, a wake-up, or the timeout; true if there was one. For the thread that is notified of leases; it
/// must have SIGIO blocked, as [`super::spawn_signals_blocked`] does.
pub fn wait_lease_break(milliseconds: Option<u64>) -> bool {
    let set = SIGIO_SET;
    let time = milliseconds.map(|ms| [ms as i64 / 1000, (ms as i64 % 1000) * 1_000_000]);
    let at = time.as_ref().map_or(0, |t| t.as_ptr() as usize);
    // SAFETY: `set` and `time` have the kernel's layouts and live across the call; no siginfo is requested.
    unsafe { syscall(k::__NR_rt_sigtimedwait, [&raw const set as usize, 0, at, 8, 0, 0]) }.is_ok()
}

/// Makes [`wait_lease_break`] of a thread of this process return; false where the signal is refused (seccomp).
pub fn wake_thread(tid: u32) -> bool {
    // SAFETY: no memory is involved; the thread has the signal blocked.
    unsafe { syscall(k::__NR_tgkill, [super::process::getpid() as usize, tid as usize, SIGIO, 0, 0, 0]) }.is_ok()
}

/// Whether a memory file is sealed against every write and every change of its length.
pub fn is_sealed(fd: Fd) -> bool {
    const SHRINK: usize = 2;
    const WRITE: usize = 8;
    fcntl(fd, F_GET_SEALS, 0).is_ok_and(|seals| seals & (SHRINK | WRITE) == SHRINK | WRITE)
}

/// Whether the file has the immutable attribute.
pub fn is_immutable(fd: Fd) -> bool {
    const STATX_ATTR_IMMUTABLE: u64 = 0x10;
    statx(fd, 0).is_ok_and(|s| s.stx_attributes & s.stx_attributes_mask & STATX_ATTR_IMMUTABLE != 0)
}

/// Whether the file system itself is mounted read-only, not merely this mount of it.
pub fn is_superblock_read_only(fd: Fd) -> bool {
    const STATX_MNT_ID_UNIQUE: u32 = 0x4000;
    const NR_STATMOUNT: u32 = 457;
    const STATMOUNT_SB_BASIC: u64 = 1;
    const SB_RDONLY: u32 = 1;
    let Ok(mount) = statx(fd, STATX_MNT_ID_UNIQUE) else { return false };
    if mount.stx_mask & STATX_MNT_ID_UNIQUE == 0 {
        return false;
    }
    // struct mnt_id_req: size, spare, id, mask.
    let request = [24u64, mount.stx_mnt_id, STATMOUNT_SB_BASIC];
    // struct statmount: size, mnt_opts, mask (u64), dev major, minor, magic (u64), sb_flags ...; 512 bytes.
    let mut answer = [0u32; 128];
    // SAFETY: both have the kernel's layouts and live across the call.
    let queried = unsafe {
        syscall(NR_STATMOUNT, [request.as_ptr() as usize, answer.as_mut_ptr() as usize, size_of_val(&answer), 0, 0, 0])
    };
    queried.is_ok() && answer[2] & STATMOUNT_SB_BASIC as u32 != 0 && answer[8] & SB_RDONLY != 0
}

fn statx(fd: Fd, mask: u32) -> Result<k::statx> {
    // SAFETY: all-zero is a valid `struct statx`.
    let mut raw: k::statx = unsafe { core::mem::zeroed() };
    // SAFETY: the empty path is a NUL-terminated constant and `raw` is alive across the call.
    unsafe {
        syscall(
            k::__NR_statx,
            [fd as usize, c"".as_ptr() as usize, k::AT_EMPTY_PATH as usize, mask as usize, &raw mut raw as usize, 0],
        )
    }?;
    Ok(raw)
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd;

    use super::*;
    use crate::linux::{gettid, spawn_signals_blocked};

    #[test]
    fn writer_waits_until_read_lease_is_released() {
        let directory = tempfile();
        let path = directory.join("leased");
        std::fs::write(&path, b"old").unwrap();
        let file = File::open(&path).unwrap();
        let fd = file.as_raw_fd();
        let (sender, answer) = std::sync::mpsc::channel();
        spawn_signals_blocked("lease", 256 << 10, move || {
            if let Err(e) = take_read_lease(fd, gettid()) {
                let _ = sender.send(Err(e));
                return;
            }
            let _ = sender.send(Ok(has_read_lease(fd)));
            let woken = wait_lease_break(Some(60_000));
            let _ = sender.send(Ok(woken && !has_read_lease(fd)));
            let _ = release_lease(fd);
        })
        .unwrap();
        match answer.recv().unwrap() {
            Err(e) => eprintln!("skipped: no leases here: {e}"),
            Ok(held) => {
                assert!(held);
                assert!(OpenOptions::new().write(true).custom_flags_nonblock().open(&path).is_err(), "EAGAIN");
                assert!(answer.recv().unwrap().unwrap(), "the signal came, and the lease is being released");
                // Waits until the thread has released it.
                OpenOptions::new().write(true).open(&path).unwrap();
            }
        }
        let _ = std::fs::remove_dir_all(directory);
    }

    trait NonBlock {
        fn custom_flags_nonblock(&mut self) -> &mut Self;
    }

    impl NonBlock for OpenOptions {
        fn custom_flags_nonblock(&mut self) -> &mut Self {
            std::os::unix::fs::OpenOptionsExt::custom_flags(self, libc::O_NONBLOCK)
        }
    }

    fn tempfile() -> std::path::PathBuf {
        let directory = std::env::temp_dir().join(format!("spinio-lease-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        directory
    }

    #[test]
    fn regular_file_is_neither_sealed_nor_immutable() {
        let file = File::open("/proc/self/exe").unwrap();
        assert!(!is_sealed(file.as_raw_fd()));
        // SAFETY: the name is NUL-terminated.
        let memfd = unsafe { libc::memfd_create(c"seals".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        assert!(!is_sealed(memfd) && !is_immutable(memfd));
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::fcntl(memfd, libc::F_ADD_SEALS, libc::F_SEAL_WRITE | libc::F_SEAL_SHRINK) }, 0);
        assert!(is_sealed(memfd) && !is_superblock_read_only(memfd));
        let _ = close(memfd);
    }
}
