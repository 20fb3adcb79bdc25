//! News of files: who opens them, who changes them (inotify).

use std::ffi::CStr;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::{Fd, read};
use super::lease::name_owner;
use super::raw::call;

type Result<T> = core::result::Result<T, Errno>;

/// Something happened to a watched file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// Somebody opened it: watch.
    Opened(i32),
    /// Somebody closed it: watch.
    Closed(i32),
    /// Somebody wrote it or changed its length: watch.
    Changed(i32),
    /// The kernel has ended this watch: the file or its file system is gone.
    Ended(i32),
    /// More happened than the kernel kept.
    Lost,
}

const IN_MODIFY: u32 = 0x2;
const IN_CLOSE: u32 = 0x8 | 0x10;
const IN_OPEN: u32 = 0x20;
const IN_Q_OVERFLOW: u32 = 0x4000;
const IN_IGNORED: u32 = 0x8000;

/// A descriptor that brings news without waiting for them.
pub fn notify() -> Result<Fd> {
    let flags = k::O_NONBLOCK | k::O_CLOEXEC;
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_inotify_init1, [flags as usize, 0, 0, 0, 0, 0]) }.map(|v| v as Fd)
}

/// Lets a signal, which [`super::await_break`] of thread `tid` waits for, tell that there are news.
pub fn tell_of_news(notify: Fd, tid: u32) -> Result<()> {
    const F_SETFL: u32 = 4;
    const O_ASYNC: u32 = 0o20_000;
    name_owner(notify, tid)?;
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_fcntl, [notify as usize, F_SETFL as usize, (O_ASYNC | k::O_NONBLOCK) as usize, 0, 0, 0]) }
        .map(drop)
}

/// Watches opens and closes of the file that a path leads to.
pub fn watch(notify: Fd, path: &CStr) -> Result<i32> {
    add(notify, path, IN_OPEN | IN_CLOSE)
}

/// Watches changes of its bytes, except through mappings, and of its length.
pub fn watch_changes(notify: Fd, path: &CStr) -> Result<i32> {
    add(notify, path, IN_MODIFY)
}

fn add(notify: Fd, path: &CStr, mask: u32) -> Result<i32> {
    // SAFETY: `path` is NUL-terminated and lives across the call.
    unsafe { call(k::__NR_inotify_add_watch, [notify as usize, path.as_ptr() as usize, mask as usize, 0, 0, 0]) }
        .map(|v| v as i32)
}

/// Ends a watch.
pub fn unwatch(notify: Fd, watch: i32) -> Result<()> {
    // SAFETY: no memory is involved.
    unsafe { call(k::__NR_inotify_rm_watch, [notify as usize, watch as usize, 0, 0, 0, 0]) }.map(drop)
}

/// What has happened since the last time.
pub fn news(notify: Fd) -> Result<Vec<News>> {
    let mut out = Vec::new();
    let mut buf = [0u8; 4096];
    loop {
        // SAFETY: `buf` has as many bytes as the call is told.
        match unsafe { read(notify, buf.as_mut_ptr(), buf.len()) } {
            Ok(0) | Err(Errno::AGAIN) => return Ok(out),
            Ok(got) => parse(&buf[..got.min(buf.len())], &mut out),
            Err(Errno::INTR) => {}
            Err(e) => return Err(e),
        }
    }
}

/// `struct inotify_event`: watch, mask, cookie, length of the name that follows.
fn parse(mut bytes: &[u8], out: &mut Vec<News>) {
    const HEAD: usize = 16;
    let word =
        |bytes: &[u8], at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes);
    while bytes.len() >= HEAD {
        let (watch, mask, name) = (word(bytes, 0) as i32, word(bytes, 4), word(bytes, 12) as usize);
        match mask {
            m if m & IN_Q_OVERFLOW != 0 => out.push(News::Lost),
            m if m & IN_IGNORED != 0 => out.push(News::Ended(watch)),
            m if m & IN_OPEN != 0 => out.push(News::Opened(watch)),
            m if m & IN_CLOSE != 0 => out.push(News::Closed(watch)),
            m if m & IN_MODIFY != 0 => out.push(News::Changed(watch)),
            _ => {}
        }
        bytes = bytes.get(HEAD.saturating_add(name)..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;

    use super::*;
    use crate::linux::close;

    #[test]
    fn opens_and_closes_are_told_in_order() {
        let file = std::env::temp_dir().join(format!("spinio-notify-{}", std::process::id()));
        std::fs::write(&file, "x").unwrap();
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        let Ok(notify) = notify() else { return eprintln!("skipped: no inotify instance to be had") };
        let id = watch(notify, &path).unwrap();
        assert_eq!(news(notify), Ok(vec![]));
        drop(std::fs::File::open(&file).unwrap());
        assert_eq!(news(notify), Ok(vec![News::Opened(id), News::Closed(id)]));
        unwatch(notify, id).unwrap();
        drop(std::fs::File::open(&file).unwrap());
        assert_eq!(news(notify), Ok(vec![News::Ended(id)]));
        close(notify).unwrap();
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_change_is_told_to_a_thread_that_waits_for_breaks() {
        let file = std::env::temp_dir().join(format!("spinio-changes-{}", std::process::id()));
        std::fs::write(&file, "x").unwrap();
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        let Ok(notify) = notify() else { return eprintln!("skipped: no inotify instance to be had") };
        let id = watch_changes(notify, &path).unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let (tell_more, more) = std::sync::mpsc::channel();
        crate::linux::spawn_quiet("notify", 256 << 10, move || {
            let _ = tell.send(tell_of_news(notify, crate::linux::gettid()));
            let woken = crate::linux::await_break(Some(60_000));
            let _ = tell_more.send((woken, news(notify)));
        })
        .unwrap();
        told.recv().unwrap().unwrap();
        // It reads, and it truncates: the kernel breaks no lease for that.
        let path = CString::new(file.as_os_str().as_bytes()).unwrap();
        crate::linux::open(&path, (k::O_RDONLY | k::O_TRUNC) as i32, 0).map(close).unwrap().unwrap();
        assert_eq!(more.recv().unwrap(), (true, Ok(vec![News::Changed(id)])));
        close(notify).unwrap();
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn noise_is_no_news() {
        for len in 0..64 {
            parse(&vec![0xff; len], &mut Vec::new());
        }
        let mut out = Vec::new();
        parse(&[0; 48], &mut out);
        assert_eq!(out, []);
    }
}
