//! A release of a client: its pages are copied as its messages arrive, then committed and made visible. And its opposite,
//! a discard.
//!
//! ```text
//!   stage of the window ──pread──> slots of no page ──commit, with the lock of the file──> new heads
//! ```
//!
//! Nothing is copied that was only declared: pages past the end of the file are left out, and a release of more pages
//! than there are slots is refused.

use std::ops::Range;
use std::os::fd::AsFd;

use rustix::io::Errno;
use spinio_pagecache::messages::{self, Reply};
use spinio_pagecache::{self as pagecache, Ended, PAGE, StagedRun, offset_of};
use spinio_sys::injection_point;

use crate::backing::Access as Open;
use crate::client::{Client, Failure, Result};
use crate::draft::{Draft, Part, count, place};
use crate::file_backing::{FileBacking, errno};
use crate::files;

/// Pages whose epoch ends while the lock of the file is held.
const END: u64 = 1 << 14;

impl<'a> Client<'a> {
    /// One message of a release.
    pub(crate) fn release(&mut self, part: &Part<'_>, out: &mut Vec<u8>) -> Result<()> {
        if self.access == messages::Access::Read {
            return Err(Failure::Refused(Errno::ACCESS));
        }
        if self.expired == Some(part.id) {
            return Err(Failure::Refused(Errno::TIMEDOUT));
        }
        let draft = self.release.take().filter(|draft| (draft.id, &draft.range) == (part.id, &part.range));
        let mut draft = draft.unwrap_or_else(|| Draft::new(part.id, part.range.clone()));
        if !draft.goes_on() {
            self.expired = Some(part.id);
            return Err(Failure::Refused(Errno::TIMEDOUT));
        }
        let size = self.size()?;
        if draft.reserved.is_none() && !part.last {
            let inside = size.div_ceil(PAGE as u64).min(part.range.end).saturating_sub(part.range.start);
            draft.total = inside.min(part.total.into());
            draft.reserved =
                Some(self.all.release_memory.reserve(self.all.content.files(), &self.memory, draft.total)?);
        }
        self.stage(&mut draft, part, size)?;
        injection_point!("server: release staged");
        if part.last {
            return self.publish(&mut draft, size, out);
        }
        draft.answered();
        self.release = Some(draft);
        Reply::Staged.encode(out);
        Ok(())
    }

    /// The client does not continue its release.
    pub(crate) fn expire(&mut self) {
        self.expired = self.release.take().map(|draft| draft.id);
    }

    /// Copies the pages of a message.
    fn stage(&self, draft: &mut Draft<'_>, part: &Part<'_>, size: u64) -> Result<()> {
        let content = &self.all.content;
        let first = 2 * (self.pages.end - self.pages.start) + u64::from(part.at);
        let mut changed: Vec<Range<u64>> = Vec::new();
        for run in part.runs.iter() {
            let pages = self.file_pages(run.first, run.count.into())?;
            let next = draft.next_run(pages, size.div_ceil(PAGE as u64), &mut changed);
            next.ok_or(Failure::Refused(Errno::INVAL))?;
        }
        let count = count(&changed);
        if draft.pages.count() + count > draft.total {
            return Err(Failure::Refused(Errno::INVAL));
        }
        let staged = place(&changed, self.slots(count as usize)?);
        if let Some(reserved) = &mut draft.reserved {
            reserved.take(count);
        }
        // Pages past the end of the file are the last ones of the stage.
        let (mut copies, mut at) = (Vec::with_capacity(staged.len()), first);
        for (_, run) in &staged {
            copies.push((offset_of(at), run.slots()));
            at += run.slots().len() as u64;
        }
        // When this returns no thread stores to a slot any more.
        content.read_into_slots(&self.window, copies)?;
        staged.into_iter().for_each(|(page, run)| draft.pages.push(page, run));
        Ok(())
    }

