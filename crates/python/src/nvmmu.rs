//! NVMMU sessions, for Python.

use std::ffi::c_int;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyBufferError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client::{Direction, Done, Error, Session, Target, Ticket};
use spinio_sys::{Errno, linux};

use crate::buffer::{Access, Buffer, MemoryPlace, OwnedGuard};
use crate::stream::{StreamScope, stream_for};
use crate::{failure, signals};

/// How long a wait lasts before a signal's handler may run.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Moves between files and devices, from the creation to `end`.
#[pyclass(frozen, module = "spinio._spinio", name = "NvmmuSession")]
pub(crate) struct Moves {
    /// Locked without the GIL only: a thread that waits for it must not block other threads from completing their move.
    session: Mutex<Option<Session>>,
    /// Memory of moves that may be in flight. Locked under the GIL, and only briefly.
    kept: Mutex<Vec<(Ticket, OwnedGuard)>>,
    /// The thread that has locked it. A signal handler may run in the middle of a move, and must not wait for that
    /// move.
    busy: AtomicU32,
    /// In a forked child the locks may stay locked forever.
    process: u32,
}

#[pymethods]
impl Moves {
    #[new]
    #[pyo3(signature = (output=None))]
    fn new(py: Python<'_>, output: Option<PathBuf>) -> PyResult<Moves> {
        let begin = || Session::begin(output.as_deref());
        let session = signals::run_interruptible(py, begin)?.map_err(|e| failure::request_error(&e))?;
        Ok(Moves {
            session: Mutex::new(Some(session)),
            kept: Mutex::default(),
            busy: AtomicU32::new(0),
            process: std::process::id(),
        })
    }

    /// Announces the range of later downloads in the output.
    fn hint_range(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<()> {
        self.with_session(py, |session| session.hint_range(offset, bytes))
    }

    /// Fills an array from a file; the bytes moved.
    fn upload(&self, path: PathBuf, into: &Bound<'_, PyAny>, offset: u64) -> PyResult<u64> {
        let buffer = Buffer::from_object(into, Access::Fill)?;
        let Some(to) = device_memory(&buffer)? else { return Ok(0) };
        let (len, order) = (buffer.bytes, buffer.order);
        self.with_session(into.py(), |session| {
            let chosen = StreamScope::new(order);
            session.move_range(&path, to.address, offset, len as u64, Direction::Upload, chosen.synchronize)
        })
    }

    /// Moves an array to a file, or to the output; the bytes moved.
    fn download(&self, from: &Bound<'_, PyAny>, path: Option<PathBuf>, offset: u64) -> PyResult<u64> {
        let buffer = Buffer::from_object(from, Access::Drain)?;
        let Some(from_device) = device_memory(&buffer)? else { return Ok(0) };
        let (len, order) = (buffer.bytes, buffer.order);
        self.with_session(from.py(), |session| {
            let path = target_path(session, path)?;
            let _chosen = StreamScope::new(order);
            session.move_range(&path, from_device.address, offset, len as u64, Direction::Download, false)
        })
    }

    /// As `upload`, in the order of the array's stream.
    fn upload_async(&self, path: PathBuf, into: &Bound<'_, PyAny>, offset: u64) -> PyResult<AsyncMove> {
        self.queue_move(into, Access::Fill, Some(path), offset, Direction::Upload)
    }

    /// As `download`, in the order of the array's stream.
    fn download_async(&self, from: &Bound<'_, PyAny>, path: Option<PathBuf>, offset: u64) -> PyResult<AsyncMove> {
        self.queue_move(from, Access::Drain, path, offset, Direction::Download)
    }

    /// Writes the gathered bytes.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let flushed = self.with_session(py, |session| session.flush(false));
        self.release_finished();
        flushed
    }

    /// As `flush`, and waits until storage has them.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let synced = self.with_session(py, |session| session.flush(true));
        self.release_finished();
        synced
    }

    /// What was done so far.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        report_dict(py, &self.with_session(py, Session::report)?)
    }

    /// Ends: all bytes are in the files. Returns the report; None if it had ended.
    fn end<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.check_process()?;
        let report = py.detach(|| {
            let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
            session.map(Session::end).transpose()
        });
        self.release_finished();
        report.map_err(|e| failure::request_error(&e))?.map(|report| report_dict(py, &report)).transpose()
    }
}

impl Moves {
    fn check_process(&self) -> PyResult<()> {
        if self.process != std::process::id() {
            return Err(wrong_process("use a session"));
        }
        if self.busy.load(Relaxed) == linux::gettid() {
            return Err(PyRuntimeError::new_err("A signal's handler cannot use the session whose move it came into"));
        }
        Ok(())
    }

