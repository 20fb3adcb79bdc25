//! The time at which the present cell must have ended.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// When the present cell must have ended; shared with the programs that run.
#[derive(Clone)]
pub struct Deadline {
    at: Rc<Cell<Instant>>,
    /// When everything must.
    last: Instant,
}

impl Deadline {
    /// From now on; everything must have ended then.
    pub fn after(limit: Duration) -> Deadline {
        let last = Instant::now() + limit;
        Deadline { at: Rc::new(Cell::new(last)), last }
    }

    /// Sets it, but not after everything must have ended.
    pub fn set(&self, at: Instant) {
        self.at.set(at.min(self.last));
    }

    /// Does something that all cells need, and the present one does first: it has as much time as before afterwards.
    pub fn not_counting<T>(&self, body: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = body();
        self.set(self.at.get() + begun.elapsed());
        result
    }

    /// Time left; none after it.
    pub fn left(&self) -> Duration {
        self.at.get().saturating_duration_since(Instant::now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_all_cells_need_is_not_counted_but_everything_ends_in_time() {
        let (second, deadline) = (Duration::from_secs(1), Deadline::after(Duration::from_secs(60)));
        let at = Instant::now() + 5 * second;
        deadline.set(at);
        let begun = Instant::now();
        deadline.not_counting(|| std::thread::sleep(second / 20));
        assert!((second / 20..=begun.elapsed()).contains(&(deadline.at.get() - at)));
        deadline.set(at + 300 * second);
        assert!(deadline.left() <= 60 * second);
    }
}
