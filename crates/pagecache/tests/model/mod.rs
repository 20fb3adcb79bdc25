//! A model of everything around the home, and random schedules of it.
//!
//! ```text
//!   CPU programs ── kernel's page cache ── READ, WRITE, SETATTR, FALLOCATE ─┐
//!   (kernel.rs)     dirty, under write-back, locked, INVAL that waits       │     FilePages
//!   3 GPU processes ── acquire, fetch, stores, release, death ──────────────┴──>  Slots in a memory (machine.rs) that
//!   (gpu.rs)                                                                      kills the server before any store
//!   oracle.rs: which values a load may return                          world.rs: the server, killed and started again
//! ```
//!
//! A schedule is a seed. Three pages, four bytes of each, a few dozen steps, each of a random actor; then everything
//! under way comes to its end, and the kernel's copies, the replicas, the slots and the file must agree on allowed
//! values. `SPINIO_PAGECACHE_SCHEDULES` sets how many seeds are run; `SPINIO_PAGECACHE_SEED` runs one. A failure is
//! reported with the shortest prefix of its schedule that fails.
//!
//! Each rule of the protocol is then broken (rules.rs), and some schedule must notice.

mod gpu;
mod kernel;
mod machine;
mod oracle;
mod random;
mod released;
mod sparse;
mod world;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::rules::{BROKEN, Rule};
use world::World;

/// Pages of the file.
const PAGES: usize = 3;

/// Runs a schedule of this many steps. Returns why it failed, and its trace.
fn run(seed: u64, steps: u32, trace: bool) -> Option<(String, Vec<String>)> {
    let mut world = World::new(seed, trace);
    for _ in 0..steps {
        world.now += 1;
        world.step();
        if world.failure.is_some() {
            break;
        }
    }
    if world.failure.is_none() {
        world.finish();
    }
    let failure = world.failure.take()?;
    Some((failure, world.trace.unwrap_or_default()))
}

/// Steps of the schedule with this seed.
fn steps(seed: u64) -> u32 {
    40 + (seed % 160) as u32
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

fn schedules() -> u64 {
    setting("SPINIO_PAGECACHE_SCHEDULES").unwrap_or(100_000)
}

/// The lowest seed that fails, of those that all processors try together.
fn search(count: u64, broken: Option<Rule>) -> Option<u64> {
    let next = AtomicU64::new(0);
    let failed = AtomicU64::new(u64::MAX);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                BROKEN.set(broken);
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= count || failed.load(Relaxed) != u64::MAX {
                        break;
                    }
                    if run(seed, steps(seed), false).is_some() {
                        failed.fetch_min(seed, Relaxed);
                    }
                }
            });
        }
    });
    Some(failed.into_inner()).filter(|seed| *seed != u64::MAX)
}

/// The shortest prefix of a schedule that fails, as text.
fn report(seed: u64) -> String {
    let shortest = (0..=steps(seed)).find(|steps| run(seed, *steps, false).is_some()).unwrap_or(steps(seed));
    let (failure, trace) = run(seed, shortest, true).unwrap_or_default();
    format!("seed {seed}, {shortest} steps: {failure}\n{}", trace.join("\n"))
}

#[test]
fn every_schedule_keeps_every_store() {
    let failed = match setting("SPINIO_PAGECACHE_SEED") {
        Some(seed) => Some(seed).filter(|seed| run(*seed, steps(*seed), false).is_some()),
        None => search(schedules(), None),
    };
    if let Some(seed) = failed {
        panic!("{}", report(seed));
    }
}

#[test]
fn every_broken_rule_is_noticed() {
    let mut unnoticed = Vec::new();
    for rule in Rule::ALL {
        match search(schedules(), Some(rule)) {
            Some(seed) => println!("{rule:?}: seed {seed}"),
            None => unnoticed.push(rule),
        }
    }
    assert!(unnoticed.is_empty(), "no schedule noticed that these rules are broken: {unnoticed:?}");
}
