//! Epochs: acquire and release.
//!
//! ```text
//!   acquire   counters as before, to read: done
//!             else flush CPU pages ─ fills ─ copy to the device ─ fills again, until none ─ fingerprints of new pages
//!   release   scan ─ pages whose fingerprint differs ─ copy to the window ─ commit
//! ```
//!
//! A page that is in an epoch when it is acquired again may have unreleased stores. Of such a page only the bytes that
//! other writers changed are stored, and its fingerprint becomes that of head, not of the replica: else the scan would
//! no longer see the program's own stores.

use std::ops::Range;
use std::sync::Arc;

use spinio_device::{Fingerprint, PAGE_BYTES};
use spinio_host::lock;
use spinio_pagecache::change_counters::Unwritten;
use spinio_pagecache::messages::{Access, Fill, ReleaseId, Run, Source};
use spinio_sys::{Errno, injection_point};

use crate::counters::Counters;
use crate::fetch::{Fetched, SMALL_READ};
use crate::file_reader::OpenFile;
use crate::handoff::Published;
use crate::lane::Lane;
use crate::map::Map;
use crate::page_states::Epoch;
use crate::peers;
use crate::replica::Copies;
use crate::sources::Named;
use crate::state::{State, timed};
use crate::window::Window;
use crate::{Error, Result};

impl Map {
    /// Makes the replica of `len` bytes from `offset` as new as the file is now, and begins an epoch. Returns the bytes
    /// of the range that are in the file.
    pub fn acquire(&self, offset: u64, len: u64, access: Access) -> Result<u64> {
        self.begin_epoch(offset, len, access, 0..0)
    }

    /// [`Map::acquire`] for writing, of bytes that the program will overwrite: pages that lie wholly in the range are
    /// not fetched, and all of their bytes are released, whatever they are then.
    pub fn overwrite(&self, offset: u64, len: u64) -> Result<u64> {
        let page = PAGE_BYTES as u64;
        let (start, end) = (offset.div_ceil(page), offset.saturating_add(len) / page);
        self.begin_epoch(offset, len, Access::Write, start as usize..end.max(start) as usize)
    }

    /// `kept`: pages that are not fetched.
    fn begin_epoch(&self, offset: u64, len: u64, access: Access, kept: Range<usize>) -> Result<u64> {
        let range = self.pages_of(offset, len)?;
        if access == Access::Write && self.spec.access == Access::Read {
            return Err(Error::new(Errno::ACCESS, "The map is read-only"));
        }
        let _turn = self.turn()?;
        let mut state = lock(&self.state);
        if access == Access::Read && state.current.has(self.now(&state), &range) {
            // Evicted pages would not be current.
            self.replica.touch(&range);
            state.pages.begin_reading(range);
            state.info.acquires += 1;
            state.info.acquires_unchanged += 1;
            return Ok(self.bytes_in_file(offset, len, state.info.file_size));
        }
        // A call that is queued has held it since.
        let _held = match Lane::current() {
            Some(_) => None,
            None => {
                // Copies between devices do it while they run. Here a failure does no harm to open epochs, which end with it there.
                let is_deferred =
                    !self.peers_of(&state, &range).is_empty() && !state.pages.has_open(0..self.spec.pages);
                drop(state);
                let held = self.replica.hold(&range)?;
                if !is_deferred {
                    self.replica.grant_access(&range)?;
                }
                state = lock(&self.state);
                held
            }
        };
        let (size, began) = loop {
            let window = self.attached(&mut state)?;
            let began = self.now(&state);
            let parts = match kept.is_empty() {
                true => [(range.clone(), true), (0..0, true), (0..0, true)],
                false => [(range.start..kept.start, true), (kept.clone(), false), (kept.end..range.end, true)],
            };
            let mut done = Ok(0);
            for (part, fetch) in parts.into_iter().filter(|(part, _)| !part.is_empty()) {
                let (asked, evicted) = (part.clone(), state.pages.evicted(part.clone()));
                let peers = if fetch { self.peers_of(&state, &part) } else { Vec::new() };
                let numbers = peers::numbers(&peers);
                // In one call: where nothing has changed, there is no other.
                let begun = self.link.run(move |link| link.begin_acquire(asked, &evicted, access, fetch, numbers))?;
                if begun.is_ok() {
                    state.pages.told(part.clone());
                }
                let stores = access == Access::Write && fetch;
                done = begun.and_then(|begun| self.refresh(&mut state, &window, begun, part, stores, &peers));
                if done.is_err() {
                    break;
                }
            }
            match done {
                Ok(size) => break (size, began),
                Err(e) if e.is_refused() => return Err(e),
                Err(e) => {
                    let lost = self.detach(&mut state);
                    if !e.is_disconnected() {
                        return Err(e);
                    }
                    if lost {
                        return Err(Error::stale());
                    }
                }
            }
        };
        injection_point!("client: acquired");
        state.info.acquires += 1;
        state.info.file_size = size;
        match kept.is_empty() {
            true => state.current.add(began, range.clone()),
            // Pages that were open already are not brought up to date.
            false => state.current.forget(),
        }
        match access {
            Access::Write => state.pages.set_epoch(range, Epoch::Open),
            Access::Read => {
                // An epoch for writing goes on; a lost one was reported, or is now forgotten.
                if state.pages.epoch_of(range.clone()) == Epoch::Lost {
                    state.pages.settle(range.clone());
                }
                state.pages.begin_reading(range);
            }
        }
        Ok(self.bytes_in_file(offset, len, size))
    }

