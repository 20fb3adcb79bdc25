//! The address ranges of the process's maps, for a hook of `munmap`: any thread, also one inside an allocator or a
//! signal handler, asks whether a range touches a map, with no lock and no allocation.
//!
//! A list that only grows: a node whose map is gone is used again. It is changed under the lock of the maps.

use std::sync::OnceLock;
use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};

/// A range; `end` is 0 while the node is free.
struct Node {
    start: AtomicU64,
    end: AtomicU64,
    next: OnceLock<Box<Node>>,
}

/// The bounds of all ranges: most ranges of a program lie outside.
static LOW: AtomicU64 = AtomicU64::new(u64::MAX);
static HIGH: AtomicU64 = AtomicU64::new(0);
static FIRST: Node = Node::new();

impl Node {
    const fn new() -> Node {
        Node { start: AtomicU64::new(0), end: AtomicU64::new(0), next: OnceLock::new() }
    }

    /// Start and end, unless it is free or being changed.
    fn range(&self) -> Option<(u64, u64)> {
        let end = self.end.load(Acquire);
        let start = self.start.load(Acquire);
        (end != 0 && self.end.load(Relaxed) == end).then_some((start, end))
    }
}

fn nodes() -> impl Iterator<Item = &'static Node> {
    std::iter::successors(Some(&FIRST), |node| node.next.get().map(|next| &**next))
}

/// Whether a range may touch a map of this process, or of its parent.
#[inline]
pub fn touches_map(at: u64, len: u64) -> bool {
    at < HIGH.load(Relaxed) && at.saturating_add(len) > LOW.load(Relaxed) && touches_range(at, len)
}

#[cold]
fn touches_range(at: u64, len: u64) -> bool {
    nodes().filter_map(Node::range).any(|(start, end)| at < end && at.saturating_add(len) > start)
}

/// Adds a range.
pub(crate) fn insert(start: u64, end: u64) {
    let mut node = &FIRST;
    while node.end.load(Relaxed) != 0 {
        node = node.next.get_or_init(|| Box::new(Node::new()));
    }
    node.start.store(start, Release);
    node.end.store(end, Release);
    set_bounds();
}

/// Removes the range that begins at `start`.
pub(crate) fn remove(start: u64) {
    let found = nodes().find(|node| node.range().is_some_and(|(begin, _)| begin == start));
    found.into_iter().for_each(|node| node.end.store(0, Release));
    set_bounds();
}

fn set_bounds() {
    let ranges = || nodes().filter_map(Node::range);
    LOW.store(ranges().map(|(start, _)| start).min().unwrap_or(u64::MAX), Relaxed);
    HIGH.store(ranges().map(|(_, end)| end).max().unwrap_or(0), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ranges_of_maps_are_touched() {
        assert!(!touches_map(0, u64::MAX));
        insert(0x5000, 0x7000);
        insert(0x1000, 0x2000);
        insert(0x9000, 0xa000);
        for (at, len, touches) in [
            (0, 0x1000, false),
            (0, 0x1001, true),
            (0x1fff, 1, true),
            (0x2000, 0x3000, false),
            (0x6000, 0x1000, true),
            (0x4000, 0x4000, true),
            (0x8000, 0x1000, false),
            (0xa000, u64::MAX, false),
            (0x1000, 0, false),
        ] {
            assert_eq!(touches_map(at, len), touches, "{at:#x} {len:#x}");
        }
        remove(0x5000);
        assert!(!touches_map(0x5000, 0x2000) && touches_map(0x9000, 1));
        insert(0x3000, 0x4000);
        assert_eq!(nodes().count(), 3, "a free node is used again");
        [0x1000, 0x3000, 0x9000].into_iter().for_each(remove);
        assert!(!touches_map(0, u64::MAX));
    }
}
