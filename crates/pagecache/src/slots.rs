//! Slots and release records of the state memory: which are free, and who refers to the others.
//!
//! One [`Slots`] serves all files of a server, each of which is used under a lock of its own; so it has a lock, held
//! for a few instructions. A [`SlotRef`] keeps the bytes of a slot: they do not change while anybody else has one.
//!
//! ```text
//!   free ──allocate──> written, label, tag ──commit of the record──> live ──retire: tag := 0──> free for recovery
//!    ^                                                                                               │
//!    └───────────────────────────── the last SlotRef is dropped ─────────────────────────────────────┘
//! ```

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::free_slots::FreeSlots;
use crate::holds::Holds;
use crate::layout::{COMMITTED, DONE, Kind, Label, MOST_COUNT, MOST_RECORDS, SlotMemory, Tag, Words};
use crate::page::{PAGE, PageBytes};
use crate::share::Share;

/// The slots and records of one server, shared by its files.
pub struct Slots {
    pub(crate) memory: Arc<dyn SlotMemory>,
    free: Mutex<Free>,
    /// Bases in ordinary memory, and how many there may be.
    copies: AtomicUsize,
    most_copies: AtomicUsize,
}

pub(crate) struct Free {
    pub(crate) slots: FreeSlots,
    /// Of slots that are not free yet, since they are read.
    pub(crate) holds: Holds,
    /// Records that are free, then those that are done, the oldest first.
    pub(crate) records: VecDeque<u32>,
    /// The last sequence number that was given to a record.
    pub(crate) sequence: u64,
}

/// A release whose pages must be invalidated.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Release {
    pub(crate) record: u32,
    pub(crate) sequence: u64,
}

impl Slots {
    /// Lays out new memory, whose words are all zero.
    pub fn format(memory: Arc<dyn SlotMemory>) -> Result<Arc<Slots>> {
        check_size(&*memory)?;
        Words(&*memory).format();
        let (slots, records) = (FreeSlots::all(memory.slots()), (0..memory.records()).collect());
        Ok(Slots::with(memory, Free { slots, holds: Holds::default(), records, sequence: 0 }))
    }

    pub(crate) fn with(memory: Arc<dyn SlotMemory>, free: Free) -> Arc<Slots> {
        let (copies, most_copies) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
        Arc::new(Slots { memory, free: Mutex::new(free), copies, most_copies })
    }

    /// Limits the pages in ordinary memory that are kept as bases of open epochs. An owner that needs one more is
    /// forgotten.
    pub fn limit_copies(&self, pages: usize) {
        self.most_copies.store(pages, Relaxed);
    }

    pub(crate) fn most_copies(&self) -> usize {
        self.most_copies.load(Relaxed)
    }

    pub(crate) fn count_copy(self: &Arc<Slots>) -> Option<Arc<Slots>> {
        if self.copies.fetch_add(1, Relaxed) < self.most_copies.load(Relaxed) {
            return Some(Arc::clone(self));
        }
        self.drop_copy();
        None
    }

    pub(crate) fn drop_copy(&self) {
        self.copies.fetch_sub(1, Relaxed);
    }

    /// Slots that there are.
    pub fn all_slots(&self) -> usize {
        self.memory.slots() as usize
    }

    /// Slots that are free now.
    pub fn free_slots(&self) -> usize {
        self.lock().slots.len()
    }

    /// Whether a release with this id was committed, as far as the records reach back.
    pub fn was_committed(&self, id: u64) -> bool {
        let words = self.words();
        (0..self.memory.records()).any(|record| words.state(record).1 != 0 && words.release(record).0 == id)
    }

    /// Whether a slot has a snapshot of a page of this file.
    pub fn is_snapshot_of(&self, slot: u32, file: u64) -> bool {
        let is_snapshot = |tag: Tag| matches!(tag.kind, Kind::Snapshot);
        let words = self.words();
        slot < self.memory.slots()
            && Tag::parse(words.tag(slot)).is_some_and(is_snapshot)
            && words.label(slot).file == file
    }

    pub(crate) fn words(&self) -> Words<'_> {
        Words(&*self.memory)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Free> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nothing refers to these any more. Those that are held are free later.
    pub(crate) fn free(&self, slots: Range<u32>, share: Option<&Arc<Share>>) {
        let mut count = slots.len();
        let mut free = self.lock();
        if free.holds.is_empty() {
            free.slots.insert(slots);
        } else {
            let unheld = free.holds.put_aside(slots, share);
            count = unheld.iter().map(Range::len).sum();
            unheld.into_iter().for_each(|run| free.slots.insert(run));
        }
        drop(free);
        share.inspect(|share| share.give_back(count));
    }

    fn allocate(self: &Arc<Slots>, share: Option<&Arc<Share>>) -> Result<SlotRef> {
        let take = || self.lock().slots.take();
        counted(share, 1, take).map(|index| self.slot(index, share.cloned()))
    }

    /// A slot for the bytes of a page that will be committed, by [`FilePages::commit_staged`](crate::FilePages).
    pub fn stage(self: &Arc<Slots>) -> Result<StagedPage> {
        self.allocate(None).map(StagedPage)
    }

