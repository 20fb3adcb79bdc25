//! A GPU process with one write replica: acquire, kernels, release, death.
//!
//! A fingerprint is the page's bytes here. While an acquire or a release goes on, no kernel runs.

use std::collections::VecDeque;
use std::ops::Range;

use super::PAGES;
use super::oracle::{Agent, BYTES_OF_PAGE, POSITIONS, StoreId, byte, offset};
use super::world::{Inval, Reply, World, note};
use crate::page::{PAGE, PageBytes, ZEROS, bytes_inside, merge};
use crate::rules::{Rule, keep};
use crate::{
    Access, Backing, Commit, Ended, Error, FilePages, Fill, OwnerId, PeerCopy, Peers, Source, StagedPages, StagedRun,
};

enum State {
    Ready,
    /// The client flushes what the CPU stored: of each page, whether its write-back was begun.
    Flushing {
        pages: Vec<(usize, bool)>,
        range: Range<u64>,
        access: Access,
        overwrite: bool,
        begin: u64,
    },
    Fetching {
        fetch: VecDeque<Fetch>,
        peers: Copied,
        range: Range<u64>,
        access: Access,
        begin: u64,
    },
    Releasing,
}

/// Half a page to fetch: others act between the halves.
struct Fetch {
    page: usize,
    half: usize,
    source: Source,
    /// Instead of half a page, and of the source.
    peer: Option<PeerCopy>,
}

/// Pages of an acquire that other GPUs had: copied, and those that could not be.
#[derive(Default)]
struct Copied {
    copied: Vec<(u64, PeerCopy)>,
    refused: Vec<u64>,
}

/// Pages whose copies were head while these were so: until one of them changes they are.
struct Current {
    changes: u64,
    stores: u64,
    pages: Range<u64>,
}

pub(super) struct Gpu {
    index: usize,
    pub(super) owner: OwnerId,
    state: State,
    replica: Vec<PageBytes>,
    prints: Vec<PageBytes>,
    /// Pages to be released whatever their fingerprint is.
    overwritten: [bool; PAGES],
    /// Of each page, when the epoch's last acquire of it began; and whether it may be stored to.
    epoch: [Option<(u64, bool)>; PAGES],
    /// Stores that are not released.
    stores: Vec<StoreId>,
    /// Stores of other GPUs that this epoch's kernels have loaded.
    seen: Vec<StoreId>,
    /// The release whose commit was asked for, and not answered.
    attempt: Option<(u64, Vec<StoreId>)>,
    /// As the last acquire began, if no program could write then.
    asked: Option<Current>,
    current: Option<Current>,
}

impl Gpu {
    pub(super) fn new(index: usize, owner: OwnerId) -> Gpu {
        Gpu {
            index,
            owner,
            state: State::Ready,
            replica: vec![ZEROS; PAGES],
            prints: vec![ZEROS; PAGES],
            overwritten: [false; PAGES],
            epoch: [None; PAGES],
            stores: Vec::new(),
            seen: Vec::new(),
            attempt: None,
            asked: None,
            current: None,
        }
    }

    pub(super) fn released(&mut self) {
        self.state = State::Ready;
    }
}

fn page_of(store: &StoreId) -> usize {
    store.0 / BYTES_OF_PAGE
}

impl World {
    /// One thing that this GPU process does: false if it cannot now.
    pub(super) fn gpu_step(&mut self, gpu: usize) -> bool {
        match &self.gpus[gpu].state {
            State::Ready => {}
            State::Flushing { .. } => return self.flush(gpu),
            State::Fetching { .. } => return self.fetch(gpu),
            State::Releasing => return self.below(30) == 0 && self.die(gpu),
        }
        if self.bias.gpus {
            return match self.below(16) {
                0..=4 => self.acquire(gpu),
                5..=8 => self.gpu_store(gpu),
                9..=10 => self.gpu_load(gpu),
                11..=13 => self.release(gpu),
                _ => self.below(3) == 0 && self.drop_pages(gpu),
            };
        }
        match self.below(16) {
            0..=3 => self.acquire(gpu),
            4..=10 => self.gpu_store(gpu),
            11..=12 => self.gpu_load(gpu),
            13..=14 => self.release(gpu),
            15 if self.below(2) == 0 => self.drop_pages(gpu),
            _ => self.below(4) == 0 && self.die(gpu),
        }
    }

