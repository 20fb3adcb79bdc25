//! The runtime of this process, for who asks it through the table: safe, and the same whoever's table it is.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null};
use std::sync::OnceLock;
use std::time::Duration;

use crate::{ARRIVED, DOWNLOAD, Memory, Move, OWN_OFFSET, Pieces, Report, SessionReport, TABLE, Table, UPLOAD};

static FOUND: OnceLock<&'static Table> = OnceLock::new();
static OWN: Table = TABLE;

/// The table of this process: that of a `libspinio.so` which was loaded when this was first asked, or our own. It is asked
/// when the module is imported, and stays.
pub fn table() -> &'static Table {
    FOUND.get_or_init(|| {
        // SAFETY: the name is NUL-terminated.
        let at = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"spinio_runtime_v1".as_ptr()) }.cast::<Table>();
        if at.is_null() || !at.is_aligned() {
            return &OWN;
        }
        // SAFETY: what has this name begins with its size, and the library is never unloaded (`-z nodelete`).
        let size = unsafe { (&raw const (*at).size).read() };
        // SAFETY: of the same version and at least as long: every function that we know is there, and means the same.
        if size >= size_of::<Table>() { unsafe { &*at } } else { &OWN }
    })
}

/// Whether the runtime is another library's: `libspinio.so` was there first.
pub fn is_shared() -> bool {
    !std::ptr::eq(table(), &OWN)
}

/// Version of the library that has the runtime.
pub fn version() -> &'static str {
    // SAFETY: a text that lives as long as the library, which is never unloaded.
    unsafe { CStr::from_ptr((table().version)()) }.to_str().unwrap_or_default()
}

/// Why a call failed.
#[derive(Clone, Debug)]
pub struct Error {
    /// As of a C call.
    pub errno: c_int,
    /// A sentence.
    pub text: String,
    /// The file, where its name is known.
    pub path: Option<PathBuf>,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Error {}

unsafe extern "C" fn told(
    context: *mut c_void,
    errno: c_int,
    text: *const u8,
    text_len: usize,
    path: *const u8,
    path_len: usize,
) {
    let bytes = |at: *const u8, len| {
        // SAFETY: the library has so many bytes there, for as long as this runs.
        (!at.is_null()).then(|| unsafe { core::slice::from_raw_parts(at, len) })
    };
    let text = String::from_utf8_lossy(bytes(text, text_len).unwrap_or_default()).into_owned();
    let path = bytes(path, path_len).map(|path| PathBuf::from(OsStr::from_bytes(path)));
    // SAFETY: the context is that of `telling`, which waits for the call.
    unsafe { *context.cast::<Option<Error>>() = Some(Error { errno, text, path }) };
}

/// Makes a call that may tell something.
fn telling<T>(call: impl FnOnce(Report) -> T) -> (T, Option<Error>) {
    let mut said = None::<Error>;
    let done = call(Report { tell: told, context: (&raw mut said).cast() });
    (done, said)
}

fn silent() -> Error {
    Error { errno: libc::EIO, text: "SPIN failed without a reason".to_owned(), path: None }
}

fn counted(call: impl FnOnce(Report) -> i64) -> Result<u64, Error> {
    let (done, said) = telling(call);
    u64::try_from(done).map_err(|_| said.unwrap_or_else(silent))
}

fn made(call: impl FnOnce(Report) -> *mut c_void) -> Result<NonNull<c_void>, Error> {
    let (done, said) = telling(call);
    NonNull::new(done).ok_or_else(|| said.unwrap_or_else(silent))
}

/// A stream of a device; 0 is the default one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub u64);

/// Device memory that a request fills or empties.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    memory: Memory,
    /// First byte.
    pub address: u64,
}

impl Target {
    /// The device memory at an address; `None` for the host's. `len`: bytes of interest.
    pub fn find(address: u64, len: usize) -> Option<Target> {
        let mut memory = core::mem::MaybeUninit::uninit();
        // SAFETY: there is room for the memory, which is filled in where the answer is yes.
        unsafe {
            let found = (table().find)(address, len, memory.as_mut_ptr()) != 0;
            found.then(|| Target { memory: memory.assume_init(), address })
        }
    }

    /// Bytes from the address to the end of the allocation.
    pub fn room(&self) -> u64 {
        (self.memory.start + self.memory.len).saturating_sub(self.address)
    }