    /// The counters now; `None`: a program may write to the file, or no server is attached.
    fn now(&self, state: &State) -> Option<Unwritten> {
        state.counters.as_ref().and_then(Counters::read)
    }

    /// Brings the replica up to date; returns the size of the file. `stores`: a scan will look for stores to its pages.
    fn refresh(
        &self,
        state: &mut State,
        window: &Arc<Window>,
        mut begun: Fetched,
        range: Range<usize>,
        stores: bool,
        peers: &[Named],
    ) -> Result<u64> {
        let size = loop {
            begun.spent.add_to(&mut state.info);
            if !begun.staged.is_empty() {
                self.replica.grant_access(&range)?;
                self.copy_staged(state, window, &begun.staged, stores)?;
            }
            let mut copied = self.copy_from_peers(state, &begun.fills, peers, &range)?;
            // To chunks into which nothing was copied.
            self.replica.grant_access(&range)?;
            if !begun.fills.is_empty() {
                self.bring_to_device(state, window, &begun.fills)?;
            }
            injection_point!("client: pages on the device");
            if let Some(size) = begun.size {
                break size;
            }
            let refused = std::mem::take(&mut copied.refused);
            begun = self.link.run(move |link| link.filled(&refused))?;
            copied.count_again(state, begun.runs());
        };
        if stores {
            let runs = state.pages.without_fingerprint(range, self.replica.scan_gap());
            let scan = |runs: &[Run]| self.replica.on_stream(|copies| copies.fingerprints(runs));
            let fingerprints =
                if runs.is_empty() { Vec::new() } else { timed(&mut state.info.scan_ns, || scan(&runs))? };
            let mut rest = &fingerprints[..];
            for run in runs {
                let (now, after) = rest.split_at(run.count as usize);
                state.pages.complete_fingerprints(run.first as usize, now);
                rest = after;
            }
            self.replica.keep_scanned(fingerprints);
        }
        Ok(size)
    }

    fn bring_to_device(&self, state: &mut State, window: &Arc<Window>, fills: &[Fill]) -> Result<()> {
        let runs: Vec<Run> = fills.iter().map(|fill| fill.run).collect();
        let Some(registered) = self.replica.register(&self.link, &runs) else {
            return self.copy_to_device(state, window, fills);
        };
        state.info.bytes_registered += registered?;
        runs.into_iter().for_each(|run| state.pages.forget(run.pages()));
        Ok(())
    }

