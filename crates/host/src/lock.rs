//! Locks that a panic does not poison: every owner keeps the guarded state consistent.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock, even if a thread has panicked with it.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
