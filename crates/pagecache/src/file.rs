//! The pages of one file: the table, and what all operations have in common.
//!
//! A page with its head in the backing file, no twin and no owner whose copy may be stale has no entry. Pages side by side
//! that one release has changed may have one entry together ([`crate::entry_runs`]).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::entry_run::EntryRun;
use crate::error::Result;
use crate::lookup::Lookup;
use crate::owner::Owner;
use crate::page::{PAGE, PageBytes, ZEROS, offset_of};
use crate::page_set::PageSet;
use crate::rules::{Rule, keep};
use crate::slot_run::SlotRun;
use crate::slots::{Release, SlotRef, Slots};
use crate::source::{Copied, Source};

/// The backing file, or what stands for it. Each operation is given it anew, since descriptors are cached.
pub trait Backing {
    /// The file's size.
    fn size(&self) -> std::io::Result<u64>;
    /// Fills `bytes` from `offset`; bytes past the end are zeros. Returns how many lie inside.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<usize>;
    /// Writes all bytes; the file grows where they lie past its end.
    fn write(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()>;
    /// Cuts the file, or extends it by zeros.
    fn set_size(&self, size: u64) -> std::io::Result<()>;
    /// Bytes inside the file become zeros; its size stays.
    fn punch(&self, bytes: Range<u64>) -> std::io::Result<()>;
}

/// Names a write replica. The caller gives each map a number of its own and never uses one again.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct OwnerId(pub u64);

/// Pages written out by one call.
const WRITE_RUN: usize = 128;

/// What the kernel may have when a [`FilePages`] is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KernelPages {
    /// Nothing: the first lookup of this file since the mount.
    None,
    /// Any page: an earlier server may have given it away.
    Any,
}

/// Numbers for `status`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Counters {
    /// Releases committed.
    pub commits: u64,
    /// Pages that they published.
    pub published: u64,
    /// Pages merged, of these and of pages that equalled head after the merge.
    pub merged: u64,
    /// Pages released whose bytes equalled head.
    pub unchanged: u64,
    /// CPU twins made.
    pub twins: u64,
    /// Write-backs merged against a twin.
    pub cpu_merged: u64,
    /// Base bytes copied before they were overwritten.
    pub bases_copied: u64,
    /// Owners forgotten because there was no memory for their bases.
    pub owners_lost: u64,
    /// Pages patched or fetched again because head was newer.
    pub refreshed: u64,
}

/// The pages of one file. Used under the caller's lock, which is never held across INVAL.
#[derive(Debug)]
pub struct FilePages {
    pub(crate) slots: Arc<Slots>,
    pub(crate) file: u64,
    pub(crate) entries: BTreeMap<u64, Entry>,
    /// Entries of runs of pages, by their first page.
    pub(crate) runs: BTreeMap<u64, EntryRun>,
    /// Pages that the kernel may have. Those with a twin need not be in it. A page that was past the end of the file
    /// since is one: a program that writes there makes the kernel fill the rest of the page with zeros, without a READ.
    pub(crate) cached: PageSet,
    /// Those that it got since [`FilePages::begin_drop`].
    pub(crate) given: Option<PageSet>,
    pub(crate) owners: BTreeMap<OwnerId, Owner>,
    /// Releases committed but not settled, and their pages.
    pub(crate) releases: BTreeMap<Release, Vec<Range<u64>>>,
    /// Counts versions, overwritten backing pages and lost owners of this file.
    pub(crate) clock: u64,
    /// The counter when an entry was last removed.
    pub(crate) forgotten: u64,
    pub(crate) counters: Counters,
}

#[derive(Debug)]
pub(crate) struct Entry {
    /// The counter when head last changed; 0 if it has not since this server attached.
    pub(crate) version: u64,
    /// `Backing` or `Slot`.
    pub(crate) head: Source,
    /// The counter when the page of the backing file was last written.
    pub(crate) overwritten: u64,
    pub(crate) twin: Option<CpuTwin>,
    /// Versions before head that are the base of an open page, the oldest first.
    pub(crate) old: Vec<(u64, Source)>,
}

