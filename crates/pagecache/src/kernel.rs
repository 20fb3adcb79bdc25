//! What the Linux kernel asks of a page: READ, WRITE. [`crate::erase`] has SETATTR(size) and FALLOCATE.

use std::ops::Range;

use crate::entry_runs::Which;
use crate::error::Result;
use crate::file::{Backing, FilePages, add_run, parts};
use crate::page::{PAGE, PageBytes, ZEROS, bytes_inside, merge, offset_of};
use crate::page_set::PageSet;
use crate::rules::{Rule, keep};
use crate::source::Source;

/// Where the bytes of a READ go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadInto {
    /// Into the kernel's page cache: the kernel had no copy of these pages.
    PageCache,
    /// Perhaps past it (the open file has O_DIRECT): the kernel may have a copy besides.
    Unknown,
}

/// What a WRITE contains.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteFrom {
    /// Pages of the kernel's page cache (FUSE_WRITE_CACHE): their bytes may be older than head where no program stored.
    PageCache,
    /// Exactly the bytes that a program wrote.
    Program,
}

/// Where to read the pages of a READ.
#[derive(Debug)]
pub struct ReadPlan {
    /// All pages of the READ, in order.
    pub runs: Vec<(Range<u64>, Source)>,
    pages: Range<u64>,
    stamp: u64,
}

impl FilePages {
    /// The kernel may have these pages from now on. [`FilePages::read_plan`] and [`FilePages::write`] call it.
    pub fn cached(&mut self, pages: Range<u64>) {
        if let Some(given) = &mut self.given {
            given.insert(pages.clone());
        }
        self.cached.insert(pages);
    }

    /// Begins to take pages that will be committed from the kernel, so that the commit needs no twins of them. The caller
    /// sends INVAL for the runs that this returns, without the lock, then calls [`FilePages::dropped`], and then this
    /// again, or never: one at a time. Nothing depends on it; a page that the kernel gets again meanwhile has a twin.
    pub fn begin_drop(
        &mut self,
        backing: &dyn Backing,
        pages: impl IntoIterator<Item = Range<u64>>,
    ) -> Result<Vec<Range<u64>>> {
        // The kernel makes pages past the end itself.
        let inside = backing.size()?.div_ceil(PAGE as u64);
        let mut runs = Vec::new();
        for run in pages {
            for cached in self.cached.runs(run.start..run.end.min(inside)) {
                let twins = self.entries.range(cached.clone()).filter(|(_, entry)| entry.twin.is_some());
                let mut at = cached.start;
                for (page, _) in twins {
                    add_run(&mut runs, at..*page);
                    at = page + 1;
                }
                add_run(&mut runs, at..cached.end);
            }
        }
        self.given = Some(PageSet::new(u64::MAX));
        Ok(runs)
    }

    /// INVAL of these runs has returned: the kernel has no page of them but those that it got meanwhile.
    pub fn dropped(&mut self, runs: &[Range<u64>]) {
        let Some(given) = self.given.take() else { return };
        let given = if keep(Rule::DropKeepsGiven) { given } else { PageSet::new(u64::MAX) };
        for run in runs {
            let mut at = run.start;
            for kept in given.runs(run.clone()) {
                self.cached.remove_all(at..kept.start);
                at = kept.end;
            }
            self.cached.remove_all(at..run.end);
        }
    }

    /// Begins a READ. The caller reads the runs without a lock, then calls [`FilePages::read_done`].
    pub fn read_plan(&mut self, pages: Range<u64>) -> ReadPlan {
        self.cached(pages.clone());
        let mut in_slots = self.hold_runs(&pages);
        let entries = self.entries.range(pages.clone()).filter(|(_, entry)| matches!(entry.head, Source::Slot(_)));
        in_slots.extend(entries.map(|(page, entry)| (*page..page + 1, entry.head.clone())));
        in_slots.sort_unstable_by_key(|(run, _)| run.start);
        let (mut runs, mut at) = (Vec::new(), pages.start);
        for (run, source) in in_slots {
            if at < run.start {
                runs.push((at..run.start, Source::Backing));
            }
            at = run.end;
            runs.push((run, source));
        }
        if at < pages.end {
            runs.push((at..pages.end, Source::Backing));
        }
        ReadPlan { runs, pages, stamp: self.clock }
    }

