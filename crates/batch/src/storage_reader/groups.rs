//! Which reads of storage serve the fragments of a batch, and which of them are made together.
//!
//! ```text
//!   fragments of one file and device ──coalesce──> reads ──pack──> groups
//!                                       whole units         one bounce buffer each, or none: `p2p`
//! ```

use std::ops::Range;

use spinio_plan::{CoalesceRule, Span, coalesce};
use spinio_transfer::bounce::BUFFER_SIZE;

use crate::device_sink::ENTRY_SIZE;
use crate::state::{BatchState, Fragment, MAX_FRAGMENT};

/// The most reads of one group: all of them complete before any is sent on.
const GROUP_MAX_READS: usize = 64;

/// Bytes that are enough for a group of at least `GROUP_MIN_READS` reads: later reads can reuse its buffer.
const GROUP_BYTES: u64 = 1 << 20;
const GROUP_MIN_READS: usize = 16;

/// The most bytes between two fragments that are read too: about the cost of a command to a fast disk.
const MERGE_GAP: u64 = 4096;

/// One read from storage.
pub(super) struct DiskRead {
    pub(super) source: u16,
    pub(super) offset: u64,
    pub(super) len: u32,
    /// Destination: offset in the group's buffer, or for P2P the address itself.
    pub(super) dest: u64,
    /// Its fragments: indices into [`ReadGroups::wanted`].
    members: Range<usize>,
}

/// Reads that are submitted together.
pub(super) struct ReadGroup {
    pub(super) sink: u16,
    reads: Range<usize>,
    /// Bytes of a buffer; 0: straight into the device.
    pub(super) buffer_len: usize,
}

/// All reads of a batch.
pub(super) struct ReadGroups {
    fragments: Vec<Fragment>,
    wanted: Vec<Span>,
    reads: Vec<DiskRead>,
    groups: Vec<ReadGroup>,
}

impl ReadGroups {
    /// How many groups there are.
    pub(super) fn len(&self) -> usize {
        self.groups.len()
    }

    /// A group.
    pub(super) fn group(&self, group: usize) -> &ReadGroup {
        &self.groups[group]
    }

    /// The reads of a group.
    pub(super) fn reads(&self, group: usize) -> &[DiskRead] {
        &self.reads[self.groups[group].reads.clone()]
    }

    /// The fragments that a read serves.
    pub(super) fn fragments_of(&self, read: &DiskRead) -> impl Iterator<Item = &Fragment> {
        self.wanted[read.members.clone()].iter().map(|w| &self.fragments[w.tag as usize])
    }

    /// The fragments that a group serves.
    pub(super) fn fragments_in(&self, group: usize) -> impl Iterator<Item = &Fragment> {
        self.reads(group).iter().flat_map(|read| self.fragments_of(read))
    }
}

/// Reads and groups being packed.
pub(super) struct GroupPacker<'a> {
    work: &'a BatchState,
    /// Fragments that were packed.
    packed: u32,
    wanted: Vec<Span>,
    reads: Vec<DiskRead>,
    groups: Vec<ReadGroup>,
}

impl GroupPacker<'_> {
    /// For so many fragments.
    pub(super) fn new(work: &BatchState, fragments: usize) -> GroupPacker<'_> {
        GroupPacker { work, packed: 0, wanted: Vec::with_capacity(fragments), reads: Vec::new(), groups: Vec::new() }
    }

    /// Adds the next fragments, all of one file and device.
    pub(super) fn add(&mut self, items: &[Fragment]) {
        let first = self.packed;
        let (mut staged, mut p2p) = (Vec::new(), Vec::new());
        for item in items {
            let span = Span { offset: item.offset, len: u64::from(item.len), tag: self.packed };
            self.packed += 1;
            if self.can_p2p(item) { p2p.push(span) } else { staged.push(span) }
        }
        let group = (items[0].source, items[0].sink);
        self.pack_staged(group, &mut staged);
        self.add_p2p(group, |span| &items[(span.tag - first) as usize], &p2p);
    }

    /// The groups; `fragments`: all that were added, in this order.
    pub(super) fn finish(self, fragments: Vec<Fragment>) -> ReadGroups {
        ReadGroups { fragments, wanted: self.wanted, reads: self.reads, groups: self.groups }
    }

    fn align(&self, source: u16) -> (u64, u64) {
        let align = &self.work.sources[source as usize].file.direct_align;
        (u64::from(align.offset).max(512), u64::from(align.memory).max(512))
    }

    /// Whether storage may write a fragment to its destination itself.
    fn can_p2p(&self, item: &Fragment) -> bool {
        let (unit, memory) = self.align(item.source);
        item.p2p && (item.offset | u64::from(item.len)).is_multiple_of(unit) && item.dest.is_multiple_of(memory)
    }

    fn pack_staged(&mut self, (source, sink): (u16, u16), wanted: &mut [Span]) {
        let (unit, memory) = self.align(source);
        // At most the length of a fragment and its units, so that any fits a buffer next to the list of its members.
        let rule = CoalesceRule { unit, gap: MERGE_GAP, max_len: MAX_FRAGMENT + 2 * unit, max_members: 4096 };
        let runs = coalesce(wanted, &rule);
        let base = self.wanted.len();
        self.wanted.extend_from_slice(wanted);
        let mut group = ReadGroup { sink, reads: self.reads.len()..self.reads.len(), buffer_len: 0 };
        let (mut used, mut entries) = (0u64, 0);
        for run in runs {
            let at = used.next_multiple_of(memory);
            let full = at + run.len + ((entries + run.members.len()) * ENTRY_SIZE) as u64 > BUFFER_SIZE as u64;
            let enough =
                group.reads.len() == GROUP_MAX_READS || group.reads.len() >= GROUP_MIN_READS && used >= GROUP_BYTES;
            let at = if full || enough {
                let next = self.reads.len();
                self.groups.push(ReadGroup { buffer_len: used as usize, ..group });
                group = ReadGroup { sink, reads: next..next, buffer_len: 0 };
                entries = 0;
                0
            } else {
                at
            };
            used = at + run.len;
            entries += run.members.len();
            group.reads.end += 1;
            let members = base + run.members.start..base + run.members.end;
            self.reads.push(DiskRead { source, offset: run.offset, len: run.len as u32, dest: at, members });
        }
        if !group.reads.is_empty() {
            self.groups.push(ReadGroup { buffer_len: used as usize, ..group });
        }
    }

    fn add_p2p<'a>(&mut self, (source, sink): (u16, u16), item: impl Fn(&Span) -> &'a Fragment, wanted: &[Span]) {
        for some in wanted.chunks(GROUP_MAX_READS) {
            let first = self.reads.len();
            for span in some {
                let at = self.wanted.len();
                self.wanted.push(*span);
                let (offset, len, dest) = (item(span).offset, item(span).len, item(span).dest);
                self.reads.push(DiskRead { source, offset, len, dest, members: at..at + 1 });
            }
            self.groups.push(ReadGroup { sink, reads: first..self.reads.len(), buffer_len: 0 });
        }
    }
}