    fn copy_to_device(&self, state: &mut State, window: &Arc<Window>, fills: &[Fill]) -> Result<()> {
        let by_stage = |fill: &Fill| fill.source == Source::File && direct(&state.backing, fill.run).is_none();
        let (small, in_window): (Vec<&Fill>, Vec<&Fill>) = fills.iter().partition(|fill| by_stage(fill));
        let small: Vec<Run> = small.into_iter().map(|fill| fill.run).collect();
        self.copy_through_stage(state, window, &small)?;
        let (mut read_ns, mut all_ns) = (0, 0);
        let copy = |copies: Copies<'_>| {
            for fill in fills {
                let pages = fill.run.pages();
                let bytes = (pages.len() * PAGE_BYTES) as u64;
                match fill.source {
                    Source::File => {
                        state.info.bytes_from_file += bytes;
                        if let Some(file) = direct(&state.backing, fill.run) {
                            timed(&mut read_ns, || self.read_file(file, window, copies, fill.run))?;
                        }
                        state.pages.forget(pages);
                        continue;
                    }
                    Source::Kept => {
                        state.pages.keep(pages);
                        continue;
                    }
                    Source::Peer(_) => continue,
                    Source::Window => state.info.bytes_from_snapshots += bytes,
                    Source::Patch => {
                        state.info.pages_patched += pages.len() as u64;
                        for page in pages {
                            let head = window.read(page);
                            copies.patch(page, &window.read_base(page), &head)?;
                            state.pages.set_fingerprint(page, Fingerprint::of(&head));
                        }
                        continue;
                    }
                }
                copies.store(fill.run, window)?;
                state.pages.forget(pages);
            }
            Ok(())
        };
        timed(&mut all_ns, || self.replica.on_stream(copy))?;
        state.info.read_ns += read_ns;
        state.info.copy_ns += all_ns.saturating_sub(read_ns);
        in_window.into_iter().for_each(|fill| window.free(fill.run.first as usize, fill.run.count as usize));
        Ok(())
    }

    /// Reads pages of the file below the mount into the replica; zeros past its end.
    fn read_file(&self, file: &dyn OpenFile, window: &Window, copies: Copies<'_>, run: Run) -> Result<()> {
        let (from, len) = ((self.spec.first + run.first) * PAGE_BYTES as u64, bytes_of(run));
        let mut done = 0;
        while done < len {
            match file.read(from + done, self.replica.device(), copies.byte(run, done), len - done)? {
                0 => return copies.store_zeros(run, done, window),
                got => done += got,
            }
        }
        Ok(())
    }

    /// Publishes the stores of the epoch to `len` bytes from `offset`, and ends it for these pages. Returns the bytes
    /// that were published. Pages that were acquired for reading only are given up.
    pub fn release(&self, offset: u64, len: u64) -> Result<u64> {
        self.release_range(offset, len, false).map(|published| published.bytes)
    }

    /// `hands_over`: the chunks of the range, if that can be done, and no block reads them.
    pub(crate) fn release_range(&self, offset: u64, len: u64, hands_over: bool) -> Result<Published> {
        let range = self.pages_of(offset, len)?;
        let _turn = self.turn()?;
        let mut state = lock(&self.state);
        if state.pages.epoch_of(range.clone()) == Epoch::Lost {
            state.pages.set_epoch(range.clone(), Epoch::Closed);
            state.pages.end_reading(range);
            return Err(Error::stale());
        }
        let open = state.pages.open_runs(range.clone());
        let open = open.ok_or_else(|| Error::new(Errno::INVAL, "The range was not acquired"))?;
        if open.is_empty() {
            state.pages.end_reading(range);
            return Ok(Published { bytes: 0, handed_over: None });
        }
        // Stores past the end of the file are dropped.
        state.current.forget();
        let window = self.attached(&mut state)?;
        let whole = Run { first: range.start as u64, count: range.len() as u32 };
        let open: Vec<Run> = open.iter().map(|run| Run { first: run.start as u64, count: run.len() as u32 }).collect();
        // Pages that are overwritten are all changed: what gives their memory away needs no look at them.
        let hands_over = hands_over && !state.pages.has_block(range.clone());
        let unseen = hands_over && open.iter().all(|run| state.pages.are_kept(run.pages()));
        let mut scan_ns = 0;
        let scan = |copies: Copies<'_>| {
            if unseen {
                return Ok((Vec::new(), open));
            }
            let scanned = copies.fingerprints(&open)?;
            let (mut fingerprints, mut changed, mut rest) = (Vec::new(), Vec::new(), &scanned[..]);
            for run in open {
                let (now, after) = rest.split_at(run.count as usize);
                for part in state.pages.changed(run.first as usize, now) {
                    let at = (part.first - run.first) as usize;
                    fingerprints.extend_from_slice(&now[at..at + part.count as usize]);
                    changed.push(part);
                }
                rest = after;
            }
            self.replica.keep_scanned(scanned);
            Ok((fingerprints, changed))
        };
        let (fingerprints, changed) = timed(&mut scan_ns, || self.replica.on_stream(scan))?;
        state.info.release_scan_ns += scan_ns;
        injection_point!("client: pages scanned");
        let id = release_id()?;
        let size = state.info.file_size;
        let mut handed_over = false;
        let sent = (|| {
            if hands_over && let Some(committed) = self.hand_over(id, whole, &changed)? {
                handed_over = true;
                return Ok(committed);
            }
            self.send_release(&mut state, &window, id, whole, &changed)
        })();
        let published = match sent {
            Ok(committed) => {
                let mut rest = &fingerprints[..];
                for run in changed.iter().copied().map(|run| run.pages()) {
                    if unseen {
                        // If they were copied after all, the next acquire scans them.
                        state.pages.forget(run);
                        continue;
                    }
                    let (now, after) = rest.split_at(run.len());
                    state.pages.set_fingerprints(run, now);
                    rest = after;
                }
                state.info.pages_committed += committed.pages;
                state.info.pages_merged += committed.merged;
                committed.bytes
            }
            Err(e) if e.is_refused() => return Err(e),
            Err(e) => {
                self.detach(&mut state);
                state.pages.set_epoch(range.clone(), Epoch::Closed);
                state.pages.end_reading(range.clone());
                if !e.is_disconnected() {
                    return Err(e);
                }
                if !self.was_committed(&mut state, id)? {
                    return Err(Error::stale());
                }
                if !changed.is_empty() {
                    // The server may have ended before the time was set.
                    self.link.run(|link| {
                        link.touch();
                        Ok(())
                    })?;
                }
                state.info.releases_recovered += 1;
                let bytes = |run: &Run| self.bytes_in_file(run.first * PAGE_BYTES as u64, bytes_of(*run), size);
                changed.iter().map(bytes).sum()
            }
        };
        state.pages.set_epoch(range.clone(), Epoch::Closed);
        state.pages.end_reading(range);
        state.info.releases += 1;
        state.info.bytes_published += published;
        state.info.releases_handed_over += u64::from(handed_over);
        Ok(Published { bytes: published, handed_over: handed_over.then_some(published) })
    }

    /// How many of `len` bytes from `offset` of the map are before the end of the file.
    fn bytes_in_file(&self, offset: u64, len: u64, size: u64) -> u64 {
        let start = self.spec.first * PAGE_BYTES as u64 + offset;
        size.saturating_sub(start).min(len)
    }
}

/// The file, if a run of its pages is read straight into the device's memory.
fn direct(backing: &Option<Box<dyn OpenFile>>, run: Run) -> Option<&dyn OpenFile> {
    backing.as_deref().filter(|_| u64::from(run.count) > SMALL_READ && Lane::current().is_none())
}

/// A number that no other release has, of this or of any other client.
fn release_id() -> Result<ReleaseId> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())
        .map_err(|e| Error::of(e, "get a random number"))?;
    Ok(u64::from_ne_bytes(random).max(1))
}

fn bytes_of(run: Run) -> u64 {
    u64::from(run.count) * PAGE_BYTES as u64
}
