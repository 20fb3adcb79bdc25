//! SPIN's objective: storage and page cache work at the same time, so the slower side determines the time.
//!
//! ```text
//!   storage side:  latency + Σ transfers (cost a command + bytes / BW)  ─┐
//!                                                                        ├─ max ──> minimise
//!   cache side:    latency + Σ runs      (cost a command + bytes / BW)  ─┘
//! ```
//!
//! Absent runs always come from storage, so the runs between two of them are a *group* that can be
//! decided independently. For a group of one run there are two choices, which differ by
//!
//! ```text
//!   storage side   + bytes / BW_storage - cost a command   (its neighbours join into one transfer)
//!   cache side     - bytes / BW_cache   - cost a command
//! ```
//!
//! Short runs win on both sides; long ones trade one side for the other. To minimise the maximum is the partition
//! problem, hard in general, so the planner does this:
//!
//! Give a price to each side, and let every group take its cheaper choice. With all weight on
//!    storage this gives the least storage time S; if S is the slower side even so, it is the
//!    solution. That is the usual case, and exact. The same with all weight on the cache.
//! 2. Otherwise there are two solutions, one on each side of the balance. Change the prices to those at which both cost
//!    the same, until that finds nothing new (a few rounds: the lower hull of a small set of points).
//! 3. Start from the solution that leaves more in the cache, and visit the groups once: move each group in which the
//!    two solutions differ, if that lowers the maximum. Unless that is at the limit that the prices prove, try every
//!    combination of the longest runs, and then the other runs one by one.
//!
//! Distance to the optimum, tested: none up to 10 resident runs, by brute force, for any model (except for a
//! thousandth). From 11 to 16, all resident: 0 to 2 % on average by model, 23 % the worst seen. 8 MiB at random
//! residency: at most 4 % above a lower limit of all plans.
//!
//! Known flaws: long segments are split into several commands when they run, and only the first is counted here; the
//! sides share the bus to the device, which the model ignores.

use crate::constraints::RouteConstraints;
use crate::scratch::{Group, Run, Scratch};
use crate::{Model, Residency};

/// Times of the two sides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct SideTimes {
    pub(crate) storage: f64,
    pub(crate) cache: f64,
}

impl SideTimes {
    pub(crate) fn slower(self) -> f64 {
        self.storage.max(self.cache)
    }

    fn plus(self, other: SideTimes) -> SideTimes {
        SideTimes { storage: self.storage + other.storage, cache: self.cache + other.cache }
    }

    fn minus(self, other: SideTimes) -> SideTimes {
        SideTimes { storage: self.storage - other.storage, cache: self.cache - other.cache }
    }

    /// The price of the side.
    fn priced(self, prices: SideTimes) -> f64 {
        self.storage * prices.storage + self.cache * prices.cache
    }
}

/// The price of a side that is practically ignored: it only breaks ties.
const MIN_PRICE: f64 = 1e-6;
/// Random requests need three.
const MAX_ROUNDS: usize = 8;
/// Stop searching when the result is this close to the limit.
const TOLERANCE: f64 = 1.0 + 1e-3;
/// Try every combination of up to this many runs.
const EXHAUSTIVE_MAX: usize = 10;
/// With more runs, try this many combinations: half a thousand.
const SAMPLED_RUNS: usize = 9;
/// The number of longest runs among them.
const SAMPLED_LONGEST: usize = 7;

/// The inputs of the decision for the groups.
struct Request<'a> {
    runs: &'a mut [Run],
    groups: &'a [Group],
    path_bits: &'a mut Vec<u32>,
    model: &'a Model,
    constraints: &'a RouteConstraints,
    /// Absent runs from storage, the rest from the cache; with both latencies, needed or not.
    base: SideTimes,
    any_absent: bool,
}

/// Decides every run; storage must be possible.
pub(crate) fn decide(scratch: &mut Scratch, model: &Model, constraints: &RouteConstraints) {
    let (base, any_absent) = build_groups(scratch, model, constraints);
    let Scratch { runs, groups, previous: ways, .. } = scratch;
    Request { runs, groups, path_bits: ways, model, constraints, base, any_absent }.decide();
}