    /// The name of its device: `cuda:0`.
    pub fn device(&self) -> String {
        // SAFETY: filled in by `find`.
        telling(|report| unsafe { (table().device_name)(&self.memory, report) }).1.map_or_else(String::new, |e| e.text)
    }

    /// Copies out of it, after the work that this thread has queued.
    pub fn fetch(&self, into: &mut [u8]) -> Result<(), Error> {
        // SAFETY: filled in by `find`; the bytes are ours.
        let done =
            |report| unsafe { (table().fetch)(&self.memory, self.address, into.as_mut_ptr(), into.len(), report) };
        counted(done).map(drop)
    }

    /// Copies into it, and waits for the arrival.
    pub fn put(&self, from: &[u8]) -> Result<(), Error> {
        // SAFETY: filled in by `find`; the bytes are ours.
        let done = |report| unsafe { (table().put)(&self.memory, self.address, from.as_ptr(), from.len(), report) };
        counted(done).map(drop)
    }
}

/// Fills device memory from a file, at an offset or the descriptor's own; the bytes read. `wait`: until they have arrived.
pub fn read(fd: c_int, at: Option<u64>, to: Target, len: usize, wait: bool) -> Result<usize, Error> {
    let flags = if wait { ARRIVED } else { 0 };
    // SAFETY: filled in by `find`.
    let done = |report| unsafe { (table().read)(fd, offset(at), &to.memory, to.address, len, flags, report) };
    counted(done).map(|n| n as usize)
}

/// Writes device memory to a file; the bytes written.
pub fn write(fd: c_int, at: Option<u64>, from: Target, len: usize) -> Result<usize, Error> {
    // SAFETY: filled in by `find`.
    let done = |report| unsafe { (table().write)(fd, offset(at), &from.memory, from.address, len, report) };
    counted(done).map(|n| n as usize)
}

/// Offsets that no file has are the kernel's to refuse.
fn offset(at: Option<u64>) -> i64 {
    at.map_or(OWN_OFFSET, |at| i64::try_from(at).unwrap_or(i64::MAX))
}

/// Numbers of many pieces: one a piece, or the first and how much more for each next one.
#[derive(Clone, Copy, Debug)]
pub enum Each<'a> {
    /// One a piece.
    Of(&'a [u64]),
    /// Of a length: all have it. Of an address: the first; the others follow, a length each.
    Same(u64),
}

/// Reads pieces of one file, and waits; how many failed. `known`: memory that all of them lie in.
///
/// # Panics
/// Where an array is shorter than `results`.
pub fn read_many(
    fd: c_int,
    offsets: &[u64],
    lens: Each<'_>,
    addresses: Each<'_>,
    results: &mut [i64],
    known: Option<Target>,
) -> Result<usize, Error> {
    let count = results.len();
    let parts = |each| match each {
        Each::Of(all) => {
            let all: &[u64] = all;
            assert!(all.len() >= count, "a number for each piece");
            (all.as_ptr(), 0)
        }
        Each::Same(value) => (null(), value),
    };
    assert!(offsets.len() >= count, "an offset for each piece");
    let ((lens, len), (addresses, address)) = (parts(lens), parts(addresses));
    let known = known.as_ref().map_or(null(), |target| &raw const target.memory);
    let (offsets, results) = (offsets.as_ptr(), results.as_mut_ptr());
    let pieces = Pieces { fd, reserved: 0, offsets, lens, len, addresses, address, results, count, known };
    // SAFETY: every array has `count` elements, as checked above, and is borrowed until this returns.
    counted(|report| unsafe { (table().read_many)(&pieces, report) }).map(|n| n as usize)
}

/// The stream that this thread has chosen; 0 where it has not.
pub fn thread_stream() -> Stream {
    Stream((table().thread_stream)())
}

/// From now on requests of this thread are ordered with this stream.
pub fn set_thread_stream(stream: Stream) {
    (table().set_thread_stream)(stream.0);
}

/// While it lives, long requests of this thread ask whether to go on.
#[must_use]
pub struct Asking {
    asking: *mut c_void,
    /// It is this thread's.
    _here: PhantomData<*const ()>,
}

/// From now on long requests of this thread call `ask`, no more often than `every` so long, and end early once it has not
/// answered 0. It must not unwind.
pub fn asking(ask: extern "C" fn() -> c_int, every: Duration) -> Asking {
    let nanos = u64::try_from(every.as_nanos()).unwrap_or(u64::MAX);
    // SAFETY: a function lives for ever.
    Asking { asking: unsafe { (table().begin_asking)(ask, nanos) }, _here: PhantomData }
}

