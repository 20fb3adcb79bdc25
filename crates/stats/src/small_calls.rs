//! Small calls: they are frequent and short, so counting one must cost almost nothing.
//!
//! ```text
//!   thread ── has an exclusive slot? ── yes ──> two plain additions, in a cache line that no other thread writes
//!                    │ no: there are more threads than slots
//!                    └──> two atomic additions, in a slot shared by processor
//! ```
//!
//! Only some are timed, and each stands for those of its slot since the last timed one ([`weight`]).

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use spinio_device::Device;
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::layout::{CALL_WORDS, CALLS, EXCLUSIVE_SLOTS, SHARED_SLOTS, SLOT_WORDS, THREAD_SLOTS, header};
use super::trace::TracedRequest;
use super::{Direction, Stats, histogram};

/// A small request in progress; only some are timed.
pub struct SmallSpan {
    direction: Direction,
    slot: CounterSlot,
    /// The start time, and how many calls it stands for.
    timed: Option<(Instant, u64)>,
    /// Boxed, because every byte passed along costs a small call time.
    traced: Option<Box<TracedRequest>>,
}

/// Where a thread counts its small calls.
#[derive(Clone, Copy)]
struct CounterSlot {
    at: usize,
    /// No other thread writes there. An atomic addition costs several times as much as a plain one.
    exclusive: bool,
}

thread_local! {
    /// The number of the table, and this thread's slot in it.
    static THREAD_SLOT: Cell<(u64, CounterSlot)> = const { Cell::new((0, CounterSlot { at: 0, exclusive: false })) };
}

impl SmallSpan {
    /// The same, with the device of the request.
    pub fn with_device(mut self, device: &dyn Device) -> SmallSpan {
        if let Some(traced) = &mut self.traced {
            traced.set_device(device.id());
        }
        self
    }

    /// Whether this call is timed.
    pub fn is_timed(&self) -> bool {
        self.timed.is_some()
    }
}

/// One small call in this many is timed; of the first ones, those at a power of two.
const SAMPLE_EVERY: u64 = 256;

/// How many calls the `n`th call of a slot, counted from 0, stands for: those since the last timed one, 0 if not timed.
fn weight(n: u64) -> u64 {
    match n {
        0 => 1,
        n if n < SAMPLE_EVERY && n.is_power_of_two() => n - n / 2,
        n if n < SAMPLE_EVERY => 0,
        SAMPLE_EVERY => SAMPLE_EVERY / 2,
        n if n.is_multiple_of(SAMPLE_EVERY) => SAMPLE_EVERY,
        _ => 0,
    }
}

impl Stats {
    /// A request of at most [`spinio_host::settings::SMALL_REQUEST_MAX`] bytes begins.
    pub fn begin_small(&self, direction: Direction, fd: Fd, offset: Option<u64>, len: u64) -> SmallSpan {
        let Some(words) = &self.words else {
            return SmallSpan { direction, slot: CounterSlot { at: 0, exclusive: false }, timed: None, traced: None };
        };
        let mut slot = self.slot_of_thread(words);
        slot.at += 2 * direction as usize;
        // On a virtual machine reading the clock twice can cost as much as the read.
        let weight = weight(words[slot.at].load(Relaxed));
        let timed = (weight > 0).then(|| (Instant::now(), weight));
        SmallSpan { direction, slot, timed, traced: self.traced(fd, offset, len).map(Box::new) }
    }

    /// The request returns: all bytes by one route, or an error.
    pub fn end_small(&self, span: &SmallSpan, route: Route, reason: Reason, result: &Result<usize, Errno>) {
        if self.words.is_none() {
            return;
        }
        let calls = CALLS + span.direction as usize * CALL_WORDS;
        let timed = span.timed.map(|(begun, weight)| (begun.elapsed().as_nanos() as u64, weight));
        if let Some((nanos, weight)) = timed {
            self.add(calls + 3, nanos.wrapping_mul(weight));
            self.add(calls + 4 + histogram::bucket(nanos), weight);
        }
        match result {
            // The common case: two additions, in a cache line of this thread.
            Ok(bytes) if (route, reason) == (Route::Copy, Reason::Small) => {
                self.add_to_slot(span.slot, 0, 1);
                self.add_to_slot(span.slot, 1, *bytes as u64);
            }
            Ok(bytes) => {
                self.add(calls, 1);
                self.add(calls + 2, *bytes as u64);
                if let Some(cell) = self.cell(span.direction, route, reason).filter(|_| *bytes > 0) {
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
            && let Some(cell) = self.cell(span.direction, route, reason).filter(|_| result.is_ok())
        {
            self.add(cell + 3, nanos.wrapping_mul(weight));
            self.add(cell + 4 + histogram::bucket(nanos), weight);
        }
        if let Some(traced) = &span.traced {
            self.trace_request(traced, span.direction, Some((route, reason)), result);
        }
    }

    /// The calling thread's slot.
    fn slot_of_thread(&self, words: &[AtomicU64]) -> CounterSlot {
        let (table, slot) = THREAD_SLOT.get();
        if table == self.table_id { slot } else { self.claim_slot(words) }
    }

    #[cold]
    fn claim_slot(&self, words: &[AtomicU64]) -> CounterSlot {
        // A thread that ends does not free its slot: there are enough for most programs, and later threads share.
        let claimed = words[header::SLOTS_TAKEN].load(Relaxed) as usize;
        if claimed < EXCLUSIVE_SLOTS {
            let index = words[header::SLOTS_TAKEN].fetch_add(1, Relaxed) as usize;
            if index < EXCLUSIVE_SLOTS {
                let slot = CounterSlot { at: THREAD_SLOTS + index * SLOT_WORDS, exclusive: true };
                THREAD_SLOT.set((self.table_id, slot));
                return slot;
            }
        }
        CounterSlot {
            at: THREAD_SLOTS + (EXCLUSIVE_SLOTS + linux::cpu() % SHARED_SLOTS) * SLOT_WORDS,
            exclusive: false,
        }
    }

    fn add_to_slot(&self, slot: CounterSlot, word: usize, n: u64) {
        if let Some(words) = &self.words {
            let word = &words[slot.at + word];
            if slot.exclusive {
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
    fn sample_weights_cover_all_calls() {
        let mut covered = 0;
        for n in 0..10_000 {
            let weight = weight(n);
            covered += weight;
            assert!(weight == 0 || covered == n + 1, "call {n} is timed, and {covered} are covered");
            assert!(n + 1 - covered <= SAMPLE_EVERY.min(n / 2), "after call {n} only {covered} are covered");
        }
    }
}
