//! One runtime a process: what the Python module asks of SPIN, as a table of C functions.
//!
//! ```text
//!   libspinio.so ── exports ──> spinio_runtime_v1: Table ──┐ found by dlsym, when the module is imported
//!        │ hooks, spinio.h                                 │
//!        ▼                                                 ▼
//!   its registry, pools, pins, counters <──────────── client.rs <── the Python module
//!                                                          │ not found
//!   the module's own copy of all that <────────────────────┘ its own table
//! ```
//!
//! Two libraries that each link `spinio_io` have two of every static: the registry of devices, the runtime with its pools and
//! rings, the settings, the counters, the stream that a thread has chosen. A module beside a preloaded library then pins
//! twice as much, has twice the threads, and `spinio stat` shows half of what the process does.
//!
//! To hand the one's Rust objects to the other would be sound only where both were made by the same compiler, of the same
//! sources, with the same features; nothing checks that at run time, and code of the second would still see its own
//! statics. So nothing of Rust crosses: numbers, pointers, `#[repr(C)]` structs and C functions, all of which run in the
//! library that the table belongs to. Its objects are opaque here.
//!
//! **Versions.** The number in the symbol's name changes when a function changes its meaning. New functions are added at the
//! end of the table, which begins with its size: [`client`] uses a table that is at least as long as the one it knows.
//! Beside an older library, whose table is shorter or absent, the module uses its own runtime: then there are two, as
//! there were always before, and both are right.
//!
//! Known flaws:
//! - Only a library that is loaded already is found: preloaded, linked, or opened with RTLD_GLOBAL before the import. One that
//!   comes later has a runtime of its own.
//! - A panic in the runtime is EIO with a sentence, where a Rust caller would see the panic.

pub mod client;
mod serve;

use std::ffi::{c_char, c_int, c_void};

pub use serve::TABLE;

/// Memory of a device, as the library that owns the table knows it. Only `start`, `len` and `host_mapped` are for others.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// First byte of the allocation.
    pub start: u64,
    /// Its length.
    pub len: u64,
    /// The CPU can store to it at the same address: 1, or 0.
    pub host_mapped: u32,
    /// The library's own.
    p2p_mapped: u32,
    /// The library's own: its device.
    device: [usize; 2],
}

/// Where a function says why it failed, or a text that is its answer.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Report {
    /// Called at most once, before the function returns. Text and path are UTF-8 and bytes, and not kept; `path` may be null.
    tell: unsafe extern "C" fn(
        context: *mut c_void,
        errno: c_int,
        text: *const u8,
        text_len: usize,
        path: *const u8,
        path_len: usize,
    ),
    context: *mut c_void,
}

/// What an NVMMU session did; the mode of its output is reported as text.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct SessionReport {
    /// Bytes brought to the device.
    pub uploaded: u64,
    /// Bytes brought to files.
    pub downloaded: u64,
    /// Bytes written as whole stripes.
    pub whole: u64,
    /// Of these, filler: old bytes of the stripes, not the session's.
    pub neighbours: u64,
    /// Bytes of the output written as they came.
    pub loose: u64,
    /// Bytes read by preparation.
    pub read_ahead: u64,
}

/// Offset of a transfer at the descriptor's own.
const OWN_OFFSET: i64 = -1;
/// Of a read or upload: it has arrived when the call returns, however small it is.
const ARRIVED: u32 = 1;
/// Directions of moves.
const UPLOAD: u32 = 0;
const DOWNLOAD: u32 = 1;

/// A read of many pieces of one file. Arrays have `count` elements.
#[repr(C)]
#[derive(Clone, Copy)]
struct Pieces {
    fd: c_int,
    reserved: u32,
    offsets: *const u64,
    /// Null: `len` for all.
    lens: *const u64,
    len: u64,
    /// Null: `address`, and `len` more for each next one.
    addresses: *const u64,
    address: u64,
    results: *mut i64,
    count: usize,
    /// Memory that all of them lie in, or null.
    known: *const Memory,
}

/// The functions. Unless stated otherwise each returns 0 or a count, or -1 after it has reported the error; a pointer is then null.
/// What is opaque was made by a function of the same table.
#[repr(C)]
pub struct Table {
    size: usize,
    version: extern "C" fn() -> *const c_char,

    // Devices. `find`: 1 for memory of a device, 0 for the host's.
    find: unsafe extern "C" fn(address: u64, len: usize, memory: *mut Memory) -> c_int,
    device_name: unsafe extern "C" fn(memory: *const Memory, report: Report),
    thread_stream: extern "C" fn() -> u64,
    set_thread_stream: extern "C" fn(stream: u64),