#[derive(Debug)]
pub(crate) struct CpuTwin {
    /// Referred to by nothing else.
    pub(crate) slot: SlotRef,
    pub(crate) release: Release,
    /// The kernel's copy was written back since INVAL was asked for, and differs from head.
    pub(crate) again: bool,
}

impl Entry {
    pub(crate) fn new() -> Entry {
        Entry { version: 0, head: Source::Backing, overwritten: 0, twin: None, old: Vec::new() }
    }

    /// Another version is head. `is_base`: the old one is the base of an open page; `saved` is where its bytes are, if not
    /// where they were.
    pub(crate) fn advance(&mut self, head: Source, version: u64, is_base: bool, saved: Option<Source>) {
        let was = std::mem::replace(&mut self.version, version);
        let old = std::mem::replace(&mut self.head, head);
        if let Source::Slot(slot) = &old {
            slot.retire();
        }
        if is_base {
            self.old.push((was, saved.unwrap_or(old)));
        }
    }

    /// Nothing but copies of owners needs it.
    pub(crate) fn is_clean(&self) -> bool {
        matches!(self.head, Source::Backing) && self.twin.is_none() && self.old.is_empty()
    }

    /// Forgets the twin, also for recovery.
    pub(crate) fn drop_twin(&mut self) {
        if let Some(twin) = self.twin.take() {
            twin.slot.retire();
        }
    }
}

impl FilePages {
    /// The pages of a file of this size that has nothing in slots. `file` names it for ever, also after a restart.
    pub fn new(slots: Arc<Slots>, file: u64, kernel: KernelPages, size: u64) -> FilePages {
        let past_the_end = if keep(Rule::PagesPastTheEnd) { size.div_ceil(PAGE as u64) } else { u64::MAX };
        let cached = match kernel {
            KernelPages::Any if keep(Rule::KernelKeepsPages) => 0,
            _ => past_the_end,
        };
        FilePages {
            slots,
            file,
            entries: BTreeMap::new(),
            runs: BTreeMap::new(),
            cached: PageSet::new(cached),
            given: None,
            owners: BTreeMap::new(),
            releases: BTreeMap::new(),
            clock: 1,
            forgotten: 0,
            counters: Counters::default(),
        }
    }

    /// Numbers since this server attached.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// A number that rises with every change of the file's pages of which an owner has copies, of its size, and of the
    /// owners that are known. While it stays, and the CPU has stored nothing, the copies of an owner are head.
    pub fn changes(&self) -> u64 {
        if keep(Rule::CountChanges) { self.clock } else { 0 }
    }

    /// Whether nothing would be lost or waited for if this were dropped: no snapshot, no twin, no owner.
    pub fn is_idle(&self) -> bool {
        let clean = |entry: &Entry| matches!(entry.head, Source::Backing) && entry.twin.is_none();
        let in_file = |run: &EntryRun| run.head.is_none();
        self.owners.is_empty()
            && self.releases.is_empty()
            && self.entries.values().all(clean)
            && self.runs.values().all(in_file)
    }

    /// Pages whose head is a snapshot, in ascending order: to be written out.
    pub fn dirty(&self) -> impl Iterator<Item = u64> + use<> {
        self.dirty_runs(0..u64::MAX).into_iter().flatten()
    }

    pub(crate) fn dirty_runs(&self, pages: Range<u64>) -> Vec<Range<u64>> {
        let mut runs = Vec::new();
        let in_slots = self.entries.range(pages.clone()).filter(|(_, entry)| matches!(entry.head, Source::Slot(_)));
        in_slots.for_each(|(page, _)| add_page(&mut runs, *page));
        let of_runs = self.in_runs(pages, |run| run.head.is_some());
        if !of_runs.is_empty() {
            runs.extend(of_runs);
            runs.sort_unstable_by_key(|run| run.start);
        }
        runs
    }

    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Of a page that is in no run.
    pub(crate) fn head(&self, page: u64) -> Source {
        debug_assert!(self.run_of(page).is_none_or(|run| run.head.is_none()));
        self.entries.get(&page).map_or(Source::Backing, |entry| entry.head.clone())
    }

    pub(crate) fn version(&self, page: u64) -> u64 {
        let of_run = || self.run_of(page).map_or(0, |run| run.version);
        self.entries.get(&page).map_or_else(of_run, |entry| entry.version)
    }

