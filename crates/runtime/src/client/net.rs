//! Sockets of kernels.

use std::ffi::{c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::{NonNull, null};

use super::{Error, call_for_count, call_for_object, missing_report, table, with_report};
use crate::NetOptions;
pub use spinio_net::{Handle, Stats};

/// What a net is made for; 0 is the default. `spinio_net.h` explains the fields.
#[derive(Clone, Copy, Debug, Default)]
#[expect(missing_docs, reason = "the fields are those of struct spinio_net_options")]
pub struct Options<'a> {
    pub sockets: u32,
    pub connections: u32,
    pub ring_bytes: u32,
    pub idle_us: u32,
    pub no_upgrade: bool,
    pub files_root: Option<&'a Path>,
    pub files_write: bool,
    pub files: u32,
    pub shared_connections: u32,
    pub threads: u32,
}

/// The network stack of a device. If it is dropped without [`Net::close`], its memory and its thread stay: a kernel may use
/// them.
#[derive(Debug)]
pub struct Net(NonNull<c_void>);

// SAFETY: the functions of a net may be called by any thread at any time.
unsafe impl Send for Net {}
// SAFETY: as above.
unsafe impl Sync for Net {}

impl Net {
    /// Opens it for a device (`emulated`, `cuda:0`), or for the one in use, else for the emulated one. ENODEV: there is a GPU that is not
    /// in use, and `SPINIO_EMULATED` is not set.
    pub fn open(device: Option<&str>, options: &Options<'_>) -> Result<Net, Error> {
        let (name, name_len) = device.map_or((null(), 0), |name| (name.as_ptr(), name.len()));
        let root = options.files_root.map(|root| root.as_os_str().as_bytes());
        let given = NetOptions {
            sockets: options.sockets,
            connections: options.connections,
            ring_bytes: options.ring_bytes,
            idle_us: options.idle_us,
            no_upgrade: options.no_upgrade.into(),
            files_write: options.files_write.into(),
            files: options.files,
            shared_connections: options.shared_connections,
            threads: options.threads,
            files_root: root.map_or(null(), <[u8]>::as_ptr),
            files_root_len: root.map_or(0, <[u8]>::len),
        };
        // SAFETY: null, or strings of these lengths; all is borrowed.
        call_for_object(|report| unsafe { (table().net_open)(name, name_len, &given, report) }).map(Net)
    }

    /// The argument of kernels.
    pub fn handle(&self) -> Handle {
        let mut handle = Handle::default();
        // SAFETY: it is open, and there is room for the handle.
        unsafe { (table().net_handle)(self.0.as_ptr(), &mut handle) };
        handle
    }

    /// A listening socket, for kernels to accept on: its number.
    pub fn listen(&self, address: &str, backlog: u32) -> Result<i32, Error> {
        let (at, len) = (address.as_ptr(), address.len());
        // SAFETY: it is open; the text is borrowed.
        call_for_number(|report| unsafe { (table().net_listen)(self.0.as_ptr(), at, len, backlog, report) })
    }

    /// A connected socket, for kernels: its number.
    pub fn connect(&self, address: &str) -> Result<i32, Error> {
        let (at, len) = (address.as_ptr(), address.len());
        // SAFETY: it is open; the text is borrowed.
        call_for_number(|report| unsafe { (table().net_connect)(self.0.as_ptr(), at, len, report) })
    }

    /// Moves a socket to the kernels: its number there. On success the descriptor is closed.
    pub fn adopt(&self, fd: c_int) -> Result<i32, Error> {
        // SAFETY: it is open.
        call_for_number(|report| unsafe { (table().net_adopt)(self.0.as_ptr(), fd, report) })
    }

    /// Takes a socket from the kernels: a descriptor, and what no kernel has received, at most `room` bytes.
    pub fn release(&self, socket: i32, room: usize) -> Result<(c_int, Vec<u8>), Error> {
        let (mut unread, mut count) = (vec![0; room], 0);
        let at = unread.as_mut_ptr();
        // SAFETY: it is open; there are `room` bytes, and room for the count.
        let release =
            |report| unsafe { (table().net_release)(self.0.as_ptr(), socket, at, room, &raw mut count, report) };
        let fd = call_for_number(release)?;
        unread.truncate(count);
        Ok((fd, unread))
    }

    /// A new event set, for kernels to wait on: its number.
    pub fn set(&self) -> Result<i32, Error> {
        // SAFETY: it is open.
        call_for_number(|report| unsafe { (table().net_set)(self.0.as_ptr(), report) })
    }

    /// Puts a socket into an event set; without events, takes it out.
    pub fn add(&self, set: i32, socket: i32, events: u32) -> Result<(), Error> {
        // SAFETY: it is open.
        call_for_count(|report| unsafe { (table().net_add)(self.0.as_ptr(), set, socket, events, report) }).map(drop)
    }

    /// The address to which a socket is bound.
    pub fn address(&self, socket: i32) -> Result<String, Error> {
        // SAFETY: it is open.
        let (done, report) = with_report(|report| unsafe { (table().net_address)(self.0.as_ptr(), socket, report) });
        let report = report.unwrap_or_else(missing_report);
        if done == 0 { Ok(report.text) } else { Err(report) }
    }

    /// What it has done.
    pub fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        // SAFETY: it is open, and there is room for them.
        unsafe { (table().net_stats)(self.0.as_ptr(), &mut stats) };
        stats
    }

    /// All calls of kernels fail with ESHUTDOWN from now on, also those that wait.
    pub fn stop(&self) -> Result<(), Error> {
        // SAFETY: it is open.
        call_for_count(|report| unsafe { (table().net_stop)(self.0.as_ptr(), report) }).map(drop)
    }

    /// Stops it, sends what is left (at most a second), and gives its memory back. No kernel of the net may run.
    pub fn close(self) -> Result<(), Error> {
        // SAFETY: it is open, and consumed.
        call_for_count(|report| unsafe { (table().net_close)(self.0.as_ptr(), report) }).map(drop)
    }
}

/// Numbers of sockets and descriptors fit.
fn call_for_number(call: impl FnOnce(crate::Report) -> i64) -> Result<i32, Error> {
    call_for_count(call).map(|number| number as i32)
}