impl Drop for Asking {
    fn drop(&mut self) {
        // SAFETY: begun on this thread; guards of a thread end in the order of their scopes.
        unsafe { (table().end_asking)(self.asking) }
    }
}

fn memory(like: Option<&Target>) -> *const Memory {
    like.map_or(null(), |target| &raw const target.memory)
}

/// Pins a file for the device of some memory, or for the device in use.
pub fn pin_file(fd: c_int, like: Option<Target>) -> Result<(), Error> {
    // SAFETY: null, or filled in by `find`.
    counted(|report| unsafe { (table().pin_file)(fd, memory(like.as_ref()), report) }).map(drop)
}

/// Unpins a file, once for each time that it was pinned.
pub fn unpin_file(fd: c_int) -> Result<(), Error> {
    // SAFETY: takes numbers only.
    counted(|report| unsafe { (table().unpin_file)(fd, report) }).map(drop)
}

/// Whether a file is pinned, and no process waits to write it.
pub fn is_pinned(fd: c_int) -> bool {
    (table().is_pinned)(fd) != 0
}

/// A range of a pinned file, at an address that GPU kernels read.
#[derive(Debug)]
pub struct Map(NonNull<c_void>);

// SAFETY: the library's object may be asked and ended on any thread.
unsafe impl Send for Map {}

impl Map {
    /// Maps it for the device of some memory, or for the one in use.
    pub fn new(fd: c_int, offset: u64, len: u64, like: Option<Target>) -> Result<Map, Error> {
        // SAFETY: null, or filled in by `find`.
        made(|report| unsafe { (table().map)(fd, offset, len, memory(like.as_ref()), report) }).map(Map)
    }

    /// Where kernels find the first byte.
    pub fn address(&self) -> u64 {
        // SAFETY: it is there until it is dropped.
        unsafe { (table().map_address)(self.0.as_ptr()) }
    }

    /// Bytes; there always are some.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> u64 {
        // SAFETY: it is there until it is dropped.
        unsafe { (table().map_len)(self.0.as_ptr()) }
    }

    /// Whether this process mapped it, and is not a forked child of that.
    pub fn is_here(&self) -> bool {
        // SAFETY: it is there until it is dropped.
        unsafe { (table().map_is_here)(self.0.as_ptr()) != 0 }
    }

    /// Whether a process waits to write the file.
    pub fn revoke_requested(&self) -> bool {
        // SAFETY: it is there until it is dropped.
        unsafe { (table().map_is_wanted)(self.0.as_ptr()) != 0 }
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: ended once.
        unsafe { (table().unmap)(self.0.as_ptr()) }
    }
}

/// Which way a move goes.
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

// SAFETY: the library's object is `Send` there, and changed only by who has it alone.
unsafe impl Send for Session {}

/// What a session did, and how its output was written.
#[derive(Clone, Debug)]
pub struct Done {
    /// In numbers.
    pub report: SessionReport,
    /// How far the output could be prepared.
    pub promise: String,
}

impl Session {
    /// Begins one.
    pub fn begin(output: Option<&Path>) -> Result<Session, Error> {
        let (path, len) = output.map_or((null(), 0), bytes);
        // SAFETY: null, or so many bytes.
        made(|report| unsafe { (table().session_begin)(path, len, report) }).map(Session)
    }

    /// Says where downloads to the output will go.
    pub fn expect(&mut self, offset: u64, len: u64) -> Result<(), Error> {
        // SAFETY: it is there, and we alone have it.
        counted(|report| unsafe { (table().session_expect)(self.0.as_ptr(), offset, len, report) }).map(drop)
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
        // SAFETY: it is there, and we alone have it; the path is borrowed.
        counted(|report| unsafe { (table().session_move)(self.0.as_ptr(), &wanted, report) })
    }