    // The emulated device. ENOMEM: it has no more. EINVAL: SPINIO_EMULATED is not understood.
    emulated_configure: unsafe extern "C" fn(text: *const u8, len: usize, report: Report) -> i64,
    emulated_alloc: unsafe extern "C" fn(len: usize, host_mapped: c_int, report: Report) -> u64,
    emulated_free: extern "C" fn(address: u64),
    emulated_stream: unsafe extern "C" fn(stream: *mut u64, report: Report) -> i64,
    emulated_return_stream: extern "C" fn(stream: u64),
    emulated_wait: unsafe extern "C" fn(stream: u64, report: Report) -> i64,
    emulated_hold: unsafe extern "C" fn(report: Report) -> i64,
    emulated_resume: unsafe extern "C" fn(report: Report) -> i64,

    // Transfers.
    begin_asking: unsafe extern "C" fn(ask: extern "C" fn() -> c_int, every_nanos: u64) -> *mut c_void,
    end_asking: unsafe extern "C" fn(asking: *mut c_void),
    read: unsafe extern "C" fn(
        fd: c_int,
        offset: i64,
        memory: *const Memory,
        address: u64,
        len: usize,
        flags: u32,
        report: Report,
    ) -> i64,
    write: unsafe extern "C" fn(
        fd: c_int,
        offset: i64,
        memory: *const Memory,
        address: u64,
        len: usize,
        report: Report,
    ) -> i64,
    fetch: unsafe extern "C" fn(memory: *const Memory, address: u64, into: *mut u8, len: usize, report: Report) -> i64,
    put: unsafe extern "C" fn(memory: *const Memory, address: u64, from: *const u8, len: usize, report: Report) -> i64,
    read_many: unsafe extern "C" fn(pieces: *const Pieces, report: Report) -> i64,

    // Files that stay registered, with the device of some memory, or (null) the one in use.
    pin_file: unsafe extern "C" fn(fd: c_int, like: *const Memory, report: Report) -> i64,
    unpin_file: unsafe extern "C" fn(fd: c_int, report: Report) -> i64,
    is_pinned: extern "C" fn(fd: c_int) -> c_int,
    map: unsafe extern "C" fn(fd: c_int, offset: u64, len: u64, like: *const Memory, report: Report) -> *mut c_void,
    map_address: unsafe extern "C" fn(map: *const c_void) -> u64,
    map_len: unsafe extern "C" fn(map: *const c_void) -> u64,
    map_is_here: unsafe extern "C" fn(map: *const c_void) -> c_int,
    map_is_wanted: unsafe extern "C" fn(map: *const c_void) -> c_int,
    unmap: unsafe extern "C" fn(map: *mut c_void),

    // Sessions of NVMMU. Paths are bytes; a null one: no output.
    session_begin: unsafe extern "C" fn(output: *const u8, len: usize, report: Report) -> *mut c_void,
    session_expect: unsafe extern "C" fn(session: *mut c_void, offset: u64, len: u64, report: Report) -> i64,
    session_move: unsafe extern "C" fn(session: *mut c_void, wanted: *const Move, report: Report) -> i64,
    session_move_async:
        unsafe extern "C" fn(session: *mut c_void, wanted: *const Move, stream: u64, report: Report) -> *mut c_void,
    session_flush: unsafe extern "C" fn(session: *mut c_void, sync: c_int, report: Report) -> i64,
    session_output: unsafe extern "C" fn(session: *const c_void, report: Report),
    session_report: unsafe extern "C" fn(session: *mut c_void, out: *mut SessionReport, report: Report) -> i64,
    session_end: unsafe extern "C" fn(session: *mut c_void, out: *mut SessionReport, report: Report) -> i64,
    session_drop: unsafe extern "C" fn(session: *mut c_void),
    ticket_is_done: unsafe extern "C" fn(ticket: *const c_void) -> c_int,
    ticket_wait: unsafe extern "C" fn(ticket: *const c_void, report: Report) -> i64,
    ticket_clone: unsafe extern "C" fn(ticket: *const c_void) -> *mut c_void,
    ticket_drop: unsafe extern "C" fn(ticket: *mut c_void),

    // Counters, as JSON.
    counters: unsafe extern "C" fn(report: Report),
}

/// A move of a session.
#[repr(C)]
#[derive(Clone, Copy)]
struct Move {
    path: *const u8,
    path_len: usize,
    address: u64,
    offset: u64,
    len: u64,
    direction: u32,
    flags: u32,
}
