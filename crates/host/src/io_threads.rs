//! I/O threads: they share out a batch of short jobs with the one thread that has them, and keep nothing.
//!
//! ```text
//!   owner        job 0   job 3   job 5 . waits for job 4 .   takes all jobs back, acts on what they have found
//!   I/O thread   job 1   job 4 .........                     looks for another batch for 20 us, then sleeps
//!   I/O thread   job 2   .                                   the same
//! ```
//!
//! The owner makes system calls for many sockets, and a call takes longer than all that it decides about it. So the calls
//! alone are shared out: a job is a value that holds what a call needs and what came of it. All other state stays the
//! owner's and needs no lock. Servers with one thread of logic, as Redis, do the same.
//!
//! A word holds how many jobs the batch has and which one is next, so a thread that comes late claims a job of the batch
//! that is there now, or none. The owner claims jobs as the others do: where no thread comes to help it does them all.
//!
//! How many threads are woken depends on how long the jobs of the owner took: one for each 25 us of a batch. A batch that
//! is shorter than that is shared only with threads that are still awake.
//!
//! Known flaws: a thread that loses its processor within a job holds up the batch. Threads that look for work cost
//! processor time, 20 us after each batch that they took part in.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use spinio_sys::linux;

use crate::sync::{AtomicU64, Condvar, Mutex, lock, pause, yield_now};

/// Jobs that are shared out at a time.
const SLOTS: usize = if cfg!(loom) { 2 } else { 256 };
/// A thread is woken for each so long part of a batch. Waking it takes 5 to 50 us.
const SHARE_NS: u64 = 25_000;
/// A shorter batch is not worth the 1 us that sharing costs, even where threads are awake.
const SHORT_NS: u64 = 8_000;
/// How long a thread looks for more jobs before it sleeps.
const LOOK_NS: u64 = 20_000;
/// What a job is taken to cost until one was measured.
const FIRST_COST_NS: u64 = 3_000;
const STACK: usize = 256 << 10;

type Run<J> = dyn Fn(&mut J) + Send + Sync;

/// The owner's end. The threads are started as batches need them, and have ended when it is dropped.
pub struct IoThreads<J: Send + 'static> {
    shared: Arc<Shared<J>>,
    run: Arc<Run<J>>,
    /// Threads that there may be, and that were started.
    most: usize,
    started: usize,
    /// Of a job, on average.
    cost_ns: u64,
}

impl<J: Send + 'static> IoThreads<J> {
    /// Up to `most` threads, which share the descriptor table of the thread that calls [`IoThreads::run`].
    pub fn new(most: usize, run: impl Fn(&mut J) + Send + Sync + 'static) -> IoThreads<J> {
        IoThreads { shared: Arc::new(Shared::new()), run: Arc::new(run), most, started: 0, cost_ns: FIRST_COST_NS }
    }

    /// Runs each job once. They come back in the same order; the result says how many of them other threads ran.
    pub fn run(&mut self, jobs: &mut Vec<J>) -> usize {
        let (mut others, mut left) = (0, jobs.len());
        while left > 0 {
            // Those at the front, which are put back at the end.
            let count = left.min(SLOTS);
            left -= count;
            let awake = self.awake();
            if let Some(wanted) = self.wanted(count).filter(|wanted| wanted + awake > 0) {
                self.shared.publish(jobs.drain(..count));
                self.wake(wanted.saturating_sub(awake));
                let begun = linux::monotonic_ns();
                let own = self.shared.run_all(&*self.run);
                self.measure(begun, own);
                self.shared.wait_until_done(count);
                jobs.extend(self.shared.slots[..count].iter().filter_map(|slot| lock(slot).take()));
                others += count - own;
            } else {
                let begun = linux::monotonic_ns();
                jobs[..count].iter_mut().for_each(|job| (self.run)(job));
                self.measure(begun, count);
                jobs.rotate_left(count);
            }
        }
        others
    }

    /// This thread has run so many jobs since then.
    fn measure(&mut self, begun: u64, jobs: usize) {
        if let Some(cost) = linux::monotonic_ns().saturating_sub(begun).checked_div(jobs as u64) {
            self.cost_ns = (self.cost_ns * 7 + cost) / 8;
        }
    }

    /// Processor time of the threads, in nanoseconds. What they used since they slept last comes with their next sleep.
    pub fn cpu_ns(&self) -> u64 {
        self.shared.cpu_ns.load(Relaxed)
    }

    /// How many threads should help with so many jobs; `None`: none, not even those that are awake.
    fn wanted(&self, jobs: usize) -> Option<usize> {
        let expected = self.cost_ns * jobs as u64;
        let worth_it = jobs >= 2 && expected >= SHORT_NS;
        worth_it.then(|| self.most.min(jobs - 1).min((expected / SHARE_NS) as usize))
    }

    /// Threads that look for jobs or have one.
    fn awake(&self) -> usize {
        self.started.saturating_sub(self.shared.asleep.load(Relaxed) as usize)
    }

    /// Wakes so many threads, or starts them. The jobs are there to be claimed: else the threads might sleep before.
    fn wake(&mut self, mut missing: usize) {
        missing -= self.shared.wake(missing);
        while missing > 0 && self.started < self.most {
            let (shared, run) = (Arc::clone(&self.shared), Arc::clone(&self.run));
            lock(&shared.state).running += 1;
            let started = linux::spawn_signals_blocked("spinio-net-io", STACK, move || {
                let left = Left(shared);
                left.0.serve(&*run);
                // What it refers to is given back before the owner goes on.
                drop(run);
            });
            if started.is_err() {
                lock(&self.shared.state).running -= 1;
                self.most = self.started;
                break;
            }
            self.started += 1;
            missing -= 1;
        }
    }
}

