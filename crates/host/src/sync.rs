//! Locks, atomics and pauses that a model checker must see. `cargo x interleavings` compiles the crate with loom's
//! versions, which run a test once for every order in which its threads can interleave.

#[cfg(loom)]
pub use self::model::*;
#[cfg(not(loom))]
pub use self::real::*;

#[cfg(not(loom))]
mod real {
    use std::sync::PoisonError;
    use std::time::{Duration, Instant};

    pub use std::sync::atomic::{AtomicBool, AtomicU64};
    pub use std::sync::{Condvar, Mutex, MutexGuard};

    use spinio_sys::linux;

    pub use crate::lock::lock;

    /// The index, below `count`, of the slot of the calling thread's processor.
    pub fn cpu_index(count: usize) -> usize {
        linux::cpu() % count
    }

    /// Lets other threads run first.
    pub fn yield_now() {
        std::thread::yield_now();
    }

    /// Between two looks at a word.
    pub fn pause() {
        std::hint::spin_loop();
    }

    /// Sleeps until it is woken. The time limit only guards against a wake-up lost to a thread that died.
    pub fn wait_a_while<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        wait_at_most(changed, guard, A_WHILE)
    }

    /// As long as [`wait_a_while`] sleeps.
    pub const A_WHILE: Duration = Duration::from_millis(200);

    /// Sleeps until it is woken, but no longer than `limit`.
    pub fn wait_at_most<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, limit: Duration) -> MutexGuard<'a, T> {
        linux::deliver_default_signals();
        changed.wait_timeout(guard, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Waits for a copy: spins briefly, then sleeps, up to a limit.
    pub struct Backoff(Instant);

    impl Default for Backoff {
        fn default() -> Backoff {
            Backoff::new()
        }
    }

    impl Backoff {
        /// Begins to wait.
        pub fn new() -> Backoff {
            Backoff(Instant::now())
        }

        /// Waits for a moment; false once it is time to check everything again.
        pub fn wait(&self) -> bool {
            match self.0.elapsed() {
                short if short < Duration::from_micros(200) => std::hint::spin_loop(),
                short if short < Duration::from_millis(5) => {
                    linux::deliver_default_signals();
                    std::thread::sleep(Duration::from_micros(50));
                }
                _ => return false,
            }
            true
        }
    }
}

#[cfg(loom)]
mod model {
    use std::sync::PoisonError;
    use std::time::Duration;

    pub use loom::sync::atomic::{AtomicBool, AtomicU64};
    pub use loom::sync::{Condvar, Mutex, MutexGuard};

    pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One slot for all threads, so that they share it.
    pub fn cpu_index(_count: usize) -> usize {
        0
    }

    pub fn yield_now() {
        loom::thread::yield_now();
    }

    pub fn pause() {
        loom::thread::yield_now();
    }

    /// Without the limit, so that a lost wake-up is found.
    pub fn wait_a_while<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    pub const A_WHILE: Duration = Duration::MAX;

    pub fn wait_at_most<'a, T>(changed: &Condvar, guard: MutexGuard<'a, T>, _: Duration) -> MutexGuard<'a, T> {
        wait_a_while(changed, guard)
    }

    pub struct Backoff;

    impl Backoff {
        pub fn new() -> Backoff {
            Backoff
        }

        pub fn wait(&self) -> bool {
            loom::thread::yield_now();
            false
        }
    }
}
