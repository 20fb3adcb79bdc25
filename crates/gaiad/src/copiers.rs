//! Threads that copy the pages of large releases into slots, beside the thread of the client.
//!
//! ```text
//!   part of a release   128 pages       │ 128 pages │ 128 pages │ ...
//!                       client's thread   copier      copier
//! ```
//!
//! One thread copies 5 to 10 GB/s, and less into slots that were never used, since each page is allocated first; the
//! device brings the pages at 55 GB/s. The threads are started by the first release that is large enough, and take no
//! processor time while there is none.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};

use rustix::io::Errno;

use crate::threads::spawn;

/// Threads at most: memory is not faster.
const MOST: usize = 7;

type Job = Box<dyn FnOnce() + Send>;

/// The threads, which live as long as the server.
#[derive(Debug, Default)]
pub(crate) struct Copiers {
    jobs: OnceLock<Option<mpsc::Sender<Job>>>,
}

impl Copiers {
    /// How many pieces of work can be done at the same time.
    pub(crate) fn width() -> usize {
        // The question takes 18 system calls where a control group limits the processors.
        static WIDTH: OnceLock<usize> = OnceLock::new();
        // Half: the server has other work, and so has the machine.
        *WIDTH.get_or_init(|| 1 + (std::thread::available_parallelism().map_or(1, |n| n.get()) / 2).min(MOST))
    }

    /// Does pieces of work, the first one on this thread. When this returns, none runs any more.
    ///
    /// # Errors
    /// That of one piece.
    pub(crate) fn run<F>(&self, work: Vec<F>) -> Result<(), Errno>
    where
        F: FnOnce() -> Result<(), Errno> + Send + 'static,
    {
        let mut work = work.into_iter();
        let Some(own) = work.next() else { return Ok(()) };
        let (answer, answers) = mpsc::channel();
        let others = work.len();
        for piece in work {
            let answer = answer.clone();
            self.send(Box::new(move || {
                let _ = answer.send(piece());
            }));
        }
        drop(answer);
        let mut done = own();
        // It ends when each piece has answered or has panicked.
        let mut answered = 0;
        for result in answers {
            answered += 1;
            done = done.and(result);
        }
        if answered < others { Err(Errno::IO) } else { done }
    }

    fn send(&self, job: Job) {
        let unsent = match self.jobs.get_or_init(start) {
            Some(jobs) => jobs.send(job).map_err(|mpsc::SendError(job)| job),
            None => Err(job),
        };
        // There are no threads.
        if let Err(job) = unsent {
            job();
        }
    }
}

fn start() -> Option<mpsc::Sender<Job>> {
    let (jobs, queue) = mpsc::channel::<Job>();
    let queue = Arc::new(Mutex::new(queue));
    let mut any = false;
    for _ in 1..Copiers::width() {
        let queue = Arc::clone(&queue);
        let next = move || queue.lock().unwrap_or_else(PoisonError::into_inner).recv().ok();
        let body = move || {
            // A piece that panics gives no answer, and the next one is another's.
            std::iter::from_fn(&next).for_each(|job| drop(catch_unwind(AssertUnwindSafe(job))));
        };
        any |= spawn("gaia-copy", body).is_ok();
    }
    any.then_some(jobs)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use super::*;

    #[test]
    fn all_work_is_done_when_it_returns_also_if_a_piece_fails_or_panics() {
        let (copiers, done) = (Copiers::default(), Arc::new(AtomicUsize::new(0)));
        let run = |pieces: usize, fails: Option<usize>, panics: Option<usize>| {
            let piece = |n| {
                let done = Arc::clone(&done);
                move || {
                    std::thread::yield_now();
                    done.fetch_add(1, SeqCst);
                    assert_ne!(Some(n), panics, "as a defect would");
                    if Some(n) == fails { Err(Errno::NOSPC) } else { Ok(()) }
                }
            };
            let result = copiers.run((0..pieces).map(piece).collect());
            (result, done.swap(0, SeqCst))
        };
        for pieces in [0, 1, 2, 40] {
            assert_eq!(run(pieces, None, None), (Ok(()), pieces));
        }
        for failing in [0, 1, 7] {
            assert_eq!(run(8, Some(failing), None), (Err(Errno::NOSPC), 8));
        }
        // More often than there are threads.
        for _ in 0..=Copiers::width() {
            assert_eq!(run(2, None, Some(1)), (Err(Errno::IO), 2));
        }
    }
}
