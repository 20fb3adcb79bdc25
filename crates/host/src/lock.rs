//! Locks that a panic elsewhere does not poison: what they guard is kept whole by every holder.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock, whoever has panicked with it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