    /// Ends a READ: true if the bytes may be given to the kernel, false if it must be planned again.
    pub fn read_done(&mut self, plan: &ReadPlan, into: ReadInto) -> bool {
        let newer = |version: u64| version > plan.stamp;
        let mut entries = self.entries.range(plan.pages.clone());
        let advanced = newer(self.forgotten)
            || entries.any(|(_, entry)| newer(entry.version))
            || self.runs_at(plan.pages.clone()).any(|(_, run)| newer(run.version));
        if advanced && keep(Rule::CheckRead) {
            return false;
        }
        if into == ReadInto::PageCache && keep(Rule::ReadEndsTwin) {
            for (_, entry) in self.entries.range_mut(plan.pages.clone()) {
                entry.drop_twin();
            }
        }
        true
    }

    /// A whole READ under the lock; returns how many bytes lie inside the file.
    pub fn read(&mut self, backing: &dyn Backing, offset: u64, bytes: &mut [u8], into: ReadInto) -> Result<usize> {
        let inside = backing.size()?.saturating_sub(offset).min(bytes.len() as u64) as usize;
        let end = offset.saturating_add(bytes.len() as u64);
        let plan = self.read_plan(offset / PAGE as u64..end.div_ceil(PAGE as u64));
        for (pages, source) in &plan.runs {
            let first = offset_of(pages.start).max(offset);
            let last = offset_of(pages.end).min(end);
            let part = &mut bytes[(first - offset) as usize..(last - offset) as usize];
            if !source.copy_part((first - offset_of(pages.start)) as usize, part) {
                backing.read(first, part)?;
            }
        }
        self.read_done(&plan, into);
        Ok(inside)
    }

    /// A WRITE. After an error some of the pages may have been written.
    pub fn write(&mut self, backing: &dyn Backing, offset: u64, bytes: &[u8], from: WriteFrom) -> Result<()> {
        let range = offset..offset.saturating_add(bytes.len() as u64);
        let pages = range.start / PAGE as u64..range.end.div_ceil(PAGE as u64);
        self.cached(pages.clone());
        self.divide(pages.clone(), Which::All);
        if self.entries.range(pages.clone()).next().is_none() && !self.has_copies(&pages) {
            self.count_growth(backing, range.end)?;
            return Ok(backing.write(offset, bytes)?);
        }
        let mut rest = bytes;
        for (page, at, len) in parts(range) {
            let (part, after) = rest.split_at(len);
            self.write_page(backing, page, at, part, from)?;
            rest = after;
        }
        Ok(())
    }

    /// Begins a WRITE of whole pages whose bytes the caller then writes to the backing file itself; false, and nothing is
    /// done, if a page has to be looked at: the kernel has a twin of it, or the bytes before are a base.
    ///
    /// Until they are written the caller lets nothing use these pages but what looks at no bytes, as after
    /// [`FilePages::commit_unseen`].
    pub fn begin_overwrite(&mut self, backing: &dyn Backing, offset: u64, len: usize) -> Result<bool> {
        let pages = offset / PAGE as u64..offset.saturating_add(len as u64) / PAGE as u64;
        let are_whole = offset_of(pages.start) == offset && offset_of(pages.end - pages.start) == len as u64;
        if !are_whole || pages.is_empty() || !pages.clone().all(|page| self.is_plain_head(page)) {
            return Ok(false);
        }
        self.cached(pages.clone());
        if self.has_copies(&pages) || self.entries.range(pages.clone()).next().is_some() || self.run_in(&pages) {
            let mut entries = self.entries.range(pages.clone());
            if entries.all(|(_, entry)| entry.old.is_empty()) && self.bases(&pages).is_empty() {
                let clock = self.tick();
                self.run_in_backing(pages, clock);
            } else {
                self.divide(pages.clone(), Which::All);
                pages.for_each(|page| self.now_in_backing(page, true, None));
            }
        } else {
            self.count_growth(backing, offset_of(pages.end))?;
        }
        Ok(true)
    }

    /// A WRITE up to here changes no page that an owner knows, but perhaps the size.
    fn count_growth(&mut self, backing: &dyn Backing, end: u64) -> Result<()> {
        if end > backing.size()? {
            self.tick();
        }
        Ok(())
    }

