//! Small calls: they are many and short, so to count one may cost nearly nothing.
//!
//! ```text
//!   thread ── has a lane of its own? ── yes ──> two plain additions, in a cache line that nobody else writes
//!                    │ no: there are more threads than lanes
//!                    └──> two locked ones, in a lane shared by processor
//! ```
//!
//! Only some are timed, and each stands for those of its lane since the last ([`weight`]).

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use spinio_device::Device;
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::layout::{CALL_WORDS, CALLS, LANE_WORDS, LANES, OWN_LANES, SHARED_LANES, header};
use super::trace::Traced;
use super::{Direction, Stats, histogram};

/// A small request under way: timed only if its turn has come.
pub struct SmallWatch {
    direction: Direction,
    lane: Lane,
    /// When it began, and how many calls it stands for.
    timed: Option<(Instant, u64)>,
    /// In a box, because a small call feels every byte that is carried along.
    traced: Option<Box<Traced>>,
}

/// Where a thread counts its small calls.
#[derive(Clone, Copy)]
struct Lane {
    at: usize,
    /// Nobody else writes there. A locked addition costs several times as much as a plain one.
    own: bool,
}

thread_local! {
    /// Number of the table, and the lane there that is this thread's.
    static LANE: Cell<(u64, Lane)> = const { Cell::new((0, Lane { at: 0, own: false })) };
}

impl SmallWatch {
    /// The same, with the device that it is about.
    pub fn on(mut self, device: &dyn Device) -> SmallWatch {
        if let Some(traced) = &mut self.traced {
            traced.set_device(device.id());
        }
        self
    }

    /// Whether its turn has come to be timed: once in a while.
    pub fn is_timed(&self) -> bool {
        self.timed.is_some()
    }
}

/// One small call in this many is timed; of the first ones, those whose number is a power of two.
const SAMPLED: u64 = 256;

/// How many calls the `n`th of a lane, counted from 0, stands for if it is timed: those since the last timed one.
fn weight(n: u64) -> u64 {
    match n {
        0 => 1,
        n if n < SAMPLED && n.is_power_of_two() => n - n / 2,
        n if n < SAMPLED => 0,
        SAMPLED => SAMPLED / 2,
        n if n.is_multiple_of(SAMPLED) => SAMPLED,
        _ => 0,
    }
}

impl Stats {
    /// A request of at most [`spinio_host::settings::SMALL`] bytes begins.
    pub fn begin_small(&self, direction: Direction, fd: Fd, offset: Option<u64>, len: u64) -> SmallWatch {
        let Some(words) = &self.words else {
            return SmallWatch { direction, lane: Lane { at: 0, own: false }, timed: None, traced: None };
        };
        let mut lane = self.lane(words);
        lane.at += 2 * direction as usize;
        // On a virtual machine reading the clock twice can cost as much as the read.
        let weight = weight(words[lane.at].load(Relaxed));
        let timed = (weight > 0).then(|| (Instant::now(), weight));
        SmallWatch { direction, lane, timed, traced: self.traced(fd, offset, len).map(Box::new) }
    }

    /// It returns: `bytes` by one route, or an error.
    pub fn end_small(&self, watch: &SmallWatch, route: Route, reason: Reason, result: &Result<usize, Errno>) {
        if self.words.is_none() {
            return;
        }
        let calls = CALLS + watch.direction as usize * CALL_WORDS;
        let timed = watch.timed.map(|(begun, weight)| (begun.elapsed().as_nanos() as u64, weight));
        if let Some((nanos, weight)) = timed {
            self.add(calls + 3, nanos.wrapping_mul(weight));
            self.add(calls + 4 + histogram::bucket(nanos), weight);
        }
        match result {
            // What nearly all of them are costs two additions, in a cache line of this thread.
            Ok(bytes) if (route, reason) == (Route::Copy, Reason::Small) => {
                self.add_in(watch.lane, 0, 1);
                self.add_in(watch.lane, 1, *bytes as u64);
            }
            Ok(bytes) => {
                self.add(calls, 1);
                self.add(calls + 2, *bytes as u64);
                if let Some(cell) = self.cell(watch.direction, route, reason).filter(|_| *bytes > 0) {
                    self.add(cell + 1, 1);
                    self.add(cell + 2, *bytes as u64);
                }
            }
            Err(_) => {
                self.add(calls, 1);
                self.add(calls + 1, 1);
            }
        }
        if let Some((nanos, weight)) = timed
            && let Some(cell) = self.cell(watch.direction, route, reason).filter(|_| result.is_ok())
        {
            self.add(cell + 3, nanos.wrapping_mul(weight));
            self.add(cell + 4 + histogram::bucket(nanos), weight);
        }
        if let Some(traced) = &watch.traced {
            self.trace_request(traced, watch.direction, Some((route, reason)), result);
        }
    }

    /// The calling thread's lane.
    fn lane(&self, words: &[AtomicU64]) -> Lane {
        let (table, lane) = LANE.get();
        if table == self.number { lane } else { self.take_lane(words) }
    }

    #[cold]
    fn take_lane(&self, words: &[AtomicU64]) -> Lane {
        // A thread that ends leaves its lane as it is: there are enough for most programs, and what comes later shares.
        let taken = words[header::LANES_TAKEN].load(Relaxed) as usize;
        if taken < OWN_LANES {
            let mine = words[header::LANES_TAKEN].fetch_add(1, Relaxed) as usize;
            if mine < OWN_LANES {
                let lane = Lane { at: LANES + mine * LANE_WORDS, own: true };
                LANE.set((self.number, lane));
                return lane;
            }
        }
        Lane { at: LANES + (OWN_LANES + linux::cpu() % SHARED_LANES) * LANE_WORDS, own: false }
    }

    fn add_in(&self, lane: Lane, word: usize, n: u64) {
        if let Some(words) = &self.words {
            let word = &words[lane.at + word];
            if lane.own {
                word.store(word.load(Relaxed).wrapping_add(n), Relaxed);
            } else {
                word.fetch_add(n, Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timed_calls_stand_for_all_before_them() {
        let mut stood_for = 0;
        for n in 0..10_000 {
            let weight = weight(n);
            stood_for += weight;
            assert!(weight == 0 || stood_for == n + 1, "call {n} is timed, and {stood_for} are stood for");
            assert!(n + 1 - stood_for <= SAMPLED.min(n / 2), "after call {n} only {stood_for} are stood for");
        }
    }
}
