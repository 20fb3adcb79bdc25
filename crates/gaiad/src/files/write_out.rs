//! Released pages become those of the file below the mount: when it is asked for, and after a while.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use spinio_pagecache::offset_of;
use spinio_sys::{injection_point, linux};

use super::{File, Files, write};
use crate::backing::Access;
use crate::file_backing::{FileBacking, errno};
use crate::late::ARRIVING;
use crate::lock::lock;
use crate::report::report;
use crate::small_writes;

/// Pages written out while the lock of a file is held.
const WRITE_OUT: usize = 128;
/// Pages that storage gets in one go: 8 MiB.
const TO_STORAGE: u64 = 2048;

/// How long a call that lacks slots is repeated while files cannot be written yet, and the pauses.
const SHORTAGE: Duration = Duration::from_secs(20);
const LOOK: Duration = Duration::from_millis(100);

/// What happens where a client holds a lease on the file below, so that it cannot be opened for writing for up to 45 s, or
/// where bytes are on their way from a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Others {
    Wait,
    /// With EAGAIN, or [`ARRIVING`].
    Fail,
}

impl Files {
    /// Writes all pages released before to the file below the mount; also, if some of them cannot be written, the others.
    /// Waits for a lease on that file, and for bytes on their way.
    pub(crate) fn write_out(&self, file: &File) -> Result<(), Errno> {
        self.write_out_then(file, Others::Wait, |_, _| ())
    }

    /// The same without that: what is there is written.
    ///
    /// # Errors
    /// EAGAIN: there is a lease. [`ARRIVING`]: some bytes are on their way.
    pub(crate) fn write_out_now(&self, file: &File) -> Result<(), Errno> {
        self.write_out_then(file, Others::Fail, |_, _| ())
    }

    /// That for a caller that will wait until they are on storage: of many pages, storage gets the first ones while the
    /// others are written to the file.
    ///
    /// # Errors
    /// As of [`Files::write_out_now`], if others are not waited for.
    pub(crate) fn write_out_to_storage(&self, file: &File, others: Others) -> Result<(), Errno> {
        let mut waiting: Option<Range<u64>> = None;
        self.write_out_then(file, others, |fd, pages| {
            let from = waiting.take().map_or(pages.start, |waiting| waiting.start);
            if pages.end - from < TO_STORAGE {
                waiting = Some(from..pages.end);
                return;
            }
            // A failure is the caller's, whose fsync finds it again.
            let _ = linux::start_write_back(fd.as_raw_fd(), offset_of(from), offset_of(pages.end - from));
        })
    }

