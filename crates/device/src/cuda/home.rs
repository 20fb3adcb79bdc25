//! Where the driver may be called: on threads that have its descriptors.
//!
//! The driver talks to its kernel part through descriptors of its own, by number. SPIN's helpers live in a private
//! descriptor table, in which these numbers mean nothing, or something else. Seen on a real driver: registering memory
//! fails, and creating a stream or an event aborts the process. So calls from private threads are carried out on one
//! ordinary thread:
//!
//! ```text
//!   program's thread ──────────────────────────────────────> driver
//!   private thread ── errand ──> queue ──> home thread ────> driver
//!                  <── done ──────────────────┘
//! ```
//!
//! It is started with the first device, by a thread of the program, looks for the next errand for a moment before it
//! sleeps, and never waits for a device: a private thread that has to polls the fence, which touches memory only.
//!
//! Known flaw: all private threads share the one thread. An errand takes a few microseconds, so a piece should be large.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering::*};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use spinio_sys::linux::{in_private_table, spawn_quiet};

use crate::{DeviceError, ErrorKind};

/// The driver's own code runs on it.
const STACK: usize = 2 << 20;

/// How long either side looks before it sleeps.
const LOOK: Duration = Duration::from_micros(100);

/// A closure on the stack of a thread that waits for it.
struct Errand {
    run: unsafe fn(*mut ()),
    with: *mut (),
    done: AtomicBool,
    sender: Thread,
}

struct Pointer(*const Errand);

// SAFETY: the errand outlives its stay in the queue: its sender waits until it is done.
unsafe impl Send for Pointer {}

struct Home {
    queue: Mutex<VecDeque<Pointer>>,
    wake: Condvar,
    /// Errands in the queue; read without the lock while looking.
    waiting: AtomicUsize,
    /// Whether the thread may be asleep.
    asleep: AtomicU32,
}

static HOME: OnceLock<Option<Home>> = OnceLock::new();

/// Makes sure that private threads have somebody to send; for a thread of the program.
pub(super) fn open() {
    if in_private_table() {
        return;
    }
    let mut started = false;
    HOME.get_or_init(|| {
        started = true;
        Some(Home {
            queue: Mutex::default(),
            wake: Condvar::new(),
            waiting: AtomicUsize::new(0),
            asleep: AtomicU32::new(0),
        })
    });
    if started {
        // Without the thread errands wait for ever, so there must be none: see `USABLE`.
        USABLE.store(spawn_quiet("spinio-driver", STACK, serve).is_ok(), Release);
    }
}

static USABLE: AtomicBool = AtomicBool::new(false);

/// Runs `body` on a thread that may call the driver: this one, if it is no private thread.
#[inline]
pub(super) fn at_home<R>(body: impl FnOnce() -> Result<R, DeviceError>) -> Result<R, DeviceError> {
    if in_private_table() { send(body) } else { body() }
}

fn send<R, F: FnOnce() -> Result<R, DeviceError>>(body: F) -> Result<R, DeviceError> {
    let nobody = DeviceError::new(ErrorKind::Unsupported, "calling the driver from a helper");
    let home = HOME.get().and_then(Option::as_ref).filter(|_| USABLE.load(Acquire)).ok_or(nobody)?;
    let mut parcel: Parcel<R, F> = (Some(body), None);
    let errand = Errand {
        run: deliver::<R, F>,
        with: (&raw mut parcel).cast(),
        done: AtomicBool::new(false),
        sender: std::thread::current(),
    };
    home.post(&errand);
    errand.wait();
    match parcel.1 {
        Some(Ok(answer)) => answer,
        Some(Err(panic)) => std::panic::resume_unwind(panic),
        None => Err(nobody),
    }
}

type Parcel<R, F> = (Option<F>, Option<std::thread::Result<Result<R, DeviceError>>>);

/// # Safety
/// `with` must point to a `Parcel<R, F>` that nobody else uses meanwhile.
unsafe fn deliver<R, F: FnOnce() -> Result<R, DeviceError>>(with: *mut ()) {
    // SAFETY: passed on to the caller.
    let parcel = unsafe { &mut *with.cast::<Parcel<R, F>>() };
    if let Some(body) = parcel.0.take() {
        parcel.1 = Some(catch_unwind(AssertUnwindSafe(body)));
    }
}

impl Errand {
    fn wait(&self) {
        let begun = Instant::now();
        while !self.done.load(Acquire) {
            if begun.elapsed() < LOOK {
                core::hint::spin_loop();
            } else {
                std::thread::park_timeout(Duration::from_millis(100));
            }
        }
    }
}

impl Home {
    fn post(&self, errand: &Errand) {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push_back(Pointer(errand));
        self.waiting.fetch_add(1, Release);
        let asleep = self.asleep.load(Relaxed) != 0;
        drop(queue);
        if asleep {
            self.wake.notify_one();
        }
    }

    fn next(&self) -> Pointer {
        let begun = Instant::now();
        while self.waiting.load(Acquire) == 0 && begun.elapsed() < LOOK {
            core::hint::spin_loop();
        }
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(errand) = queue.pop_front() {
                self.waiting.fetch_sub(1, Relaxed);
                return errand;
            }
            self.asleep.store(1, Relaxed);
            queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            self.asleep.store(0, Relaxed);
        }
    }
}

fn serve() {
    let Some(home) = HOME.get().and_then(Option::as_ref) else { return };
    loop {
        let Pointer(errand) = home.next();
        // SAFETY: the sender keeps the errand, and what it points to, until `done` is set.
        let (sender, done) = unsafe {
            ((*errand).run)((*errand).with);
            ((*errand).sender.clone(), &(*errand).done)
        };
        done.store(true, Release); // from here on the errand may be gone
        sender.unpark();
    }
}
