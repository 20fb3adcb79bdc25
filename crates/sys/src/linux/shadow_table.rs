//! Threads with an unshared descriptor table, which the program cannot see.
//!
//! The program owns every number in its descriptor table: it may `close_range`
//! all of it, or `dup2` onto any number, and closing one descriptor of a file
//! drops every `fcntl` lock that the process holds on that file. So SPIN's own
//! descriptors are in a separate table:
//!
//! ```text
//!   program's threads ──── table A: 0 1 2 3 ...      opened by the program
//!   shadow threads ──────── table B: (empty) 0 1 ...  shadow descriptors, pipes
//!
//! `close_range(0, ~0, CLOSE_RANGE_UNSHARE)` makes table B without first copying
//! table A, so no pipe or socket of the program is kept open even for a moment,
//! and since locks belong to a table, no lock is dropped either.
//!
//! A descriptor made by a shadow thread is invalid on every other thread, and the program's are invalid on a shadow
//! thread. That also concerns libraries that keep their own descriptors, such as a GPU's driver: [`in_shadow_table`]
//! shows where they must not be called.
//!
//! Table B is enlarged while only one thread has it. A table that threads share is doubled only after every
//! processor passed an RCU grace period, and the read that needed one number more is delayed by 10 to 30 ms.
//!
//! Known flaw: needs Linux 5.11; before that, `spawn` returns the Linux kernel's error and SPIN has no shadow threads.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use core::ffi::c_void;
use core::mem::MaybeUninit;
use std::cell::Cell;
use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;

use rustix::io::Errno;

use super::Fd;
use super::files::{close, close_range_unshare, dup_at_least};
use super::pipe::pipe;
use super::signals::SignalGuard;