/// Fills the groups; returns the base, and whether any run is absent.
fn build_groups(scratch: &mut Scratch, model: &Model, constraints: &RouteConstraints) -> (SideTimes, bool) {
    let Scratch { runs, groups, .. } = scratch;
    let queue = &model.storage_queue;
    let mut base = SideTimes::default();
    let mut any_absent = false;
    groups.clear();
    let mut open = false;
    for (i, run) in runs.iter_mut().enumerate() {
        run.from_storage = run.residency == Residency::Absent;
        if run.from_storage {
            base.storage += queue.command_time(run.len);
            any_absent = true;
            if let Some(last) = groups.last_mut().filter(|_| open) {
                last.absent_after = true;
                last.storage -= queue.per_command;
            }
            open = false;
            continue;
        }
        let cache = constraints.queued_cache_time(model, run.residency, run.len);
        base.cache += cache;
        match groups.last_mut() {
            Some(last) if open => last.runs += 1,
            _ => {
                // Unknown alone never moves.
                let is_known = run.residency.is_cached();
                let storage = if is_known { storage_bytes(model, run) } else { f64::INFINITY };
                // Without an absent run before it, it begins a transfer.
                let begins = if i > 0 { 0.0 } else { queue.per_command };
                groups.push(Group {
                    first: i as u32,
                    runs: 1,
                    absent_before: i > 0,
                    absent_after: false,
                    storage: storage + begins,
                    cache: -cache,
                });
                open = true;
            }
        }
    }
    base.storage += queue.latency;
    base.cache += if groups.is_empty() { 0.0 } else { model.queue(constraints.cache).latency };
    (base, any_absent)
}

/// What a resident run's bytes add to the storage side.
fn storage_bytes(model: &Model, run: &Run) -> f64 {
    let dirty = if run.residency == Residency::Dirty { model.writeback } else { 0.0 };
    run.len as f64 * (model.storage_queue.per_byte + dirty)
}