    fn die(&mut self, gpu: usize) -> bool {
        self.abandon(gpu);
        true
    }

    fn acquire(&mut self, gpu: usize) -> bool {
        let first = self.page();
        let most = if self.bias.gpus { 1 } else { PAGES - first };
        let range = first as u64..(first + 1 + self.below(most)) as u64;
        let access = if self.below(if self.bias.gpus { 2 } else { 5 }) == 0 { Access::Read } else { Access::Write };
        let overwrite = access == Access::Write && !self.bias.gpus && self.below(5) == 0;
        note!(self, "gpu {gpu}: acquire {range:?} {access:?}, overwrite: {overwrite}");
        let (changes, stores) = (self.server().pages.changes(), self.kernel.stores);
        let is_current = |current: &Current| {
            (current.changes, current.stores) == (changes, stores)
                && current.pages.start <= range.start
                && range.end <= current.pages.end
        };
        if access == Access::Read && self.gpus[gpu].current.as_ref().is_some_and(is_current) {
            note!(self, "gpu {gpu}: current");
            self.begin_epoch(gpu, range, access, self.now);
            return true;
        }
        let without_writers = self.kernel.is_without_writers();
        self.gpus[gpu].current = None;
        self.gpus[gpu].asked = without_writers.then(|| Current { changes, stores, pages: range.clone() });
        let pages = range.clone().map(|page| (page as usize, false)).collect();
        self.gpus[gpu].state = State::Flushing { pages, range, access, overwrite, begin: self.now };
        true
    }

    fn flush(&mut self, gpu: usize) -> bool {
        let State::Flushing { pages, range, access, overwrite, begin } = &mut self.gpus[gpu].state else {
            return false;
        };
        let kernel = &mut self.kernel;
        pages.retain_mut(|(page, begun)| {
            if kernel.is_under_write_back(*page) {
                return true;
            }
            if kernel.is_dirty(*page) && !*begun {
                *begun = kernel.write_back(*page);
                return true;
            }
            false
        });
        if !pages.is_empty() {
            return false;
        }
        let (range, access, overwrite, begin) = (range.clone(), *access, *overwrite, *begin);
        let owner = self.gpus[gpu].owner;
        let asked = range.clone();
        if overwrite {
            return self.open_overwritten(gpu, range, begin);
        }
        let peers: Vec<OwnerId> = self.gpus.iter().map(|other| other.owner).filter(|other| *other != owner).collect();
        let peers = if self.bias.gpus || self.below(2) == 0 { &peers[..] } else { &[] };
        let least = if self.bias.gpus { 1 } else { 1 + self.below(2) as u64 };
        let open = |home: &mut FilePages, disk: &dyn Backing| {
            home.open_from(disk, owner, asked, access, Peers { owners: peers, least }).unwrap()
        };
        let Some(fills) = self.call(open) else { return true };
        note!(self, "gpu {gpu}: open {range:?}: {fills:?}");
        let fetch = self.take(gpu, fills);
        self.gpus[gpu].state = State::Fetching { fetch, peers: Copied::default(), range, access, begin };
        true
    }

    /// Kernels will store to all of these pages: they begin with whatever the replica has.
    fn open_overwritten(&mut self, gpu: usize, range: Range<u64>, begin: u64) -> bool {
        let (owner, asked) = (self.gpus[gpu].owner, range.clone());
        let Some(kept) = self.call(|home, _| home.open_overwritten(owner, asked).unwrap()) else { return true };
        note!(self, "gpu {gpu}: opened without a fetch: {kept:?}");
        // A page that was open is not brought up to date.
        for page in range {
            let epoch = &mut self.gpus[gpu].epoch[page as usize];
            *epoch = epoch.filter(|(_, writing)| *writing).or(Some((begin, true)));
        }
        for page in kept.into_iter().flat_map(|fill| fill.pages) {
            let page = page as usize;
            self.gpus[gpu].epoch[page] = Some((begin, true));
            self.gpus[gpu].overwritten[page] = true;
            self.gpus[gpu].replica[page] = ZEROS;
            for (position, at) in POSITIONS.into_iter().enumerate() {
                let value = self.value();
                self.gpus[gpu].replica[page][at] = value;
                let id = self.oracle.store(byte(page, position), Agent::Gpu(gpu), begin, self.now, value, None);
                self.gpus[gpu].stores.push(id);
            }
        }
        self.gpus[gpu].current = None;
        self.gpus[gpu].state = State::Ready;
        true
    }

