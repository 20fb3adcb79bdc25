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
//! A word holds which job is next, how many there are, and how many threads may help, so a thread that comes late claims a
//! job of the batch that is there now, or none. The owner claims jobs as the others do: where no thread comes to help it does
//! them all.
//!
//! How many threads help depends on how long the jobs of the owner took: one for each 40 us of a batch, and one for half of
//! that if it is still awake. Those that are not needed any more sleep soon. A shorter batch is not worth it: the memory of
//! the sockets moves from one processor to another, and on one H200 machine four connections that ask as soon as they are
//! answered got 257000 answers a second from one thread, and 215000 from two.
//!
//! Known flaws: a thread that loses its processor within a job holds up the batch. Threads that look for work cost
//! processor time, 20 us after each batch that they took part in.

use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

use spinio_sys::linux;

use crate::sync::{AtomicBool, AtomicU64, Condvar, Mutex, lock, pause, yield_now};

/// Jobs that are shared out at a time.
const SLOTS: usize = if cfg!(loom) { 2 } else { 256 };
/// A thread helps with each so long part of a batch. Waking it takes 5 to 50 us.
const SHARE_NS: u64 = 40_000;
/// The same for a thread that is awake.
const SHARE_AWAKE_NS: u64 = 20_000;
/// How long a thread looks for more jobs before it sleeps.
const LOOK_NS: u64 = 20_000;
/// What a job is taken to cost until one was measured.
const FIRST_COST_NS: u64 = 3_000;
const STACK: usize = 256 << 10;

type Run<J> = dyn Fn(&mut J) + Send + Sync;

/// The owner's end. The threads are started as batches need them, and have ended when it is dropped.
pub struct IoThreads<J: Send + 'static> {
    name: &'static str,
    batch: Arc<Batch<J>>,
    run: Arc<Run<J>>,
    /// Threads that there may be.
    most: usize,
    /// Those that were started, in the order in which they help.
    helpers: Vec<Arc<Helper>>,
    /// Of a job, on average.
    cost_ns: u64,
}

