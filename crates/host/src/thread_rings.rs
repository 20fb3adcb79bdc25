//! The rings of threads of the program: each reads storage by itself, with one system call.
//!
//! ```text
//!   first read of a thread    makes a ring; a shadow worker takes its descriptor over
//!   first read of a file      a shadow worker puts the shadow descriptor into a slot of it
//!   other reads               io_uring_enter(index, slot), on the thread itself
//!   file dropped              a shadow worker empties the slot
//! ```
//!
//! How a thread enters a ring without a descriptor: sys/src/linux/uring/own.rs. A thread keeps its ring's number in a
//! thread-local word, which a new thread finds zero. A forked child has the word and another runtime, whose rings have
//! other numbers.
//!
//! Known flaw: the end of a thread is seen only when another thread makes a ring. Until then its ring stays, empty of files
//! as soon as these are dropped.

#![expect(unsafe_code, reason = "the kernel writes into memory of callers")]

use std::cell::Cell;
use std::sync::atomic::{
    AtomicBool, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, OwnRing, RingFile};

use crate::lock;
use crate::pool::PoolShare;
use crate::ring_slots::RingSlots;
use crate::shadow_fd::ShadowFd;
use crate::syscalls::Syscalls;
use spinio_plan::Route;

/// Rings at once.
const MAX_RINGS: usize = 64;

/// Those of one thread: a handler of SIGSEGV that jumps out of a read leaves commands of it in flight, and the ring in use.
const RINGS_OF_THREAD: usize = 4;

/// Between two tries of a thread to get a ring, while others have all.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// Files that can be in the ring of a thread at once.
const SLOTS: u32 = 64;

thread_local! {
    // Without a destructor: hooks use it too.
    static RING_OF_THREAD: Cell<u64> = const { Cell::new(0) };
    /// The thread has got none, and asks again after a while: to find threads that have ended takes a system call for each.
    static REFUSED: Cell<Option<Instant>> = const { Cell::new(None) };
}

static NEXT_NUMBER: AtomicU64 = AtomicU64::new(1);

/// The ring of one thread.
pub struct ThreadRing {
    number: u64,
    tid: u32,
    sys: &'static dyn Syscalls,
    ring: OwnRing,
    /// Its thread reads; a signal handler of that thread may not.
    busy: AtomicBool,
    slots: RingSlots,
    /// Closed by a worker.
    _fd: ShadowFd,
}

impl ThreadRing {
    /// Bytes of one read at most.
    pub const MAX_READ: usize = OwnRing::MAX_READ;

    /// Different from that of every other ring of the process.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Puts a file into a slot, on a shadow worker.
    pub fn add_file(&self, fd: Fd) -> Option<u32> {
        self.slots.add(|slot| self.ring.set_slot(slot, Some(fd)))
    }

    /// Empties a slot, on a shadow worker. No read of it may begin any more.
    pub fn remove_file(&self, slot: u32) {
        self.slots.remove(slot, |slot| self.ring.set_slot(slot, None));
    }

    /// Reads a file, for a route, and waits for the bytes; `on_wait` is called while it lasts. `None`: the calling thread has
    /// another ring, or is in a read already.
    ///
    /// # Safety
    /// `buf` must be memory that the Linux kernel may write until this returns, or an address that it may refuse. No handler
    /// may leave this by a jump.
    pub unsafe fn read(
        &self,
        route: Route,
        file: RingFile,
        (buf, len): (*mut u8, usize),
        offset: u64,
        on_wait: &mut dyn FnMut(),
    ) -> Option<Result<usize, Errno>> {
        if RING_OF_THREAD.get() != self.number || self.busy.swap(true, Acquire) {
            return None;
        }
        // SAFETY: on the thread that made the ring, which is in no other read; passed on.
        let got = unsafe { self.sys.read_by_own_ring(route, (&self.ring, file), (buf, len), offset, on_wait) };
        self.busy.store(false, Release);
        Some(got)
    }
}

/// The rings of a runtime.
#[derive(Default)]
pub struct ThreadRings {
    made: Mutex<Vec<Arc<ThreadRing>>>,
    refused: AtomicBool,
}

impl ThreadRings {
    /// The ring of the calling thread, made if it has none; `None`: it gets none.
    pub(crate) fn get(&self, sys: &'static dyn Syscalls, shadow: &PoolShare<'_>) -> Option<Arc<ThreadRing>> {
        if self.refused.load(Relaxed) {
            return None;
        }
        let number = RING_OF_THREAD.get();
        if number != 0 {
            let made = lock(&self.made);
            let of_thread = |tid| made.iter().filter(|ring| ring.tid == tid).count();
            let current = made.iter().find(|ring| ring.number == number);
            if let Some(ring) = current.filter(|r| !r.busy.load(Relaxed) || of_thread(r.tid) >= RINGS_OF_THREAD) {
                return Some(Arc::clone(ring));
            }
        }
        if REFUSED.get().is_some_and(|at| at.elapsed() < ASK_AGAIN) {
            return None;
        }
        {
            let mut made = lock(&self.made);
            if made.len() >= MAX_RINGS / 2 {
                made.retain(|ring| !linux::is_no_thread(ring.tid));
            }
            if made.len() >= MAX_RINGS {
                REFUSED.set(Some(Instant::now()));
                return None;
            }
        }
        match Self::make(sys, shadow) {
            Ok(ring) => {
                let ring = Arc::new(ring);
                RING_OF_THREAD.set(ring.number);
                lock(&self.made).push(Arc::clone(&ring));
                Some(ring)
            }
            // Those may pass.
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => None,
            Err(_) => {
                self.refused.store(true, Relaxed);
                None
            }
        }
    }

