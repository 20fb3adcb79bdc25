//! One runtime per process: the functions of SPIN that the Python module uses, as a table of C functions.
//!
//! ```text
//!   libspinio.so ── exports ──> spinio_runtime_v3: Table ──┐ found by dlsym, when the module is imported
//!        │ hooks, spinio.h                                 │
//!        ▼                                                 ▼
//!   its registry, pools, pins, counters <──────────── client.rs <── the Python module
//!                                                          │ not found
//!   the module's own copy of all that <────────────────────┘ its own table
//! ```
//!
//! Two libraries that each link `spinio_io` have two of every static: the registry of devices, the runtime with its
//! pools and rings, the settings, the counters, the stream that a thread has chosen. A module next to a preloaded
//! library then pins twice as much, has twice the threads, and `spinio stat` shows half of the I/O of the process.
//!
//! Passing Rust objects of one library to the other would be sound only if both were made by the same compiler, from
//! the same sources, with the same features. Nothing checks that at run time, and code of the second library would
//! still see its own statics. So only numbers, pointers, `#[repr(C)]` structs and C functions are passed, and all
//! functions run in the library that owns the table. Its objects are opaque here.
//!
//! **Versions.** The number in the symbol's name changes when a function changes its meaning. New functions are added
//! at the end of the table, which begins with its size: [`client`] uses a table that is at least as long as the one it
//! knows. Structs of counters grow at their end, and a function that fills a longer one than its caller has overwrites
//! what is next to it: the table has the length of each struct too, and they must be equal. With a library whose table
//! is absent, shorter or of other structs, the module uses its own runtime: then there are two, as before this table
//! existed, and both are correct.
//!
//! Known flaws:
//! - Only a library that is already loaded is found: preloaded, linked, or opened with RTLD_GLOBAL before the import. A
//!   library that is loaded later has its own runtime.
//! - A panic in the runtime is EIO with a text, where a Rust caller would see the panic.

pub mod client;
mod serve;

use std::ffi::{c_char, c_int, c_void};

pub use serve::TABLE;
pub use serve::file_reader::Routes;

/// Memory of a device, as the library that owns the table knows it. Clients may read only `start`, `len` and
/// `host_mapped`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// First byte of the allocation.
    pub start: u64,
    /// Its length.
    pub len: u64,
    /// The CPU can store to it at the same address: 1, or 0.
    pub host_mapped: u32,
    /// Private to the library.
    p2p_mapped: u32,
    /// Private to the library: its device.
    device: [usize; 2],
}

/// Receives the error of a function, or a text that is its result.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Report {
    /// Called at most once, before the function returns. Text (UTF-8) and path (bytes) are not kept; `path` may be
    /// null.
    callback: unsafe extern "C" fn(
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
    /// Bytes uploaded to the device.
    pub uploaded: u64,
    /// Bytes downloaded to files.
    pub downloaded: u64,
    /// Bytes written as full stripes.
    pub full_stripe: u64,
    /// Of these, filler: old bytes of the stripes, not the session's.
    pub filler: u64,
    /// Bytes of the output written as they arrived.
    pub unaligned: u64,
    /// Bytes read by preparation.
    pub read_ahead: u64,
}

/// The offset of a transfer at the descriptor's own.
const FILE_OFFSET: i64 = -1;
/// Of a read or upload: wait until the bytes have arrived, for small ones too.
const WAIT_ARRIVED: u32 = 1;
/// Directions of moves.
const UPLOAD: u32 = 0;
const DOWNLOAD: u32 = 1;
/// Access of maps.
const GAIA_READ: u32 = 1;
/// An acquire for writing that fetches nothing.
const GAIA_OVERWRITE: u32 = 4;
const GAIA_WRITE: u32 = 2;
/// A map that is read in place; with the access.
const GAIA_IN_PLACE: u32 = 8;

/// A read of many ranges of one file. Arrays have `count` elements.
#[repr(C)]
#[derive(Clone, Copy)]
struct ReadOps {
    fd: c_int,
    reserved: u32,
    offsets: *const u64,
    /// Null: `len` for all.
    lens: *const u64,
    len: u64,
    /// Null: `address`, plus `len` for each further one.
    addresses: *const u64,
    address: u64,
    results: *mut i64,
    count: usize,
    /// Memory that contains all destinations, or null.
    known: *const Memory,
}

