//! Injection points: where a test ends or stops this process, to see that what is promised then is kept.
//!
//! ```text
//!   code:   commit(..); injection_point!("server: release committed"); answer(..);
//!   test:   a file of words, named by SPINIO_INJECTION in the environment of the process
//!             │ armed: a point, which pass of it, and a signal            counts: passes of each point
//!             └────────> that pass: SIGKILL or SIGSTOP to the process itself, exactly there; or its thread waits
//! ```
//!
//! A point is the hash of its name. Builds without debug assertions, and so all that are installed, have no points:
//! `cargo x stage` verifies that.

#![cfg_attr(debug_assertions, expect(unsafe_code, reason = "system calls and driver entry points"))]

/// Passes a named place: a literal, unique in all crates, `process: what has just happened`.
#[cfg(debug_assertions)]
#[macro_export]
macro_rules! injection_point {
    ($name:literal) => {{
        const POINT: u64 = $crate::injection::hash($name);
        $crate::injection::pass(POINT);
    }};
}

/// Nothing, in this build.
#[cfg(not(debug_assertions))]
#[macro_export]
macro_rules! injection_point {
    ($name:literal) => {};
}

/// The environment variable that names the file.
pub const VARIABLE: &str = concat!("SPINIO", "_INJECTION");

/// Words of the file.
pub mod word {
    /// The point that is armed; 0: none.
    pub const ARMED: usize = 0;
    /// Passes of it until the signal is sent.
    pub const LEFT: usize = 1;
    /// The number of the signal, or [`HOLD`].
    pub const SIGNAL: usize = 2;
    /// Signals that were sent.
    pub const FIRED: usize = 3;
    /// Not 0: threads that were held go on.
    pub const LET_GO: usize = 4;
    /// Pairs: a point, and its passes.
    pub const COUNTS: usize = 8;
    /// Pairs at most.
    pub const POINTS: usize = 256;
    /// Words in total.
    pub const ALL: usize = COUNTS + 2 * POINTS;
    /// Instead of a signal: the thread that passes is held there, and no other one.
    pub const HOLD: u64 = 0;
}

/// A point's number (FNV-1a), never 0.
pub const fn hash(name: &str) -> u64 {
    let (bytes, mut hash, mut at) = (name.as_bytes(), 0xcbf2_9ce4_8422_2325_u64, 0);
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x100_0000_01b3);
        at += 1;
    }
    hash | 1
}

#[cfg(debug_assertions)]
pub use points::pass;

#[cfg(debug_assertions)]
mod points {
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicU64;
    use std::sync::atomic::Ordering::SeqCst;
    use std::time::Duration;

    use super::{VARIABLE, word};
    use crate::linux::{SharedWords, kill_this_thread};

    /// Passes a point; see [`injection_point!`](crate::injection_point).
    pub fn pass(point: u64) {
        static WORDS: OnceLock<Option<SharedWords>> = OnceLock::new();
        if let Some(words) = WORDS.get_or_init(open) {
            count(words, point);
            if words[word::ARMED].load(SeqCst) == point && words[word::LEFT].fetch_sub(1, SeqCst) == 1 {
                words[word::ARMED].store(0, SeqCst);
                words[word::FIRED].fetch_add(1, SeqCst);
                match words[word::SIGNAL].load(SeqCst) {
                    word::HOLD => hold(words),
                    signal => kill_this_thread(signal as u32),
                }
            }
        }
    }

    fn hold(words: &[AtomicU64]) {
        while words[word::LET_GO].load(SeqCst) == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn open() -> Option<SharedWords> {
        let path = std::env::var_os(VARIABLE)?;
        let file = std::fs::OpenOptions::new().read(true).write(true).open(path).ok()?;
        // SAFETY: the test has made it of this length, and no process cuts it.
        unsafe { SharedWords::map(std::os::fd::AsFd::as_fd(&file), word::ALL) }.ok()
    }

    fn count(words: &[AtomicU64], point: u64) {
        let first = point as usize % word::POINTS;
        for at in (first..word::POINTS).chain(0..first) {
            let pair = &words[word::COUNTS + 2 * at..][..2];
            match pair[0].compare_exchange(0, point, SeqCst, SeqCst) {
                Ok(_) => {}
                Err(other) if other == point => {}
                Err(_) => continue,
            }
            pair[1].fetch_add(1, SeqCst);
            return;
        }
    }
}
