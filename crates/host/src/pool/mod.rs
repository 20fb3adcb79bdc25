//! Crews: helper threads that work on large requests.
//!
//! ```text
//!   caller ── post(job, 3) ──> queue ──> helper: job.help() until nothing is left
//!          ── call(f) ───────> queue ──> helper: f(), answer back
//!   any thread drops a twin ─> graveyard ──> keeper closes it, in the table it lives in
//! ```
//!
//! There are three kinds, because a thread sees one descriptor table:
//!
//! - **keepers** have a table of their own and hold SPIN's descriptors in it. They must not call a
//!   device: its driver finds its own descriptors by number, in the table of the caller (seen: CUDA
//!   fails to register memory there, or aborts).
//! - **mates** share the program's table, so they can call the driver, and read files through the
//!   program's descriptor while the program's thread waits in its call.
//! - **readers** have one each, so that they share no word with anybody when they read (batch/readers.rs). They open what
//!   they need for the time of a task; like keepers, they call no device.
//!
//! What a helper does between two tasks: `worker.rs`.
//!
//! Known flaw: helpers do not know NUMA; the kernel's scheduler places them.

mod worker;
mod workers;

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_sys::linux::{Private, gettid, leave_descriptor_table, spawn_quiet};

use self::worker::{Entry, Shared};
pub use self::worker::{Idle, Task, Tidy};
pub use self::workers::{SHADOW_WORKERS, Workers};
use crate::lock::lock;
use crate::shadow_fd::Graveyard;
use crate::syscalls::Kernel;

/// Helper threads of a runtime.
pub struct Crew {
    shared: Arc<Shared>,
    /// Keepers and readers have it.
    private: Option<Private>,
    /// Each thread leaves the table that it was made with for one of its own.
    apart: bool,
    size: usize,
}

/// Bytes of a mate's stack: it calls the driver.
pub const STACK: usize = 1 << 20;

impl Crew {
    /// Up to `size` keepers, started as work comes.
    /// `look`: how long an idle one looks for work before it sleeps.
    pub fn keepers(
        kernel: &'static dyn Kernel,
        size: usize,
        look: Duration,
        tidy: impl Tidy + 'static,
    ) -> Option<Crew> {
        let private = kernel.private().ok()?;
        Crew::new(kernel, Some(private), false, size, look, tidy)
    }

    /// `size` mates. A thread has the descriptor table of the one that makes it, so all are made now, and this must be
    /// called on a thread of the program.
    pub fn mates(
        kernel: &'static dyn Kernel,
        size: usize,
        look: Duration,
        tidy: impl Tidy + 'static,
    ) -> Option<Crew> {
        Crew::new(kernel, None, false, size, look, tidy)
    }

    /// Up to `size` readers, started as work comes.
    pub fn readers(kernel: &'static dyn Kernel, size: usize, look: Duration) -> Option<Crew> {
        let private = kernel.private().ok()?;
        Crew::new(kernel, Some(private), true, size, look, Idle)
    }

    fn new(
        kernel: &'static dyn Kernel,
        private: Option<Private>,
        apart: bool,
        size: usize,
        look: Duration,
        tidy: impl Tidy + 'static,
    ) -> Option<Crew> {
        let shared = Arc::new(Shared::new(kernel, look, tidy));
        let crew = Crew { shared, private, apart, size: size.max(1) };
        let at_once = if crew.private.is_some() { 1 } else { crew.size };
        crew.hire(at_once).then_some(crew)
    }

    /// Lets up to `helpers` threads work on a task. Does not wait.
    pub fn post(&self, task: Arc<dyn Task>, helpers: usize) {
        let helpers = helpers.min(self.size);
        if helpers > 0 {
            self.hire_more(helpers);
            self.enqueue(Entry::Task(task, helpers), helpers);
        }
    }

    /// Runs `f` on a helper, some time.
    pub fn send(&self, f: impl FnOnce() + Send + 'static) {
        let shared = Arc::clone(&self.shared);
        shared.sent.fetch_add(1, Relaxed);
        let guarded = move || {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
            shared.sent.fetch_sub(1, Release);
            debug_assert!(done.is_ok(), "what is sent must not panic");
        };
        self.enqueue(Entry::Sent(Box::new(guarded)), 1);
    }

