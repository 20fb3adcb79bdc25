//! Pages on their way through the stage, a part at a time: of a release to the server, and single ones of the file to the
//! replica.
//!
//! ```text
//!   device   copy 0 ──────> copy 1 ──────────> copy 2 ──────────> ...
//!   stage    first half     second half        first half
//!   server            └──────> reads part 0 ───────> reads part 1 ───────> ...  last: commits all
//! ```
//!
//! The server copies a part of a release while the device copies the next one into the other half, after the answer for
//! the part that was there. A small release is one part.

use std::sync::Arc;

use spinio_device::{Fingerprint, PAGE_BYTES};
use spinio_pagecache::messages::{MAX_RUNS, ReleaseId, ReleasePart, Run, STAGE, pages_in};
use spinio_sys::injection_point;

use crate::Result;
use crate::link::Committed;
use crate::map::Map;
use crate::state::{State, timed};
use crate::window::Window;

/// Pages of a part.
const PART: u32 = STAGE / 2;
/// See [`are_few`].
const FEW: u64 = 64;

impl Map {
    /// Sends the pages of a release, and waits until they are visible to CPU programs. All that was published before the
    /// server has committed is dropped by it if this fails.
    pub(crate) fn send_release(
        &self,
        state: &mut State,
        window: &Arc<Window>,
        id: ReleaseId,
        range: Run,
        changed: &[Run],
    ) -> Result<Committed> {
        let parts = parts(changed);
        let (last, total) = (parts.len() - 1, pages_in(changed) as u32);
        let mut committed = Committed::default();
        self.replica.prepare_stage(window, changed);
        for (number, part) in parts.into_iter().enumerate() {
            let at = number as u32 % 2 * PART;
            let copy = || self.replica.on_stream(|copies| copies.load(&part, window, at as usize));
            let copied = timed(&mut state.info.release_copy_ns, copy);
            if let Err(e) = copied {
                // The next call must not get the answer for the part before.
                let _ = self.link.run(|link| link.end_parts());
                return Err(e);
            }
            injection_point!("client: pages staged");
            let is_last = number == last;
            let send = || {
                self.link.run(move |link| {
                    if number == 0 {
                        // It may flush what CPU programs have written.
                        link.sync_size_first()?;
                    }
                    let head = ReleasePart { id, first: range.first, pages: range.count, last: is_last, at, total };
                    match head.last {
                        true => link.release(head, &part).map(Some),
                        false => link.release_part(head, &part).map(|()| None),
                    }
                })
            };
            let spent = if is_last { &mut state.info.release_commit_ns } else { &mut state.info.release_copy_ns };
            committed = timed(spent, send)?.unwrap_or_default();
        }
        window.trim_stage(total as usize);
        Ok(committed)
    }

    /// Brings pages of the file below the mount to the replica.
    pub(crate) fn copy_through_stage(&self, state: &mut State, window: &Arc<Window>, runs: &[Run]) -> Result<()> {
        self.replica.prepare_stage(window, runs);
        for part in parts(runs).into_iter().filter(|part| !part.is_empty()) {
            let asked = part.clone();
            let read = || self.link.run(move |link| link.read_into_stage(&asked));
            timed(&mut state.info.read_ns, read)?;
            let copy = || self.replica.on_stream(|copies| copies.store_staged(&part, window, 0));
            timed(&mut state.info.copy_ns, copy)?;
        }
        window.trim_stage(pages_in(runs));
        Ok(())
    }

    /// Brings pages of the file that the link has read into the stage to the replica.
    pub(crate) fn copy_staged(
        &self,
        state: &mut State,
        window: &Arc<Window>,
        runs: &[Run],
        stores: bool,
    ) -> Result<()> {
        let pages = pages_in(runs);
        self.replica.prepare_stage(window, runs);
        let begins_epoch = stores && are_few(runs, self.replica.scan_gap());
        let copied = timed(&mut state.info.copy_ns, || {
            self.replica.on_stream(|copies| {
                copies.store_staged(runs, window, 0)?;
                // While the device copies.
                let of_page = |page| Fingerprint::of(&window.read_staged(page));
                Ok(if begins_epoch { (0..pages).map(of_page).collect() } else { Vec::new() })
            })
        });
        let fingerprints: Vec<Fingerprint> = copied?;
        let mut rest = &fingerprints[..];
        for run in runs {
            let pages = run.pages();
            let now = rest.split_off(..pages.len().min(rest.len())).unwrap_or_default();
            match now.is_empty() {
                true => state.pages.forget(pages),
                false => state.pages.set_fingerprints(pages, now),
            }
        }
        state.info.bytes_from_file += (pages * PAGE_BYTES) as u64;
        window.trim_stage(pages);
        Ok(())
    }
}

/// Whether the processor computes the fingerprints of these pages sooner than the device, which looks at all pages
/// between them, or takes a launch of 10 us for each: 0.7 us for a page, in which an H200 looks at 90, and has them copied.
/// An emulated one is a processor. `gap`: [`Replica::scan_gap`](crate::replica::Replica::scan_gap).
fn are_few(runs: &[Run], gap: u64) -> bool {
    let (Some(first), Some(last)) = (runs.first(), runs.last()) else { return false };
    let (pages, between) = (pages_in(runs) as u64, last.first + u64::from(last.count) - first.first);
    pages <= FEW || pages * (gap / FEW) <= between
}

/// The runs, divided so that each part fits into half of the stage and into a message; at least one part, which may be
/// empty.
fn parts(runs: &[Run]) -> Vec<Vec<Run>> {
    let mut parts = vec![Vec::new()];
    let mut room = PART;
    for run in runs {
        let mut rest = *run;
        while rest.count > 0 {
            if room == 0 || parts.last().is_none_or(|part: &Vec<Run>| part.len() == MAX_RUNS) {
                parts.push(Vec::new());
                room = PART;
            }
            let count = rest.count.min(room);
            if let Some(part) = parts.last_mut() {
                part.push(Run { first: rest.first, count });
            }
            room -= count;
            rest = Run { first: rest.first + u64::from(count), count: rest.count - count };
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_far_from_each_other_are_few() {
        let singles = |count: u64, step: u64| (0..count).map(|n| Run { first: n * step, count: 1 }).collect::<Vec<_>>();
        assert!(are_few(&singles(64, 1), 4096) && are_few(&singles(1024, 256), 4096));
        assert!(!are_few(&singles(1024, 16), 4096) && are_few(&singles(1024, 16), 8) && !are_few(&[], 8));
    }

    #[test]
    fn every_page_is_in_one_part_in_order_and_parts_fit() {
        let run = |first, count| Run { first, count };
        let single: Vec<Run> = (0..3000).map(|n| run(n * 2, 1)).collect();
        let mixed = vec![run(1, PART - 1), run(5000, 3), run(9000, 3 * PART), run(50_000, 1)];
        for runs in [vec![], vec![run(7, 1)], vec![run(0, PART)], vec![run(0, PART + 1)], single, mixed] {
            let pages = |runs: &[Run]| -> Vec<u64> {
                runs.iter().flat_map(|run| run.first..run.first + u64::from(run.count)).collect()
            };
            let parts = parts(&runs);
            assert_eq!(pages(&parts.concat()), pages(&runs));
            for part in &parts {
                assert!(part.len() <= MAX_RUNS && pages(part).len() <= PART as usize);
                assert!(parts.len() == 1 || !part.is_empty());
            }
        }
        assert_eq!(parts(&[run(0, 4 * PART)]).len(), 4);
    }
}