thread_local! {
    static IN_SHADOW_TABLE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread's descriptor table is a shadow table.
#[inline]
pub fn in_shadow_table() -> bool {
    IN_SHADOW_TABLE.get()
}

/// The first of the threads that share one shadow descriptor table.
pub struct FdTableRoot {
    sender: mpsc::Sender<SpawnRequest>,
}

type ThreadFn = Box<dyn FnOnce() + Send>;
type SpawnRequest = (String, ThreadFn, mpsc::Sender<bool>);

/// Why no shadow thread could be created.
#[derive(Debug)]
pub enum FdTableError {
    /// The thread itself could not be created.
    Spawn(std::io::Error),
    /// The Linux kernel refused an unshared table.
    Unshare(Errno),
}

impl FdTableRoot {
    /// Creates the first shadow thread; it sleeps, and spawns the others.
    pub fn new() -> Result<FdTableRoot, FdTableError> {
        let (sender, requests) = mpsc::channel::<SpawnRequest>();
        let (table_sender, table_result) = mpsc::channel();
        spawn_signals_blocked("spinio-fdroot", WORKER_STACK, move || {
            IN_SHADOW_TABLE.set(true);
            let unshared = close_range_unshare(0);
            let failed = unshared.is_err();
            if !failed {
                grow_fd_table();
            }
            let _ = table_sender.send(unshared);
            if failed {
                return;
            }
            while let Ok((name, body, done)) = requests.recv() {
                let spawn_result = spawn_signals_blocked(&name, WORKER_STACK, move || {
                    IN_SHADOW_TABLE.set(true);
                    body();
                });
                let _ = done.send(spawn_result.is_ok());
            }
        })
        .map_err(FdTableError::Spawn)?;
        match table_result.recv() {
            Ok(Ok(())) => Ok(FdTableRoot { sender }),
            Ok(Err(errno)) => Err(FdTableError::Unshare(errno)),
            Err(_) => Err(FdTableError::Unshare(Errno::IO)),
        }
    }

    /// Runs `body` on a new thread with this table; false if no thread could be created.
    pub fn spawn(&self, name: &str, body: impl FnOnce() + Send + 'static) -> bool {
        let (done, answer) = mpsc::channel();
        self.sender.send((name.to_owned(), Box::new(body), done)).is_ok() && answer.recv().unwrap_or(false)
    }
}

/// The initial capacity of a shadow table.
const INITIAL_CAPACITY: Fd = 1024;

/// Makes the Linux kernel enlarge this thread's table; where RLIMIT_NOFILE forbids it, the table grows on demand.
fn grow_fd_table() {
    let Ok((out, into)) = pipe() else { return };
    if let Ok(high_fd) = dup_at_least(out, INITIAL_CAPACITY - 1) {
        let _ = close(high_fd);
    }
    let _ = close(out);
    let _ = close(into);
}

/// Shadow threads run code of SPIN only.
const WORKER_STACK: usize = 256 << 10;

/// A thread that takes none of the program's signals; it shares the descriptor table of the spawning thread.
///
/// Not std's: in a Rust program its threads take a lock as they start and end, which a child forked at that moment
/// would find locked forever. glibc handles its own locks.
pub fn spawn_signals_blocked(name: &str, stack: usize, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let start = Box::new(ThreadStart { name: CString::new(name)?, body: Box::new(body) });
    // The new thread inherits the mask, so a signal can never reach it. libc's call, not the kernel's: it leaves out
    // the two signals that glibc itself needs for pthread_cancel and for setuid, which would otherwise wait for this
    // thread forever.
    let _signals = SignalGuard::block_all();
    pthread_create_detached(stack, start)
}

/// The arguments of a new thread.
struct ThreadStart {
    name: CString,
    body: ThreadFn,
}

/// `pthread_create`, detached.
fn pthread_create_detached(stack: usize, start: Box<ThreadStart>) -> std::io::Result<()> {
    let start = Box::into_raw(start).cast::<c_void>();
    let mut failed = 0;
    // glibc takes the thread-local variables of the whole program out of the stack: a small one may be too short for
    // them.
    for stack in [Some(stack), None] {
        let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
        let mut attr = MaybeUninit::<libc::pthread_attr_t>::uninit();
        // SAFETY: glibc's initialiser cannot fail; `attr` is used between it and its end only. `begin` becomes the
        // owner of `start` if the thread is created, else it is still this function's.
        failed = unsafe {
            libc::pthread_attr_init(attr.as_mut_ptr());
            libc::pthread_attr_setdetachstate(attr.as_mut_ptr(), libc::PTHREAD_CREATE_DETACHED);
            if let Some(bytes) = stack {
                libc::pthread_attr_setstacksize(attr.as_mut_ptr(), bytes);
            }
            let failed = libc::pthread_create(thread.as_mut_ptr(), attr.as_ptr(), thread_main, start);
            libc::pthread_attr_destroy(attr.as_mut_ptr());
            failed
        };
        if failed == 0 {
            return Ok(());
        }
    }
    // SAFETY: made by `Box::into_raw` above, and no thread took it.
    drop(unsafe { Box::from_raw(start.cast::<ThreadStart>()) });
    Err(std::io::Error::from_raw_os_error(failed))
}

extern "C" fn thread_main(start: *mut c_void) -> *mut c_void {
    // SAFETY: `create` passed its ownership to this thread.
    let ThreadStart { name, body } = *unsafe { Box::from_raw(start.cast::<ThreadStart>()) };
    // SAFETY: a NUL-terminated string, which the Linux kernel truncates after 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
    // A panic ends this thread alone, as it would one of std's; the hook has reported it.
    let _ = catch_unwind(AssertUnwindSafe(body));
    core::ptr::null_mut()
}

/// How much later than asked for the calling thread may wake up from a sleep, in nanoseconds; the usual is 50 us.
pub fn set_timer_slack(nanoseconds: u64) {
    // SAFETY: no memory is involved.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, nanoseconds) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fd_table_is_grown_before_it_is_shared() {
        let root = match FdTableRoot::new() {
            Ok(family) => family,
            Err(e) => return eprintln!("skipped: no unshared descriptor table: {e:?}"),
        };
        let (sender, receiver) = mpsc::channel();
        assert!(root.spawn("asks", move || {
            let of_this_thread = |file: &str| std::fs::read_to_string(format!("/proc/thread-self/{file}"));
            let open = std::fs::read_dir("/proc/thread-self/fd").map(Iterator::count);
            let _ = sender.send((of_this_thread("status"), of_this_thread("limits"), open));
        }));
        let (Ok(status), Ok(limits), Ok(open)) = receiver.recv().unwrap() else {
            return eprintln!("skipped: no /proc");
        };
        let number = |text: &str, name: &str| {
            let line = text.lines().find_map(|l| l.strip_prefix(name)).unwrap();
            line.split_whitespace().next().unwrap().parse::<Fd>().unwrap_or(Fd::MAX)
        };
        let allowed = number(&limits, "Max open files");
        if allowed < INITIAL_CAPACITY {
            return eprintln!("skipped: only {allowed} descriptors are allowed");
        }
        assert!(number(&status, "FDSize:") >= INITIAL_CAPACITY, "{status}");
        assert_eq!(open, 1, "only the listed directory is open");
    }
}