    /// Applies what changes pages with stores; returns the pages to fetch.
    fn take(&mut self, gpu: usize, fills: Vec<Fill>) -> VecDeque<Fetch> {
        let mut fetch = VecDeque::new();
        let gpu = &mut self.gpus[gpu];
        for mut fill in fills {
            let page = fill.pages.start as usize;
            let Some(base) = fill.base else {
                while !fill.pages.is_empty() {
                    let Fill { pages, source, peer, .. } = fill.split_to(1);
                    let page = pages.start as usize;
                    if peer.is_some() {
                        fetch.push_back(Fetch { page, half: 0, source, peer });
                        continue;
                    }
                    let half = |half| Fetch { page, half, source: source.clone(), peer: None };
                    fetch.extend([half(0), half(1)]);
                }
                continue;
            };
            let (mut old, mut new) = (ZEROS, ZEROS);
            assert!(base.copy(&mut old) && fill.source.copy(&mut new), "a patch has its bytes");
            let mut patched = new;
            merge(&mut patched, &old, &gpu.replica[page]);
            gpu.replica[page] = patched;
            gpu.prints[page] = if keep(Rule::FingerprintOfHead) { new } else { gpu.replica[page] };
        }
        fetch
    }

    fn fetch(&mut self, gpu: usize) -> bool {
        let State::Fetching { fetch, peers, range, access, begin } = &mut self.gpus[gpu].state else { return false };
        // What the other GPU does between the steps of a copy is of interest.
        let copies = !peers.copied.is_empty() || fetch.front().is_some_and(|fetch| fetch.peer.is_some());
        if self.bias.gpus && copies && self.random.below(6) != 0 {
            return false;
        }
        if let Some(fetch) = fetch.pop_front() {
            match fetch.peer {
                Some(copy) => self.copy_from_peer(gpu, fetch.page, copy),
                None => self.fetch_half(gpu, &fetch),
            }
            return true;
        }
        let (range, access, begin, peers) = (range.clone(), *access, *begin, std::mem::take(peers));
        let (owner, asked) = (self.gpus[gpu].owner, range.clone());
        let confirm = |home: &mut FilePages, _: &dyn Backing| {
            let mut again = Vec::new();
            for page in asked {
                let run = page..page + 1;
                let copied = peers.copied.iter().find(|(copied, _)| *copied == page);
                again.extend(match copied {
                    Some((_, copy)) => home.filled_from(owner, run, *copy).unwrap(),
                    None if peers.refused.contains(&page) => home.not_filled(owner, run).unwrap(),
                    None => home.filled(owner, run).unwrap(),
                });
            }
            again
        };
        let Some(again) = self.call(confirm) else { return true };
        note!(self, "gpu {gpu}: filled {range:?}, again {again:?}");
        let again = self.take(gpu, again);
        if again.is_empty() {
            self.begin_epoch(gpu, range, access, begin);
            self.gpus[gpu].current = self.gpus[gpu].asked.take();
            self.gpus[gpu].state = State::Ready;
        } else {
            let peers = Copied::default();
            self.gpus[gpu].state = State::Fetching { fetch: again, peers, range, access, begin };
        }
        true
    }

    fn begin_epoch(&mut self, gpu: usize, range: Range<u64>, access: Access, begin: u64) {
        for page in range {
            let epoch = &mut self.gpus[gpu].epoch[page as usize];
            let writing = access == Access::Write || epoch.is_some_and(|(_, writing)| writing);
            *epoch = Some((begin, writing));
        }
    }

