//! The runtime of this process, called through the table: safe functions that work with any library's table.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null};
use std::sync::OnceLock;
use std::time::Duration;

use crate::{
    DOWNLOAD, FILE_OFFSET, Memory, Move, ReadOps, Report, STRUCTS, SessionReport, TABLE, Table, UPLOAD, WAIT_ARRIVED,
};

static FOUND: OnceLock<&'static Table> = OnceLock::new();
static OWN: Table = TABLE;

/// The table of this process: that of a `libspinio.so` which is loaded at the first call, or that of this library. It
/// is looked up when the module is imported, and does not change.
pub fn table() -> &'static Table {
    FOUND.get_or_init(|| {
        // SAFETY: the name is NUL-terminated.
        let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"spinio_runtime_v3".as_ptr()) }.cast::<Table>();
        if at.is_null() || !at.is_aligned() {
            return &OWN;
        }
        // SAFETY: a table of a library that is never unloaded (`-z nodelete`).
        unsafe { usable(at) }.unwrap_or(&OWN)
    })
}

/// The table, if this client may use it.
///
/// # Safety
/// It must begin with its size, and be there for ever.
unsafe fn usable(table: *const Table) -> Option<&'static Table> {
    // SAFETY: the caller's promise.
    let size = unsafe { (&raw const (*table).size).read() };
    if size < size_of::<Table>() {
        return None;
    }
    // SAFETY: of the same version and at least as long: every function that this version has is there, with the same
    // meaning.
    let table = unsafe { &*table };
    (table.structs == STRUCTS).then_some(table)
}

/// Version of the library that owns the runtime.
pub fn version() -> &'static str {
    // SAFETY: a string that lives as long as the library, which is never unloaded.
    unsafe { CStr::from_ptr((table().version)()) }.to_str().unwrap_or_default()
}

/// Why a call failed.
#[derive(Clone, Debug)]
pub struct Error {
    /// As of the C function.
    pub errno: c_int,
    /// The cause, as text.
    pub text: String,
    /// The file, if its name is known.
    pub path: Option<PathBuf>,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

unsafe extern "C" fn receive_report(
    context: *mut c_void,
    errno: c_int,
    text: *const u8,
    text_len: usize,
    path: *const u8,
    path_len: usize,
) {
    let bytes = |at: *const u8, len| {
        // SAFETY: the library has `len` bytes there, for as long as this runs.
        (!at.is_null()).then(|| unsafe { core::slice::from_raw_parts(at, len) })
    };
    let text = String::from_utf8_lossy(bytes(text, text_len).unwrap_or_default()).into_owned();
    let path = bytes(path, path_len).map(|path| PathBuf::from(OsStr::from_bytes(path)));
    // SAFETY: the context is that of `with_report`, which waits for the call.
    unsafe { *context.cast::<Option<Error>>() = Some(Error { errno, text, path }) };
}

/// Makes a call that may report an error or a text.
fn with_report<T>(call: impl FnOnce(Report) -> T) -> (T, Option<Error>) {
    let mut received = None::<Error>;
    let done = call(Report { callback: receive_report, context: (&raw mut received).cast() });
    (done, received)
}

fn missing_report() -> Error {
    Error { errno: libc::EIO, text: "SPIN failed without a reason".to_owned(), path: None }
}

fn call_for_count(call: impl FnOnce(Report) -> i64) -> Result<u64, Error> {
    let (done, received) = with_report(call);
    u64::try_from(done).map_err(|_| received.unwrap_or_else(missing_report))
}

fn call_for_object(call: impl FnOnce(Report) -> *mut c_void) -> Result<NonNull<c_void>, Error> {
    let (done, received) = with_report(call);
    NonNull::new(done).ok_or_else(|| received.unwrap_or_else(missing_report))
}

/// A stream of a device; 0 is the default one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub u64);

/// Device memory that a request fills or reads.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    memory: Memory,
    /// First byte.
    pub address: u64,
}

impl Target {
    /// The device memory at an address; `None` for host memory. `len`: bytes of interest.
    pub fn find(address: u64, len: usize) -> Option<Target> {
        let mut memory = core::mem::MaybeUninit::uninit();
        // SAFETY: there is room for the memory, which is filled in if the result is 1.
        unsafe {
            let found = (table().find)(address, len, memory.as_mut_ptr()) != 0;
            found.then(|| Target { memory: memory.assume_init(), address })
        }
    }