    /// Runs `f` on a helper and waits for its answer.
    pub fn call<T: Send + 'static>(&self, f: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let busy = {
            let state = lock(&self.shared.state);
            (state.entries.len() >= state.sleeping).then_some(state.started)
        };
        if let Some(started) = busy {
            self.hire_more(started + 1);
        }
        let answer = Arc::new((Mutex::new(None), Condvar::new()));
        let theirs = Arc::clone(&answer);
        self.enqueue(
            Entry::Call(Box::new(move || {
                let value = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f));
                *lock(&theirs.0) = Some(value.ok());
                theirs.1.notify_one();
            })),
            1,
        );
        let mut slot = lock(&answer.0);
        loop {
            match slot.take() {
                Some(value) => return value,
                None => slot = answer.1.wait(slot).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Runs `f` on a helper some time; nobody waits. A panic in it is lost.
    pub fn start(&self, f: impl FnOnce() + Send + 'static) {
        let started = lock(&self.shared.state).started;
        self.hire_more(started + 1);
        let quiet = || drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)));
        self.enqueue(Entry::Call(Box::new(quiet)), 1);
    }

    /// Runs something on a thread of its own that has the keepers' table; `false` if there is none.
    pub fn beside(&self, name: &str, body: impl FnOnce() + Send + 'static) -> bool {
        self.private.as_ref().is_some_and(|private| private.spawn(name, body))
    }

    /// Whether descriptors mean to mates what they mean to this thread; `None`: nobody tells.
    pub fn shares_my_table(&self) -> Option<bool> {
        match self.shared.member.load(Relaxed) {
            0 => None,
            member => self.shared.kernel.have_one_table(member, gettid()).ok(),
        }
    }

    /// Lets a sleeping helper look again how long it may sleep.
    pub fn nudge(&self) {
        let mut state = lock(&self.shared.state);
        state.nudges += 1;
        let somebody = state.sleeping > 0;
        drop(state);
        if somebody {
            self.shared.wake.notify_one();
        }
    }

    /// Waits until every buried descriptor is closed, but not for ever: a server may be slow, or this very thread.
    pub fn await_burials(&self, limit: Duration) {
        let begun = Instant::now();
        loop {
            let state = lock(&self.shared.state);
            // What was sent may hold the last twin.
            if state.graves.is_empty() && state.closing == 0 && self.shared.sent.load(Acquire) == 0 {
                return;
            }
            drop(state);
            if begun.elapsed() > limit {
                return;
            }
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// A way to have descriptors closed where they live.
    pub fn graveyard(&self) -> Graveyard {
        Graveyard(Arc::clone(&self.shared) as _)
    }

    fn enqueue(&self, entry: Entry, helpers: usize) {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        state.entries.push_back(entry);
        shared.waiting.fetch_add(1, Release);
        let wake = state.sleeping.min(helpers);
        drop(state);
        for _ in 0..wake {
            shared.wake.notify_one();
        }
    }

    /// Makes sure `wanted` keepers or readers run; mates are all there from the beginning.
    fn hire_more(&self, wanted: usize) {
        if self.private.is_some() {
            self.hire(wanted);
        }
    }

    /// Makes sure `wanted` threads run; false if there is none at all.
    fn hire(&self, wanted: usize) -> bool {
        let mut state = lock(&self.shared.state);
        while state.started < wanted.min(self.size) {
            state.started += 1;
            let shared = Arc::clone(&self.shared);
            drop(state);
            let made = match &self.private {
                Some(private) if self.apart => private.spawn("spinio-reader", move || {
                    // Else it shares the table with the other readers: that is slower, not wrong.
                    let _ = leave_descriptor_table(0);
                    shared.work();
                }),
                Some(private) => private.spawn("spinio-keeper", move || shared.work()),
                None => spawn_quiet("spinio-mate", STACK, move || shared.work()).is_ok(),
            };
            state = lock(&self.shared.state);
            if !made {
                state.started -= 1;
                break;
            }
        }
        state.started > 0
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        // The private table goes with the last helper, and every descriptor with the table.
        lock(&self.shared.state).dismissed = true;
        self.shared.wake.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow_fd::PrivateFd;
    use crate::syscalls::Linux;
    use std::sync::atomic::{AtomicU64, Ordering::AcqRel};

    struct Count {
        left: AtomicU64,
        done: AtomicU64,
    }

    impl Task for Count {
        fn help(&self) {
            while self.left.fetch_update(AcqRel, Acquire, |n| n.checked_sub(1)).is_ok() {
                self.done.fetch_add(1, AcqRel);
            }
        }
    }

    #[test]
    fn every_piece_of_every_task_is_done_once() {
        let crew = Crew::keepers(&Linux, 3, Duration::ZERO, Idle).expect("helpers");
        let tasks: Vec<_> =
            (0..50).map(|_| Arc::new(Count { left: AtomicU64::new(100), done: AtomicU64::new(0) })).collect();
        for task in &tasks {
            crew.post(task.clone(), 3);
        }
        let begun = Instant::now();
        while tasks.iter().any(|t| t.done.load(Acquire) < 100) {
            assert!(begun.elapsed() < Duration::from_secs(60), "helpers never finished");
            std::thread::yield_now();
        }
        assert!(tasks.iter().all(|t| t.done.load(Acquire) == 100));
    }

    #[test]
    fn what_a_helper_opens_the_program_cannot_see_and_a_dropped_twin_is_closed() {
        let crew = Crew::keepers(&Linux, 2, Duration::ZERO, Idle).expect("helpers");
        let tid = spinio_sys::linux::gettid();
        let file = tempfile::tempfile().unwrap();
        let ours = std::os::fd::AsRawFd::as_raw_fd(&file);
        let fd = crew.call(move || Linux.open_again(tid, ours, 0)).unwrap().expect("opened again");
        let here = spinio_sys::linux::fstat(fd);
        let there = crew.call(move || Linux.fstat(fd)).unwrap().unwrap();
        assert_eq!(there.ino, spinio_sys::linux::fstat(ours).unwrap().ino);
        assert!(here.is_err() || here.unwrap().ino != there.ino || fd == ours, "the twin is in the program's table");
        drop(PrivateFd::new(fd, crew.graveyard()));
        crew.await_burials(Duration::from_secs(60));
        assert!(crew.call(move || Linux.fstat(fd)).unwrap().is_err());
    }

    #[test]
    fn a_call_that_panics_answers_nothing_and_the_crew_lives_on() {
        let crew = Crew::keepers(&Linux, 1, Duration::ZERO, Idle).expect("helpers");
        assert_eq!(crew.call(|| -> u32 { std::panic::resume_unwind(Box::new("planned")) }), None);
        assert_eq!(crew.call(|| 7), Some(7));
    }
}