    /// `written` is told of pages that are written to the file, and others between them.
    fn write_out_then(
        &self,
        file: &File,
        others: Others,
        mut written: impl FnMut(BorrowedFd<'_>, Range<u64>),
    ) -> Result<(), Errno> {
        *lock(&file.dirty_since) = None;
        // Also those whose bytes are on their way: those that are there are written while the others arrive.
        let dirty: Vec<u64> = file.pages_now().dirty().collect();
        if dirty.is_empty() {
            file.stuck.store(false, SeqCst);
            return Ok(());
        }
        let opened = match others {
            Others::Wait => self.backing.open_waiting(file.node, Access::Write),
            Others::Fail => self.backing.open(file.node, Access::Write),
        };
        if opened.as_ref().err() == Some(&Errno::AGAIN) {
            // It is broken by now, and will end.
            file.mark_dirty();
            return Err(Errno::AGAIN);
        }
        let result = opened.and_then(|fd| {
            let backing = FileBacking(fd.as_fd());
            self.times.keep(file.node, fd.as_fd(), || {
                let chunks = dirty.chunks(WRITE_OUT);
                let write = |chunk: &[u64]| {
                    let all = chunk.first().map_or(0..0, |first| *first..chunk.last().map_or(*first, |last| last + 1));
                    let done = {
                        let mut table = match others {
                            Others::Wait => file.pages_to_change(&all),
                            Others::Fail => file.pages_to_change_if_there(&all).ok_or(ARRIVING)?,
                        };
                        table.write_out(&backing, chunk).map_err(|e| errno(&e))
                    };
                    injection_point!("server: released pages written");
                    if let [first, .., last] = chunk {
                        written(fd.as_fd(), *first..*last + 1);
                    }
                    done
                };
                chunks.map(write).fold(Ok(()), worse)
            })
        });
        file.stuck.store(result.is_err() && !waits(&result), SeqCst);
        if result.is_err() {
            file.mark_dirty();
        }
        result
    }

    /// Writes out files with pages that were released before this age, or all; drops tables that no client needs.
    pub(crate) fn write_out_older(&self, age: Duration) {
        let is_old = |file: &File| lock(&file.dirty_since).is_some_and(|since| since.elapsed() >= age);
        // A file whose bytes are on their way is written out the next time: other files do not wait for it. Nor for a lease.
        self.write_out_ready(self.all().into_iter().filter(|file| is_old(file) && !file.is_arriving()).collect());
        let is_idle = |file: &File| file.users.load(SeqCst) == 0 && file.pages_now().is_idle();
        for file in self.all() {
            if is_idle(&file) {
                let mut shard = write(self.shard(file.node));
                // No thread can enter while the shard is locked, and no request can make it busy: only releases do.
                if is_idle(&file) {
                    shard.remove(&file.node);
                }
            }
        }
        self.note_none();
    }

    /// Splits large folios of files below the mount to which few pages at a time are written.
    pub(crate) fn split_folios(&self) {
        for file in self.all() {
            let due = file.small_writes().take_due();
            if !due.is_empty()
                && let Ok(fd) = self.backing.open(file.node, Access::Read)
            {
                small_writes::split(&fd, &due);
            }
        }
    }

    /// Writes out files as far as that can be done now, and returns those of which something waits for a lease or for bytes on
    /// their way: those of one user must not keep others waiting.
    pub(crate) fn write_out_ready(&self, files: Vec<Arc<File>>) -> Vec<Arc<File>> {
        let has_more = |file: &Arc<File>| {
            let written = self.write_out_now(file);
            // Also beside another error: the slots of those that have arrived become free.
            let waits = waits(&written) || written.is_err() && file.is_arriving();
            if let Err(error) = written
                && !waits
            {
                report_not_written(file.node, error);
            }
            waits
        };
        files.into_iter().filter(has_more).collect()
    }

    /// Repeats a call that finds too few slots after what was released before is written out; while files wait for a lease or
    /// for bytes on their way, for some time.
    pub(crate) fn with_slots<T>(
        &self,
        mut call: impl FnMut() -> spinio_pagecache::Result<T>,
    ) -> spinio_pagecache::Result<T> {
        let (begun, mut waiting) = (Instant::now(), None);
        loop {
            match call() {
                Err(spinio_pagecache::Error::NoSpace) => {}
                done => return done,
            }
            let files = match waiting.take() {
                None => self.all(),
                Some(files) if Vec::is_empty(&files) || begun.elapsed() > SHORTAGE => {
                    return Err(spinio_pagecache::Error::NoSpace);
                }
                Some(files) => {
                    std::thread::sleep(LOOK);
                    files
                }
            };
            waiting = Some(self.write_out_ready(files));
        }
    }

    /// Writes out everything, also what another thread has begun to write out. Waits for leases and bytes on their way.
    pub(crate) fn finish(&self) {
        for file in self.all() {
            if let Err(error) = self.write_out(&file) {
                report_not_written(file.node, error);
            }
        }
    }
}

/// What is said of two parts: an error that does not pass by itself comes first.
fn worse(first: Result<(), Errno>, second: Result<(), Errno>) -> Result<(), Errno> {
    if waits(&first) && second.is_err() { second } else { first.and(second) }
}

/// Whether released pages could not be written because something else is waited for.
fn waits(written: &Result<(), Errno>) -> bool {
    matches!(written, Err(Errno::AGAIN | ARRIVING))
}

fn report_not_written(node: u64, error: Errno) {
    report!("cannot write released pages of node {node}: {error}");
}