    /// Bytes from the address to the end of the allocation.
    pub fn bytes_left(&self) -> u64 {
        (self.memory.start + self.memory.len).saturating_sub(self.address)
    }

    /// The name of its device: `cuda:0`.
    pub fn device(&self) -> String {
        // SAFETY: filled in by `find`.
        with_report(|report| unsafe { (table().device_name)(&self.memory, report) })
            .1
            .map_or_else(String::new, |e| e.text)
    }

    /// Copies from it, after the work that this thread has queued.
    pub fn copy_to_host(&self, into: &mut [u8]) -> Result<(), Error> {
        // SAFETY: filled in by `find`; the bytes are borrowed from the caller.
        let done = |report| unsafe {
            (table().copy_to_host)(&self.memory, self.address, into.as_mut_ptr(), into.len(), report)
        };
        call_for_count(done).map(drop)
    }

    /// Copies into it, and waits until the bytes have arrived.
    pub fn copy_from_host(&self, from: &[u8]) -> Result<(), Error> {
        // SAFETY: filled in by `find`; the bytes are borrowed from the caller.
        let done =
            |report| unsafe { (table().copy_from_host)(&self.memory, self.address, from.as_ptr(), from.len(), report) };
        call_for_count(done).map(drop)
    }
}

/// Fills device memory from a file, at an offset or the descriptor's own; the bytes read. `wait`: until they have
/// arrived.
pub fn read(fd: c_int, at: Option<u64>, to: Target, len: usize, wait: bool) -> Result<usize, Error> {
    let flags = if wait { WAIT_ARRIVED } else { 0 };
    // SAFETY: filled in by `find`.
    let done = |report| unsafe { (table().read)(fd, offset(at), &to.memory, to.address, len, flags, report) };
    call_for_count(done).map(|n| n as usize)
}

/// Writes device memory to a file; the bytes written.
pub fn write(fd: c_int, at: Option<u64>, from: Target, len: usize) -> Result<usize, Error> {
    // SAFETY: filled in by `find`.
    let done = |report| unsafe { (table().write)(fd, offset(at), &from.memory, from.address, len, report) };
    call_for_count(done).map(|n| n as usize)
}

/// Offsets that no file has are refused by the kernel.
fn offset(at: Option<u64>) -> i64 {
    at.map_or(FILE_OFFSET, |at| i64::try_from(at).unwrap_or(i64::MAX))
}

/// Numbers of many operations: an array, or a single number.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// One per operation.
    PerOp(&'a [u64]),
    /// For lengths: all have this one. For addresses: that of the first; each further one follows by the length.
    Same(u64),
}

/// Reads many ranges of one file, and waits; the number that failed. `known`: memory that contains all destinations.
///
/// # Panics
/// If an array is shorter than `results`.
pub fn read_many(
    fd: c_int,
    offsets: &[u64],
    lens: Arg<'_>,
    addresses: Arg<'_>,
    results: &mut [i64],
    known: Option<Target>,
) -> Result<usize, Error> {
    let count = results.len();
    let parts = |each| match each {
        Arg::PerOp(all) => {
            let all: &[u64] = all;
            assert!(all.len() >= count, "a number for each piece");
            (all.as_ptr(), 0)
        }
        Arg::Same(value) => (null(), value),
    };
    assert!(offsets.len() >= count, "an offset for each piece");
    let ((lens, len), (addresses, address)) = (parts(lens), parts(addresses));
    let known = known.as_ref().map_or(null(), |target| &raw const target.memory);
    let (offsets, results) = (offsets.as_ptr(), results.as_mut_ptr());
    let ops = ReadOps { fd, reserved: 0, offsets, lens, len, addresses, address, results, count, known };
    // SAFETY: every array has `count` elements, as checked above, and stays borrowed until this returns.
    call_for_count(|report| unsafe { (table().read_many)(&ops, report) }).map(|n| n as usize)
}

/// The stream that this thread has chosen; 0 if none.
pub fn thread_stream() -> Stream {
    Stream((table().thread_stream)())
}