impl<J: Send + 'static> Drop for IoThreads<J> {
    fn drop(&mut self) {
        self.shared.end();
    }
}

/// A thread that ends says so, also if a job panicked.
struct Left<J: Send + 'static>(Arc<Shared<J>>);

impl<J: Send + 'static> Drop for Left<J> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// What the threads have in common.
struct Shared<J> {
    /// Jobs of the batch in the upper half, the next one to be claimed in the lower half.
    claims: AtomicU64,
    done: AtomicU64,
    slots: Box<[Mutex<Option<J>>]>,
    /// Threads that sleep and are not to wake up: the owner looks at it without the lock.
    asleep: AtomicU64,
    state: Mutex<State>,
    changed: Condvar,
    cpu_ns: AtomicU64,
}

#[derive(Default)]
struct State {
    asleep: usize,
    /// Those of them that are to wake up.
    wakes: usize,
    /// Threads that have not ended.
    running: usize,
    ended: bool,
}

impl<J: Send> Shared<J> {
    fn new() -> Shared<J> {
        Shared {
            claims: AtomicU64::new(0),
            done: AtomicU64::new(0),
            slots: (0..SLOTS).map(|_| Mutex::new(None)).collect(),
            asleep: AtomicU64::new(0),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            cpu_ns: AtomicU64::new(0),
        }
    }

    /// The jobs are there to be claimed. All jobs of the batch before are done and taken back.
    fn publish(&self, jobs: impl ExactSizeIterator<Item = J>) {
        let count = jobs.len() as u64;
        for (slot, job) in self.slots.iter().zip(jobs) {
            *lock(slot) = Some(job);
        }
        self.done.store(0, Relaxed);
        self.claims.store(count << 32, Release);
    }

    /// The number of a job that is this thread's.
    fn claim(&self) -> Option<usize> {
        let mut word = self.claims.load(Relaxed);
        loop {
            let next = word & u64::from(u32::MAX);
            if next >= word >> 32 {
                return None;
            }
            match self.claims.compare_exchange(word, word + 1, AcqRel, Relaxed) {
                Ok(_) => return Some(next as usize),
                Err(now) => word = now,
            }
        }
    }

    /// Runs jobs as long as there are some: how many.
    fn run_all(&self, run: &Run<J>) -> usize {
        let mut count = 0;
        while let Some(number) = self.claim() {
            // Counted as done if it panics too: the owner waits for it.
            let _done = Done(&self.done);
            if let Some(job) = lock(&self.slots[number]).as_mut() {
                run(job);
            }
            count += 1;
        }
        count
    }

    /// The owner has no job left, but others may be at work.
    fn wait_until_done(&self, count: usize) {
        let mut looks = 0;
        while self.done.load(Acquire) < count as u64 {
            looks += 1;
            // On machines with few processors the thread with the job may need this one.
            if looks % 256 == 0 { yield_now() } else { pause() }
        }
    }

    /// A thread's work until the end.
    fn serve(&self, run: &Run<J>) {
        let (mut counted, mut idle_since) = (0, None);
        loop {
            if self.run_all(run) > 0 {
                idle_since = None;
            }
            if may_look(&mut idle_since) {
                pause();
                continue;
            }
            let used = linux::thread_cpu_time().as_nanos() as u64;
            self.cpu_ns.fetch_add(used - counted, Relaxed);
            counted = used;
            if !self.sleep() {
                return;
            }
            idle_since = None;
        }
    }

    /// Until it is woken; false at the end.
    fn sleep(&self) -> bool {
        let mut state = lock(&self.state);
        state.asleep += 1;
        self.tell_asleep(&state);
        while state.wakes == 0 && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.wakes = state.wakes.saturating_sub(1);
        state.asleep -= 1;
        self.tell_asleep(&state);
        !state.ended
    }

