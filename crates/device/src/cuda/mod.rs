//! CUDA: whatever the driver of the program calls device memory.
//!
//! ```text
//!   find(addr) ── 2 MiB granule known to be the host's? ── yes ──> not ours        a load and a compare
//!        │ no
//!        ▼
//!   the driver: what is this address? ── host ──> remember the granule
//!        │ device memory of context C             (pools and mappings: of device N, so a context of that device)
//!        ▼
//!   the Device object of C ── made once a context, leaked ──> Allocation
//! ```
//!
//! **What is remembered.** Only that a granule is the host's. Device memory is asked about on every call: the query
//! costs 113 ns on an H200, to check a remembered answer (`BUFFER_ID`) costs 86, and a remembered one can be stale,
//! after a free and a new allocation at the same address, in exactly the way that corrupts. A stale "host" is
//! harmless: the kernel refuses device memory, and [`crate::registry::find_after_fault`] does not believe the table.
//!
//! **Contexts.** We call no `cuInit` and make no context; all is done in the one that the memory belongs to. It is
//! made current for a call where it is not. `cudaDeviceReset` kills a context, and its successor has the *same*
//! address; the driver crashes on streams and events of the dead one. So every call compares the context's number
//! (17 ns) with the one the device object was made for: it answers [`crate::ErrorKind::Gone`] and never touches a
//! dead handle.
//!
//! **Captures.** While a stream is captured into a graph, one careless call spoils it. Seen on a real driver: copying,
//! recording or asking for the context on the legacy default stream spoils it in every mode; waiting, querying an event
//! and registering memory do unless the thread is in relaxed mode; copies on our own non-blocking streams never do.
//! `cuStreamIsCapturing` tells and spoils nothing.
//!
//! **Threads.** The driver talks to its kernel part through descriptors of its own, by number, which a thread with a
//! private descriptor table does not have. Seen from there: registering memory fails, creating a stream aborts the
//! process. Whoever calls a device must share the program's table; debug builds check it.
//!
//! **Forks.** A forked child cannot use its parent's driver. A word that the kernel wipes in the child tells.
//!
//! Known flaws:
//! - In a callback of the driver (`cuLaunchHostFunc`) the driver refuses all questions, so `pread` there fails with
//!   EFAULT.
//! - A program that resets its device while another of its threads reads into it can crash, as without us.
//! - Each context that dies leaves a small object behind. Of more than 64 alive at once, the others' memory is not
//!   recognised.
//! - Two requests that pin the same pages at the same time: the driver refuses the second, which is then copied.
//! - Managed memory always goes through the device, also where the host holds its pages.
//! - Mappings are joined within one reservation only.

mod capture;
mod contexts;
mod device;
mod events;
mod gather;
mod granules;
mod handles;
mod lookup;
mod queues;
mod registered;
pub mod tools;

use crate::Allocation;

/// Whether this process could own CUDA memory: its driver is loaded. One relaxed load.
#[inline]
pub(crate) fn is_possible() -> bool {
    lookup::is_possible()
}

/// The allocation that holds `addr`. May believe its negative cache.
pub(crate) fn find(addr: *const u8, want: usize) -> Option<Allocation> {
    lookup::find(addr as u64, want as u64)
}

/// As [`find`] after the kernel refused the address: believes no negative cache, and looks whether the driver has
/// been loaded meanwhile.
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
