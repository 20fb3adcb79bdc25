//! The time at which the present experiment must have ended.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// When the present experiment must have ended; shared with the programs that run.
#[derive(Clone)]
pub struct Deadline(Rc<Cell<Instant>>);

impl Deadline {
    /// From now on.
    pub fn after(limit: Duration) -> Deadline {
        Deadline(Rc::new(Cell::new(Instant::now() + limit)))
    }

    /// Sets it.
    pub fn set(&self, at: Instant) {
        self.0.set(at);
    }

    /// Time left; none after it.
    pub fn left(&self) -> Duration {
        self.0.get().saturating_duration_since(Instant::now())
    }
}
