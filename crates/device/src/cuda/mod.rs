//! CUDA: all memory that the program's driver reports as device memory.
//!
//! ```text
//!   find(addr) ── 2 MiB granule known to be the host's? ── yes ──> host            a load and a compare
//!        │ no
//!        ▼
//!   the driver: query the address         ── host ──> remember the granule
//!        │ device memory of context C             (pools and mappings: of device N, so a context of that device)
//!        ▼
//!   the Device object of C ── made once per context, leaked ──> Allocation
//! ```
//!
//! **What is cached.** Only that a granule is the host's. Device memory is queried on every call: the query
//! costs 113 ns on an H200, checking a cached result (`BUFFER_ID`) costs 86, and a cached one can be stale,
//! after a free and a new allocation at the same address, in exactly the way that corrupts. A stale "host" is
//! harmless: the Linux kernel refuses device memory, and [`crate::registry::find_after_fault`] ignores the table.
//!
//! **Contexts.** SPIN creates no context, and calls no `cuInit` but to count GPUs (`standalone.rs`); every call uses the context that
//! the memory belongs to. It is made current for a call where it is not. `cudaDeviceReset` destroys a context, and its successor has the *same*
//! address; the driver crashes on streams and events of the destroyed one. So every call compares the context's number
//! (17 ns) with the one the device object was made for: it returns [`crate::ErrorKind::ContextLost`] and never uses a
//! dead handle.
//!
//! **Captures.** While a stream is captured into a graph, one wrong call invalidates the capture. Seen on a real
//! driver: copying, recording or querying the context on the legacy default stream invalidates it in every mode;
//! waiting, querying an event and registering memory do unless the thread is in relaxed mode; copies on SPIN's own
//! non-blocking streams never do. `cuStreamIsCapturing` reports a capture and invalidates nothing.
//!
//! **Threads.** The driver calls its kernel module through its own descriptors, by number, which a thread with an
//! unshared descriptor table does not have. Seen from such a thread: registering memory fails, creating a stream aborts
//! the process. A thread that calls a device must share the program's table; debug builds check it.
//!
//! **Forks.** A forked child cannot use its parent's driver. A word that the Linux kernel wipes in the child detects
//! it.
//!
//! Known flaws:
//! - In a callback of the driver (`cuLaunchHostFunc`) the driver refuses all queries, so `pread` there fails with
//!   EFAULT.
//! - A program that resets its device while another of its threads reads into it can crash, as without SPIN.
//! - Each destroyed context leaves a small object. Of more than 64 alive at once, the others' memory is not
//!   recognised.
//! - If two requests pin the same pages at the same time, the driver refuses the second, which is then copied.
//! - Managed memory always goes through the device, also where its pages are on the host.
//! - Mappings are joined within one reservation only.

mod capture;
mod contexts;
mod device;
mod events;
mod gather;
mod handle_pool;
mod host_page_cache;
mod kernel;
mod lookup;
mod peer_memory;
mod pinned_groups;
mod registered;
mod replica;
mod shared_memory;
pub mod standalone;
mod stops;
mod streams;

use crate::Allocation;

/// Whether this process could own CUDA memory: its driver is loaded. One relaxed load.
#[inline]
pub(crate) fn is_possible() -> bool {
    lookup::is_possible()
}

/// The allocation that contains `addr`. May use its negative cache.
pub(crate) fn find(addr: *const u8, want: usize) -> Option<Allocation> {
    lookup::find(addr as u64, want as u64)
}

/// Like [`find`] after the Linux kernel refused the address: ignores the negative cache, and checks whether the driver
/// has been loaded meanwhile.
pub(crate) fn find_after_fault(addr: *const u8, want: usize) -> Option<Allocation> {
    lookup::find_after_fault(addr as u64, want as u64)
}

/// The device of the context that is current on this thread.
pub(crate) fn current_device() -> Option<&'static dyn crate::Device> {
    lookup::current().map(|d| d as &'static dyn crate::Device)
}

/// The program opened a path.
pub(crate) fn hint_open(path: &[u8]) {
    lookup::hint_open(path);
}
