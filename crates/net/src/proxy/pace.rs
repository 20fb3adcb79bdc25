//! How long the proxy may sleep. A GPU cannot wake a thread, so the proxy has to look for doorbells by itself.
//!
//! ```text
//!   busy       something happened in the last 50 us: it looks again at once (not on machines with less than 8 processors)
//!   expecting  kernels were given bytes and usually answer after T: asleep for T/2. An answer that is there after such a
//!              sleep came at some time in it, so T is less: else each sleep would confirm the T that it was made of
//!   idle       silence: asleep for 50 us, 100 us ... 5 ms; the network wakes it at once, a doorbell at the next timeout
//! ```

/// How long it is busy after an event.
const BUSY_NS: u64 = 50_000;
/// The shortest sleep.
const FIRST_SLEEP_NS: u64 = 50_000;
/// Processors from which on a thread may be busy without an event.
pub(crate) const MANY_PROCESSORS: usize = 8;
/// Answers that take longer are not expected.
const LONGEST_ANSWER_NS: u64 = 2_000_000;

/// The state.
#[derive(Debug)]
pub(crate) struct Pace {
    may_spin: bool,
    longest_ns: u64,
    last_event: u64,
    sleep_ns: u64,
    /// When kernels were given something that they have not answered.
    given: Option<u64>,
    /// How long answers took on average; 0: unknown.
    answer_ns: u64,
    /// The last wait was for an expected answer.
    slept_for_answer: bool,
}

impl Pace {
    pub(crate) fn new(processors: usize, longest_ns: u64) -> Pace {
        let may_spin = processors >= MANY_PROCESSORS;
        let sleep_ns = FIRST_SLEEP_NS.min(longest_ns);
        Pace { may_spin, longest_ns, last_event: 0, sleep_ns, given: None, answer_ns: 0, slept_for_answer: false }
    }

    /// Kernels were given bytes or an answer.
    pub(crate) fn gave(&mut self, now: u64) {
        self.given.get_or_insert(now);
    }

    /// Doorbells came.
    pub(crate) fn heard(&mut self, now: u64) {
        if let Some(given) = self.given.take() {
            let passed = now.saturating_sub(given);
            let took = if self.slept_for_answer { passed / 2 } else { passed }.min(LONGEST_ANSWER_NS);
            self.answer_ns = if self.answer_ns == 0 { took } else { (self.answer_ns * 7 + took) / 8 };
        }
    }

    /// Something happened: doorbells, events or bytes.
    pub(crate) fn worked(&mut self, now: u64) {
        self.last_event = now;
        self.sleep_ns = FIRST_SLEEP_NS.min(self.longest_ns);
    }

    /// Whether it looks again at once.
    pub(crate) fn is_busy(&self, now: u64) -> bool {
        self.may_spin && now.saturating_sub(self.last_event) < BUSY_NS
    }

    /// For how many nanoseconds to wait for the network now.
    pub(crate) fn sleep(&mut self, now: u64) -> u64 {
        self.slept_for_answer = false;
        if let Some(given) = self.given {
            let half = self.answer_ns / 2;
            let passed = now.saturating_sub(given);
            if half > FIRST_SLEEP_NS && passed < half {
                self.slept_for_answer = true;
                return (half - passed).min(self.longest_ns);
            }
        }
        if self.is_busy(now) {
            return 0;
        }
        let sleep = self.sleep_ns;
        self.sleep_ns = (sleep * 2).min(self.longest_ns);
        sleep
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn silence_doubles_the_sleep_up_to_the_limit() {
        let mut pace = Pace::new(2, 5 * MS);
        pace.worked(0);
        let sleeps: Vec<u64> = (0..9).map(|_| pace.sleep(1)).collect();
        assert_eq!(sleeps[..3], [50_000, 100_000, 200_000]);
        assert_eq!(sleeps[7..], [5 * MS, 5 * MS]);
        pace.worked(100);
        assert_eq!(pace.sleep(101), 50_000);
    }

    #[test]
    fn event_keeps_it_awake_only_where_processors_are_many() {
        for (processors, first) in [(2, 50_000), (8, 0)] {
            let mut pace = Pace::new(processors, 5 * MS);
            pace.worked(1000);
            assert_eq!(pace.sleep(1001), first);
            assert!(pace.sleep(1000 + BUSY_NS) > 0);
        }
    }

    #[test]
    fn answer_that_comes_during_each_sleep_makes_the_sleeps_shorter() {
        let mut pace = Pace::new(8, 5 * MS);
        let mut now = 0;
        pace.gave(now);
        pace.heard(now + MS);
        // The kernel answers at once, and a sleep is as late as a timer may be.
        for _ in 0..200 {
            now += 10 * MS;
            pace.gave(now);
            pace.worked(now);
            let slept = pace.sleep(now);
            now += if slept > 0 { slept + 60_000 } else { 10_000 };
            pace.heard(now);
        }
        pace.gave(now);
        pace.worked(now);
        assert_eq!(pace.sleep(now), 0);
    }

    #[test]
    fn expected_answer_is_slept_for_by_half() {
        let mut pace = Pace::new(8, 5 * MS);
        pace.gave(0);
        pace.heard(MS);
        pace.worked(MS);
        pace.gave(2 * MS);
        assert_eq!(pace.sleep(2 * MS), MS / 2);
        assert_eq!(pace.sleep(2 * MS + MS / 4), MS / 4);
    }
}