/// From now on requests of this thread are ordered with this stream.
pub fn set_thread_stream(stream: Stream) {
    (table().set_thread_stream)(stream.0);
}

/// While it lives, long requests of this thread poll for cancellation.
#[must_use]
pub struct CancelPollGuard {
    previous: *mut c_void,
    /// Bound to this thread.
    _here: PhantomData<*const ()>,
}

/// From now on long requests of this thread call `poll`, at most once per `every`, and end early once it has returned
/// other than 0. It must not unwind.
pub fn poll_for_cancel(poll: extern "C" fn() -> c_int, every: Duration) -> CancelPollGuard {
    let nanos = u64::try_from(every.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: a function lives forever.
    CancelPollGuard { previous: unsafe { (table().set_cancel_poll)(poll, nanos) }, _here: PhantomData }
}

impl Drop for CancelPollGuard {
    fn drop(&mut self) {
        // SAFETY: begun on this thread; guards of a thread end in the order of their scopes.
        unsafe { (table().restore_cancel_poll)(self.previous) }
    }
}

fn memory(like: Option<&Target>) -> *const Memory {
    like.map_or(null(), |target| &raw const target.memory)
}

/// Pins a file for the device of some memory, or for the device in use. Returns the generation of its pins.
pub fn pin_file(fd: c_int, like: Option<Target>) -> Result<u64, Error> {
    // SAFETY: null, or filled in by `find`.
    call_for_count(|report| unsafe { (table().pin_file)(fd, memory(like.as_ref()), report) })
}

/// Unpins a file, once for each time that it was pinned in this generation; ESTALE if it was unpinned since.
pub fn unpin_file(fd: c_int, generation: u64) -> Result<(), Error> {
    // SAFETY: takes numbers only.
    call_for_count(|report| unsafe { (table().unpin_file)(fd, generation, report) }).map(drop)
}

/// Whether a file is pinned, and no process waits to write it.
pub fn is_pinned(fd: c_int) -> bool {
    (table().is_pinned)(fd) != 0
}

/// A range of a pinned file, at an address that GPU kernels read.
#[derive(Debug)]
pub struct Map(NonNull<c_void>);

// SAFETY: the library's object may be used and dropped on any thread.
unsafe impl Send for Map {}

impl Map {
    /// Maps it for the device of some memory, or for the one in use.
    pub fn new(fd: c_int, offset: u64, len: u64, like: Option<Target>) -> Result<Map, Error> {
        // SAFETY: null, or filled in by `find`.
        call_for_object(|report| unsafe { (table().map)(fd, offset, len, memory(like.as_ref()), report) }).map(Map)
    }

    /// Where GPU kernels find the first byte.
    pub fn address(&self) -> u64 {
        // SAFETY: it is alive until it is dropped.
        unsafe { (table().map_address)(self.0.as_ptr()) }
    }

    /// Its length in bytes, never 0.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> u64 {
        // SAFETY: it is alive until it is dropped.
        unsafe { (table().map_len)(self.0.as_ptr()) }
    }

    /// Whether this process mapped it, and is not a forked child of the one that did.
    pub fn is_own_process(&self) -> bool {
        // SAFETY: it is alive until it is dropped.
        unsafe { (table().map_is_own_process)(self.0.as_ptr()) != 0 }
    }

    /// Whether a process waits to write the file.
    pub fn revoke_requested(&self) -> bool {
        // SAFETY: it is alive until it is dropped.
        unsafe { (table().map_revoke_requested)(self.0.as_ptr()) != 0 }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: ended once.
        unsafe { (table().unmap)(self.0.as_ptr()) }
    }
}

/// The direction of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file to the device.
    Upload,
    /// From the device to the file.
    Download,
}

/// A session of NVMMU.
#[derive(Debug)]
pub struct Session(NonNull<c_void>);

// SAFETY: the library's object is `Send`, and changed only through an exclusive reference.
unsafe impl Send for Session {}

/// What a session did, and how its output was written.
#[derive(Clone, Debug)]
pub struct Done {
    /// The counts.
    pub report: SessionReport,
    /// How far the output could be prepared.
    pub mode: String,
}

