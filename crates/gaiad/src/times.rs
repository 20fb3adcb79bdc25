//! Modification times, and the bits of a mode that a write clears: the kernel owns them.
//!
//! With the write-back cache the kernel decides when a file was modified, and tells the server (SETATTR) only if the
//! time is another than it was. A file that is created and written within one tick of the clock is not: so a WRITE that
//! gave the file below a time of its own would make the file look modified once the kernel has forgotten it. Therefore
//! what the server writes to a file leaves the time as it was.
//!
//! ```text
//!   WRITE, FALLOCATE, released pages:  first of a file: time? ── write ── last of it: set that time
//!                                                        others: write
//!   SETATTR(times):                    set the kernel's time, which is then the one that the last sets
//!   release:                           until SETATTR, the next last of it sets no time
//! ```
//!
//! Set-user-ID and set-group-ID bits likewise: a write by a process without CAP_FSETID, as the server of a user's own
//! mount, clears them in the file below. But pages are written back after the program may have set these bits, and when
//! a program's own write clears them, the kernel says so (WRITE_KILL_SUIDGID). So the last writer sets them again.
//!
//! Known flaws: the change time (ctime) cannot be set, so it is that of the last WRITE once the kernel has forgotten the
//! file. A server that is killed between both calls leaves the time of a WRITE, as does one that is killed while several
//! threads write without a pause; without CAP_FSETID it may leave the file without these bits.

use std::array;
use std::collections::HashSet;
use std::os::fd::BorrowedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{Mode, Stat, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;

use crate::lock::lock;

/// Set-user-ID and set-group-ID.
const BITS: u32 = 0o6000;

/// Files of one shard wait for each other while a time is read or set, not while they are written.
const SHARDS: usize = 1024;

/// The files that are written now.
#[derive(Debug)]
pub(crate) struct Times {
    shards: [Mutex<Vec<Written>>; SHARDS],
    /// Files with a release after which no program has set the time. The client does so once it has the answer, unless it is
    /// killed or may not.
    released: Mutex<HashSet<u64>>,
}

/// A file that is written now.
#[derive(Debug)]
struct Written {
    node: u64,
    writers: usize,
    modified: Timespec,
    /// Of [`BITS`].
    bits: u32,
    /// One of the calls has written.
    wrote: bool,
}

/// A call that writes to a file.
struct Writing<'a> {
    times: &'a Times,
    node: u64,
    file: BorrowedFd<'a>,
    wrote: bool,
}

impl Default for Times {
    fn default() -> Times {
        Times { shards: array::from_fn(|_| Mutex::default()), released: Mutex::default() }
    }
}

