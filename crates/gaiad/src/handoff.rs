//! A release that hands device memory over: committed at once, copied later.
//!
//! ```text
//!   descriptors of chunks, changed pages ── import ── slots ── kept by the supervisor ── commit ── answer
//!                                              │                      (arrivals.rs)         └ the bytes are copied: until
//!                                              └ cannot be done: refused, nothing has changed     then their pages wait
//! ```
//!
//! Only pages are taken whose bytes nothing looks at to commit them: whose head is what the client has got, and which the
//! kernel has not. Else the release is refused, and the client makes an ordinary one. That is decided with the lock of the
//! file, which is released only when everything that wants bytes of its pages waits for them.

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use spinio_pagecache::messages::{self, HandOver, Reply, Runs};
use spinio_pagecache::{self as pagecache, Backing, Commit, PAGE, StagedRun, offset_of};
use spinio_sys::injection_point;

use crate::arrivals::{Arrival, Kept, Part};
use crate::backing::Access as Open;
use crate::client::{Client, Failure, Result};
use crate::device_process::CopyRange;
use crate::draft::{Draft, count, place};
use crate::file_backing::FileBacking;
use crate::files;

impl Client<'_> {
    /// A release whose pages are in chunks of device memory.
    pub(crate) fn hand_over(
        &mut self,
        part: &HandOver,
        runs: Runs<'_>,
        fds: Vec<OwnedFd>,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        if self.access == messages::Access::Read {
            return Err(Failure::Refused(Errno::ACCESS));
        }
        let size = self.size()?;
        let (draft, pages) = self.pages_in_chunks(part, runs, size)?;
        if fds.len() != part.chunks as usize {
            return Err(Failure::Refused(Errno::INVAL));
        }
        // Pages that find no space on the disk must leave memory to other files: an ordinary release does that.
        if pages.is_empty() || self.file.is_stuck() {
            return Err(Failure::Refused(Errno::OPNOTSUPP));
        }
        let chunks = self.all.arrivals.import(part, fds)?;
        injection_point!("server: chunks imported");
        let count = count(&pages);
        let mut reserved = self.all.release_memory.reserve(self.all.content.files(), &self.memory, count)?;
        injection_point!("server: chunks promised memory");
        // Releases of one message take some without a promise.
        let slots = self.slots(count as usize)?;
        reserved.take(count);
        let staged = place(&pages, slots);
        let mut parts: Vec<Part> = chunks.into_iter().map(Part::new).collect();
        let first = self.pages.start + part.chunk;
        let chunk_pages = u64::from(part.chunk_pages);
        for (page, run) in &staged {
            let (slots, end) = (run.slots(), page + run.slots().len() as u64);
            if size < offset_of(end) {
                // What is after the end of the file counts as zeros.
                run.write(slots.end - slots.start - 1, &[0; PAGE]);
            }
            let mut page = *page;
            while page < end {
                let (chunk, at) = ((page - first) / chunk_pages, (page - first) % chunk_pages);
                let next = end.min(page + chunk_pages - at);
                let len = offset_of(next).min(size) - offset_of(page);
                let to = self.all.content.slot_offset(slots.end - (end - page) as u32);
                parts[chunk as usize].add(page..next, CopyRange { from: offset_of(at), to, len });
                page = next;
            }
        }
        // Of a chunk without a changed page nothing is copied.
        parts.retain(|part| !part.pages().is_empty());
        let arrival = |of| Arrival::new(self.file.node, part.device, of);
        self.commit_handed(&draft, &pages, staged, parts.into_iter().map(arrival).collect(), size, out)?;
        self.handed_from = Some(part.device);
        Ok(())
    }

    /// The pages of a message that are inside the file, which has `size` bytes, as runs.
    fn pages_in_chunks(&self, part: &HandOver, runs: Runs<'_>, size: u64) -> Result<(Draft<'static>, Vec<Range<u64>>)> {
        let invalid = || Failure::Refused(Errno::INVAL);
        let range = self.file_pages(part.first, part.pages.into())?;
        let in_chunks = u64::from(part.chunks - 1) * u64::from(part.chunk_pages) + u64::from(part.last_pages);
        let chunks = part.chunk..part.chunk + in_chunks;
        let (mut draft, mut pages) = (Draft::new(part.id, range), Vec::<Range<u64>>::new());
        for run in runs.iter() {
            if run.first < chunks.start || run.first + u64::from(run.count) > chunks.end {
                return Err(invalid());
            }
            let run = self.file_pages(run.first, run.count.into())?;
            draft.next_run(run, size.div_ceil(PAGE as u64), &mut pages).ok_or_else(invalid)?;
        }
        if !self.memory.has_room_for(count(&pages)) {
            return Err(Failure::Refused(Errno::NOSPC));
        }
        Ok((draft, pages))
    }

    fn commit_handed(
        &self,
        draft: &Draft<'_>,
        pages: &[Range<u64>],
        mut staged: Vec<(u64, StagedRun)>,
        arrivals: Vec<Arrival>,
        size: u64,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        // What cannot be written out later must not be committed. It may wait for a lease, with no lock.
        let _writable = self.all.backing.open_waiting(self.file.node, Open::Write)?;
        let _release = self.file.lock_release();
        files::settle(&self.file, &self.all.kernel);
        self.take_from_kernel(pages).map_err(|e| self.refusal(&e))?;
        // Before the commit: a server that finds it committed finds the chunks too.
        let keep = |arrival| self.all.arrivals.keep(arrival);
        let kept = arrivals.into_iter().map(keep).collect::<std::result::Result<Vec<_>, _>>()?;
        injection_point!("server: chunks kept");
        // As for a release that copies its pages: what is written out meanwhile frees records.
        let commit = self.all.content.files().with_slots(|| self.commit_chunks(draft, pages, &mut staged, &kept, size));
        let commit = commit.map_err(|e| self.refusal(&e))?.ok_or(Failure::Refused(Errno::AGAIN))?;
        injection_point!("server: chunks committed");
        self.all.content.files().times().release(self.file.node);
        self.file.mark_dirty();
        self.all.arrivals.start(kept, self.file.share());
        self.all.count_release(commit.published, 0);
        files::invalidate(&self.file, &self.all.kernel, commit.release, commit.invalidate);
        // As of an ordinary release.
        self.end_epoch(draft).map_err(|_| Failure::Ended)?;
        let bytes = pages.iter().map(|run| offset_of(run.end).min(size) - offset_of(run.start)).sum();
        Reply::Committed { pages: commit.published, merged: 0, bytes }.encode(out);
        Ok(())
    }

    /// `None`: a page has to be looked at now.
    fn commit_chunks(
        &self,
        draft: &Draft<'_>,
        pages: &[Range<u64>],
        staged: &mut Vec<(u64, StagedRun)>,
        kept: &[Kept],
        size: u64,
    ) -> pagecache::Result<Option<Commit>> {
        // What has been handed over before is not replaced while it is on its way.
        let hull = pages.first().map_or(0, |run| run.start)..pages.last().map_or(0, |run| run.end);
        let mut table = self.file.pages_of(&hull);
        let backing = FileBacking(self.backing.as_fd());
        if backing.size()? != size {
            return Ok(None);
        }
        let commit = table.commit_unseen(&backing, self.owner, draft.id, staged)?;
        if commit.is_some() {
            kept.iter().for_each(|kept| self.file.begin_arrival(kept.number(), kept.pages()));
        }
        Ok(commit)
    }
}