    /// Slots; if there are too few, after what was released before is written out.
    pub(crate) fn slots(&self, count: usize) -> Result<Vec<StagedRun>> {
        if !self.memory.has_room_for(count as u64) {
            return Err(Failure::Refused(Errno::NOSPC));
        }
        let files = self.all.content.files();
        let slots = files.with_slots(|| files.slots().stage_runs_of(self.memory.share(), count));
        slots.map_err(|e| Failure::Refused(errno(&e)))
    }

    fn publish(&self, draft: &mut Draft<'_>, size: u64, out: &mut Vec<u8>) -> Result<()> {
        // What cannot be written out later must not be committed. It may wait for a lease, with no lock.
        let _writable = self.all.backing.open_waiting(self.file.node, Open::Write)?;
        let _release = self.file.lock_release();
        files::settle(&self.file, &self.all.kernel);
        injection_point!("server: release begun");
        let files = self.all.content.files();
        // Pages that find no space on the disk must leave memory to other files.
        if self.file.is_stuck() && files.slots().free_slots() < self.all.content.slots() as usize / 2 {
            files.write_out(&self.file)?;
        }
        self.take_from_kernel(draft.pages.pages()).map_err(|e| self.refusal(&e))?;
        injection_point!("server: release taken from the kernel");
        // Slots are freed by writing out what is released already.
        let commit = files.with_slots(|| self.commit(draft)).map_err(|e| self.refusal(&e))?;
        injection_point!("server: release committed");
        let merged = commit.merged.iter().map(|run| run.end - run.start).sum();
        self.all.count_release(commit.published, merged);
        if commit.published > 0 {
            files.times().release(self.file.node);
        }
        self.file.mark_dirty();
        files::invalidate(&self.file, &self.all.kernel, commit.release, commit.invalidate);
        injection_point!("server: release invalidated");
        // Not before: the CPU must not see less than this owner once the release has returned. It is committed: if this
        // fails, the client asks the next connection, and is told so.
        self.end_epoch(draft).map_err(|_| Failure::Ended)?;
        injection_point!("server: epoch ended");
        // The file may have been cut since their part of the release came.
        let inside = |run: &Range<u64>| offset_of(run.end).min(size).saturating_sub(offset_of(run.start));
        let bytes = draft.pages.pages().iter().map(inside).sum();
        Reply::Committed { pages: commit.published, merged, bytes }.encode(out);
        Ok(())
    }

    /// Without it the Linux kernel may have any page of a file that was mapped now, and each would need a twin.
    pub(crate) fn take_from_kernel(&self, pages: &[Range<u64>]) -> pagecache::Result<()> {
        let backing = FileBacking(self.backing.as_fd());
        // Neither looks at bytes. What the kernel writes back waits for those of its pages.
        let runs = self.file.pages_now().begin_drop(&backing, pages.iter().cloned())?;
        self.all.kernel.invalidate(self.file.node, &runs);
        self.file.pages_now().dropped(&runs);
        Ok(())
    }

    fn commit(&self, draft: &mut Draft<'_>) -> pagecache::Result<pagecache::Commit> {
        let backing = FileBacking(self.backing.as_fd());
        self.file.pages_of(&draft.pages.hull()).commit_all(&backing, self.owner, draft.id, &mut draft.pages)
    }

    pub(crate) fn end_epoch(&self, draft: &Draft<'_>) -> pagecache::Result<()> {
        // The client has bytes there that the file never gets.
        let past = draft.past.unwrap_or(draft.range.end).clamp(draft.range.start, draft.range.end);
        for (range, ended) in [(past..draft.range.end, Ended::Abandoned), (draft.range.start..past, Ended::Unchanged)] {
            for start in range.clone().step_by(END as usize) {
                let part = start..range.end.min(start + END);
                self.file.pages_now().end_epoch(self.owner, part, ended)?;
            }
        }
        Ok(())
    }

    /// Forgets what the client has of these pages: of those that are open, or of the others.
    pub(crate) fn forget(&mut self, range: Range<u64>, open: bool) -> Result<()> {
        for start in range.clone().step_by(END as usize) {
            let part = start..range.end.min(start + END);
            let mut pages = self.file.pages_now();
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
