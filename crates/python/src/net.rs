//! Sockets of kernels.

#![expect(unsafe_code, reason = "descriptors, and the words of a handle as bytes")]

use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::path::PathBuf;
use std::sync::{PoisonError, RwLock};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use spinio_runtime::client::Error;
use spinio_runtime::client::net::{self, Handle, Options};
use spinio_sys::Errno;

use crate::failure;

/// The network stack of a device. Without `close` its memory stays: a kernel may use it.
#[pyclass(frozen, module = "spinio._spinio")]
pub(crate) struct Net {
    /// Locked without the GIL only. Calls share it, and `close` takes it.
    net: RwLock<Option<net::Net>>,
    /// In a forked child the lock may stay locked forever.
    process: u32,
}

#[pymethods]
impl Net {
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the options of a net")]
    fn new(
        py: Python<'_>,
        device: Option<&str>,
        sockets: u32,
        connections: u32,
        ring_bytes: u32,
        idle_us: u32,
        upgrade: bool,
        files_root: Option<PathBuf>,
        files_write: bool,
        files: u32,
        shared_connections: u32,
        threads: u32,
    ) -> PyResult<Net> {
        let options = Options {
            sockets,
            connections,
            ring_bytes,
            idle_us,
            no_upgrade: !upgrade,
            files_root: files_root.as_deref(),
            files_write,
            files,
            shared_connections,
            threads,
        };
        let net = py.detach(|| net::Net::open(device, &options)).map_err(|e| failure::request_error(&e))?;
        Ok(Net { net: RwLock::new(Some(net)), process: std::process::id() })
    }

    /// The argument of kernels, as the bytes of `struct spinio_net_handle`.
    fn handle<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let handle = self.with_net(py, |net| Ok(net.handle()))?;
        // SAFETY: eight words without padding.
        let words = unsafe { core::mem::transmute::<Handle, [u8; size_of::<Handle>()]>(handle) };
        Ok(PyBytes::new(py, &words))
    }

    /// A listening socket for kernels.
    fn listen(&self, py: Python<'_>, address: &str, backlog: u32) -> PyResult<i32> {
        self.with_net(py, |net| net.listen(address, backlog))
    }

    /// A connected socket for kernels.
    fn connect(&self, py: Python<'_>, address: &str) -> PyResult<i32> {
        self.with_net(py, |net| net.connect(address))
    }

    /// Moves a socket to the kernels. The descriptor stays, for the caller to close: so Python's object of it is right
    /// at any time, also if a signal's handler raises an exception here.
    fn adopt(&self, py: Python<'_>, fd: i32) -> PyResult<i32> {
        if fd < 0 {
            return Err(failure::errno_error(Errno::BADF, "Cannot adopt a socket"));
        }
        // SAFETY: it is used for this call only, which fails if it is not open.
        let copy = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?;
        let number = self.with_net(py, |net| net.adopt(copy.as_raw_fd()))?;
        // The net has closed it.
        let _ = copy.into_raw_fd();
        Ok(number)
    }

    /// Takes a socket from the kernels: a descriptor, and the bytes that no kernel has received.
    fn release<'py>(&self, py: Python<'py>, socket: i32, room: usize) -> PyResult<(i32, Bound<'py, PyBytes>)> {
        let (fd, unread) = self.with_net(py, |net| net.release(socket, room))?;
        Ok((fd, PyBytes::new(py, &unread)))
    }

    /// A new event set.
    fn set(&self, py: Python<'_>) -> PyResult<i32> {
        self.with_net(py, net::Net::set)
    }

    /// Puts a socket into an event set.
    fn add(&self, py: Python<'_>, set: i32, socket: i32, events: u32) -> PyResult<()> {
        self.with_net(py, |net| net.add(set, socket, events))
    }

    /// The address to which a socket is bound.
    fn address(&self, py: Python<'_>, socket: i32) -> PyResult<String> {
        self.with_net(py, |net| net.address(socket))
    }

    /// What it has done.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.with_net(py, |net| Ok(net.stats()))?;
        let dict = PyDict::new(py);
        for (name, value) in stats.fields() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    /// Ends it for kernels.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        self.with_net(py, net::Net::stop)
    }

    /// Gives its memory back. No kernel of the net may run.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        self.check_process()?;
        let done = py.detach(|| {
            let net = self.net.write().unwrap_or_else(PoisonError::into_inner).take();
            net.map_or(Ok(()), net::Net::close)
        });
        done.map_err(|e| failure::request_error(&e))
    }
}

impl Net {
    /// Makes a call without the GIL: the proxy answers it at its next look.
    fn with_net<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&net::Net) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.check_process()?;
        let done = py.detach(|| self.net.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(call));
        done.ok_or_else(|| PyValueError::new_err("The net is closed"))?.map_err(|e| failure::request_error(&e))
    }

    fn check_process(&self) -> PyResult<()> {
        if self.process == std::process::id() {
            return Ok(());
        }
        let errno = Errno::NODEV.raw_os_error();
        let text = "A forked child does not have the net of its parent".to_owned();
        Err(failure::request_error(&Error { errno, text, path: None }))
    }
}