    /// The same in the order of a stream. The memory must stay until the ticket is done.
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
        // SAFETY: it is there, and we alone have it; the path is borrowed.
        made(|report| unsafe { (table().session_move_async)(self.0.as_ptr(), &wanted, stream.0, report) }).map(Ticket)
    }

    /// Writes what is still gathered; with `sync` waits until the storage has it.
    pub fn flush(&mut self, sync: bool) -> Result<(), Error> {
        // SAFETY: it is there, and we alone have it.
        counted(|report| unsafe { (table().session_flush)(self.0.as_ptr(), sync.into(), report) }).map(drop)
    }

    /// The output, where one was named.
    pub fn output(&self) -> Option<PathBuf> {
        // SAFETY: it is alive, and no thread changes it meanwhile.
        telling(|report| unsafe { (table().session_output)(self.0.as_ptr(), report) }).1.and_then(|said| said.path)
    }

    /// What was done so far.
    pub fn report(&mut self) -> Result<Done, Error> {
        // SAFETY: it is there, and we alone have it.
        done(|out, report| unsafe { (table().session_report)(self.0.as_ptr(), out, report) })
    }

    /// Ends it: everything is in the files.
    pub fn end(self) -> Result<Done, Error> {
        let session = core::mem::ManuallyDrop::new(self);
        // SAFETY: it is there, and ends here: it is not dropped as well.
        done(|out, report| unsafe { (table().session_end)(session.0.as_ptr(), out, report) })
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
    Move { path, path_len, address, offset, len, direction, flags: if wait { ARRIVED } else { 0 } }
}

fn done(call: impl FnOnce(*mut SessionReport, Report) -> i64) -> Result<Done, Error> {
    let mut report = SessionReport::default();
    match telling(|told| call(&mut report, told)) {
        (0, Some(said)) => Ok(Done { report, promise: said.text }),
        (_, said) => Err(said.unwrap_or_else(silent)),
    }
}

/// A move that was asked for.
#[derive(Debug)]
pub struct Ticket(NonNull<c_void>);

// SAFETY: the library's object is `Send` and `Sync` there.
unsafe impl Send for Ticket {}
// SAFETY: as above.
unsafe impl Sync for Ticket {}

impl Ticket {
    /// Whether the move is over.
    pub fn is_done(&self) -> bool {
        // SAFETY: it is there until it is dropped.
        unsafe { (table().ticket_is_done)(self.0.as_ptr()) != 0 }
    }

    /// Waits until it is; the bytes moved.
    pub fn wait(&self) -> Result<u64, Error> {
        // SAFETY: it is there until it is dropped.
        counted(|report| unsafe { (table().ticket_wait)(self.0.as_ptr(), report) })
    }
}

impl Clone for Ticket {
    fn clone(&self) -> Ticket {
        // SAFETY: it is there until it is dropped; a clone is never null.
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
    telling(|report| unsafe { (table().counters)(report) }).1.map_or_else(|| "{}".to_owned(), |said| said.text)
}

/// The emulated device.
pub mod emulated {
    use super::{Error, Stream, c_int, counted, silent, table, telling};

    /// Says what it shall be like. Too late once it has memory.
    pub fn configure(text: &str) -> Result<(), Error> {
        // SAFETY: so many bytes.
        counted(|report| unsafe { (table().emulated_configure)(text.as_ptr(), text.len(), report) }).map(drop)
    }

    /// New memory. EINVAL: `SPINIO_EMULATED` is not understood.
    pub fn alloc(len: usize, host_mapped: bool) -> Result<u64, Error> {
        // SAFETY: takes numbers only.
        let (address, said) =
            telling(|report| unsafe { (table().emulated_alloc)(len, c_int::from(host_mapped), report) });
        if address == 0 { Err(said.unwrap_or_else(silent)) } else { Ok(address) }
    }

    /// Gives memory back, after everything that is queued.
    pub fn free(address: u64) {
        (table().emulated_free)(address);
    }

    /// A new stream.
    pub fn stream() -> Result<Stream, Error> {
        let mut stream = 0;
        // SAFETY: there is room for it.
        counted(|report| unsafe { (table().emulated_stream)(&mut stream, report) })?;
        Ok(Stream(stream))
    }

    /// Gives one back; what is on it still runs.
    pub fn return_stream(stream: Stream) {
        (table().emulated_return_stream)(stream.0);
    }

    /// Waits for what is queued on one.
    pub fn wait(stream: Stream) -> Result<(), Error> {
        // SAFETY: takes numbers only.
        counted(|report| unsafe { (table().emulated_wait)(stream.0, report) }).map(drop)
    }

    /// No copy starts until it is resumed.
    pub fn hold() -> Result<(), Error> {
        // SAFETY: takes the report only.
        counted(|report| unsafe { (table().emulated_hold)(report) }).map(drop)
    }

    /// Unpins a file, once for each time that it was pinned.
    pub fn resume() -> Result<(), Error> {
        // SAFETY: takes the report only.
        counted(|report| unsafe { (table().emulated_resume)(report) }).map(drop)
    }
}
