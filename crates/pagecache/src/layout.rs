//! What the state memory contains: one header, release records, slots with headers.
//!
//! ```text
//!   words (u64)                                                       bytes
//!   ┌ 8 ────────┬ 4 per record ───────────┬ 4 per slot ─────────────┐ ┌ 4096 per slot ┐
//!   │ magic     │ state: sequence | code  │ tag: sequence, record,  │ │               │
//!   │ slots     │ id of the client        │      kind               │ │               │
//!   │ records   │ file                    │ file                    │ │               │
//!   │           │                         │ page, count  version    │ │               │
//!   └───────────┴─────────────────────────┴─────────────────────────┘ └───────────────┘
//! ```
//!
//! A header is that of `count` slots side by side, with as many pages of the file side by side; what the headers of the
//! others say does not count. So a release of a run of pages stores four words, not four for each of its pages. A run is
//! divided by one store to its `count`, after the header of the second part was written.
//!
//! A slot that names a record counts only if the record's state is COMMITTED with the same sequence: so one store
//! commits all slots of a release. Before a record is used again, its slots are settled: they name no record.
//! A server may be killed between any two stores; [`crate::Slots::recover`] reads what it left.

use crate::page::PageBytes;

/// Memory that outlives the server: words, and pages of bytes.
///
/// A store must become visible after all earlier ones of the same thread (`Ordering::Release`), a load before all later
/// ones (`Ordering::Acquire`). Words are zero at birth. Two threads never access the bytes of one slot at the same time
/// unless both read.
pub trait SlotMemory: Send + Sync {
    /// Slots that the memory has.
    fn slots(&self) -> u32;
    /// Release records that the memory has.
    fn records(&self) -> u32;
    /// Word number `index`, below [`words`].
    fn load(&self, index: usize) -> u64;
    /// Replaces a word by one atomic store.
    fn store(&self, index: usize, value: u64);
    /// Copies the bytes of a slot.
    fn read(&self, slot: u32, bytes: &mut PageBytes);
    /// Replaces bytes of a slot, from byte `at`.
    fn write(&self, slot: u32, at: usize, bytes: &[u8]);
}

/// Words that a memory of this many slots and records needs.
pub const fn words(slots: u32, records: u32) -> usize {
    HEADER + RECORD * records as usize + SLOT * slots as usize
}

const HEADER: usize = 8;
const RECORD: usize = 4;
const SLOT: usize = 4;
const MAGIC: u64 = u64::from_le_bytes(*b"SPNpage2");

/// A record's state: free, or a sequence number with one of these codes.
pub(crate) const COMMITTED: u64 = 1;
pub(crate) const DONE: u64 = 2;

/// What a slot contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Released bytes: the head of its page.
    Snapshot,
    /// The bytes that the kernel's copy of a page was made from.
    Twin,
}

/// The first word of a slot's header: free, or a kind and the record that it belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Tag {
    pub(crate) kind: Kind,
    /// Record and sequence; `None` once the release is settled.
    pub(crate) record: Option<(u32, u64)>,
}

const KIND_BITS: u32 = 2;
const RECORD_BITS: u32 = 16;

/// Sequence numbers are below: each release takes one, and a tag has room for them.
pub(crate) const SEQUENCES: u64 = 1 << 45;
/// Pages of a file are below, so that offsets of bytes are numbers too.
const PAGES: u64 = 1 << PAGE_BITS;
const PAGE_BITS: u32 = 51;
/// Slots that have one header at most: a word has room for the number less one beside that of a page.
pub(crate) const MOST_COUNT: u32 = 1 << (64 - PAGE_BITS);
/// Versions are below: stamps of owners have room for them.
const VERSIONS: u64 = 1 << 60;

/// Records at most.
pub(crate) const MOST_RECORDS: u32 = (1 << RECORD_BITS) - 1;

impl Tag {
    pub(crate) fn word(self) -> u64 {
        let kind = match self.kind {
            Kind::Snapshot => 1,
            Kind::Twin => 2,
        };
        let (record, sequence) = self.record.map_or((0, 0), |(record, sequence)| (record as u64 + 1, sequence));
        sequence << (KIND_BITS + RECORD_BITS) | record << KIND_BITS | kind
    }

    pub(crate) fn parse(word: u64) -> Option<Tag> {
        let kind = match word & 3 {
            1 => Kind::Snapshot,
            2 => Kind::Twin,
            _ => return None,
        };
        let record = (word >> KIND_BITS & MOST_RECORDS as u64) as u32;
        let sequence = word >> (KIND_BITS + RECORD_BITS);
        Some(Tag { kind, record: record.checked_sub(1).map(|record| (record, sequence)) })
    }
}