impl Times {
    fn shard(&self, node: u64) -> MutexGuard<'_, Vec<Written>> {
        self.shards[node as usize % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a call that writes to the file, and sets its modification time back, and its mode. The lock of its pages may
    /// be taken meanwhile.
    pub(crate) fn keep<T>(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        call: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        self.keep_with(node, file, BITS, |_| true, call)
    }

    /// The same of a call that may return without having written.
    pub(crate) fn keep_if_written<T>(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        call: impl FnOnce() -> Result<Option<T>, Errno>,
    ) -> Result<Option<T>, Errno> {
        self.keep_with(node, file, BITS, Option::is_some, call)
    }

    /// The same, but the mode is as the call leaves it: a program has asked for it now.
    pub(crate) fn keep_time<T>(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        call: impl FnOnce() -> Result<Option<T>, Errno>,
    ) -> Result<Option<T>, Errno> {
        self.keep_with(node, file, 0, Option::is_some, call)
    }

    fn keep_with<T>(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        bits: u32,
        wrote: impl FnOnce(&T) -> bool,
        call: impl FnOnce() -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let mut shard = self.shard(node);
        match shard.iter_mut().find(|written| written.node == node) {
            Some(written) => written.writers += 1,
            None => {
                let stat = rustix::fs::fstat(file)?;
                let bits = stat.st_mode & bits;
                shard.push(Written { node, writers: 1, modified: modified(&stat), bits, wrote: false });
            }
        }
        drop(shard);
        let mut writing = Writing { times: self, node, file, wrote: false };
        let done = call();
        writing.wrote = done.as_ref().is_ok_and(wrote);
        done
    }

    /// A release was committed: if no program sets the time of the file, it is that of the next write to it.
    pub(crate) fn release(&self, node: u64) {
        lock(&self.released).insert(node);
    }

    /// The node is gone.
    pub(crate) fn forget(&self, node: u64) {
        lock(&self.released).remove(&node);
    }

    /// Runs a call that sets times of the file, that of its modification among them or not.
    pub(crate) fn set(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        sets_modified: bool,
        call: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut shard = self.shard(node);
        call()?;
        if sets_modified {
            lock(&self.released).remove(&node);
        }
        if let Some(written) = shard.iter_mut().find(|written| written.node == node) {
            written.modified = modified(&rustix::fs::fstat(file)?);
        }
        Ok(())
    }

    /// Runs a call after which the file has this mode, or if it is `None`, the bits that the call leaves.
    pub(crate) fn set_mode(
        &self,
        node: u64,
        mode: Option<u32>,
        call: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let mut shard = self.shard(node);
        call()?;
        if let Some(written) = shard.iter_mut().find(|written| written.node == node) {
            written.bits = mode.unwrap_or_default() & BITS;
        }
        Ok(())
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        let mut shard = self.times.shard(self.node);
        let Some(at) = shard.iter().position(|written| written.node == self.node) else { return };
        shard[at].writers -= 1;
        shard[at].wrote |= self.wrote;
        if shard[at].writers == 0 {
            let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
            let Written { modified, bits, wrote, .. } = shard.swap_remove(at);
            let times = Timestamps { last_access: omit, last_modification: modified };
            let mut released = lock(&self.times.released);
            let is_released = if wrote { released.remove(&self.node) } else { released.contains(&self.node) };
            drop(released);
            if !is_released {
                // A file whose time cannot be set is written all the same.
                let _ = rustix::fs::futimens(self.file, &times);
            }
            if bits != 0
                && let Ok(now) = rustix::fs::fstat(self.file)
                && now.st_mode & bits != bits
            {
                let _ = rustix::fs::fchmod(self.file, Mode::from_raw_mode((now.st_mode | bits) & 0o7777));
            }
        }
    }
}

fn modified(stat: &Stat) -> Timespec {
    Timespec { tv_sec: stat.st_mtime as _, tv_nsec: stat.st_mtime_nsec as _ }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::fs::PermissionsExt;
    use std::time::{Duration, SystemTime};

    #[test]
    fn time_is_that_from_before_all_writers_or_the_one_that_was_set_meanwhile() {
        let file = tempfile::tempfile().unwrap();
        let (old, new) = (SystemTime::UNIX_EPOCH + Duration::from_secs(1000), SystemTime::UNIX_EPOCH);
        file.set_modified(old).unwrap();
        let times = Times::default();
        let write = || rustix::io::pwrite(&file, b"bytes", 0).map(drop);
        let modified = || file.metadata().unwrap().modified().unwrap();
        let two = |between: &dyn Fn()| {
            times.keep(1, file.as_fd(), || {
                times.keep(1, file.as_fd(), write)?;
                assert!(modified() > old, "the first sets no time while the second writes");
                between();
                write()
            })
        };
        two(&|| {}).unwrap();
        assert_eq!(modified(), old);
        let set = || file.set_modified(new).map_err(|e| Errno::from_io_error(&e).unwrap());
        two(&|| times.set(1, file.as_fd(), true, set).unwrap()).unwrap();
        assert_eq!(modified(), new);
        assert_eq!(times.keep(1, file.as_fd(), || Err::<(), _>(Errno::IO)), Err(Errno::IO));
        assert!(times.shards.iter().all(|shard| shard.lock().unwrap().is_empty()), "nothing is left");
    }

    #[test]
    fn released_pages_change_the_time_where_the_client_does_not() {
        let file = tempfile::tempfile().unwrap();
        let old = SystemTime::UNIX_EPOCH + Duration::from_secs(1000);
        let set = || file.set_modified(old).map_err(|e| Errno::from_io_error(&e).unwrap());
        let times = Times::default();
        let write = |node| times.keep(node, file.as_fd(), || rustix::io::pwrite(&file, b"bytes", 0).map(drop)).unwrap();
        let modified = || file.metadata().unwrap().modified().unwrap();
        set().unwrap();
        times.release(1);
        times.set(1, file.as_fd(), true, set).unwrap();
        write(1);
        assert_eq!(modified(), old, "the client has set it");
        times.release(1);
        write(2);
        assert_eq!(modified(), old, "another file's release");
        write(1);
        let new = modified();
        assert!(new > old, "the client has died");
        write(1);
        assert_eq!(modified(), new);
    }

    #[test]
    fn bits_that_a_write_clears_are_set_again_unless_a_program_has_cleared_them() {
        let file = tempfile::tempfile().unwrap();
        let times = Times::default();
        let mode = || file.metadata().unwrap().permissions().mode() & 0o7777;
        let chmod = |mode| rustix::fs::fchmod(&file, Mode::from_raw_mode(mode));
        // What a write does below, whatever this process may do.
        let write = || chmod(mode() & !BITS);
        chmod(0o4755).unwrap();
        times.keep(1, file.as_fd(), write).unwrap();
        assert_eq!(mode(), 0o4755);
        let meanwhile = |to, call: u32| {
            let set = || times.set_mode(1, to, || chmod(call));
            times.keep(1, file.as_fd(), || set().and_then(|()| write())).unwrap();
            mode()
        };
        assert_eq!(meanwhile(Some(0o0755), 0o0755), 0o0755);
        assert_eq!(meanwhile(Some(0o2750), 0o2750), 0o2750);
        assert_eq!(meanwhile(None, 0o6755), 0o0755);
    }
}
