//! What a map knows of its pages without asking: those that were head at a moment when no program could write, and that
//! have not been touched since.

use std::ops::Range;

use spinio_pagecache::change_counters::Unwritten;

/// Pages of the replica, and the moment.
#[derive(Debug, Default)]
pub(crate) struct Current(Option<(Unwritten, Range<usize>)>);

impl Current {
    /// Whether these pages are still head.
    pub(crate) fn has(&self, now: Option<Unwritten>, range: &Range<usize>) -> bool {
        self.0
            .as_ref()
            .is_some_and(|(then, pages)| Some(*then) == now && pages.start <= range.start && range.end <= pages.end)
    }

    /// Pages were brought up to date by an acquire that began at this moment.
    pub(crate) fn add(&mut self, began: Option<Unwritten>, range: Range<usize>) {
        let Some(began) = began else { return self.forget() };
        let joined = match &self.0 {
            Some((then, pages)) if *then == began && pages.start <= range.end && range.start <= pages.end => {
                pages.start.min(range.start)..pages.end.max(range.end)
            }
            _ => range,
        };
        self.0 = Some((began, joined));
    }

    /// The next acquire asks the server.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use spinio_pagecache::change_counters::{FILE_WORDS, SERVER_WORDS, count_change, read};

    use super::*;

    #[test]
    fn ranges_of_one_moment_are_joined_and_those_of_another_replaced() {
        let file: [AtomicU64; FILE_WORDS] = Default::default();
        let servers: [AtomicU64; SERVER_WORDS] = Default::default();
        let now = read(&file, &servers);
        let mut current = Current::default();
        assert!(!current.has(now, &(0..1)));
        current.add(now, 4..8);
        assert!(current.has(now, &(4..8)) && current.has(now, &(5..6)));
        assert!(!current.has(now, &(3..5)) && !current.has(now, &(7..9)) && !current.has(None, &(5..6)));
        current.add(now, 8..10);
        assert!(current.has(now, &(4..10)));
        // Not joined: what lies between was not acquired.
        current.add(now, 12..14);
        assert!(current.has(now, &(12..14)) && !current.has(now, &(4..14)));
        count_change(&file);
        let later = read(&file, &servers);
        assert!(!current.has(later, &(12..14)));
        current.add(later, 13..16);
        assert!(current.has(later, &(13..16)) && !current.has(later, &(12..14)));
        current.add(None, 13..16);
        assert!(!current.has(later, &(13..16)));
    }
}
