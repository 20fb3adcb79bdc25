//! What the link does of an acquire in one call: ask, read, confirm.
//!
//! ```text
//!   flush ─ Acquire ─ fills ── only short runs in the file? ── yes: read into the stage ─ Filled ─ fills, or none: size
//!                                        └ no: the caller brings them to the device, and has Filled sent
//! ```
//!
//! The caller copies what is in the stage to the device afterwards. For the server the pages are in the replica before
//! that: what counts for it is that no byte of the file is read any more. If the copy fails, the map is detached, and the
//! server forgets all of its pages.

use std::ops::Range;

use spinio_pagecache::messages::{self, Access, Fill, Peers, Request, Run, STAGE, Source};

use crate::Result;
use crate::link::LinkState;
use crate::state::{Info, timed};

/// Pages of a read that goes through the stage, with all others of its kind: one call of the link, and copies that
/// are waited for together, instead of a wait for each.
pub(crate) const SMALL_READ: u64 = 16;

/// A step of an acquire.
#[derive(Debug, Default)]
pub(crate) struct Fetched {
    /// Their bytes are in the stage, one after the other; the server counts them as being in the replica.
    pub(crate) staged: Vec<Run>,
    /// Pages to bring to the device after those, before [`LinkState::filled`].
    pub(crate) fills: Vec<Fill>,
    /// Bytes of the file, if there are none.
    pub(crate) size: Option<u64>,
    pub(crate) spent: Spent,
}

impl Fetched {
    /// All pages of the step.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> {
        self.staged.iter().copied().chain(self.fills.iter().map(|fill| fill.run))
    }
}

/// Nanoseconds, as in [`Info`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Spent {
    flush: u64,
    plan: u64,
    read: u64,
    confirm: u64,
}

impl Spent {
    pub(crate) fn add_to(self, info: &mut Info) {
        info.flush_ns += self.flush;
        info.plan_ns += self.plan;
        info.read_ns += self.read;
        info.confirm_ns += self.confirm;
    }
}

impl LinkState {
    /// Hands what CPU programs have written to the part to the server, has it forget pages whose memory was taken away,
    /// and asks which pages are absent or stale.
    ///
    /// `fetch` false: the program overwrites them, and none is. An error of the outer result: nothing was asked.
    pub(crate) fn begin_acquire(
        &mut self,
        part: Range<usize>,
        evicted: &[Run],
        access: Access,
        fetch: bool,
        peers: Peers,
    ) -> Result<Result<Fetched>> {
        let mut spent = Spent::default();
        timed(&mut spent.flush, || self.flush(part.start, part.len()))?;
        let fetch = fetch && !self.spec.is_in_place();
        let request = Request::Acquire { first: part.start as u64, pages: part.len() as u64, access, fetch, peers };
        let fills = timed(&mut spent.plan, || {
            self.drop_evicted(evicted)?;
            self.fill(|out| request.encode(out))
        });
        Ok(fills.and_then(|fills| self.fetch(fills, spent)))
    }

    /// The pages of the last reply are in the replica, but for these, which another map was to have.
    pub(crate) fn filled(&mut self, refused: &[Run]) -> Result<Fetched> {
        let mut spent = Spent::default();
        let fills = timed(&mut spent.confirm, || match refused.is_empty() {
            true => self.fill(|out| Request::Filled.encode(out)),
            false => self.fill(|out| messages::filled_but(out, refused)),
        })?;
        self.fetch(fills, spent)
    }

    fn fetch(&mut self, (mut fills, mut below): (Vec<Fill>, u64), mut spent: Spent) -> Result<Fetched> {
        let mut staged = Vec::new();
        if !self.spec.is_in_place() && fit_into_stage(&fills) {
            staged.extend(fills.iter().map(|fill| fill.run));
            timed(&mut spent.read, || self.read_into_stage(&staged))?;
            (fills, below) = timed(&mut spent.confirm, || self.fill(|out| Request::Filled.encode(out)))?;
        }
        let size = if fills.is_empty() { Some(self.sync_size_with(below)?) } else { None };
        Ok(Fetched { staged, fills, size, spent })
    }
}

/// Whether all are short runs of pages of the file, and some.
fn fit_into_stage(fills: &[Fill]) -> bool {
    let short = |fill: &Fill| fill.source == Source::File && u64::from(fill.run.count) <= SMALL_READ;
    let pages: u64 = fills.iter().map(|fill| u64::from(fill.run.count)).sum();
    pages > 0 && pages <= u64::from(STAGE) && fills.iter().all(short)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_short_runs_in_the_file_that_fit_are_staged() {
        let fill = |first, count, source| Fill { run: Run { first, count }, source };
        let singles = |count| (0..count).map(|n| fill(n * 2, 1, Source::File)).collect::<Vec<_>>();
        assert!(fit_into_stage(&singles(1)) && fit_into_stage(&singles(u64::from(STAGE))));
        assert!(!fit_into_stage(&[]) && !fit_into_stage(&singles(u64::from(STAGE) + 1)));
        let with = |other| [singles(3), vec![other]].concat();
        assert!(fit_into_stage(&with(fill(100, SMALL_READ as u32, Source::File))));
        assert!(!fit_into_stage(&with(fill(100, SMALL_READ as u32 + 1, Source::File))));
        for source in [Source::Window, Source::Patch, Source::Kept, Source::Peer(0)] {
            assert!(!fit_into_stage(&with(fill(100, 1, source))));
        }
    }
}
