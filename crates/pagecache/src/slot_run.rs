//! Slots side by side with the bytes of pages side by side: one reference, and one header, for all of them.
//!
//! ```text
//!   stage_runs ──> staged ──publish──> [ header: tag, page, count ][ no header ][ no header ] ...
//!                                        divide: into two runs, or into slots that have a header and a reference each
//! ```

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::Result;
use crate::held_slots::HeldSlots;
use crate::layout::{Kind, Label, Tag};
use crate::page::PageBytes;
use crate::share::Share;
use crate::slots::{SlotRef, Slots, StagedPage};

/// Keeps the bytes of slots side by side.
pub(crate) struct SlotRun {
    slots: Arc<Slots>,
    /// Their numbers. Empty once others have them.
    indices: Range<u32>,
    share: Option<Arc<Share>>,
}

impl SlotRun {
    /// Of slots that nothing refers to.
    fn new(slots: &Arc<Slots>, indices: Range<u32>, share: Option<Arc<Share>>) -> SlotRun {
        SlotRun { slots: Arc::clone(slots), indices, share }
    }

    /// How many.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.indices.end - self.indices.start)
    }

    /// Writes the header: the tag last, since it makes the rest count.
    pub(crate) fn publish(&self, tag: Tag, file: u64, first: u64, version: u64) {
        let label = Label { file, page: first, count: self.indices.end - self.indices.start, version };
        let words = self.slots.words();
        words.set_label(self.indices.start, label);
        words.set_tag(self.indices.start, tag.word());
    }

    pub(crate) fn tag(&self) -> Option<Tag> {
        Tag::parse(self.slots.words().tag(self.indices.start))
    }

    /// The release is settled: the header names it no more.
    pub(crate) fn settle(&self) {
        self.slots.words().set_tag(self.indices.start, Tag { kind: Kind::Snapshot, record: None }.word());
    }

    /// Recovery will not find them any more. They are free once this is dropped.
    pub(crate) fn retire(&self) {
        self.slots.words().set_tag(self.indices.start, 0);
    }

    /// Copies the bytes of one.
    pub(crate) fn read(&self, at: u64, bytes: &mut PageBytes) {
        self.slots.memory.read(self.indices.start + at as u32, bytes);
    }

    /// Keeps the bytes of some, counted from the first, also when this is divided, retired and dropped.
    pub(crate) fn hold(&self, some: Range<u64>) -> HeldSlots {
        let first = self.indices.start;
        HeldSlots::new(&self.slots, first + some.start as u32..first + some.end as u32)
    }

    /// Divides them; the second part has those from `at` on. Both have a header if this had one.
    pub(crate) fn split_off(&mut self, at: u64) -> SlotRun {
        let (words, first) = (self.slots.words(), self.indices.start);
        let (second, rest) = (first + at as u32, self.indices.end);
        if let Some(tag) = self.tag() {
            let label = words.label(first);
            words.set_label(second, Label { page: label.page + at, count: rest - second, ..label });
            words.set_tag(second, tag.word());
            words.end_run(first, at as u32);
        }
        self.indices.end = second;
        SlotRun::new(&self.slots, second..rest, self.share.clone())
    }

    /// A header and a reference for each, which had one header.
    pub(crate) fn divide(mut self) -> impl Iterator<Item = SlotRef> {
        let words = self.slots.words();
        if let Some(tag) = self.tag() {
            words.divide(self.indices.start, words.label(self.indices.start), tag);
        }
        let (slots, share) = (Arc::clone(&self.slots), self.share.take());
        std::mem::take(&mut self.indices).map(move |index| slots.slot(index, share.clone()))
    }
}

impl fmt::Debug for SlotRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slots({:?})", self.indices)
    }
}

impl Drop for SlotRun {
    /// As of one slot: those that were not retired stay in use.
    fn drop(&mut self) {
        if !self.indices.is_empty() && self.slots.words().tag(self.indices.start) == 0 {
            self.slots.free(self.indices.clone(), self.share.as_ref());
        }
    }
}

/// Slots side by side that no page refers to yet, for pages side by side: [`FilePages::commit_unseen`](crate::FilePages).
#[derive(Debug)]
pub struct StagedRun(pub(crate) SlotRun);

impl Slots {
    /// So many slots, in ascending order, as few runs; all or none.
    pub fn stage_runs(self: &Arc<Slots>, count: usize) -> Result<Vec<StagedRun>> {
        self.staged(count, None)
    }

    /// The same for a user, as far as that user's share reaches. Slots that the commit of their pages takes count for it too.
    pub fn stage_runs_of(self: &Arc<Slots>, share: &Arc<Share>, count: usize) -> Result<Vec<StagedRun>> {
        self.staged(count, Some(share))
    }

    fn staged(self: &Arc<Slots>, count: usize, share: Option<&Arc<Share>>) -> Result<Vec<StagedRun>> {
        let run = |run| StagedRun(SlotRun::new(self, run, share.cloned()));
        Ok(self.take_runs(count, share)?.into_iter().map(run).collect())
    }
}

impl StagedRun {
    /// Their numbers, for a caller that fills the memory itself.
    pub fn slots(&self) -> Range<u32> {
        self.0.indices.clone()
    }

    /// Sets the bytes of one, counted from the first.
    pub fn write(&self, at: u32, bytes: &PageBytes) {
        self.0.slots.memory.write(self.0.indices.start + at, 0, bytes);
    }

    /// One by one.
    pub fn into_pages(self) -> impl Iterator<Item = StagedPage> {
        self.0.divide().map(StagedPage)
    }

    /// Divides them: the second part has those from `at` on.
    pub fn split_off(&mut self, at: u32) -> StagedRun {
        StagedRun(self.0.split_off(at.into()))
    }
}