    fn fetch_half(&mut self, gpu: usize, fetch: &Fetch) {
        let mut bytes = ZEROS;
        if !fetch.source.copy(&mut bytes) {
            self.disk.read((fetch.page * PAGE) as u64, &mut bytes).unwrap();
        }
        let half = if fetch.half == 0 { 0..PAGE / 2 } else { PAGE / 2..PAGE };
        self.gpus[gpu].replica[fetch.page][half.clone()].copy_from_slice(&bytes[half]);
        self.gpus[gpu].prints[fetch.page] = self.gpus[gpu].replica[fetch.page];
    }

    /// A copy from another GPU, which runs no call meanwhile and begins none; or not, for any reason.
    fn copy_from_peer(&mut self, gpu: usize, page: usize, copy: PeerCopy) {
        let is_free =
            |other: &Gpu| matches!(other.state, State::Ready) && other.epoch[page].is_none_or(|(_, writing)| !writing);
        let source = self.gpus.iter().find(|other| other.owner == copy.owner);
        let source = source.filter(|other| is_free(other) || !keep(Rule::PeerClosed));
        let bytes = source.map(|other| other.replica[page]).filter(|_| self.random.below(8) != 0);
        note!(self, "gpu {gpu}: page {page} from {copy:?}, copied: {}", bytes.is_some());
        let of = &mut self.gpus[gpu];
        let State::Fetching { peers, .. } = &mut of.state else { return };
        match bytes {
            Some(bytes) => {
                peers.copied.push((page as u64, copy));
                of.replica[page] = bytes;
                of.prints[page] = bytes;
            }
            None => peers.refused.push(page as u64),
        }
    }

    fn gpu_load(&mut self, gpu: usize) -> bool {
        let (page, position) = (self.page(), self.position());
        let byte = byte(page, position);
        let Some((begin, _)) = self.gpus[gpu].epoch[page] else { return false };
        if offset(byte) < self.disk.len() {
            let value = self.gpus[gpu].replica[page][POSITIONS[position]];
            self.check("gpu load", byte, Agent::Gpu(self.gpus[gpu].index), begin, value);
            let seen = self.oracle.seen(byte, Agent::Gpu(gpu), value);
            self.gpus[gpu].seen.extend(seen);
        }
        true
    }

    fn gpu_store(&mut self, gpu: usize) -> bool {
        let (page, position) = (self.page(), self.position());
        let Some((begin, true)) = self.gpus[gpu].epoch[page] else { return false };
        let before = self.gpus[gpu].prints[page][POSITIONS[position]];
        // As a kernel that undoes what it did.
        let value = if self.bias.gpus && self.below(2) == 0 { before } else { self.value() };
        let old = std::mem::replace(&mut self.gpus[gpu].replica[page][POSITIONS[position]], value);
        note!(self, "gpu {gpu}: page {page} byte {position}: {old} -> {value}");
        let id = self.oracle.store(byte(page, position), Agent::Gpu(gpu), begin, self.now, value, Some(old));
        self.gpus[gpu].stores.push(id);
        true
    }