    fn tell_asleep(&self, state: &State) {
        self.asleep.store(state.asleep.saturating_sub(state.wakes) as u64, Relaxed);
    }

    /// Wakes so many threads, or as many as sleep: how many.
    fn wake(&self, wanted: usize) -> usize {
        if wanted == 0 || self.asleep.load(Relaxed) == 0 {
            return 0;
        }
        let mut state = lock(&self.state);
        let count = wanted.min(state.asleep.saturating_sub(state.wakes));
        state.wakes += count;
        self.tell_asleep(&state);
        drop(state);
        (0..count).for_each(|_| self.changed.notify_one());
        count
    }

    fn leave(&self) {
        lock(&self.state).running -= 1;
        self.changed.notify_all();
    }

    /// Ends the threads, and waits for them.
    fn end(&self) {
        let mut state = lock(&self.state);
        state.ended = true;
        self.changed.notify_all();
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

struct Done<'a>(&'a AtomicU64);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Release);
    }
}

/// Whether a thread looks on for work. A model checker has no clock.
fn may_look(idle_since: &mut Option<u64>) -> bool {
    if cfg!(loom) {
        return false;
    }
    let now = linux::monotonic_ns();
    now.saturating_sub(*idle_since.get_or_insert(now)) < LOOK_NS
}

#[cfg(all(test, loom))]
mod interleavings {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;

    #[test]
    fn each_job_of_two_batches_is_run_once_and_seen_by_the_owner() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(|| {
            let shared = Arc::new(Shared::<u32>::new());
            lock(&shared.state).running = 1;
            let run = |job: &mut u32| *job += 1;
            let other = Arc::clone(&shared);
            let other = thread::spawn(move || {
                other.serve(&run);
                other.leave();
            });
            for jobs in [[0, 10], [20, 30]] {
                shared.publish(jobs.into_iter());
                shared.wake(1);
                shared.run_all(&run);
                shared.wait_until_done(2);
                let after: Vec<_> = shared.slots.iter().map(|slot| lock(slot).take()).collect();
                assert_eq!(after, jobs.map(|job| Some(job + 1)));
            }
            shared.end();
            other.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn jobs_come_back_in_order_also_if_they_are_more_than_slots() {
        let mut threads = IoThreads::new(3, |job: &mut (u64, u64)| job.1 = job.0 * job.0);
        for count in [0, 1, 2, 20, SLOTS, SLOTS + 1, 3 * SLOTS] {
            for _ in 0..20 {
                let mut jobs: Vec<_> = (0..count as u64).map(|n| (n, 0)).collect();
                threads.run(&mut jobs);
                assert_eq!(jobs, (0..count as u64).map(|n| (n, n * n)).collect::<Vec<_>>());
            }
        }
    }

    /// The first job ends only after a second one began, which another thread has to run.
    #[test]
    fn threads_run_jobs_at_the_same_time() {
        let begun = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&begun);
        let mut threads = IoThreads::new(1, move |both: &mut bool| {
            let begun = Instant::now();
            seen.fetch_add(1, AcqRel);
            while seen.load(Acquire) < 2 && begun.elapsed() < Duration::from_secs(60) {
                std::thread::yield_now();
            }
            *both = seen.load(Acquire) >= 2;
        });
        let mut jobs = vec![false; 32];
        let others = threads.run(&mut jobs);
        assert!(jobs.iter().all(|both| *both));
        assert!(others > 0);
    }

    #[test]
    fn job_that_panics_on_another_thread_does_not_hold_up_the_batch() {
        let owner = linux::gettid();
        let (mut jobs, mut panics) = (vec![false; 32], 0);
        let mut threads = IoThreads::new(1, move |ran: &mut bool| {
            if linux::gettid() != owner {
                std::panic::resume_unwind(Box::new("planned"));
            }
            std::thread::sleep(Duration::from_micros(100));
            *ran = true;
        });
        for _ in 0..50 {
            jobs.fill(false);
            threads.run(&mut jobs);
            assert_eq!(jobs.len(), 32);
            panics += jobs.iter().filter(|ran| !**ran).count();
        }
        assert_eq!(panics, 1, "the thread ended with its first job, and its job was counted as done");
    }

    #[test]
    fn short_batches_and_owners_without_threads_run_alone() {
        let owner = linux::gettid();
        let same = move |same: &mut bool| *same = linux::gettid() == owner;
        for (most, jobs) in [(0, 1000), (4, 1), (4, 2)] {
            let mut jobs = vec![false; jobs];
            assert_eq!(IoThreads::new(most, same).run(&mut jobs), 0);
            assert!(jobs.iter().all(|same| *same));
        }
    }
}
