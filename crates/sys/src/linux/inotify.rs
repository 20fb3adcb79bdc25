//! Events of files: opens, closes and changes (inotify).

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::CStr;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::{Fd, read};
use super::lease::set_signal_owner;
use super::raw::syscall;

type Result<T> = core::result::Result<T, Errno>;

/// An event of a watched file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InotifyEvent {
    /// Another descriptor was opened on it: watch.
    Opened(i32),
    /// It was closed: watch.
    Closed(i32),
    /// It was written or its length changed: watch.
    Modified(i32),
    /// The Linux kernel has removed this watch: the file or its file system was removed.
    WatchRemoved(i32),
    /// The event queue overflowed.
    Overflow,
}

const IN_MODIFY: u32 = 0x2;
const IN_CLOSE: u32 = 0x8 | 0x10;
const IN_OPEN: u32 = 0x20;
const IN_Q_OVERFLOW: u32 = 0x4000;
const IN_IGNORED: u32 = 0x8000;

/// A nonblocking inotify descriptor.
pub fn inotify_init() -> Result<Fd> {
    let flags = k::O_NONBLOCK | k::O_CLOEXEC;
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_inotify_init1, [flags as usize, 0, 0, 0, 0, 0]) }.map(|v| v as Fd)
}

/// Sends a signal, for which [`super::wait_lease_break`] of thread `tid` waits, when events are available.
pub fn inotify_signal(inotify: Fd, tid: u32) -> Result<()> {
    const F_SETFL: u32 = 4;
    const O_ASYNC: u32 = 0o20_000;
    set_signal_owner(inotify, tid)?;
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_fcntl, [inotify as usize, F_SETFL as usize, (O_ASYNC | k::O_NONBLOCK) as usize, 0, 0, 0]) }
        .map(drop)
}

/// Watches opens and closes of the file at a path.
pub fn watch_opens(inotify: Fd, path: &CStr) -> Result<i32> {
    add_watch(inotify, path, IN_OPEN | IN_CLOSE)
}

/// Watches changes of its bytes, except through mappings, and of its length.
pub fn watch_modifications(inotify: Fd, path: &CStr) -> Result<i32> {
    add_watch(inotify, path, IN_MODIFY)
}

fn add_watch(inotify: Fd, path: &CStr, mask: u32) -> Result<i32> {
    // SAFETY: `path` is NUL-terminated and lives across the call.
    unsafe { syscall(k::__NR_inotify_add_watch, [inotify as usize, path.as_ptr() as usize, mask as usize, 0, 0, 0]) }
        .map(|v| v as i32)
}

/// Removes a watch.
pub fn remove_watch(inotify: Fd, wd: i32) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { syscall(k::__NR_inotify_rm_watch, [inotify as usize, wd as usize, 0, 0, 0, 0]) }.map(drop)
}

/// The events since the last call.
pub fn inotify_events(notify: Fd) -> Result<Vec<InotifyEvent>> {
    let mut out = Vec::new();
    let mut buf = [0u8; 4096];
    loop {
        // SAFETY: `buf` has the length passed to the call.
        match unsafe { read(notify, buf.as_mut_ptr(), buf.len()) } {
            Ok(0) | Err(Errno::AGAIN) => return Ok(out),
            Ok(got) => parse_events(&buf[..got.min(buf.len())], &mut out),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// `struct inotify_event`: watch, mask, cookie, length of the following name.
fn parse_events(mut bytes: &[u8], out: &mut Vec<InotifyEvent>) {
    const HEADER_LEN: usize = 16;
    let read_word =
        |bytes: &[u8], at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
    while bytes.len() >= HEADER_LEN {
        let (wd, mask, name) = (read_word(bytes, 0) as i32, read_word(bytes, 4), read_word(bytes, 12) as usize);
        match mask {
            m if m & IN_Q_OVERFLOW != 0 => out.push(InotifyEvent::Overflow),
            m if m & IN_IGNORED != 0 => out.push(InotifyEvent::WatchRemoved(wd)),
            m if m & IN_OPEN != 0 => out.push(InotifyEvent::Opened(wd)),
            m if m & IN_CLOSE != 0 => out.push(InotifyEvent::Closed(wd)),
            m if m & IN_MODIFY != 0 => out.push(InotifyEvent::Modified(wd)),
            _ => {}
        }
        bytes = bytes.get(HEADER_LEN.saturating_add(name)..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use crate::linux::close;

    #[test]
    fn opens_and_closes_arrive_in_order() {
        let file = std::env::temp_dir().join(format!("spinio-notify-{}", std::process::id()));
        std::fs::write(&file, "x").unwrap();
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        let Ok(inotify) = inotify_init() else { return eprintln!("skipped: no inotify instance to be had") };
        let wd = watch_opens(inotify, &path).unwrap();
        assert_eq!(inotify_events(inotify), Ok(vec![]));
        drop(std::fs::File::open(&file).unwrap());
        assert_eq!(inotify_events(inotify), Ok(vec![InotifyEvent::Opened(wd), InotifyEvent::Closed(wd)]));
        remove_watch(inotify, wd).unwrap();
        drop(std::fs::File::open(&file).unwrap());
        assert_eq!(inotify_events(inotify), Ok(vec![InotifyEvent::WatchRemoved(wd)]));
        close(inotify).unwrap();
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn modification_wakes_thread_waiting_for_lease_breaks() {
        let file = std::env::temp_dir().join(format!("spinio-changes-{}", std::process::id()));
        std::fs::write(&file, "x").unwrap();
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        let Ok(inotify) = inotify_init() else { return eprintln!("skipped: no inotify instance to be had") };
        let wd = watch_modifications(inotify, &path).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        let (event_sender, event_receiver) = std::sync::mpsc::channel();
        crate::linux::spawn_signals_blocked("notify", 256 << 10, move || {
            let _ = sender.send(inotify_signal(inotify, crate::linux::gettid()));
            let woken = crate::linux::wait_lease_break(Some(60_000));
            let _ = event_sender.send((woken, inotify_events(inotify)));
        })
        .unwrap();
        receiver.recv().unwrap().unwrap();
        // It reads, and it truncates: the Linux kernel breaks no lease for that.
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        crate::linux::open(&path, (k::O_RDONLY | k::O_TRUNC) as i32, 0).map(close).unwrap().unwrap();
        assert_eq!(event_receiver.recv().unwrap(), (true, Ok(vec![InotifyEvent::Modified(wd)])));
        close(inotify).unwrap();
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn malformed_events_are_ignored() {
        for len in 0..64 {
            parse_events(&vec![0xff; len], &mut Vec::new());
        }
        let mut out = Vec::new();
        parse_events(&[0; 48], &mut out);
        assert_eq!(out, []);
    }
}
