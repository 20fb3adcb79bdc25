//! The host's side of every request: threads, descriptors, system calls, cancellation and settings.
//!
//! ```text
//!   settings      SPINIO_*, read once
//!   syscalls      every system call of an engine behind one trait, for fault injection
//!   pool/         worker pools, one fd table each (app, shadow, per thread)
//!   shadow_fd     a descriptor of the shadow table, closed there (deferred close)
//!   storage_ring  reads of storage that any thread starts without a system call (io_uring with SQPOLL)
//!   storage_rings which storage has such a ring, and why other reads have none
//!   shares        one file system gets only its share of workers and buffers
//!   thread_rings  reads of storage by a thread of the program itself, with one system call (io_uring)
//!   ring_slots    which slots of a ring are free
//!   copy_threads  how many threads copy for one request
//!   processors    how many this process may use, and whether copying threads get them
//!   io_threads    system calls for many sockets, shared out by the one thread that has them
//!   parallel      one pass over many items, shared among the workers of a pool
//!   task_scope    counts the threads at work on a task, and waits for them at its end
//!   panic_relay   delays a panic until all other threads have left
//!   device_call   whether a signal handler has interrupted a device call
//!   cancel        long requests poll whether to go on
//!   sync, lock    locks and pauses, as a model checker sees them
//! ```
//!
//! Nothing here uses a device: `transfer` and `files` build on it, and so will sockets and the mapped page cache.

pub mod cancel;
pub mod copy_threads;
mod device_call;
mod held_signals;
pub mod io_threads;
mod lock;
pub mod panic_relay;
pub mod parallel;
pub mod pool;
pub mod processors;
mod ring_slots;
pub mod settings;
pub mod shadow_fd;
pub mod shares;
pub mod storage_ring;
pub mod storage_rings;
pub mod sync;
pub mod syscalls;
pub mod task_scope;
pub mod thread_rings;

pub use cancel::{CancelPoll, has_cancel_poll, install_cancel_poll, is_cancelled};
pub use device_call::{device_call, is_in_device_call};
pub use held_signals::{HeldSignals, deliver_after, deliver_now};
pub use lock::{lock, try_lock};
pub use settings::Settings;