/// The rest of a slot's header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Label {
    pub(crate) file: u64,
    /// The page whose bytes are in the slot that has the header.
    pub(crate) page: u64,
    /// Slots, and pages; at least 1.
    pub(crate) count: u32,
    pub(crate) version: u64,
}

impl Label {
    /// Whether a server can have written it, at this slot of so many.
    pub(crate) fn is_possible(&self, slot: u32, slots: u32) -> bool {
        self.page + u64::from(self.count) <= PAGES
            && self.version < VERSIONS
            && u64::from(slot) + u64::from(self.count) <= u64::from(slots)
    }

    fn pages(&self) -> u64 {
        self.page | u64::from(self.count - 1) << PAGE_BITS
    }
}

/// Access to the words by their names.
pub(crate) struct Words<'a>(pub(crate) &'a dyn SlotMemory);

impl Words<'_> {
    fn record(&self, record: u32) -> usize {
        HEADER + RECORD * record as usize
    }

    fn slot(&self, slot: u32) -> usize {
        HEADER + RECORD * self.0.records() as usize + SLOT * slot as usize
    }

    /// Marks the memory as laid out; false if it was, in the same way.
    pub(crate) fn format(&self) {
        self.0.store(1, self.0.slots() as u64);
        self.0.store(2, self.0.records() as u64);
        self.0.store(0, MAGIC);
    }

    pub(crate) fn is_formatted(&self) -> bool {
        self.0.load(0) == MAGIC && self.0.load(1) == self.0.slots() as u64 && self.0.load(2) == self.0.records() as u64
    }

    /// Sequence and code of a record; (0, 0) if it is free.
    pub(crate) fn state(&self, record: u32) -> (u64, u64) {
        let word = self.0.load(self.record(record));
        (word >> 2, word & 3)
    }

    pub(crate) fn set_state(&self, record: u32, sequence: u64, code: u64) {
        self.0.store(self.record(record), sequence << 2 | code);
    }

    /// The client's id and the file of a release.
    pub(crate) fn release(&self, record: u32) -> (u64, u64) {
        (self.0.load(self.record(record) + 1), self.0.load(self.record(record) + 2))
    }

    pub(crate) fn set_release(&self, record: u32, id: u64, file: u64) {
        self.0.store(self.record(record) + 1, id);
        self.0.store(self.record(record) + 2, file);
    }

    pub(crate) fn tag(&self, slot: u32) -> u64 {
        self.0.load(self.slot(slot))
    }

    pub(crate) fn set_tag(&self, slot: u32, tag: u64) {
        self.0.store(self.slot(slot), tag);
    }

    pub(crate) fn label(&self, slot: u32) -> Label {
        let at = self.slot(slot);
        let pages = self.0.load(at + 2);
        Label {
            file: self.0.load(at + 1),
            page: pages & (PAGES - 1),
            count: (pages >> PAGE_BITS) as u32 + 1,
            version: self.0.load(at + 3),
        }
    }

    pub(crate) fn set_label(&self, slot: u32, label: Label) {
        let at = self.slot(slot);
        self.0.store(at + 1, label.file);
        self.0.store(at + 2, label.pages());
        self.0.store(at + 3, label.version);
    }

    /// Gives each slot of a run a header of its own: those of the others count with the last store.
    pub(crate) fn divide(&self, slot: u32, label: Label, tag: Tag) {
        for at in 1..label.count {
            let page = label.page + u64::from(at);
            self.set_label(slot + at, Label { page, count: 1, ..label });
            self.set_tag(slot + at, tag.word());
        }
        if label.count > 1 {
            self.end_run(slot, 1);
        }
    }

    /// Divides a run after its first `count` slots: the header of the rest counts too from now on. One store.
    pub(crate) fn end_run(&self, slot: u32, count: u32) {
        let label = Label { count, ..self.label(slot) };
        self.0.store(self.slot(slot) + 2, label.pages());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tag_survives_its_word() {
        for kind in [Kind::Snapshot, Kind::Twin] {
            for record in [None, Some((0, 1)), Some((MOST_RECORDS - 1, (1 << 46) - 1))] {
                let tag = Tag { kind, record };
                assert_eq!(Tag::parse(tag.word()), Some(tag));
            }
        }
        assert_eq!(Tag::parse(0), None);
        assert_eq!(Tag::parse(3), None);
    }
}
