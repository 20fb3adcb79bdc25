//! The session of the calling thread: for callers that cannot keep a handle.
//!
//! `nvmmuMove` takes neither session nor thread, so a session is bound to the thread that began it. The number that the
//! caller passes identifies it for `end`. A session that a thread left open when it ended is ended by the next thread
//! that begins with that number.
//!
//! Known flaw: a thread that left a session open, and whose TID the kernel has reused for another thread, seems to be
//! alive.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use spinio_io::runtime;
use spinio_sys::linux;

use crate::{Error, ErrorKind, Report, Session};

/// How long a thread that was joined may still look alive: `join` returns a little before the kernel releases the TID.
const JOIN_GRACE: Duration = Duration::from_millis(200);

struct Slot {
    /// The TID of the thread, and a number of this module, which is never reused.
    owner: (u32, u64),
    session: Mutex<Session>,
}

/// The sessions of a process. A forked child begins with none, in a new table: it does not have the threads that would
/// serve its parent's sessions, and their locks may stay locked forever.
struct Table {
    /// 1 in the process that made it, wiped in its children.
    alive: Option<&'static AtomicU64>,
    slots: Mutex<HashMap<i32, Arc<Slot>>>,
    child_table: OnceLock<Box<Table>>,
}

static TABLE: OnceLock<Box<Table>> = OnceLock::new();
static THREADS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// A number for this thread: TIDs are reused.
    static THREAD: Cell<u64> = const { Cell::new(0) };
    /// The session that it has begun.
    static CURRENT: Cell<Option<i32>> = const { Cell::new(None) };
}

impl Table {
    fn create() -> Box<Table> {
        let alive = linux::wipe_on_fork_word().ok();
        alive.iter().for_each(|word| word.store(1, Relaxed));
        Box::new(Table { alive, slots: Mutex::default(), child_table: OnceLock::new() })
    }

    fn get() -> &'static Table {
        let mut table = TABLE.get_or_init(Table::create);
        while table.alive.is_some_and(|word| word.load(Relaxed) == 0) {
            table = table.child_table.get_or_init(Table::create);
        }
        table
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<i32, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn thread_ids() -> (u32, u64) {
    if THREAD.get() == 0 {
        THREAD.set(THREADS.fetch_add(1, Relaxed));
    }
    (linux::gettid(), THREAD.get())
}

fn my_session() -> Option<Arc<Slot>> {
    let slot = Table::get().slots().get(&CURRENT.get()?).cloned()?;
    (slot.owner == thread_ids()).then_some(slot)
}

/// A function that the session has called calls the session.
fn reentrant_call(operation: &'static str) -> Error {
    Error::new(ErrorKind::AlreadyBegun, operation, "the session is in use: it is running a pipeline")
}

/// Begins a session of the calling thread, under a number chosen by the caller.
pub fn begin(thread: i32, output: Option<&Path>) -> Result<(), Error> {
    if my_session().is_some() {
        let number = CURRENT.get().unwrap_or(thread);
        let why = format!("this thread has begun as {number} and not ended that");
        return Err(Error::new(ErrorKind::AlreadyBegun, "begin", why));
    }
    // Its bytes are written as far as possible; there is no caller to return an error to.
    let since = Instant::now();
    let left = loop {
        let left = take_orphan(&mut Table::get().slots(), thread);
        if left.is_ok() || since.elapsed() > JOIN_GRACE {
            break left?;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    drop(left);
    let session = Mutex::new(Session::begin(runtime(), output)?);
    let slot = Arc::new(Slot { owner: thread_ids(), session });
    let mut slots = Table::get().slots();
    // Another thread may have begun meanwhile.
    let left = take_orphan(&mut slots, thread)?;
    slots.insert(thread, slot);
    drop(slots);
    drop(left);
    CURRENT.set(Some(thread));
    Ok(())
}

/// Removes the session that a thread which has ended left under a number; an error if a living thread has one.
fn take_orphan(slots: &mut HashMap<i32, Arc<Slot>>, thread: i32) -> Result<Option<Arc<Slot>>, Error> {
    match slots.get(&thread) {
        Some(slot) if linux::is_thread(slot.owner.0) && slot.owner.0 != thread_ids().0 => {
            let why = format!("another thread has begun as {thread} and not ended that");
            Err(Error::new(ErrorKind::AlreadyBegun, "begin", why))
        }
        _ => Ok(slots.remove(&thread)),
    }
}

/// Runs `f` on the session of the calling thread; `operation` is for the error if it has none.
pub fn current<T>(operation: &'static str, f: impl FnOnce(&mut Session) -> Result<T, Error>) -> Result<T, Error> {
    let none = || Error::new(ErrorKind::NoSession, operation, "this thread has no session: it has not begun, or ended");
    let slot = my_session().ok_or_else(none)?;
    // No other thread uses this session, so if it is locked, the session itself is the caller: a function of a
    // pipeline.
    let mut session = match slot.session.try_lock() {
        Ok(session) => session,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Err(reentrant_call(operation)),
    };
    f(&mut session)
}

/// Ends the session of that number, which must be the calling thread's.
pub fn end(thread: i32) -> Result<Report, Error> {
    let table = Table::get();
    let slot = {
        let mut slots = table.slots();
        let Some(slot) = slots.get(&thread) else {
            let why = format!("nothing was begun as {thread}, or it has ended");
            return Err(Error::new(ErrorKind::NoSession, "end", why));
        };
        if slot.owner != thread_ids() {
            let why = format!("another thread has begun as {thread}");
            return Err(Error::new(ErrorKind::NotOwner, "end", why));
        }
        // Its own thread is inside a call, which takes it while the table is locked.
        if Arc::strong_count(slot) > 1 {
            return Err(reentrant_call("end"));
        }
        slots.remove(&thread)
    };
    CURRENT.set(None);
    let slot = slot.and_then(Arc::into_inner).ok_or_else(|| reentrant_call("end"))?;
    slot.session.into_inner().unwrap_or_else(PoisonError::into_inner).end()
}
