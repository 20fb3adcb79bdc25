//! Small calls: they are frequent and short, so counting one must cost almost nothing.
//!
//! ```text
//!   thread ── has an exclusive slot? ── yes ──> plain additions, in a cache line that no other thread writes
//!                    │ no: there are more threads than slots
//!                    └──> atomic additions, in a slot shared by processor
//! ```
//!
//! Only some are timed, and each stands for those that its slot began since the last timed one ([`weight`]): also those
//! that fail or take another route, which the slot does not count.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_device::Device;
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::layout::{CALL_WORDS, CALLS, EXCLUSIVE_SLOTS, SHARED_SLOTS, SLOT_BEGUN, SLOT_WORDS, THREAD_SLOTS, header};
use super::trace::TracedRequest;
use super::{Direction, Stats, histogram};

/// A small request in progress; only some are timed. Small, because every byte passed along costs a small call time.
pub struct SmallSpan {
    begun: u64,
    /// How many calls the measured time stands for; 0 if this one is not timed.
    weight: u64,
    direction: Direction,
    slot: CounterSlot,
    traced: Option<Box<TracedRequest>>,
}

/// Where a thread counts its small calls.
#[derive(Clone, Copy)]
struct CounterSlot {
    at: u32,
    /// No other thread writes there. An atomic addition costs several times as much as a plain one.
    exclusive: bool,
}

thread_local! {
    /// The number of the table, and this thread's slot in it.
    static THREAD_SLOT: Cell<(u64, CounterSlot)> = const { Cell::new((0, CounterSlot { at: 0, exclusive: false })) };
}

impl SmallSpan {
    /// Whether this call is timed.
    #[inline]
    pub fn is_timed(&self) -> bool {
        self.weight > 0
    }
}

/// One small call in this many is timed; of the first ones, those at a power of two.
const SAMPLE_EVERY: u64 = 256;

/// How many calls the `n`th call of a slot, counted from 0, stands for: those since the last timed one, 0 if not timed.
#[inline]
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
    #[inline]
    pub fn begin_small(
        &self,
        direction: Direction,
        device: Option<&dyn Device>,
        fd: Fd,
        offset: Option<u64>,
        len: u64,
    ) -> SmallSpan {
        let mut span =
            SmallSpan { begun: 0, weight: 0, direction, slot: CounterSlot { at: 0, exclusive: false }, traced: None };
        let Some(words) = &self.words else { return span };
        span.slot = self.slot_of_thread(words);
        // Batches are not small.
        let begun = span.slot.add(words, SLOT_BEGUN + (direction == Direction::Write) as usize, 1);
        span.slot.at += 2 * direction as u32;
        span.weight = weight(begun);
        if span.weight > 0 || self.always_traces || words[header::TRACING].load(Relaxed) != 0 {
            self.observe(&mut span, device, fd, offset, len);
        }
        span
    }

    /// The rest of the beginning of a call that is timed, or may have to be traced.
    #[cold]
    #[inline(never)]
    fn observe(&self, span: &mut SmallSpan, device: Option<&dyn Device>, fd: Fd, offset: Option<u64>, len: u64) {
        span.traced = self.traced(fd, offset, len).map(|mut traced| {
            if let Some(device) = device {
                traced.set_device(device.id());
            }
            Box::new(traced)
        });
        if span.weight > 0 {
            // On a virtual machine reading the clock twice can cost as much as the read.
            span.begun = linux::monotonic_ns();
        }
    }

    /// The request returns: all bytes by one route, or an error.
    #[inline]
    pub fn end_small(&self, span: &SmallSpan, route: Route, reason: Reason, result: &Result<usize, Errno>) {
        let Some(words) = &self.words else { return };
        match result {
            // The common case: two additions, in a cache line of this thread.
            Ok(bytes) if (route, reason) == (Route::Copy, Reason::Small) => {
                span.slot.add(words, 0, 1);
                span.slot.add(words, 1, *bytes as u64);
            }
            result => self.count_other(span.direction, route, reason, result),
        }
        if span.weight > 0 || span.traced.is_some() {
            self.end_observed(span, route, reason, result);
        }
    }

    /// Counts a call that took another route, or failed.
    #[cold]
    #[inline(never)]
    fn count_other(&self, direction: Direction, route: Route, reason: Reason, result: &Result<usize, Errno>) {
        let calls = CALLS + direction as usize * CALL_WORDS;
        self.add(calls, 1);
        match result {
            Ok(bytes) => {
                self.add(calls + 2, *bytes as u64);
                if let Some(cell) = self.cell(direction, route, reason).filter(|_| *bytes > 0) {
                    self.add(cell + 1, 1);
                    self.add(cell + 2, *bytes as u64);
                }
            }
            Err(_) => self.add(calls + 1, 1),
        }
    }

    /// The rest of the end of a call that is timed or traced.
    #[cold]
    #[inline(never)]
    fn end_observed(&self, span: &SmallSpan, route: Route, reason: Reason, result: &Result<usize, Errno>) {
        let SmallSpan { weight, direction, .. } = *span;
        if weight > 0 {
            let nanos = linux::monotonic_ns().saturating_sub(span.begun);
            let all_calls = CALLS + direction as usize * CALL_WORDS;
            let cell = if result.is_ok() { self.cell(direction, route, reason) } else { None };
            for at in [Some(all_calls), cell].into_iter().flatten() {
                self.add(at + 3, nanos.wrapping_mul(weight));
                self.add(at + 4 + histogram::bucket(nanos), weight);
            }
        }
        if let Some(traced) = &span.traced {
            self.trace_request(traced, direction, Some((route, reason)), result);
        }
    }

    /// The calling thread's slot.
    #[inline]
    fn slot_of_thread(&self, words: &[AtomicU64]) -> CounterSlot {
        let (table, slot) = THREAD_SLOT.get();
        if table == self.table_id { slot } else { self.claim_slot(words) }
    }

    #[cold]
    #[inline(never)]
    fn claim_slot(&self, words: &[AtomicU64]) -> CounterSlot {
        // A thread that ends does not free its slot: there are enough for most programs, and later threads share.
        let claimed = words[header::SLOTS_TAKEN].load(Relaxed) as usize;
        if claimed < EXCLUSIVE_SLOTS {
            let index = words[header::SLOTS_TAKEN].fetch_add(1, Relaxed) as usize;
            if index < EXCLUSIVE_SLOTS {
                let slot = CounterSlot { at: (THREAD_SLOTS + index * SLOT_WORDS) as u32, exclusive: true };
                THREAD_SLOT.set((self.table_id, slot));
                return slot;
            }
        }
        let shared = EXCLUSIVE_SLOTS + linux::cpu() % SHARED_SLOTS;
        CounterSlot { at: (THREAD_SLOTS + shared * SLOT_WORDS) as u32, exclusive: false }
    }
}

impl CounterSlot {
    /// Returns what it was.
    #[inline]
    fn add(self, words: &[AtomicU64], word: usize, n: u64) -> u64 {
        let word = &words[self.at as usize + word];
        if self.exclusive {
            let before = word.load(Relaxed);
            word.store(before.wrapping_add(n), Relaxed);
            before
        } else {
            word.fetch_add(n, Relaxed)
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