    /// Whether a copy with this stamp is head.
    pub(crate) fn is_current(&self, page: u64, stamp: u64) -> bool {
        self.version(page) <= stamp
    }

    /// Where the version with this stamp is; `None` only if it was not kept. Of a page that is in no run.
    pub(crate) fn base(&self, page: u64, stamp: u64) -> Option<Source> {
        debug_assert!(self.run_of(page).is_none_or(|run| run.head.is_none() && run.version <= stamp));
        let Some(entry) = self.entries.get(&page) else { return Some(Source::Backing) };
        if entry.version <= stamp {
            return Some(entry.head.clone());
        }
        entry.old.iter().rev().find(|(version, _)| *version <= stamp).map(|(_, source)| source.clone())
    }

    /// The bytes of a version.
    pub(crate) fn fetch(&self, backing: &dyn Backing, page: u64, source: &Source) -> Result<PageBytes> {
        let mut bytes = ZEROS;
        self.fetch_into(backing, page, source, &mut bytes)?;
        Ok(bytes)
    }

    pub(crate) fn fetch_into(
        &self,
        backing: &dyn Backing,
        page: u64,
        source: &Source,
        bytes: &mut PageBytes,
    ) -> Result<()> {
        if !source.copy(bytes) {
            backing.read(offset_of(page), bytes)?;
        }
        Ok(())
    }

    /// Whether some owner has a copy of one of these pages, or is fetching one.
    pub(crate) fn has_copies(&self, pages: &Range<u64>) -> bool {
        self.owners.values().any(|owner| owner.copies(pages.clone()).next().is_some())
    }

    /// Whether an open page has a base with one of these stamps.
    pub(crate) fn is_base(&self, page: u64, stamps: Range<u64>) -> bool {
        is_base(&self.owners, page, stamps)
    }

    /// Called before the page's bytes in the backing file are overwritten: copies those that are the base of an open
    /// page. Returns the copy of head, if it is one of them.
    pub(crate) fn save_bases(&mut self, backing: &dyn Backing, page: u64) -> Result<Option<Source>> {
        let entry = self.entries.get(&page);
        let in_file = |source: &Source| matches!(source, Source::Backing);
        let old = entry.is_some_and(|entry| entry.old.iter().any(|(_, source)| in_file(source)));
        let head = entry.is_none_or(|entry| in_file(&entry.head)) && self.is_base(page, self.version(page)..u64::MAX);
        if !(old || head) || !keep(Rule::CopyBase) {
            return Ok(None);
        }
        let bytes = self.fetch(backing, page, &Source::Backing)?;
        let Some(copy) = Copied::kept(&bytes, &self.slots).map(Source::Memory) else {
            self.lose_owners_of(page);
            return Ok(None);
        };
        self.counters.bases_copied += 1;
        if let Some(entry) = self.entries.get_mut(&page) {
            entry.old.iter_mut().filter(|(_, source)| in_file(source)).for_each(|(_, source)| *source = copy.clone());
        }
        Ok(head.then_some(copy))
    }

    /// There is no memory for the base of this page: its owners are lost.
    fn lose_owners_of(&mut self, page: u64) {
        self.lose_owners(|file, owner| {
            let base = owner.get(page).base();
            base.is_some_and(|stamp| !matches!(file.base(page, stamp), Some(Source::Slot(_) | Source::Memory(_))))
        });
    }

    /// There is no memory for the bases of these pages: as above.
    pub(crate) fn lose_owners_with_bases(&mut self, pages: &Range<u64>) {
        self.lose_owners(|_, owner| owner.runs(pages.clone()).any(|(_, replica)| replica.base().is_some()));
    }

    /// Forgets owners, whose epochs are lost.
    fn lose_owners(&mut self, is_lost: impl Fn(&Self, &Owner) -> bool) {
        let lost: Vec<OwnerId> =
            self.owners.iter().filter(|(_, owner)| is_lost(self, owner)).map(|(id, _)| *id).collect();
        self.counters.owners_lost += lost.len() as u64;
        lost.into_iter().for_each(|owner| self.drop_owner(owner));
    }

