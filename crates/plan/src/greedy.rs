//! The paper's rule (SPIN, 4.3.1): decide each resident run once, from left to right.
//!
//! ```text
//!   ... a ──┬── b ──┬── c ...      b resident; a: the storage transfer so far; c: absent
//!
//!   |a| + |b| < cutoff                      merge: b is free
//!   T(a + b + c) < T(a) + T_cache(b) + T(c) merge: cheaper than a second transfer
//!   otherwise                               from the cache, and a new transfer begins at c
//! ```
//!
//! Kept for comparison with the exact planner. Where the paper is silent: resident runs that
//! touch (clean next to dirty) are one `b`; write-back of its dirty bytes counts against
//! merging; an unknown run among them keeps all of `b` in the cache; without an `a` only the second
//! rule applies, because the first is about merging with `a`.
//!
//! Known flaws: that of the paper: it never looks past `c`.

use crate::constraints::RouteConstraints;
use crate::scratch::Scratch;
use crate::{Model, Residency};

/// Decides every run; storage must be possible.
pub(crate) fn decide(scratch: &mut Scratch, model: &Model, constraints: &RouteConstraints) {
    let runs = &mut scratch.runs;
    let storage = &model.storage;
    let mut before = 0;
    let mut i = 0;
    while i < runs.len() {
        if runs[i].residency == Residency::Absent {
            runs[i].from_storage = true;
            before += runs[i].len;
            i += 1;
            continue;
        }
        let (mut bytes, mut from_cache, mut writeback, mut is_known) = (0, 0.0, 0.0, true);
        let mut end = i;
        while end < runs.len() && runs[end].residency != Residency::Absent {
            let run = &runs[end];
            bytes += run.len;
            from_cache += constraints.serial_cache_time(model, run.residency, run.len);
            is_known &= run.residency.is_cached();
            if run.residency == Residency::Dirty {
                writeback += run.len as f64 * model.writeback;
            }
            end += 1;
        }
        let after = runs.get(end).map_or(0, |r| r.len);
        let free = before > 0 && before + bytes < storage.cutoff() && writeback == 0.0;
        let merged_cost = storage.time(before + bytes + after) + writeback;
        let separate_cost = storage.time(before) + from_cache + storage.time(after);
        let to_storage = is_known && before + after > 0 && (free || merged_cost < separate_cost);
        runs[i..end].iter_mut().for_each(|run| run.from_storage = to_storage);
        before = if to_storage { before + bytes } else { 0 };
        i = end;
    }
}