    fn release(&mut self, gpu: usize) -> bool {
        let first = self.below(PAGES) as u64;
        let range = if self.below(2) == 0 { 0..PAGES as u64 } else { first..PAGES as u64 };
        let of = &self.gpus[gpu];
        let is_open =
            |page: &usize| range.contains(&(*page as u64)) && of.epoch[*page].is_some_and(|(_, writing)| writing);
        let open: Vec<usize> = (0..PAGES).filter(is_open).collect();
        if open.is_empty() {
            return false;
        }
        let is_changed = |page: &usize| of.overwritten[*page] || of.replica[*page] != of.prints[*page];
        let changed: Vec<usize> = open.iter().copied().filter(is_changed).collect();
        let bytes: Vec<(u64, PageBytes)> = changed.iter().map(|page| (*page as u64, of.replica[*page])).collect();
        let owner = of.owner;
        self.next_id += 1;
        let id = self.next_id;
        let released = self.gpus[gpu].stores.iter().filter(|store| open.contains(&page_of(store))).copied().collect();
        let size = self.disk.len();
        self.gpus[gpu].current = None;
        self.gpus[gpu].attempt = Some((id, released));
        note!(self, "gpu {gpu}: release {open:?}, changed {changed:?}");
        // Handed over where that can be done, or staged by runs; else copied.
        let how = self.below(4);
        let commit = self.call(|home, disk| {
            if how < 2
                && let Some(commit) = hand_over(home, disk, owner, id, &bytes)
            {
                return Ok(commit);
            }
            if how == 2 {
                let mut staged = StagedPages::default();
                stage(home, &bytes)?.into_iter().for_each(|(first, run)| staged.push(first, run));
                return home.commit_all(disk, owner, id, &mut staged);
            }
            let pages = bytes.iter().map(|(page, bytes)| (*page, bytes));
            home.commit(disk, owner, id, pages)
        });
        let Some(commit) = commit else { return true };
        let (_, released) = self.gpus[gpu].attempt.take().expect("asked for");
        note!(self, "gpu {gpu}: {commit:?}");
        let commit = match commit {
            Ok(commit) => commit,
            Err(Error::NoSpace) => {
                self.call(|home, disk| home.write_out_all(disk, 0..u64::MAX).unwrap());
                return true;
            }
            Err(Error::Busy) => return true,
            Err(error) => {
                self.fail(format!("gpu {gpu}: commit: {error}"));
                return true;
            }
        };
        let merged: Vec<usize> = commit.merged.into_iter().flatten().map(|page| page as usize).collect();
        let of = &mut self.gpus[gpu];
        for page in open {
            of.epoch[page] = None;
            of.overwritten[page] = false;
            if !merged.contains(&page) {
                of.prints[page] = of.replica[page];
            }
        }
        of.stores.retain(|store| !released.contains(store));
        of.state = State::Releasing;
        let seen = std::mem::take(&mut self.gpus[gpu].seen);
        let (seen, rest): (Vec<StoreId>, _) =
            seen.into_iter().partition(|store| range.contains(&(page_of(store) as u64)));
        self.gpus[gpu].seen = rest;
        let mut released = self.publish(released, size);
        released.extend(seen);
        let release = Some(commit.release);
        self.replies.push(Reply { release, stores: released, pages: range, gpu: Some(gpu) });
        let pages = commit.invalidate.into_iter().flatten().map(|page| page as usize).collect();
        self.server().invals.push(Inval { release: commit.release, pages });
        true
    }

    /// Drops the stores of the epoch, or the copies outside of it.
    fn drop_pages(&mut self, gpu: usize) -> bool {
        let (range, open) = (self.page() as u64..PAGES as u64, self.below(2) == 0);
        self.gpus[gpu].current = None;
        let owner = self.gpus[gpu].owner;
        note!(self, "gpu {gpu}: drop {range:?}, open: {open}");
        let asked = range.clone();
        let dropped = self.call(|home, _| match open {
            true => home.end_epoch(owner, asked, Ended::Abandoned).unwrap(),
            false => home.drop_copies(owner, asked).unwrap(),
        });
        if dropped.is_none() {
            return true;
        }
        let of = &mut self.gpus[gpu];
        let is_dropped = |page: usize| {
            let writing = of.epoch[page].is_some_and(|(_, writing)| writing);
            range.contains(&(page as u64)) && writing == open
        };
        let pages: Vec<usize> = (0..PAGES).filter(|page| is_dropped(*page)).collect();
        for &page in &pages {
            of.epoch[page] = None;
            of.overwritten[page] = false;
            if !open {
                // The owner that gets these bytes was not given others.
                of.replica[page] = [251; PAGE];
                of.prints[page] = of.replica[page];
            }
        }
        let (lost, kept) = of.stores.drain(..).partition(|store| pages.contains(&page_of(store)));
        of.stores = kept;
        let lost: Vec<StoreId> = lost;
        lost.into_iter().for_each(|store| self.oracle.lose(store));
        true
    }

    /// Stores are visible from now on, but for those past the end of the file.
    fn publish(&mut self, stores: Vec<StoreId>, size: u64) -> Vec<StoreId> {
        let (inside, outside): (Vec<StoreId>, Vec<StoreId>) =
            stores.into_iter().partition(|store| offset(store.0) < size);
        outside.into_iter().for_each(|store| self.oracle.lose(store));
        inside.iter().for_each(|store| self.oracle.set_visible(*store));
        inside
    }