    /// So many slots, in ascending order, as runs for which one header is enough; all or none.
    pub(crate) fn take_runs(&self, count: usize, share: Option<&Arc<Share>>) -> Result<Vec<Range<u32>>> {
        counted(share, count, || self.lock().slots.take_runs(count, MOST_COUNT))
    }

    /// A reference to a slot that is in use and that no page refers to yet.
    pub(crate) fn slot(self: &Arc<Slots>, index: u32, share: Option<Arc<Share>>) -> SlotRef {
        SlotRef(Arc::new(Slot { slots: Arc::clone(self), index, share }))
    }

    /// Takes a record. Its state is free until it is committed.
    pub(crate) fn begin(&self, id: u64, file: u64) -> Result<Release> {
        let mut free = self.lock();
        let record = free.records.pop_front().ok_or(Error::NoSpace)?;
        free.sequence += 1;
        let sequence = free.sequence;
        drop(free);
        self.words().set_state(record, 0, 0);
        self.words().set_release(record, id, file);
        Ok(Release { record, sequence })
    }

    /// The one store that commits a release.
    pub(crate) fn commit(&self, release: Release) {
        self.words().set_state(release.record, release.sequence, COMMITTED);
    }

    /// The release was not committed, and no tag names it.
    pub(crate) fn abort(&self, release: Release) {
        self.lock().records.push_front(release.record);
    }

    /// No tag names the release any more: its record keeps the id until it is used again.
    pub(crate) fn done(&self, release: Release) {
        self.words().set_state(release.record, release.sequence, DONE);
        self.lock().records.push_back(release.record);
    }
}

impl fmt::Debug for Slots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slots").field("slots", &self.memory.slots()).field("free", &self.free_slots()).finish()
    }
}

/// Takes slots of a share, if there is one.
fn counted<T>(share: Option<&Arc<Share>>, count: usize, take: impl FnOnce() -> Option<T>) -> Result<T> {
    if share.is_some_and(|share| !share.take(count)) {
        return Err(Error::NoSpace);
    }
    let taken = take();
    if taken.is_none() {
        share.inspect(|share| share.give_back(count));
    }
    taken.ok_or(Error::NoSpace)
}

pub(crate) fn check_size(memory: &dyn SlotMemory) -> Result<()> {
    let fits = (1..=MOST_RECORDS).contains(&memory.records());
    if fits { Ok(()) } else { Err(Error::Layout) }
}

/// A slot that no page refers to yet. It is free when dropped, unless its page was committed; a server that dies leaves
/// nothing of it.
#[derive(Debug)]
pub struct StagedPage(pub(crate) SlotRef);

impl StagedPage {
    /// The slot's number, for a caller that fills the memory itself.
    pub fn slot(&self) -> u32 {
        self.0.index()
    }

    /// Sets the bytes.
    pub fn write(&self, bytes: &PageBytes) {
        self.0.write(0, bytes);
    }
}

/// Keeps the bytes of one slot.
#[derive(Clone)]
pub struct SlotRef(Arc<Slot>);

struct Slot {
    slots: Arc<Slots>,
    index: u32,
    share: Option<Arc<Share>>,
}

impl SlotRef {
    /// The slot's number in the memory.
    pub fn index(&self) -> u32 {
        self.0.index
    }

    /// Another slot, of the same user.
    pub(crate) fn allocate_another(&self) -> Result<SlotRef> {
        self.0.slots.allocate(self.0.share.as_ref())
    }

    /// Copies its bytes.
    pub fn read(&self, bytes: &mut PageBytes) {
        self.0.slots.memory.read(self.0.index, bytes);
    }

    /// Replaces bytes. Only for a slot that no other reference can reach.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        debug_assert!(at + bytes.len() <= PAGE && Arc::strong_count(&self.0) == 1);
        self.0.slots.memory.write(self.0.index, at, bytes);
    }

    /// Writes the header: the tag last, since it makes the rest count.
    pub(crate) fn publish(&self, tag: Tag, label: Label) {
        let words = self.0.slots.words();
        words.set_label(self.0.index, label);
        words.set_tag(self.0.index, tag.word());
    }

    /// Replaces the tag, by one store.
    pub(crate) fn set_tag(&self, tag: Tag) {
        self.0.slots.words().set_tag(self.0.index, tag.word());
    }

    pub(crate) fn tag(&self) -> Option<Tag> {
        Tag::parse(self.0.slots.words().tag(self.0.index))
    }

    /// Recovery will not find it any more. It is free once the last reference is dropped.
    pub(crate) fn retire(&self) {
        self.0.slots.words().set_tag(self.0.index, 0);
    }
}

impl fmt::Debug for SlotRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slot({})", self.0.index)
    }
}

impl Drop for Slot {
    /// A slot that was not retired stays in use, so that a file that is dropped loses nothing.
    fn drop(&mut self) {
        if self.slots.words().tag(self.index) == 0 {
            self.slots.free(self.index..self.index + 1, self.share.as_ref());
        }
    }
}
