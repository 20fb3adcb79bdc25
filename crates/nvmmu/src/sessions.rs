//! Which session is the calling thread's: for callers that have no place to keep one.
//!
//! `nvmmuMove` says neither session nor thread, so a session binds to the thread that began it. The number that the
//! caller gives names it for `end`. What a thread left open when it ended is ended by whoever begins with that number.
//!
//! Known flaw: a thread that left a session open, and whose number the kernel has given to another one, seems to live.

use std::cell::Cell;
use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use spinio_io::runtime;
use spinio_sys::linux;

use crate::{Error, ErrorKind, Report, Session};

struct Slot {
    /// The kernel's number of the thread, and ours, which is never used again.
    owner: (u32, u64),
    session: Mutex<Session>,
}

/// The sessions of a process. A forked child begins with none, in a table of its own: it has not the threads that would
/// serve its parent's, and their locks may be held for ever.
struct Table {
    /// 1 in the process that made it, wiped in its children.
    alive: Option<&'static AtomicU64>,
    slots: Mutex<HashMap<i32, Arc<Slot>>>,
    of_children: OnceLock<Box<Table>>,
}

static TABLE: OnceLock<Box<Table>> = OnceLock::new();
static THREADS: AtomicU64 = AtomicU64::new(1);

thread_local! {
    /// A number of this thread's own: the kernel's are used again.
    static THREAD: Cell<u64> = const { Cell::new(0) };
    /// What it has begun.
    static BEGUN: Cell<Option<i32>> = const { Cell::new(None) };
}

impl Table {
    fn made() -> Box<Table> {
        let alive = linux::word_wiped_on_fork().ok();
        alive.iter().for_each(|word| word.store(1, Relaxed));
        Box::new(Table { alive, slots: Mutex::default(), of_children: OnceLock::new() })
    }

    fn get() -> &'static Table {
        let mut table = TABLE.get_or_init(Table::made);
        while table.alive.is_some_and(|word| word.load(Relaxed) == 0) {
            table = table.of_children.get_or_init(Table::made);
        }
        table
    }

    fn slots(&self) -> MutexGuard<'_, HashMap<i32, Arc<Slot>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn me() -> (u32, u64) {
    if THREAD.get() == 0 {
        THREAD.set(THREADS.fetch_add(1, Relaxed));
    }
    (linux::gettid(), THREAD.get())
}

fn mine() -> Option<Arc<Slot>> {
    let slot = Table::get().slots().get(&BEGUN.get()?).cloned()?;
    (slot.owner == me()).then_some(slot)
}

/// Begins a session of the calling thread, under a number of the caller's choice.
pub fn begin(thread: i32, output: Option<&Path>) -> Result<(), Error> {
    if mine().is_some() {
        let number = BEGUN.get().unwrap_or(thread);
        let why = format!("this thread has begun as {number} and not ended that");
        return Err(Error::new(ErrorKind::AlreadyBegun, "begin", why));
    }
    let table = Table::get();
    let left = {
        let mut slots = table.slots();
        match slots.get(&thread) {
            Some(slot) if linux::is_thread(slot.owner.0) && slot.owner.0 != me().0 => {
                let why = format!("another thread has begun as {thread} and not ended that");
                return Err(Error::new(ErrorKind::AlreadyBegun, "begin", why));
            }
            _ => slots.remove(&thread),
        }
    };
    // Its bytes are written, as far as that goes; nobody is there to be told.
    drop(left);
    let session = Mutex::new(Session::begin(runtime(), output)?);
    table.slots().insert(thread, Arc::new(Slot { owner: me(), session }));
    BEGUN.set(Some(thread));
    Ok(())
}

/// Does something with the session of the calling thread; `operation` is for the error if it has none.
pub fn current<T>(operation: &'static str, f: impl FnOnce(&mut Session) -> Result<T, Error>) -> Result<T, Error> {
    let none = || Error::new(ErrorKind::NoSession, operation, "this thread has no session: it has not begun, or ended");
    let slot = mine().ok_or_else(none)?;
    let mut session = slot.session.lock().unwrap_or_else(PoisonError::into_inner);
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
        if slot.owner != me() {
            let why = format!("another thread has begun as {thread}");
            return Err(Error::new(ErrorKind::NotYours, "end", why));
        }
        slots.remove(&thread)
    };
    BEGUN.set(None);
    let alone = slot.and_then(Arc::into_inner);
    let busy = || Error::new(ErrorKind::AlreadyBegun, "end", "the session is in use");
    let session = alone.ok_or_else(busy)?.session.into_inner().unwrap_or_else(PoisonError::into_inner);
    session.end()
}
