//! Since when a group waits, as the proxy has seen it: for `spinio net`.

use spinio_ring::Position;
use spinio_ring::wait::Waiter;

/// A word of a group that waits, and when it was seen first.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SeenWait {
    word: u64,
    since: u64,
}

impl SeenWait {
    /// The group that waits at this position, and since when.
    pub(super) fn look(&mut self, word: u64, at: Position, now: u64) -> Option<(Waiter, u64)> {
        self.see(word, now);
        Waiter::of(word, at).map(|waiter| (waiter, self.since))
    }

    /// The group that has a span, and since when.
    pub(super) fn look_for_span(&mut self, word: u64, now: u64) -> Option<(Waiter, u64)> {
        self.see(word, now);
        Waiter::of_span(word).map(|waiter| (waiter, self.since))
    }

    fn see(&mut self, word: u64, now: u64) {
        if self.word != word {
            *self = SeenWait { word, since: now };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wait_begins_when_its_word_is_seen_first() {
        let (mut seen, waiter, at) = (SeenWait::default(), Waiter { block: 3, thread: 64 }, Position::of(5));
        let word = waiter.word(at);
        assert_eq!(seen.look(0, at, 5), None);
        assert_eq!(seen.look(word, at, 10), Some((waiter, 10)));
        assert_eq!(seen.look(word, at, 90), Some((waiter, 10)));
        assert_eq!(seen.look(word, at.after(1), 91), None);
        assert_eq!((seen.look(0, at, 95), seen.look(word, at, 99)), (None, Some((waiter, 99))));
    }
}
