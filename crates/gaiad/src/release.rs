//! A release of a client: collected from messages, then committed and made visible. And its opposite, a discard.
//!
//! Nothing is copied that was only declared: pages past the end of the file are left out, a release of more pages than
//! there are slots is refused, and the others are read a few at a time while they are committed.

use std::ops::Range;
use std::os::fd::AsFd;

use rustix::io::Errno;
use spinio_pagecache::messages::{self, ReleaseId, Reply};
use spinio_pagecache::{self as pagecache, Ended, PAGE, offset_of};

use crate::backing::Access as Open;
use crate::client::{Client, Failure, Result};
use crate::draft::Draft;
use crate::file_backing::FileBacking;
use crate::files;
use crate::window_pages::WindowPages;

/// Pages whose epoch ends while the lock of the file is held.
const END: u64 = 1 << 14;

impl Client<'_> {
    /// One message of a release; the last one is answered.
    pub(crate) fn release(
        &mut self,
        id: ReleaseId,
        range: Range<u64>,
        last: bool,
        runs: messages::Runs<'_>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let size = self.size()?;
        let most = u64::from(self.all.content.slots());
        let mut draft = match self.release.take() {
            Some(draft) if (draft.id, &draft.range) == (id, &range) => draft,
            _ => Draft::new(id, range),
        };
        for run in runs.iter() {
            let pages = self.file_pages(run.first, run.count.into())?;
            if !draft.add(pages, size.div_ceil(PAGE as u64), most) {
                return Err(Failure::Refused(Errno::INVAL));
            }
        }
        if !last {
            self.release = Some(draft);
            return Ok(());
        }
        if self.access == messages::Access::Read {
            return Err(Failure::Refused(Errno::ACCESS));
        }
        if draft.count > most {
            return Err(Failure::Refused(Errno::NOSPC));
        }
        // What cannot be written out later must not be committed. It may wait for a lease, with no lock.
        let _writable = self.all.backing.open_waiting(self.file.node, Open::Write)?;
        let _release = self.file.lock_release();
        files::settle(&self.file, &self.all.kernel);
        let files = self.all.content.files();
        // Pages that find no space on the disk must leave memory to other files.
        if self.file.is_stuck() && (files.slots().free_slots() as u64) < most / 2 {
            files.write_out(&self.file)?;
        }
        let commit = match self.commit(&draft) {
            Err(pagecache::Error::NoSpace) => {
                // Slots are freed by writing out what is released already.
                files.finish();
                self.commit(&draft)
            }
            result => result,
        }
        .map_err(|e| self.refusal(&e))?;
        self.file.mark_dirty();
        files::invalidate(&self.file, &self.all.kernel, commit.release, commit.invalidate);
        // Not before: the CPU must not see less than this owner once the release has returned. It is committed: if this
        // fails, the client asks the next connection, and is told so.
        self.end_epoch(&draft).map_err(|_| Failure::Ended)?;
        let bytes =
            draft.runs.iter().map(|run| offset_of(run.end).min(size).saturating_sub(offset_of(run.start))).sum();
        let merged = commit.merged.iter().map(|run| run.end - run.start).sum();
        Reply::Committed { pages: commit.published, merged, bytes }.encode(out);
        Ok(())
    }

    fn commit(&self, draft: &Draft) -> pagecache::Result<pagecache::Commit> {
        let backing = FileBacking(self.backing.as_fd());
        let pages = WindowPages::new(self.window.as_fd(), self.pages.start, &draft.runs);
        self.file.pages().commit_each(&backing, self.owner, draft.id, pages)
    }

    fn end_epoch(&self, draft: &Draft) -> pagecache::Result<()> {
        // The client has bytes there that the file never gets.
        let past = draft.past.unwrap_or(draft.range.end).clamp(draft.range.start, draft.range.end);
        for (range, ended) in [(past..draft.range.end, Ended::Abandoned), (draft.range.start..past, Ended::Unchanged)] {
            for start in range.clone().step_by(END as usize) {
                let part = start..range.end.min(start + END);
                self.file.pages().end_epoch(self.owner, part, ended)?;
            }
        }
        Ok(())
    }

    /// Forgets what the client has of these pages: of those that are open, or of the others.
    pub(crate) fn forget(&mut self, range: Range<u64>, open: bool) -> Result<()> {
        for start in range.clone().step_by(END as usize) {
            let part = start..range.end.min(start + END);
            let mut pages = self.file.pages();
            let forgotten = match open {
                true => pages.end_epoch(self.owner, part, Ended::Abandoned),
                false => pages.drop_copies(self.owner, part),
            };
            drop(pages);
            forgotten.map_err(|e| self.refusal(&e))?;
        }
        Ok(())
    }
}