    /// Makes a new version head. `saved` is where the bytes of the old head are, if not where they were.
    pub(crate) fn advance(&mut self, page: u64, head: Source, version: u64, saved: Option<Source>) {
        let was = self.version(page);
        let is_base = self.is_base(page, was..version);
        self.entries.entry(page).or_insert_with(Entry::new).advance(head, version, is_base, saved);
    }

    /// The page's bytes in the backing file are head now. `changed`: they are a new version.
    pub(crate) fn now_in_backing(&mut self, page: u64, changed: bool, saved: Option<Source>) {
        let clock = self.tick();
        if changed {
            self.advance(page, Source::Backing, clock, saved);
        }
        let entry = self.entries.entry(page).or_insert_with(Entry::new);
        entry.overwritten = clock;
        if let Source::Slot(slot) = std::mem::replace(&mut entry.head, Source::Backing) {
            slot.retire();
        }
        self.tidy(page);
    }

    /// Drops what no owner needs of a page: bytes of old versions, and the entry.
    pub(crate) fn tidy(&mut self, page: u64) {
        let Some(entry) = self.entries.get(&page) else { return };
        if !entry.old.is_empty() {
            let ends = entry.old.iter().skip(1).map(|(version, _)| *version).chain([entry.version]);
            let spans: Vec<_> = entry.old.iter().zip(ends).map(|((version, _), end)| *version..end).collect();
            let mut needed = spans.into_iter().map(|span| self.is_base(page, span)).collect::<Vec<_>>().into_iter();
            if let Some(entry) = self.entries.get_mut(&page) {
                entry.old.retain(|_| needed.next().unwrap_or(true));
            }
        }
        let Some(entry) = self.entries.get(&page) else { return };
        if entry.is_clean() && !self.has_copies(&(page..page + 1)) {
            self.entries.remove(&page);
            self.forgotten = self.clock;
        }
    }

    /// Writes the snapshots of pages, of those that have one, to the backing file: for fsync, by timer, or to free the
    /// slots. The pages ascend. If one cannot be written, the others are. The caller makes them durable.
    pub fn write_out(&mut self, backing: &dyn Backing, pages: &[u64]) -> Result<()> {
        let (mut result, mut rest, mut buffer) = (Ok(()), pages, Vec::new());
        while let Some(first) = rest.first() {
            let of_run = self.runs_at(*first..*first + 1).next().map(|(run, _)| run.end);
            if let Some(end) = of_run {
                let run = rest.iter().zip(*first..end).take(WRITE_RUN);
                let (run, after) = rest.split_at(run.take_while(|(page, expected)| *page == expected).count());
                rest = after;
                let pages = run[0]..run[0] + run.len() as u64;
                let mut done = self.write_out_slots(backing, pages.clone(), &mut buffer);
                if done.is_err() && run.len() > 1 {
                    let mut single = |page| self.write_out_slots(backing, page..page + 1, &mut buffer);
                    done = pages.map(&mut single).fold(Ok(()), Result::and);
                }
                result = result.and(done);
                continue;
            }
            let mut entries = Lookup::new(&self.entries);
            let mut has_snapshot = |page| entries.get(page).is_some_and(|entry| matches!(entry.head, Source::Slot(_)));
            let run = rest.iter().zip(*first..).take(WRITE_RUN);
            let len = run.take_while(|(page, expected)| *page == expected && has_snapshot(**page)).count();
            let (run, after) = rest.split_at(len.max(1));
            rest = after;
            if len > 0
                && let Err(error) = self.write_out_run(backing, run, &mut buffer)
            {
                let mut single = |page: &u64| self.write_out_run(backing, &[*page], &mut buffer);
                let singles = if len > 1 { run.iter().map(&mut single).fold(Ok(()), Result::and) } else { Err(error) };
                result = result.and(singles);
            }
        }
        result
    }

