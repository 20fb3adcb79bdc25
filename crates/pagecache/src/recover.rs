//! What a new server finds in the state memory.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::file::{Backing, CpuTwin, Entry, FilePages, KernelPages, add_page};
use crate::free_slots::FreeSlots;
use crate::holds::Holds;
use crate::layout::{COMMITTED, DONE, Kind, SEQUENCES, SlotMemory, Tag, Words};
use crate::page::bytes_inside;
use crate::rules::{Rule, keep};
use crate::slots::{Free, Release, Slots, check_size};
use crate::source::Source;

/// The slots of one file that an earlier server left.
#[derive(Debug, Default)]
pub struct Recovered {
    file: u64,
    /// Slots of committed snapshots and twins.
    slots: Vec<Found>,
    releases: Vec<Release>,
}

#[derive(Debug)]
struct Found {
    slot: u32,
    kind: Kind,
    release: Option<Release>,
    page: u64,
    version: u64,
}

impl Recovered {
    /// The file's name in the state memory.
    pub fn file(&self) -> u64 {
        self.file
    }

    /// Frees its slots: the file was deleted.
    pub fn discard(self, slots: &Arc<Slots>) {
        self.slots.iter().for_each(|found| slots.slot(found.slot, None).retire());
        self.releases.into_iter().for_each(|release| slots.done(release));
    }
}

impl Slots {
    /// Takes over the memory of a server that died. Files with slots are returned: each must be given to
    /// [`FilePages::recover`], before the file is used.
    pub fn recover(memory: Arc<dyn SlotMemory>) -> Result<(Arc<Slots>, Vec<Recovered>)> {
        check_size(&*memory)?;
        let words = Words(&*memory);
        if !words.is_formatted() {
            return Err(Error::Layout);
        }
        let mut files: BTreeMap<u64, Recovered> = BTreeMap::new();
        let (slots, records) = (FreeSlots::none(memory.slots()), Default::default());
        let mut free = Free { slots, holds: Holds::default(), records, sequence: 0 };
        let mut done = Vec::new();
        for record in 0..memory.records() {
            let (sequence, code) = words.state(record);
            if sequence >= SEQUENCES {
                words.set_state(record, 0, 0);
                free.records.push_back(record);
                continue;
            }
            free.sequence = free.sequence.max(sequence);
            match code {
                COMMITTED => {
                    let file = words.release(record).1;
                    let releases = &mut files.entry(file).or_default().releases;
                    releases.push(Release { record, sequence });
                }
                DONE => done.push((sequence, record)),
                _ => free.records.push_back(record),
            }
        }
        done.sort_unstable();
        free.records.extend(done.into_iter().map(|(_, record)| record));
        for slot in 0..memory.slots() {
            let tag = Tag::parse(words.tag(slot));
            let is_live = |tag: &Tag| match tag.record {
                Some((record, sequence)) if record < memory.records() && sequence < SEQUENCES => {
                    free.sequence = free.sequence.max(sequence);
                    words.state(record) == (sequence, COMMITTED) || !keep(Rule::CommittedOnly)
                }
                Some(_) => false,
                None => true,
            };
            let label = words.label(slot);
            let Some(tag) = tag.filter(is_live).filter(|_| label.is_possible(slot, memory.slots())) else {
                words.set_tag(slot, 0);
                free.slots.insert(slot..slot + 1);
                continue;
            };
            // Those after it are next: from now on each has a header that counts.
            words.divide(slot, label, tag);
            let release = tag.record.map(|(record, sequence)| Release { record, sequence });
            let found = Found { slot, kind: tag.kind, release, page: label.page, version: label.version };
            files.entry(label.file).or_default().slots.push(found);
        }
        for (file, recovered) in &mut files {
            recovered.file = *file;
            // The lowest last, where older snapshots are as a rule: so the model sees whether they are taken for newer ones.
            recovered.slots.reverse();
        }
        Ok((Slots::with(memory, free), files.into_values().collect()))
    }
}

impl FilePages {
    /// The pages of a file that an earlier server had snapshots or twins of.
    ///
    /// The caller sends INVAL for [`FilePages::pending`] and calls [`FilePages::invalidated`], as after a commit.
    pub fn recover(slots: Arc<Slots>, recovered: Recovered, backing: &dyn Backing) -> Result<FilePages> {
        let size = backing.size()?;
        let mut pages = FilePages::new(slots, recovered.file, KernelPages::Any, size);
        let mut of_release: BTreeMap<Release, HashSet<u64>> =
            recovered.releases.iter().map(|release| (*release, HashSet::new())).collect();
        for found in recovered.slots {
            let slot = pages.slots.slot(found.slot, None);
            pages.clock = pages.clock.max(found.version);
            if let Some(of_release) = found.release.and_then(|release| of_release.get_mut(&release)) {
                of_release.insert(found.page);
            }
            let entry = pages.entries.entry(found.page).or_insert_with(Entry::new);
            match (found.kind, found.release) {
                (Kind::Twin, Some(release)) => entry.twin = Some(CpuTwin { slot, release, again: false }),
                (Kind::Twin, None) => slot.retire(),
                (Kind::Snapshot, _) => {
                    let later = found.version > entry.version || !keep(Rule::LatestSnapshot);
                    if later && bytes_inside(found.page, size) > 0 {
                        entry.version = found.version;
                        if let Source::Slot(older) = std::mem::replace(&mut entry.head, Source::Slot(slot)) {
                            older.retire();
                        }
                    } else {
                        slot.retire();
                    }
                }
            }
        }
        for (release, of_release) in of_release {
            let mut of_release: Vec<u64> = of_release.into_iter().collect();
            of_release.sort_unstable();
            let mut runs = Vec::new();
            of_release.into_iter().for_each(|page| add_page(&mut runs, page));
            pages.releases.insert(release, runs);
        }
        let all: Vec<u64> = pages.entries.keys().copied().collect();
        all.into_iter().for_each(|page| pages.tidy(page));
        Ok(pages)
    }
}