    fn with_session<T: Send>(
        &self,
        py: Python<'_>,
        body: impl FnOnce(&mut Session) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        self.check_process()?;
        let done = signals::run_interruptible(py, || {
            let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
            self.busy.store(linux::gettid(), Relaxed);
            let done = session.as_mut().map(body);
            self.busy.store(0, Relaxed);
            done
        })?;
        done.ok_or_else(|| PyValueError::new_err("The session has ended"))?.map_err(|e| failure::request_error(&e))
    }
}

impl Moves {
    /// Queues a move. Its memory is kept until the move is complete, even if the array or the ticket is dropped
    /// meanwhile.
    fn queue_move(
        &self,
        array: &Bound<'_, PyAny>,
        access: Access,
        path: Option<PathBuf>,
        offset: u64,
        direction: Direction,
    ) -> PyResult<AsyncMove> {
        let buffer = Buffer::from_object(array, access)?;
        let memory = device_memory(&buffer)?;
        let (len, queue) = (buffer.bytes as u64, stream_for(buffer.order));
        // An empty array has no memory; the session handles that case.
        let at = memory.map_or(0, |target| target.address);
        self.release_finished();
        let ticket = self.with_session(array.py(), |session| {
            let path = target_path(session, path)?;
            session.move_async(&path, at, offset, len, direction, queue)
        })?;
        if !ticket.is_done() {
            let kept = buffer.keep();
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).push((ticket.clone(), kept));
        }
        Ok(AsyncMove { ticket, process: self.process })
    }

    /// Releases the memory of completed moves.
    fn release_finished(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (over, still) = std::mem::take(&mut *kept).into_iter().partition(|(ticket, _)| ticket.is_done());
        *kept = still;
        drop(kept);
        // Dropping these may run arbitrary code, which may call this session.
        let over: Vec<(Ticket, OwnedGuard)> = over;
        drop(over);
    }
}

/// A stream-ordered move.
#[pyclass(frozen, module = "spinio._spinio", name = "NvmmuTicket")]
pub(crate) struct AsyncMove {
    ticket: Ticket,
    process: u32,
}

#[pymethods]
impl AsyncMove {
    /// Waits until it is complete; the bytes moved.
    fn wait(&self, py: Python<'_>) -> PyResult<u64> {
        while !self.done()? {
            py.check_signals()?;
            py.detach(|| {
                let begun = Instant::now();
                while !self.ticket.is_done() && begun.elapsed() < SIGNAL_CHECK_INTERVAL {
                    match begun.elapsed() < Duration::from_micros(100) {
                        true => std::thread::yield_now(),
                        false => std::thread::sleep(Duration::from_micros(50)),
                    }
                }
            });
        }
        self.ticket.wait().map_err(|e| failure::request_error(&e))
    }

    /// Whether it is complete.
    fn done(&self) -> PyResult<bool> {
        match self.ticket.is_done() || self.process == std::process::id() {
            true => Ok(self.ticket.is_done()),
            false => Err(wrong_process("query a move")),
        }
    }
}

/// The file of a download: the given one, or the session's output.
fn target_path(session: &Session, path: Option<PathBuf>) -> Result<PathBuf, Error> {
    path.or_else(|| session.output())
        .ok_or_else(|| error(Errno::INVAL, "Cannot download: the session has no output: name a file".to_owned()))
}

fn wrong_process(what: &str) -> PyErr {
    let why = "a process that was forked meanwhile has no session: its parent has";
    failure::request_error(&error(Errno::SRCH, format!("Cannot {what}: {why}")))
}

impl Drop for Moves {
    fn drop(&mut self) {
        let session = self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // The gathered bytes are written, without blocking other threads.
        if let Some(session) = session {
            Python::attach(|py| py.detach(|| drop(session)));
        }
    }
}

/// The device memory of an array; `None` if it is empty.
fn device_memory(buffer: &Buffer<'_>) -> PyResult<Option<Target>> {
    match buffer.memory_place {
        _ if buffer.bytes == 0 => Ok(None),
        MemoryPlace::Device(target) => Ok(Some(target)),
        MemoryPlace::Host(_) => Err(PyBufferError::new_err(
            "NVMMU moves between files and devices, and this memory is the host's: spinio.open() reads and writes it",
        )),
    }
}

fn report_dict<'py>(py: Python<'py>, done: &Done) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let report = &done.report;
    dict.set_item("uploaded", report.uploaded)?;
    dict.set_item("downloaded", report.downloaded)?;
    // With the names of earlier releases next to the new ones.
    for name in ["mode", "promise"] {
        dict.set_item(name, &done.mode)?;
    }
    for (new, old, bytes) in [
        ("full_stripe", "whole", report.full_stripe),
        ("filler", "neighbours", report.filler),
        ("unaligned", "loose", report.unaligned),
    ] {
        dict.set_item(new, bytes)?;
        dict.set_item(old, bytes)?;
    }
    dict.set_item("read_ahead", report.read_ahead)?;
    Ok(dict)
}

fn error(errno: Errno, text: String) -> Error {
    let errno: c_int = errno.raw_os_error();
    Error { errno, text, path: None }
}