    /// Writes consecutive pages by one call. If it fails, some of them may be in the file; their heads are in slots still.
    fn write_out_run(&mut self, backing: &dyn Backing, run: &[u64], buffer: &mut Vec<PageBytes>) -> Result<()> {
        buffer.resize(run.len(), ZEROS);
        let mut bases = Vec::new();
        let mut entries = Lookup::new(&self.entries);
        for (page, bytes) in run.iter().zip(&mut *buffer) {
            let Some(entry) = entries.get(*page) else { continue };
            entry.head.copy(bytes);
            // Head is in a slot: of old versions only.
            if !entry.old.is_empty() {
                bases.push(*page);
            }
        }
        for page in bases {
            self.save_bases(backing, page)?;
        }
        let first = run.first().copied().unwrap_or_default();
        let inside = backing.size()?.saturating_sub(offset_of(first)) as usize;
        let bytes = buffer.as_flattened();
        if let Err(error) = backing.write(offset_of(first), &bytes[..bytes.len().min(inside)]) {
            // It may have written some of them: what a client reads from the file meanwhile counts for no older version.
            let clock = self.tick();
            for page in run {
                self.entries.entry(*page).and_modify(|entry| entry.overwritten = clock);
            }
            return Err(error.into());
        }
        if let (Some(first), Some(last)) = (run.first(), run.last()) {
            self.are_in_backing(*first..*last + 1);
        }
        Ok(())
    }

    /// The bytes of these pages in the backing file, side by side, are those of their heads now.
    fn are_in_backing(&mut self, run: Range<u64>) {
        let clock = self.tick();
        // Of most pages the owner that released them has a copy, and their entry stays.
        let owners = self.owners.values();
        let copied: Vec<Range<u64>> = owners.flat_map(|owner| owner.copied_runs(run.clone())).collect();
        let mut untidy = Vec::new();
        for (page, entry) in self.entries.range_mut(run) {
            entry.overwritten = clock;
            if let Source::Slot(slot) = std::mem::replace(&mut entry.head, Source::Backing) {
                slot.retire();
            }
            if !entry.old.is_empty() || !copied.iter().any(|copied| copied.contains(page)) {
                untidy.push(*page);
            }
        }
        untidy.into_iter().for_each(|page| self.tidy(page));
    }

    /// Writes out every snapshot of these pages.
    pub fn write_out_all(&mut self, backing: &dyn Backing, pages: Range<u64>) -> Result<()> {
        let dirty: Vec<u64> = self.dirty_runs(pages).into_iter().flatten().collect();
        self.write_out(backing, &dirty)
    }

    /// Forgets everything, also for recovery: the file was deleted and no process has it open.
    pub fn discard(mut self) {
        for entry in self.entries.values_mut() {
            if let Source::Slot(slot) = &entry.head {
                slot.retire();
            }
            entry.drop_twin();
        }
        self.runs.values().filter_map(|run| run.head.as_ref()).for_each(SlotRun::retire);
        for release in std::mem::take(&mut self.releases).into_keys() {
            self.slots.done(release);
        }
    }
}

/// Whether one of the owners has an open page whose base has one of these stamps.
pub(crate) fn is_base(owners: &BTreeMap<OwnerId, Owner>, page: u64, stamps: Range<u64>) -> bool {
    owners.values().any(|owner| owner.get(page).base().is_some_and(|stamp| stamps.contains(&stamp)))
}

/// Adds a page to runs that ascend.
pub(crate) fn add_page(runs: &mut Vec<Range<u64>>, page: u64) {
    match runs.last_mut() {
        Some(run) if run.end == page => run.end += 1,
        _ => runs.push(page..page + 1),
    }
}

/// Adds pages to runs that ascend.
pub(crate) fn add_run(runs: &mut Vec<Range<u64>>, pages: Range<u64>) {
    match runs.last_mut() {
        _ if pages.is_empty() => {}
        Some(run) if run.end == pages.start => run.end = pages.end,
        _ => runs.push(pages),
    }
}

/// The parts of a byte range, page by page: the page, where the part begins in it, and its length.
pub(crate) fn parts(bytes: Range<u64>) -> impl Iterator<Item = (u64, usize, usize)> {
    let mut at = bytes.start;
    std::iter::from_fn(move || {
        (at < bytes.end).then(|| {
            let within = (at % PAGE as u64) as usize;
            let len = (bytes.end - at).min((PAGE - within) as u64) as usize;
            let part = (at / PAGE as u64, within, len);
            at += len as u64;
            part
        })
    })
}