    fn run_in(&self, pages: &Range<u64>) -> bool {
        self.runs_at(pages.clone()).next().is_some()
    }

    /// Whether nothing needs the bytes of a page that is overwritten, which are in the backing file: no twin, no base.
    fn is_plain_head(&self, page: u64) -> bool {
        let in_file = |source: &Source| matches!(source, Source::Backing);
        let entry = self.entries.get(&page);
        let is_plain = entry.is_none_or(|entry| {
            entry.twin.is_none() && in_file(&entry.head) && !entry.old.iter().any(|(_, source)| in_file(source))
        });
        is_plain
            && self.run_of(page).is_none_or(|run| run.head.is_none())
            && !(self.is_base(page, self.version(page)..u64::MAX) && keep(Rule::OverwritesNoBase))
    }

    fn write_page(&mut self, backing: &dyn Backing, page: u64, at: usize, bytes: &[u8], from: WriteFrom) -> Result<()> {
        if bytes.len() == PAGE && self.is_plain_head(page) {
            // Most pages of a write-back are such. To look whether one differs from head takes as long as to write it, while
            // others wait for the lock; the few that do not are fetched again.
            let written = backing.write(offset_of(page), bytes);
            // After an error too: a part may be written.
            self.now_in_backing(page, true, None);
            return Ok(written?);
        }
        let region = at..at + bytes.len();
        let (mut head, mut merged) = (ZEROS, ZEROS);
        self.fetch_into(backing, page, &self.head(page), &mut head)?;
        let twin = self.entries.get(&page).and_then(|entry| entry.twin.as_ref());
        let new = match (twin.filter(|_| from == WriteFrom::PageCache), <&PageBytes>::try_from(bytes)) {
            (Some(twin), _) => {
                let mut base = ZEROS;
                twin.slot.read(&mut base);
                merged.copy_from_slice(&head);
                merge(&mut merged[region.clone()], &base[region.clone()], bytes);
                self.counters.cpu_merged += 1;
                &merged
            }
            // Without a copy: most pages of a write-back are whole.
            (None, Ok(whole)) => whole,
            (None, Err(_)) => {
                merged.copy_from_slice(&head);
                merged[region.clone()].copy_from_slice(bytes);
                &merged
            }
        };
        if !keep(Rule::HeadBeforeTwin) {
            self.follow(page, at, bytes, from, new);
        }
        self.store(backing, page, &head, new, region.end)?;
        if keep(Rule::HeadBeforeTwin) {
            self.follow(page, at, bytes, from, new);
        }
        Ok(())
    }

    /// These bytes of the kernel's copy, or of the next that it makes without a READ, are the base of what it writes
    /// next.
    fn follow(&mut self, page: u64, at: usize, bytes: &[u8], from: WriteFrom, head: &PageBytes) {
        let Some(entry) = self.entries.get_mut(&page) else { return };
        let Some(twin) = &mut entry.twin else { return };
        let mut base = ZEROS;
        twin.slot.read(&mut base);
        base[at..at + bytes.len()].copy_from_slice(bytes);
        if from == WriteFrom::PageCache && base == *head {
            entry.drop_twin();
            return self.tidy(page);
        }
        if from == WriteFrom::PageCache {
            twin.again = keep(Rule::InvalidateAgain);
        }
        if keep(if from == WriteFrom::PageCache { Rule::TwinFollows } else { Rule::TwinFollowsProgram }) {
            twin.slot.write(at, bytes);
        }
    }

    /// Makes `new` head, in the backing file; `end` is where the bytes of the WRITE end.
    fn store(&mut self, backing: &dyn Backing, page: u64, head: &[u8], new: &[u8], end: usize) -> Result<()> {
        let changed = head != new;
        // A page that is written to its end needs no question about the file's.
        let inside = if changed && end == PAGE { PAGE } else { bytes_inside(page, backing.size()?) };
        if changed || end > inside {
            let saved = self.save_bases(backing, page)?;
            let written = backing.write(offset_of(page), &new[..end.max(inside)]);
            // After an error too: a part may be written.
            self.now_in_backing(page, changed, saved);
            written?;
        }
        Ok(())
    }
}