/// The functions. Unless stated otherwise each returns 0 or a count, or -1 after it has reported the error; a pointer
/// is then null. What is opaque was made by a function of the same table.
#[repr(C)]
pub struct Table {
    size: usize,
    structs: [u32; 9],
    version: extern "C" fn() -> *const c_char,

    // Devices. `find`: 1 for memory of a device, 0 for host memory.
    find: unsafe extern "C" fn(address: u64, len: usize, memory: *mut Memory) -> c_int,
    device_name: unsafe extern "C" fn(memory: *const Memory, report: Report),
    thread_stream: extern "C" fn() -> u64,
    set_thread_stream: extern "C" fn(stream: u64),

    // The emulated device; `emulated_alloc` and `emulated_stream`: that of a number. ENOMEM: it has no more. EINVAL: SPINIO_EMULATED cannot be parsed.
    emulated_configure: unsafe extern "C" fn(text: *const u8, len: usize, report: Report) -> i64,
    emulated_alloc: unsafe extern "C" fn(device: u32, len: usize, host_mapped: c_int, report: Report) -> u64,
    emulated_free: extern "C" fn(address: u64),
    emulated_stream: unsafe extern "C" fn(device: u32, stream: *mut u64, report: Report) -> i64,
    emulated_release_stream: extern "C" fn(stream: u64),
    emulated_wait: unsafe extern "C" fn(stream: u64, report: Report) -> i64,
    emulated_pause: unsafe extern "C" fn(report: Report) -> i64,
    emulated_resume: unsafe extern "C" fn(report: Report) -> i64,

    // Transfers.
    set_cancel_poll: unsafe extern "C" fn(poll: extern "C" fn() -> c_int, every_nanos: u64) -> *mut c_void,
    restore_cancel_poll: unsafe extern "C" fn(installed: *mut c_void),
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
    copy_to_host:
        unsafe extern "C" fn(memory: *const Memory, address: u64, into: *mut u8, len: usize, report: Report) -> i64,
    copy_from_host:
        unsafe extern "C" fn(memory: *const Memory, address: u64, from: *const u8, len: usize, report: Report) -> i64,
    read_many: unsafe extern "C" fn(ops: *const ReadOps, report: Report) -> i64,

    // Pinned files, for the device of some memory, or (null) the one in use.
    // `pin_file` returns the generation of the pins; `unpin_file` fails if the file was unpinned since that one.
    pin_file: unsafe extern "C" fn(fd: c_int, like: *const Memory, report: Report) -> i64,
    unpin_file: unsafe extern "C" fn(fd: c_int, generation: u64, report: Report) -> i64,
    is_pinned: extern "C" fn(fd: c_int) -> c_int,
    map: unsafe extern "C" fn(fd: c_int, offset: u64, len: u64, like: *const Memory, report: Report) -> *mut c_void,
    map_address: unsafe extern "C" fn(map: *const c_void) -> u64,
    map_len: unsafe extern "C" fn(map: *const c_void) -> u64,
    map_is_own_process: unsafe extern "C" fn(map: *const c_void) -> c_int,
    map_revoke_requested: unsafe extern "C" fn(map: *const c_void) -> c_int,
    unmap: unsafe extern "C" fn(map: *mut c_void),

    // Sessions of NVMMU. Paths are bytes; a null one: no output.
    session_begin: unsafe extern "C" fn(output: *const u8, len: usize, report: Report) -> *mut c_void,
    session_hint_range: unsafe extern "C" fn(session: *mut c_void, offset: u64, len: u64, report: Report) -> i64,
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