    /// The process dies, and another one takes its place.
    pub(super) fn abandon(&mut self, gpu: usize) {
        note!(self, "gpu {gpu}: dies");
        let owner = self.gpus[gpu].owner;
        self.server().pages.drop_owner(owner);
        self.start_again(gpu);
    }

    fn start_again(&mut self, gpu: usize) {
        self.gpus[gpu].stores.iter().for_each(|store| self.oracle.lose(*store));
        for reply in self.replies.iter_mut().filter(|reply| reply.gpu == Some(gpu)) {
            reply.gpu = None;
        }
        let owner = self.add_owner();
        self.gpus[gpu] = Gpu::new(gpu, owner);
    }

    /// After a restart of the server: the epoch is lost, but a release may have been committed.
    pub(super) fn reattach(&mut self, gpu: usize) {
        let size = self.disk.len();
        let waits = self.replies.iter().position(|reply| reply.gpu == Some(gpu));
        let attempt = self.gpus[gpu].attempt.take();
        let committed = attempt.filter(|(id, _)| self.server().slots.was_committed(*id));
        let asked = committed.map(|(_, stores)| {
            self.gpus[gpu].stores.retain(|store| !stores.contains(store));
            self.publish(stores, size)
        });
        if let Some(reply) = waits {
            self.replies[reply].gpu = None;
        }
        self.start_again(gpu);
        if let Some(stores) = asked {
            note!(self, "gpu {gpu}: its release was committed");
            self.replies.push(Reply { release: None, stores, pages: 0..0, gpu: Some(gpu) });
            self.gpus[gpu].state = State::Releasing;
        } else if let Some(reply) = waits {
            self.replies[reply].gpu = Some(gpu);
            self.gpus[gpu].state = State::Releasing;
        }
    }

    /// The bytes that a new acquire of a page brings.
    pub(super) fn refresh(&mut self, gpu: usize, page: usize) -> PageBytes {
        let owner = self.gpus[gpu].owner;
        let range = page as u64..page as u64 + 1;
        let fills = self.call(|home, disk| home.open(disk, owner, range.clone(), Access::Read).unwrap());
        for fetch in self.take(gpu, fills.unwrap_or_default()) {
            self.fetch_half(gpu, &fetch);
        }
        self.call(|home, _| assert!(home.filled(owner, range).unwrap().is_empty()));
        self.gpus[gpu].replica[page]
    }
}

/// Commits pages whose bytes the home does not look at; `None`: that cannot be done, and nothing has changed.
fn hand_over(
    home: &mut FilePages,
    disk: &dyn Backing,
    owner: OwnerId,
    id: u64,
    pages: &[(u64, PageBytes)],
) -> Option<Commit> {
    let size = disk.size().unwrap();
    // The replica of a page with stores past the end is no copy of head, but is kept here.
    let is_copy = |(page, bytes): &(u64, PageBytes)| bytes[bytes_inside(*page, size)..].iter().all(|byte| *byte == 0);
    if pages.is_empty() || !pages.iter().all(is_copy) {
        return None;
    }
    home.commit_unseen(disk, owner, id, &mut stage(home, pages).ok()?).unwrap_or(None)
}

/// Pages in slots, by runs.
fn stage(home: &FilePages, pages: &[(u64, PageBytes)]) -> crate::Result<Vec<(u64, StagedRun)>> {
    let mut runs = Vec::new();
    for slots in home.slots.stage_runs(pages.len())? {
        let mut slots = Some(slots);
        while let Some(mut run) = slots.take() {
            let at: usize = runs.iter().map(|(_, run): &(u64, StagedRun)| run.slots().len()).sum();
            let rest = &pages[at..at + run.slots().len()];
            let len = rest.iter().zip(rest[0].0..).take_while(|((page, _), expected)| page == expected).count();
            slots = (len < rest.len()).then(|| run.split_off(len as u32));
            for (index, (_, bytes)) in (0..).zip(&rest[..len]) {
                run.write(index, bytes);
            }
            runs.push((rest[0].0, run));
        }
    }
    Ok(runs)
}
