//! A bounded pool of the driver's handles: streams or events that are not in use.

use std::sync::{Mutex, PoisonError};

pub(super) struct HandlePool {
    state: Mutex<State>,
    max: usize,
}

struct State {
    idle: Vec<usize>,
    created: usize,
}

impl HandlePool {
    pub(super) const fn new(max: usize) -> HandlePool {
        HandlePool { state: Mutex::new(State { idle: Vec::new(), created: 0 }), max }
    }

    /// An idle one, else a new one; `None` at the limit.
    pub(super) fn acquire<E>(&self, create: impl FnOnce() -> Result<usize, E>) -> Result<Option<usize>, E> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(handle) = state.idle.pop() {
            return Ok(Some(handle));
        }
        if state.created == self.max {
            return Ok(None);
        }
        state.created += 1;
        drop(state); // the driver may be slow
        match create() {
            Ok(handle) => Ok(Some(handle)),
            Err(e) => {
                self.state.lock().unwrap_or_else(PoisonError::into_inner).created -= 1;
                Err(e)
            }
        }
    }

    /// Returns one.
    pub(super) fn release(&self, handle: usize) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).idle.push(handle);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_reuses_handles_and_is_bounded() {
        let pool = HandlePool::new(2);
        let mut next = 0;
        let mut make = || {
            next += 1;
            Ok::<usize, ()>(next)
        };
        let a = pool.acquire(&mut make).unwrap().unwrap();
        let b = pool.acquire(&mut make).unwrap().unwrap();
        assert_ne!(a, b);
        assert_eq!(pool.acquire(&mut make), Ok(None));
        pool.release(b);
        assert_eq!(pool.acquire(&mut make), Ok(Some(b)));
    }

    #[test]
    fn failed_creation_does_not_count() {
        let pool = HandlePool::new(1);
        assert_eq!(pool.acquire(|| Err("no")), Err("no"));
        assert_eq!(pool.acquire(|| Ok::<usize, ()>(5)), Ok(Some(5)));
    }
}