    // Files in device memory, as in spinio_gaia.h: a map is its device address. The device is a name (UTF-8), or (null)
    // the one in use. `gaia_map`: 0 after an error.
    gaia_map: unsafe extern "C" fn(
        fd: c_int,
        offset: u64,
        len: u64,
        access: u32,
        device: *const u8,
        device_len: usize,
        report: Report,
    ) -> u64,
    gaia_unmap: unsafe extern "C" fn(address: u64, report: Report) -> i64,
    gaia_acquire: unsafe extern "C" fn(address: u64, len: u64, access: u32, report: Report) -> i64,
    gaia_release: unsafe extern "C" fn(address: u64, len: u64, report: Report) -> i64,
    gaia_info: unsafe extern "C" fn(address: u64, out: *mut spinio_gaia::Info, report: Report) -> i64,
    gaia_discard: unsafe extern "C" fn(address: u64, len: u64, report: Report) -> i64,
    gaia_sync: unsafe extern "C" fn(address: u64, len: u64, report: Report) -> i64,
    // The report is the device's name.
    gaia_device: unsafe extern "C" fn(address: u64, report: Report),
    // In the order of a stream; the results of releases are not reported.
    gaia_acquire_async: unsafe extern "C" fn(address: u64, len: u64, access: u32, stream: u64, report: Report) -> i64,
    gaia_release_async: unsafe extern "C" fn(address: u64, len: u64, stream: u64, report: Report) -> i64,
    gaia_end_reading: unsafe extern "C" fn(address: u64, len: u64, report: Report) -> i64,

    // `gaia_release` that may hand device memory over.
    gaia_release_handing_over: unsafe extern "C" fn(address: u64, len: u64, report: Report) -> i64,

    // Sockets of kernels, as in spinio_net.h. The device is a name (UTF-8), or (null) the one in use, else the emulated one.
    // Addresses are texts (UTF-8). Sockets and event sets are numbers.
    net_open: unsafe extern "C" fn(
        device: *const u8,
        device_len: usize,
        options: *const NetOptions,
        report: Report,
    ) -> *mut c_void,
    net_handle: unsafe extern "C" fn(net: *const c_void, out: *mut spinio_net::Handle),
    net_listen:
        unsafe extern "C" fn(net: *const c_void, address: *const u8, len: usize, backlog: u32, report: Report) -> i64,
    net_connect: unsafe extern "C" fn(net: *const c_void, address: *const u8, len: usize, report: Report) -> i64,
    net_adopt: unsafe extern "C" fn(net: *const c_void, fd: c_int, report: Report) -> i64,
    // A descriptor; `count` bytes are stored at `unread`, which has room for `size`.
    net_release: unsafe extern "C" fn(
        net: *const c_void,
        socket: i32,
        unread: *mut u8,
        size: usize,
        count: *mut usize,
        report: Report,
    ) -> i64,
    net_set: unsafe extern "C" fn(net: *const c_void, report: Report) -> i64,
    net_add: unsafe extern "C" fn(net: *const c_void, set: i32, socket: i32, events: u32, report: Report) -> i64,
    // The report is the address if the result is 0.
    net_address: unsafe extern "C" fn(net: *const c_void, socket: i32, report: Report) -> i64,
    net_stats: unsafe extern "C" fn(net: *const c_void, out: *mut spinio_net::Stats),
    net_stop: unsafe extern "C" fn(net: *const c_void, report: Report) -> i64,
    // The net is gone then, after an error too.
    net_close: unsafe extern "C" fn(net: *mut c_void, report: Report) -> i64,

    // A block of the program that acquires a range for reading begins, or has ended: until then its memory stays.
    gaia_begin_block: unsafe extern "C" fn(address: u64, len: u64, report: Report) -> i64,
    gaia_end_block: unsafe extern "C" fn(address: u64, len: u64, report: Report) -> i64,
}

/// Lengths of the structs that functions are passed or fill.
const STRUCTS: [u32; 9] = [
    size_of::<Memory>() as u32,
    size_of::<Report>() as u32,
    size_of::<SessionReport>() as u32,
    size_of::<ReadOps>() as u32,
    size_of::<Move>() as u32,
    size_of::<NetOptions>() as u32,
    size_of::<spinio_gaia::Info>() as u32,
    size_of::<spinio_net::Handle>() as u32,
    size_of::<spinio_net::Stats>() as u32,
];

/// What a net is made for; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy)]
struct NetOptions {
    sockets: u32,
    connections: u32,
    ring_bytes: u32,
    idle_us: u32,
    no_upgrade: u32,
    files_write: u32,
    files: u32,
    shared_connections: u32,
    threads: u32,
    /// A path in bytes; null: kernels may open no files.
    files_root: *const u8,
    files_root_len: usize,
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