impl Request<'_> {
    fn decide(&mut self) {
        let storage_first = SideTimes { storage: 1.0, cache: MIN_PRICE };
        let cache_first = SideTimes { storage: MIN_PRICE, cache: 1.0 };
        let least_storage = self.apply_prices(storage_first);
        let now = if least_storage.storage >= least_storage.cache {
            least_storage
        } else {
            let least_cache = self.evaluate_prices(cache_first);
            if least_cache.cache >= least_cache.storage {
                self.apply_prices(cache_first)
            } else {
                self.bisect_prices((storage_first, least_storage), (cache_first, least_cache))
            }
        };
        self.compare_with_uniform(now);
    }

    /// From prices that leave the cache slower and prices that leave storage slower to near the balance.
    fn bisect_prices(&mut self, mut low: (SideTimes, SideTimes), mut high: (SideTimes, SideTimes)) -> SideTimes {
        let mut lower_bound = 0.0_f64;
        for _ in 0..MAX_ROUNDS {
            let prices = break_even_prices(low.1, high.1);
            let found = self.evaluate_prices(prices);
            // The prices add up to 1, so the slower side is at least the price of both.
            lower_bound = lower_bound.max(found.priced(prices));
            // Not below the line through both: the line is the hull.
            if found.priced(prices) >= low.1.priced(prices) * (1.0 - 1e-9) {
                break;
            }
            *(if found.storage > found.cache { &mut high } else { &mut low }) = (prices, found);
        }
        let now = self.apply_between(low, high.0);
        if now.slower() <= lower_bound * TOLERANCE { now } else { self.local_search(now) }
    }

    /// The sides if every group takes its cheaper choice.
    fn evaluate_prices(&mut self, prices: SideTimes) -> SideTimes {
        let mut total = self.base;
        for group in self.groups {
            total = total.plus(self.cheaper_choice(group, prices, false));
        }
        total
    }

    /// The same, and records the decisions.
    fn apply_prices(&mut self, prices: SideTimes) -> SideTimes {
        let mut total = self.base;
        for group in self.groups {
            total = total.plus(self.cheaper_choice(group, prices, true));
        }
        total
    }

    /// Moves from the solution `less` towards that of the prices `more`, as long as the slower side gets faster.
    fn apply_between(&mut self, low: (SideTimes, SideTimes), high: SideTimes) -> SideTimes {
        let (less, mut now) = low;
        for group in self.groups {
            let old = self.cheaper_choice(group, less, true);
            let new = self.cheaper_choice(group, high, false);
            let switched = now.minus(old).plus(new);
            if switched.slower() < now.slower() {
                self.cheaper_choice(group, high, true);
                now = switched;
            }
        }
        now
    }

    /// How a group's cheaper choice changes the sides; optionally records the decisions of its runs.
    #[inline]
    fn cheaper_choice(&mut self, group: &Group, prices: SideTimes, apply: bool) -> SideTimes {
        if group.runs > 1 {
            return self.cheapest_path(group, prices, apply);
        }
        let delta = SideTimes { storage: group.storage, cache: group.cache };
        let is_cheaper = delta.priced(prices) < 0.0;
        if apply {
            self.runs[group.first as usize].from_storage = is_cheaper;
        }
        if is_cheaper { delta } else { SideTimes::default() }
    }

    /// The cheapest path through a group, one run a step: from storage or from the cache.
    #[cold]
    fn cheapest_path(&mut self, group: &Group, prices: SideTimes, apply: bool) -> SideTimes {
        // Finite, so that a price of 0 does not make it NaN.
        const INFEASIBLE: SideTimes = SideTimes { storage: 1e30, cache: 1e30 };
        const IN_TRANSFER: u32 = 1;
        let command = SideTimes { storage: self.model.storage_queue.per_command, cache: 0.0 };
        let cheaper = |a: SideTimes, b: SideTimes| a.priced(prices) < b.priced(prices);
        let range = group.first as usize..(group.first + group.runs) as usize;

        self.path_bits.clear();
        let (mut transfer, mut cache) =
            if group.absent_before { (SideTimes::default(), INFEASIBLE) } else { (INFEASIBLE, SideTimes::default()) };
        for run in &self.runs[range.clone()] {
            // Bit 0: the previous choice for 'from storage'; bit 1: the previous choice for 'from the cache'.
            let mut from_bits = 0;
            let new_transfer = cache.plus(command);
            let mut next_transfer = INFEASIBLE;
            if run.residency.is_cached() {
                let continue_transfer = cheaper(transfer, new_transfer);
                from_bits |= u32::from(continue_transfer) * IN_TRANSFER;
                let from_cache = self.constraints.queued_cache_time(self.model, run.residency, run.len);
                let bytes = SideTimes { storage: storage_bytes(self.model, run), cache: -from_cache };
                next_transfer = (if continue_transfer { transfer } else { new_transfer }).plus(bytes);
            }
            let leave_transfer = cheaper(transfer, cache);
            from_bits |= (u32::from(leave_transfer) * IN_TRANSFER) << 1;
            cache = if leave_transfer { transfer } else { cache };
            transfer = next_transfer;
            self.path_bits.push(from_bits);
        }
        if group.absent_after {
            transfer = transfer.minus(command);
        }
        let mut in_transfer = cheaper(transfer, cache);
        let found = if in_transfer { transfer } else { cache };
        if apply {
            for (run, from_bits) in self.runs[range].iter_mut().zip(self.path_bits.iter()).rev() {
                run.from_storage = in_transfer;
                in_transfer =
                    if in_transfer { from_bits & IN_TRANSFER != 0 } else { (from_bits >> 1) & IN_TRANSFER != 0 };
            }
        }
        found
    }

    /// Moves single runs to the other side: every combination of the longest, then one by one what lowers the maximum.
    fn local_search(&mut self, mut now: SideTimes) -> SideTimes {
        // The longest runs first: they decide the coarse balance. Then the remaining runs, for the fine balance.
        let mut longest_runs = [(0, usize::MAX); EXHAUSTIVE_MAX];
        let mut resident_count = 0;
        let resident = |(_, run): &(usize, &Run)| run.residency.is_cached();
        for (at, run) in self.runs.iter().enumerate().filter(resident) {
            let longest = if resident_count < EXHAUSTIVE_MAX { EXHAUSTIVE_MAX } else { SAMPLED_LONGEST };
            resident_count += 1;
            if run.len > longest_runs[longest - 1].0 {
                longest_runs[longest - 1] = (run.len, at);
                let mut slot = longest - 1;
                while slot > 0 && longest_runs[slot].0 > longest_runs[slot - 1].0 {
                    longest_runs.swap(slot, slot - 1);
                    slot -= 1;
                }
            }
        }
        let longest_runs =
            &longest_runs[..if resident_count <= EXHAUSTIVE_MAX { resident_count } else { SAMPLED_RUNS }];
        let all_deltas = longest_runs.iter().map(|&(_, at)| self.move_delta(at));
        let mut deltas = [SideTimes::default(); EXHAUSTIVE_MAX];
        deltas.iter_mut().zip(all_deltas).for_each(|(slot, moved)| *slot = moved);

        // One run at a time, in the order of a Gray code, which passes every combination.
        let (mut best, mut best_code, mut code) = (now, 0u32, 0u32);
        for step in 1u32..1 << longest_runs.len() {
            let which = step.trailing_zeros() as usize;
            let at = longest_runs[which].1;
            now = self.after_toggle(at, deltas[which], now);
            self.runs[at].from_storage ^= true;
            code ^= 1 << which;
            if now.slower() < best.slower() {
                (best, best_code) = (now, code);
            }
        }
        for (which, (_, at)) in longest_runs.iter().enumerate() {
            self.runs[*at].from_storage ^= (code ^ best_code) >> which & 1 == 1;
        }
        if resident_count > EXHAUSTIVE_MAX {
            for at in 0..self.runs.len() {
                if self.runs[at].residency.is_cached() {
                    let next = self.after_toggle(at, self.move_delta(at), best);
                    if next.slower() < best.slower() {
                        best = next;
                        self.runs[at].from_storage ^= true;
                    }
                }
            }
        }
        best
    }

    /// The change from moving a resident run to storage, without the commands.
    fn move_delta(&self, at: usize) -> SideTimes {
        let run = &self.runs[at];
        let from_cache = self.constraints.queued_cache_time(self.model, run.residency, run.len);
        SideTimes { storage: storage_bytes(self.model, run), cache: -from_cache }
    }

    /// The sides if the run changed sides: it may begin a transfer, extend one, or join two.
    #[inline]
    fn after_toggle(&self, at: usize, mut moved: SideTimes, now: SideTimes) -> SideTimes {
        let is_storage_at = |at: usize| self.runs.get(at).map_or(0.0, |r| f64::from(u8::from(r.from_storage)));
        let adjacent = is_storage_at(at.wrapping_sub(1)) + is_storage_at(at + 1);
        moved.storage += (1.0 - adjacent) * self.model.storage_queue.per_command;
        if self.runs[at].from_storage { now.minus(moved) } else { now.plus(moved) }
    }

    /// A side's latency disappears with its last segment, which the steps before do not see: so the
    /// two simplest plans are compared directly. This also guarantees that the result is never worse than either.
    fn compare_with_uniform(&mut self, now: SideTimes) {
        let queue = &self.model.storage_queue;
        let is_known = self.runs.iter().all(|r| r.residency != Residency::Unknown);
        let from_storage = if is_known {
            let bytes = self.runs.last().map_or(0, Run::end);
            let dirty: u64 = self.runs.iter().filter(|r| r.residency == Residency::Dirty).map(|r| r.len).sum();
            queue.latency + queue.command_time(bytes) + dirty as f64 * self.model.writeback
        } else {
            f64::INFINITY
        };
        let uniform_cache = if self.any_absent { self.base.slower() } else { self.base.cache };
        if uniform_cache <= now.slower() && uniform_cache <= from_storage {
            self.runs.iter_mut().for_each(|r| r.from_storage = r.residency == Residency::Absent);
        } else if from_storage < now.slower() {
            self.runs.iter_mut().for_each(|r| r.from_storage = true);
        }
    }
}

/// Prices at which both cost the same.
fn break_even_prices(low: SideTimes, high: SideTimes) -> SideTimes {
    let (storage, cache) = (high.storage - low.storage, low.cache - high.cache);
    SideTimes { storage: cache / (storage + cache), cache: storage / (storage + cache) }
}