impl Session {
    /// Begins one.
    pub fn begin(output: Option<&Path>) -> Result<Session, Error> {
        let (path, len) = output.map_or((null(), 0), bytes);
        // SAFETY: null, or `len` bytes.
        call_for_object(|report| unsafe { (table().session_begin)(path, len, report) }).map(Session)
    }

    /// Announces where downloads to the output will be written.
    pub fn hint_range(&mut self, offset: u64, len: u64) -> Result<(), Error> {
        // SAFETY: it is alive, and this reference is exclusive.
        call_for_count(|report| unsafe { (table().session_hint_range)(self.0.as_ptr(), offset, len, report) }).map(drop)
    }

    /// Moves; the bytes moved. `wait`: until an upload has arrived.
    pub fn move_range(
        &mut self,
        path: &Path,
        address: u64,
        offset: u64,
        len: u64,
        direction: Direction,
        wait: bool,
    ) -> Result<u64, Error> {
        let wanted = wanted(path, address, offset, len, direction, wait);
        // SAFETY: it is alive, and this reference is exclusive; the path is borrowed.
        call_for_count(|report| unsafe { (table().session_move)(self.0.as_ptr(), &wanted, report) })
    }

    /// The same in the order of a stream. The memory must stay valid until the ticket is done.
    pub fn move_async(
        &mut self,
        path: &Path,
        address: u64,
        offset: u64,
        len: u64,
        direction: Direction,
        stream: Stream,
    ) -> Result<Ticket, Error> {
        let wanted = wanted(path, address, offset, len, direction, false);
        // SAFETY: it is alive, and this reference is exclusive; the path is borrowed.
        call_for_object(|report| unsafe { (table().session_move_async)(self.0.as_ptr(), &wanted, stream.0, report) })
            .map(Ticket)
    }

    /// Writes the gathered bytes; with `sync` waits until the storage has them.
    pub fn flush(&mut self, sync: bool) -> Result<(), Error> {
        // SAFETY: it is alive, and this reference is exclusive.
        call_for_count(|report| unsafe { (table().session_flush)(self.0.as_ptr(), sync.into(), report) }).map(drop)
    }

    /// The output file, if any.
    pub fn output(&self) -> Option<PathBuf> {
        // SAFETY: it is alive, and no thread changes it meanwhile.
        with_report(|report| unsafe { (table().session_output)(self.0.as_ptr(), report) })
            .1
            .and_then(|report| report.path)
    }

    /// What was done so far.
    pub fn report(&mut self) -> Result<Done, Error> {
        // SAFETY: it is alive, and this reference is exclusive.
        call_for_report(|out, report| unsafe { (table().session_report)(self.0.as_ptr(), out, report) })
    }

    /// Ends it: all bytes are in the files.
    pub fn end(self) -> Result<Done, Error> {
        let session = core::mem::ManuallyDrop::new(self);
        // SAFETY: it is alive, and ends here: it is not dropped as well.
        call_for_report(|out, report| unsafe { (table().session_end)(session.0.as_ptr(), out, report) })
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // SAFETY: ended once.
        unsafe { (table().session_drop)(self.0.as_ptr()) }
    }
}

fn bytes(path: &Path) -> (*const u8, usize) {
    let bytes = path.as_os_str().as_bytes();
    (bytes.as_ptr(), bytes.len())
}

fn wanted(path: &Path, address: u64, offset: u64, len: u64, direction: Direction, wait: bool) -> Move {
    let (path, path_len) = bytes(path);
    let direction = match direction {
        Direction::Upload => UPLOAD,
        Direction::Download => DOWNLOAD,
    };
    Move { path, path_len, address, offset, len, direction, flags: if wait { WAIT_ARRIVED } else { 0 } }
}

fn call_for_report(call: impl FnOnce(*mut SessionReport, Report) -> i64) -> Result<Done, Error> {
    let mut report = SessionReport::default();
    match with_report(|callback| call(&mut report, callback)) {
        (0, Some(message)) => Ok(Done { report, mode: message.text }),
        (_, error) => Err(error.unwrap_or_else(missing_report)),
    }
}

/// A stream-ordered move.
#[derive(Debug)]
pub struct Ticket(NonNull<c_void>);

