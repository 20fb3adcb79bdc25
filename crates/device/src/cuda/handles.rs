//! A bounded pool of the driver's handles: streams or events that nobody uses at the moment.

use std::sync::{Mutex, PoisonError};

pub(super) struct Handles {
    state: Mutex<State>,
    most: usize,
}

struct State {
    idle: Vec<usize>,
    made: usize,
}

impl Handles {
    pub(super) const fn new(most: usize) -> Handles {
        Handles { state: Mutex::new(State { idle: Vec::new(), made: 0 }), most }
    }

    /// An idle one, else a new one; `None` once as many as may be are in use.
    pub(super) fn take<E>(&self, make: impl FnOnce() -> Result<usize, E>) -> Result<Option<usize>, E> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = state.idle.pop() {
            return Ok(Some(handle));
        }
        if state.made == self.most {
            return Ok(None);
        }
        state.made += 1;
        drop(state); // the driver may take its time
        match make() {
            Ok(handle) => Ok(Some(handle)),
            Err(e) => {
                self.state.lock().unwrap_or_else(PoisonError::into_inner).made -= 1;
                Err(e)
            }
        }
    }

    /// Gives one back.
    pub(super) fn give(&self, handle: usize) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).idle.push(handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_reuses_and_is_bounded() {
        let pool = Handles::new(2);
        let mut next = 0;
        let mut make = || {
            next += 1;
            Ok::<usize, ()>(next)
        };
        let a = pool.take(&mut make).unwrap().unwrap();
        let b = pool.take(&mut make).unwrap().unwrap();
        assert_ne!(a, b);
        assert_eq!(pool.take(&mut make), Ok(None));
        pool.give(b);
        assert_eq!(pool.take(&mut make), Ok(Some(b)));
    }

    #[test]
    fn what_could_not_be_made_does_not_count() {
        let pool = Handles::new(1);
        assert_eq!(pool.take(|| Err("no")), Err("no"));
        assert_eq!(pool.take(|| Ok::<usize, ()>(5)), Ok(Some(5)));
    }
}