    fn make(sys: &'static dyn Syscalls, shadow: &PoolShare<'_>) -> Result<ThreadRing, Errno> {
        let new = sys.new_own_ring(SLOTS)?;
        let (tid, fd) = (linux::gettid(), new.fd());
        let take_over = move || {
            let fd = sys.dup_from_thread(tid, fd)?;
            OwnRing::check_slots(fd).map(|()| fd).inspect_err(|_| sys.close(fd))
        };
        match shadow.run_blocking(take_over).unwrap_or(Err(Errno::NOSYS)) {
            Ok(fd) => Ok(ThreadRing {
                number: NEXT_NUMBER.fetch_add(1, Relaxed),
                tid,
                sys,
                ring: new.adopt(fd),
                busy: AtomicBool::new(false),
                slots: RingSlots::new(SLOTS),
                _fd: ShadowFd::new(fd, shadow.close_queue()),
            }),
            Err(errno) => {
                new.discard();
                Err(errno)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use super::*;
    use crate::pool::{NoIdleTask, WorkerPool};
    use crate::syscalls::LinuxSyscalls;

    /// Bytes of a file by the ring of the calling thread; `None` if it has none.
    fn read(ring: &ThreadRing, slot: u32) -> Option<Result<Vec<u8>, Errno>> {
        let (mut out, file) = (vec![0; 4096], RingFile { slot, max_command: 4096 });
        // SAFETY: `out` is as long as said.
        let got = unsafe { ring.read(Route::P2p, file, (out.as_mut_ptr(), out.len()), 0, &mut || ()) }?;
        Some(got.map(|got| out[..got].to_vec()))
    }

    /// One at a time: one looks for descriptors of rings.
    static TESTS: Mutex<()> = Mutex::new(());

    fn rings_in_this_table() -> usize {
        let names = std::fs::read_dir("/proc/thread-self/fd").unwrap();
        let targets = names.filter_map(|name| std::fs::read_link(name.unwrap().path()).ok());
        targets.filter(|target| target.to_string_lossy().contains("io_uring")).count()
    }

    #[test]
    fn each_thread_reads_by_its_own_ring_and_the_program_sees_no_descriptor() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 2, Duration::ZERO, NoIdleTask).expect("workers");
        let _one = lock(&TESTS);
        let rings = ThreadRings::default();
        let share = pool.for_key(1);
        let Some(ring) = rings.get(&LinuxSyscalls, &share) else {
            return eprintln!("skipped: the kernel gives this thread no ring");
        };
        assert_eq!(rings_in_this_table(), 0, "the ring's descriptor is still in the program's table");
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"bytes").unwrap();
        let (tid, fd) = (linux::gettid(), file.as_raw_fd());
        let add = |ring: &Arc<ThreadRing>| {
            let ring = Arc::clone(ring);
            pool.run_blocking(move || {
                let shadow_fd = LinuxSyscalls.reopen(tid, fd, 0).unwrap();
                let slot = ring.add_file(shadow_fd).unwrap();
                LinuxSyscalls.close(shadow_fd);
                slot
            })
            .unwrap()
        };
        let slot = add(&ring);
        assert_eq!(read(&ring, slot), Some(Ok(b"bytes".to_vec())));
        assert_eq!(rings.get(&LinuxSyscalls, &share).unwrap().number(), ring.number());
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(read(&ring, slot), None, "the ring of another thread");
                let own = rings.get(&LinuxSyscalls, &share).unwrap();
                let slot = add(&own);
                assert_eq!(read(&own, slot), Some(Ok(b"bytes".to_vec())));
            });
        });
        let removed = Arc::clone(&ring);
        pool.run_blocking(move || removed.remove_file(slot)).unwrap();
        assert_eq!(read(&ring, slot), Some(Err(Errno::BADF)));
    }

    #[test]
    fn read_within_a_read_is_refused() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 2, Duration::ZERO, NoIdleTask).expect("workers");
        let _one = lock(&TESTS);
        let Some(ring) = ThreadRings::default().get(&LinuxSyscalls, &pool.for_key(1)) else {
            return eprintln!("skipped: the kernel gives this thread no ring");
        };
        ring.busy.store(true, Relaxed);
        assert_eq!(read(&ring, 0), None);
        ring.busy.store(false, Relaxed);
        assert_eq!(read(&ring, 0), Some(Err(Errno::BADF)));
    }

    #[test]
    fn thread_that_has_left_reads_gets_few_other_rings() {
        let pool = WorkerPool::shadow_workers(&LinuxSyscalls, 2, Duration::ZERO, NoIdleTask).expect("workers");
        let _one = lock(&TESTS);
        let (rings, share) = (ThreadRings::default(), pool.for_key(1));
        if rings.get(&LinuxSyscalls, &share).is_none() {
            return eprintln!("skipped: the kernel gives this thread no ring");
        }
        let mut left = Vec::new();
        for _ in 0..RINGS_OF_THREAD {
            let ring = rings.get(&LinuxSyscalls, &share).unwrap();
            assert!(!left.contains(&ring.number()));
            assert_eq!(read(&ring, 0), Some(Err(Errno::BADF)), "it can be used");
            ring.busy.store(true, Relaxed);
            left.push(ring.number());
        }
        let last = rings.get(&LinuxSyscalls, &share).unwrap();
        assert_eq!((Some(&last.number()), read(&last, 0)), (left.last(), None));
    }
}
