//! What a helper does, from its start until the crew is dismissed.
//!
//! ```text
//!   look at the queue for some microseconds, if somebody waited for what was done last
//!        │
//!        ▼
//!   close what is buried ── take an entry ──> do it, and look again
//!        │ there is none
//!        ▼
//!   sleep until there is, or until it is time to tidy up
//! ```
//!
//! A helper that ran out of work looks at the queue for a few microseconds, because the
//! next request of a stream of reads comes soon and waking a sleeper costs more than
//! the read of 64 KiB; then it sleeps. On machines with few processors it sleeps at once.
//! What is sent has nobody waiting for it, so the next of its kind is not looked for: a stream
//! through the page cache sends something every few hundred microseconds, and would keep one
//! processor busy with nothing but looking.

use std::collections::VecDeque;
use std::sync::atomic::{
    AtomicBool, AtomicU32, AtomicUsize,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_sys::linux::gettid;

use crate::lock::lock;
use crate::shadow_fd::{Closer, Grave};
use crate::syscalls::Kernel;

/// Something that several helpers can work on at once.
pub trait Task: Send + Sync {
    /// Works until there is nothing left to take.
    fn help(&self);
}

/// How many times as long as the others one helper looks for work.
const LINGER: u32 = 8;

type Call = Box<dyn FnOnce() + Send>;

/// What waits in the queue.
pub(super) enum Entry {
    /// For as many helpers.
    Task(Arc<dyn Task>, usize),
    /// Once; more may follow soon.
    Call(Call),
    /// Once; nobody waits for it.
    Sent(Call),
}

#[derive(Default)]
pub(super) struct State {
    pub(super) entries: VecDeque<Entry>,
    pub(super) graves: Vec<Grave>,
    /// Descriptors being closed outside the lock.
    pub(super) closing: usize,
    pub(super) nudges: u64,
    pub(super) sleeping: usize,
    pub(super) started: usize,
    pub(super) dismissed: bool,
}

/// What the helpers share with who gives them work.
pub(super) struct Shared {
    pub(super) kernel: &'static dyn Kernel,
    pub(super) state: Mutex<State>,
    pub(super) wake: Condvar,
    /// Entries and graves that wait; read without the lock by helpers that still look.
    pub(super) waiting: AtomicUsize,
    /// What was sent and is not over.
    pub(super) sent: AtomicUsize,
    look: Duration,
    lingering: AtomicBool,
    /// Number of a thread of it; 0 before the first one runs.
    pub(super) member: AtomicU32,
    tidy: Box<dyn Tidy>,
}

/// What idle helpers look after.
pub trait Tidy: Send + Sync {
    /// How long a helper may sleep before it looks again; for ever if there is nothing to look after.
    fn nap(&self) -> Option<Duration>;
    /// Lets go of what is no longer needed.
    fn tidy(&self);
}

/// What the readers of batches do while there is no batch: nothing.
pub struct Idle;

impl Tidy for Idle {
    fn nap(&self) -> Option<Duration> {
        None
    }

    fn tidy(&self) {}
}

impl Closer for Shared {
    fn bury(&self, grave: Grave) {
        let mut state = lock(&self.state);
        state.graves.push(grave);
        self.waiting.fetch_add(1, Release);
        drop(state);
        self.wake.notify_one();
    }
}

impl Shared {
    pub(super) fn new(kernel: &'static dyn Kernel, look: Duration, tidy: impl Tidy + 'static) -> Shared {
        Shared {
            kernel,
            state: Mutex::default(),
            wake: Condvar::new(),
            waiting: AtomicUsize::new(0),
            sent: AtomicUsize::new(0),
            look,
            lingering: AtomicBool::new(false),
            member: AtomicU32::new(0),
            tidy: Box::new(tidy),
        }
    }

    /// All that a helper does, until the crew is dismissed.
    pub(super) fn work(&self) {
        let _ = self.member.compare_exchange(0, gettid(), Relaxed, Relaxed);
        let mut waited_for = None;
        while let Some(entry) = self.next(waited_for) {
            match entry {
                Entry::Task(task, _) => {
                    let helped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| task.help()));
                    debug_assert!(helped.is_ok(), "a task must not panic");
                }
                Entry::Call(call) => call(),
                Entry::Sent(call) => {
                    call();
                    continue;
                }
            }
            waited_for = Some(Instant::now());
        }
    }

    /// Waits for something to do; `None` when the crew is dismissed. `waited_for`: when this helper last did something
    /// that somebody waited for.
    fn next(&self, waited_for: Option<Instant>) -> Option<Entry> {
        let (mut look, mut lingers) = (self.look, false);
        while let Some(begun) = waited_for
            && self.waiting.load(Acquire) == 0
        {
            if begun.elapsed() >= look {
                // One of them looks longer: where requests follow each other, the next finds somebody awake.
                if lingers || self.lingering.swap(true, Acquire) {
                    break;
                }
                (look, lingers) = (self.look * LINGER, true);
            }
            std::hint::spin_loop();
        }
        if lingers {
            self.lingering.store(false, Release);
        }
        let mut state = lock(&self.state);
        loop {
            let graves = std::mem::take(&mut state.graves);
            if !graves.is_empty() {
                // Closing can wait for a server; nobody else shall wait for that.
                state.closing += graves.len();
                drop(state);
                let count = graves.len();
                for Grave { fd, farewell } in graves {
                    if let Some(farewell) = farewell {
                        farewell(fd);
                    }
                    self.kernel.close(fd);
                }
                self.waiting.fetch_sub(count, Relaxed);
                state = lock(&self.state);
                state.closing -= count;
            }
            if let Some(Entry::Task(task, more)) = state.entries.front_mut()
                && *more > 1
            {
                *more -= 1;
                return Some(Entry::Task(Arc::clone(task), 1));
            }
            if let Some(entry) = state.entries.pop_front() {
                self.waiting.fetch_sub(1, Relaxed);
                return Some(entry);
            }
            if state.dismissed {
                return None;
            }
            // Asked without the lock: what it looks at may end with this look, and end here.
            let nudges = state.nudges;
            drop(state);
            let nap = self.tidy.nap();
            state = lock(&self.state);
            let news = !state.entries.is_empty() || !state.graves.is_empty() || state.dismissed;
            if news || state.nudges != nudges {
                continue;
            }
            state.sleeping += 1;
            let timed_out;
            (state, timed_out) = match nap {
                Some(nap) => {
                    let (state, slept) = self.wake.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner);
                    (state, slept.timed_out())
                }
                None => (self.wake.wait(state).unwrap_or_else(PoisonError::into_inner), false),
            };
            state.sleeping -= 1;
            if timed_out {
                drop(state);
                self.tidy.tidy();
                state = lock(&self.state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering::AcqRel};

    use super::*;
    use crate::pool::Crew;
    use crate::syscalls::Linux;

    #[test]
    fn who_did_what_nobody_waits_for_goes_to_sleep() {
        // Who looks, looks for longer than this test may take.
        let crew = Crew::keepers(&Linux, 1, Duration::from_secs(600), Idle).expect("helpers");
        let done = Arc::new(AtomicU64::new(0));
        let begun = Instant::now();
        for turn in 1..=3 {
            let theirs = Arc::clone(&done);
            crew.send(move || {
                theirs.fetch_add(1, AcqRel);
            });
            while done.load(Acquire) < turn || lock(&crew.shared.state).sleeping == 0 {
                assert!(begun.elapsed() < Duration::from_secs(60), "it looks for more");
                std::thread::yield_now();
            }
        }
    }
}