impl<J: Send + 'static> IoThreads<J> {
    /// Up to `most` threads of a name, which share the descriptor table of the thread that calls [`IoThreads::run`].
    pub fn new(name: &'static str, most: usize, run: impl Fn(&mut J) + Send + Sync + 'static) -> IoThreads<J> {
        IoThreads {
            name,
            batch: Arc::new(Batch::new()),
            run: Arc::new(run),
            most,
            helpers: Vec::new(),
            cost_ns: FIRST_COST_NS,
        }
    }

    /// Runs each job once. They come back in the same order; the result says how many of them other threads ran.
    pub fn run(&mut self, jobs: &mut Vec<J>) -> usize {
        let (mut others, mut left) = (0, jobs.len());
        while left > 0 {
            // Those at the front, which are put back at the end.
            let count = left.min(SLOTS);
            left -= count;
            let wanted = self.wanted(count);
            if wanted > 0 {
                // The jobs are there before the threads wake up: else these might sleep again before.
                self.batch.publish(jobs.drain(..count), wanted);
                self.wake(wanted);
                let begun = linux::monotonic_ns();
                let own = self.batch.run_all(OWNER, &*self.run);
                self.measure(begun, own);
                self.batch.wait_until_done(count);
                jobs.extend(self.batch.slots[..count].iter().filter_map(|slot| lock(slot).take()));
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

    /// Processor time of the threads, in nanoseconds. What they used since they slept last comes with their next sleep.
    pub fn cpu_ns(&self) -> u64 {
        self.helpers.iter().map(|helper| helper.cpu_ns.load(Relaxed)).sum()
    }

    /// This thread has run so many jobs since then.
    fn measure(&mut self, begun: u64, jobs: usize) {
        if let Some(cost) = linux::monotonic_ns().saturating_sub(begun).checked_div(jobs as u64) {
            self.cost_ns = (self.cost_ns * 7 + cost) / 8;
        }
    }

    /// How many threads should help with so many jobs.
    fn wanted(&self, jobs: usize) -> usize {
        let expected = self.cost_ns * jobs as u64;
        let first_is_awake = || self.helpers.first().is_some_and(|helper| !helper.asleep.load(Relaxed));
        let wanted = match (expected / SHARE_NS) as usize {
            0 => usize::from(expected >= SHARE_AWAKE_NS && first_is_awake()),
            wanted => wanted,
        };
        wanted.min(self.most).min(jobs - 1)
    }

    /// Wakes the first threads, or starts them.
    fn wake(&mut self, wanted: usize) {
        self.helpers.iter().take(wanted).for_each(|helper| helper.wake());
        while self.helpers.len() < wanted {
            let number = self.helpers.len() as u64 + 1;
            let helper = Arc::new(Helper::default());
            let (batch, run, own) = (Arc::clone(&self.batch), Arc::clone(&self.run), Arc::clone(&helper));
            let started = linux::spawn_signals_blocked(self.name, STACK, move || {
                let leaves = Leaves(&own);
                // All that it refers to is given back before the owner goes on.
                serve(&own, &*batch, number, &*run);
                drop((batch, run));
                drop(leaves);
            });
            if started.is_err() {
                self.most = self.helpers.len();
                break;
            }
            self.helpers.push(helper);
        }
    }
}

impl<J: Send + 'static> Drop for IoThreads<J> {
    fn drop(&mut self) {
        self.helpers.iter().for_each(|helper| helper.end());
    }
}

/// A thread: how it sleeps and ends.
#[derive(Default)]
struct Helper {
    /// As in the state: the owner looks at it without the lock.
    asleep: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    cpu_ns: AtomicU64,
}

#[derive(Default)]
struct State {
    asleep: bool,
    ends: bool,
    has_left: bool,
}

impl Helper {
    /// Until it is woken; false at the end.
    fn sleep(&self) -> bool {
        let mut state = lock(&self.state);
        state.asleep = true;
        self.asleep.store(true, Relaxed);
        while state.asleep && !state.ends {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.ends
    }

    fn wake(&self) {
        // One that is about to sleep is not woken: the others do its part.
        if self.asleep.load(Relaxed) {
            let mut state = lock(&self.state);
            state.asleep = false;
            self.asleep.store(false, Relaxed);
            drop(state);
            self.changed.notify_all();
        }
    }

    /// Ends the thread, and waits for it.
    fn end(&self) {
        let mut state = lock(&self.state);
        state.ends = true;
        self.changed.notify_all();
        while !state.has_left {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self) {
        lock(&self.state).has_left = true;
        self.changed.notify_all();
    }
}

/// A thread that ends says so, also if a job panicked.
struct Leaves<'a>(&'a Helper);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// A thread's work until the end.
fn serve<J: Send>(helper: &Helper, batch: &Batch<J>, number: u64, run: &Run<J>) {
    let mut idle_since = None;
    loop {
        if batch.run_all(number, run) > 0 {
            idle_since = None;
        }
        if may_look(&mut idle_since) {
            pause();
            continue;
        }
        helper.cpu_ns.store(linux::thread_cpu_time().as_nanos() as u64, Relaxed);
        if !helper.sleep() {
            return;
        }
        idle_since = None;
    }
}

/// The number of the owner; those of the other threads follow.
const OWNER: u64 = 0;

/// The jobs that are shared out now.
struct Batch<J> {
    /// The next job to be claimed (16 bits), how many jobs there are (16 bits), and how many threads may help.
    claims: AtomicU64,
    done: AtomicU64,
    slots: Box<[Mutex<Option<J>>]>,
}

impl<J: Send> Batch<J> {
    fn new() -> Batch<J> {
        let slots = (0..SLOTS).map(|_| Mutex::new(None)).collect();
        Batch { claims: AtomicU64::new(0), done: AtomicU64::new(0), slots }
    }

    /// The jobs are there to be claimed. All jobs of the batch before are done and taken back.
    fn publish(&self, jobs: impl ExactSizeIterator<Item = J>, helpers: usize) {
        let word = (helpers as u64) << 32 | (jobs.len() as u64) << 16;
        for (slot, job) in self.slots.iter().zip(jobs) {
            *lock(slot) = Some(job);
        }
        self.done.store(0, Relaxed);
        self.claims.store(word, Release);
    }

    /// A job that is now this thread's.
    fn claim(&self, number: u64) -> Option<usize> {
        let mut word = self.claims.load(Relaxed);
        loop {
            let (next, count, helpers) = (word & 0xffff, word >> 16 & 0xffff, word >> 32);
            if next >= count || number > helpers {
                return None;
            }
            match self.claims.compare_exchange(word, word + 1, AcqRel, Relaxed) {
                Ok(_) => return Some(next as usize),
                Err(now) => word = now,
            }
        }
    }

    /// Runs jobs as long as there are some: how many.
    fn run_all(&self, number: u64, run: &Run<J>) -> usize {
        let mut count = 0;
        while let Some(slot) = self.claim(number) {
            // Counted as done if it panics too: the owner waits for it.
            let _done = Done(&self.done);
            if let Some(job) = lock(&self.slots[slot]).as_mut() {
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
            let (batch, helper) = (Arc::new(Batch::<u32>::new()), Arc::new(Helper::default()));
            let run = |job: &mut u32| *job += 1;
            let others = (Arc::clone(&batch), Arc::clone(&helper));
            let other = thread::spawn(move || {
                serve(&others.1, &others.0, 1, &run);
                others.1.leave();
            });
            for jobs in [[0, 10], [20, 30]] {
                batch.publish(jobs.into_iter(), 1);
                helper.wake();
                batch.run_all(OWNER, &run);
                batch.wait_until_done(2);
                let after: Vec<_> = batch.slots.iter().map(|slot| lock(slot).take()).collect();
                assert_eq!(after, jobs.map(|job| Some(job + 1)));
            }
            helper.end();
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
        let mut threads = IoThreads::new("jobs", 3, |job: &mut (u64, u64)| job.1 = job.0 * job.0);
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
        let mut threads = IoThreads::new("jobs", 1, move |both: &mut bool| {
            let begun = Instant::now();
            seen.fetch_add(1, AcqRel);
            while seen.load(Acquire) < 2 && begun.elapsed() < Duration::from_secs(600) {
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
        let mut threads = IoThreads::new("jobs", 1, move |ran: &mut bool| {
            if linux::gettid() != owner {
                std::panic::resume_unwind(Box::new("planned"));
            }
            std::thread::sleep(Duration::from_micros(100));
            *ran = true;
        });
        let (begun, mut rounds) = (Instant::now(), 0);
        // On a busy machine the other thread may get no processor for many rounds.
        while panics == 0 || rounds < 50 {
            assert!(begun.elapsed() < Duration::from_secs(600), "the other thread runs no job");
            jobs.fill(false);
            threads.run(&mut jobs);
            assert_eq!(jobs.len(), 32);
            panics += jobs.iter().filter(|ran| !**ran).count();
            rounds += 1;
        }
        assert_eq!(panics, 1, "the thread ended with its first job, and its job was counted as done");
    }

    #[test]
    fn short_batches_and_owners_without_threads_run_alone() {
        let owner = linux::gettid();
        let same = move |same: &mut bool| *same = linux::gettid() == owner;
        for (most, jobs) in [(0, 1000), (4, 1), (4, 2)] {
            let mut jobs = vec![false; jobs];
            assert_eq!(IoThreads::new("jobs", most, same).run(&mut jobs), 0);
            assert!(jobs.iter().all(|same| *same));
        }
    }
}