// SAFETY: the library's object is `Send` and `Sync` there.
unsafe impl Send for Ticket {}
// SAFETY: as above.
unsafe impl Sync for Ticket {}

impl Ticket {
    /// Whether the move is complete.
    pub fn is_done(&self) -> bool {
        // SAFETY: it is alive until it is dropped.
        unsafe { (table().ticket_is_done)(self.0.as_ptr()) != 0 }
    }

    /// Waits until it is complete; the bytes moved.
    pub fn wait(&self) -> Result<u64, Error> {
        // SAFETY: it is alive until it is dropped.
        call_for_count(|report| unsafe { (table().ticket_wait)(self.0.as_ptr(), report) })
    }
}

impl Clone for Ticket {
    fn clone(&self) -> Ticket {
        // SAFETY: it is alive until it is dropped; a clone is never null.
        Ticket(unsafe { NonNull::new_unchecked((table().ticket_clone)(self.0.as_ptr())) })
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // SAFETY: released once.
        unsafe { (table().ticket_drop)(self.0.as_ptr()) }
    }
}

/// The counters, as JSON.
pub fn counters() -> String {
    // SAFETY: takes the report only.
    with_report(|report| unsafe { (table().counters)(report) }).1.map_or_else(|| "{}".to_owned(), |report| report.text)
}

pub mod gaia;
pub mod net;

/// The emulated device.
pub mod emulated {
    use super::{Error, Stream, c_int, call_for_count, missing_report, table, with_report};

    /// Sets its configuration. Without effect once it has memory.
    pub fn configure(text: &str) -> Result<(), Error> {
        // SAFETY: a string of `len` bytes.
        call_for_count(|report| unsafe { (table().emulated_configure)(text.as_ptr(), text.len(), report) }).map(drop)
    }

    /// Allocates memory on the device of a number. EINVAL: `SPINIO_EMULATED` cannot be parsed. ENODEV: there is none.
    pub fn alloc(device: u32, len: usize, host_mapped: bool) -> Result<u64, Error> {
        // SAFETY: takes numbers only.
        let (address, report) =
            with_report(|report| unsafe { (table().emulated_alloc)(device, len, c_int::from(host_mapped), report) });
        if address == 0 { Err(report.unwrap_or_else(missing_report)) } else { Ok(address) }
    }

    /// Frees memory, after all work that is queued.
    pub fn free(address: u64) {
        (table().emulated_free)(address);
    }

    /// A new stream of the device of a number.
    pub fn stream(device: u32) -> Result<Stream, Error> {
        let mut stream = 0;
        // SAFETY: there is room for it.
        call_for_count(|report| unsafe { (table().emulated_stream)(device, &mut stream, report) })?;
        Ok(Stream(stream))
    }

    /// Releases a stream; work queued on it still runs.
    pub fn release_stream(stream: Stream) {
        (table().emulated_release_stream)(stream.0);
    }

    /// Waits for the work queued on a stream.
    pub fn wait(stream: Stream) -> Result<(), Error> {
        // SAFETY: takes numbers only.
        call_for_count(|report| unsafe { (table().emulated_wait)(stream.0, report) }).map(drop)
    }

    /// No copy starts on the first device until `resume`.
    pub fn pause() -> Result<(), Error> {
        // SAFETY: takes the report only.
        call_for_count(|report| unsafe { (table().emulated_pause)(report) }).map(drop)
    }

    /// Copies start again.
    pub fn resume() -> Result<(), Error> {
        // SAFETY: takes the report only.
        call_for_count(|report| unsafe { (table().emulated_resume)(report) }).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_of_other_structs_is_not_used() {
        let usable = |table: Table| {
            // SAFETY: it is never freed.
            unsafe { usable(Box::leak(Box::new(table))) }.is_some()
        };
        assert!(usable(TABLE) && usable(Table { size: TABLE.size + 8, ..TABLE }));
        assert!(!usable(Table { size: TABLE.size - 8, ..TABLE }));
        for at in 0..STRUCTS.len() {
            let mut other = TABLE;
            other.structs[at] += 8;
            assert!(!usable(other), "struct {at} is longer");
        }
    }
}
