//! NVMMU's sessions, for Python.

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

use crate::buffer::{Access, Buffer, Kept, Place};
use crate::stream::{Chosen, queue_of};
use crate::{failure, signals};

/// How long a wait lasts before a signal's handler may run.
const TURN: Duration = Duration::from_millis(20);

/// Moves between files and devices, from its making to `end`.
#[pyclass(frozen, module = "spinio._spinio", name = "NvmmuSession")]
pub(crate) struct Moves {
    /// Locked without the GIL only: who waits for it must not keep others from ending their move.
    session: Mutex<Option<Session>>,
    /// Memory of moves that may not be over. Locked under the GIL, and for no longer than a look.
    kept: Mutex<Vec<(Ticket, Kept)>>,
    /// The thread that has it locked. A signal's handler may run in the middle of a move, and must not wait for that.
    busy: AtomicU32,
    /// In a forked child the locks may be held for ever.
    process: u32,
}

#[pymethods]
impl Moves {
    #[new]
    #[pyo3(signature = (output=None))]
    fn new(py: Python<'_>, output: Option<PathBuf>) -> PyResult<Moves> {
        let begin = || Session::begin(output.as_deref());
        let session = signals::interruptible(py, begin)?.map_err(|e| failure::request(&e))?;
        Ok(Moves {
            session: Mutex::new(Some(session)),
            kept: Mutex::default(),
            busy: AtomicU32::new(0),
            process: std::process::id(),
        })
    }

    /// Says where downloads to the output will go.
    fn expect(&self, py: Python<'_>, offset: u64, bytes: u64) -> PyResult<()> {
        self.with(py, |session| session.expect(offset, bytes))
    }

    /// Fills an array from a file; the bytes moved.
    fn upload(&self, path: PathBuf, into: &Bound<'_, PyAny>, offset: u64) -> PyResult<u64> {
        let buffer = Buffer::of(into, Access::Fill)?;
        let Some(to) = memory(&buffer)? else { return Ok(0) };
        let (len, order) = (buffer.bytes, buffer.order);
        self.with(into.py(), |session| {
            let chosen = Chosen::new(order);
            session.move_range(&path, to.address, offset, len as u64, Direction::Upload, chosen.settle)
        })
    }

    /// Brings an array to a file, or to the output; the bytes moved.
    fn download(&self, from: &Bound<'_, PyAny>, path: Option<PathBuf>, offset: u64) -> PyResult<u64> {
        let buffer = Buffer::of(from, Access::Drain)?;
        let Some(from_device) = memory(&buffer)? else { return Ok(0) };
        let (len, order) = (buffer.bytes, buffer.order);
        self.with(from.py(), |session| {
            let path = named(session, path)?;
            let _chosen = Chosen::new(order);
            session.move_range(&path, from_device.address, offset, len as u64, Direction::Download, false)
        })
    }

    /// As `upload`, in the order of the array's stream.
    fn upload_async(&self, path: PathBuf, into: &Bound<'_, PyAny>, offset: u64) -> PyResult<OnItsWay> {
        self.later(into, Access::Fill, Some(path), offset, Direction::Upload)
    }

    /// As `download`, in the order of the array's stream.
    fn download_async(&self, from: &Bound<'_, PyAny>, path: Option<PathBuf>, offset: u64) -> PyResult<OnItsWay> {
        self.later(from, Access::Drain, path, offset, Direction::Download)
    }

    /// Writes what is still gathered.
    fn flush(&self, py: Python<'_>) -> PyResult<()> {
        let flushed = self.with(py, |session| session.flush(false));
        self.let_go();
        flushed
    }

    /// As `flush`, and waits until the storage has it.
    fn sync(&self, py: Python<'_>) -> PyResult<()> {
        let synced = self.with(py, |session| session.flush(true));
        self.let_go();
        synced
    }

    /// What was done so far.
    fn report<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dictionary(py, &self.with(py, Session::report)?)
    }

    /// Ends: everything is in the files. What was done; None if it had ended.
    fn end<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.ours()?;
        let report = py.detach(|| {
            let session = self.session.lock().unwrap_or_else(PoisonError::into_inner).take();
            session.map(Session::end).transpose()
        });
        self.let_go();
        report.map_err(|e| failure::request(&e))?.map(|report| dictionary(py, &report)).transpose()
    }
}

impl Moves {
    fn ours(&self) -> PyResult<()> {
        if self.process != std::process::id() {
            return Err(foreign("work with a session"));
        }
        if self.busy.load(Relaxed) == linux::gettid() {
            return Err(PyRuntimeError::new_err("A signal's handler cannot use the session whose move it came into"));
        }
        Ok(())
    }

    fn with<T: Send>(&self, py: Python<'_>, body: impl FnOnce(&mut Session) -> Result<T, Error> + Send) -> PyResult<T> {
        self.ours()?;
        let done = signals::interruptible(py, || {
            let mut session = self.session.lock().unwrap_or_else(PoisonError::into_inner);
            self.busy.store(linux::gettid(), Relaxed);
            let done = session.as_mut().map(body);
            self.busy.store(0, Relaxed);
            done
        })?;
        done.ok_or_else(|| PyValueError::new_err("The session has ended"))?.map_err(|e| failure::request(&e))
    }
}

impl Moves {
    /// Queues a move. Its memory is kept until it is over, whoever lets go of the array or of the ticket meanwhile.
    fn later(
        &self,
        array: &Bound<'_, PyAny>,
        access: Access,
        path: Option<PathBuf>,
        offset: u64,
        direction: Direction,
    ) -> PyResult<OnItsWay> {
        let buffer = Buffer::of(array, access)?;
        let memory = memory(&buffer)?;
        let (len, queue) = (buffer.bytes as u64, queue_of(buffer.order));
        // Nothing has no memory; the session knows what that means.
        let at = memory.map_or(0, |target| target.address);
        self.let_go();
        let ticket = self.with(array.py(), |session| {
            let path = named(session, path)?;
            session.move_async(&path, at, offset, len, direction, queue)
        })?;
        if !ticket.is_done() {
            let kept = buffer.keep();
            self.kept.lock().unwrap_or_else(PoisonError::into_inner).push((ticket.clone(), kept));
        }
        Ok(OnItsWay { ticket, process: self.process })
    }

    /// Lets go of the memory of moves that are over.
    fn let_go(&self) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (over, still) = std::mem::take(&mut *kept).into_iter().partition(|(ticket, _)| ticket.is_done());
        *kept = still;
        drop(kept);
        // What this ends may run any code, which may come back here.
        let over: Vec<(Ticket, Kept)> = over;
        drop(over);
    }
}

/// A move that was asked for.
#[pyclass(frozen, module = "spinio._spinio", name = "NvmmuTicket")]
pub(crate) struct OnItsWay {
    ticket: Ticket,
    process: u32,
}

#[pymethods]
impl OnItsWay {
    /// Waits until it is over; the bytes moved.
    fn wait(&self, py: Python<'_>) -> PyResult<u64> {
        while !self.done()? {
            py.check_signals()?;
            py.detach(|| {
                let begun = Instant::now();
                while !self.ticket.is_done() && begun.elapsed() < TURN {
                    match begun.elapsed() < Duration::from_micros(100) {
                        true => std::thread::yield_now(),
                        false => std::thread::sleep(Duration::from_micros(50)),
                    }
                }
            });
        }
        self.ticket.wait().map_err(|e| failure::request(&e))
    }

    /// Whether it is over.
    fn done(&self) -> PyResult<bool> {
        match self.ticket.is_done() || self.process == std::process::id() {
            true => Ok(self.ticket.is_done()),
            false => Err(foreign("ask for a move")),
        }
    }
}

/// The file of a download: the one that is named, or the session's output.
fn named(session: &Session, path: Option<PathBuf>) -> Result<PathBuf, Error> {
    path.or_else(|| session.output())
        .ok_or_else(|| error(Errno::INVAL, "Cannot download: the session has no output: name a file".to_owned()))
}

fn foreign(what: &str) -> PyErr {
    let why = "a process that was forked meanwhile has no session: its parent has";
    failure::request(&error(Errno::SRCH, format!("Cannot {what}: {why}")))
}

impl Drop for Moves {
    fn drop(&mut self) {
        let session = self.session.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // What it still has is written, which others need not wait for.
        if let Some(session) = session {
            Python::attach(|py| py.detach(|| drop(session)));
        }
    }
}

/// The device memory of an array; `None` if it has no byte.
fn memory(buffer: &Buffer<'_>) -> PyResult<Option<Target>> {
    match buffer.place {
        _ if buffer.bytes == 0 => Ok(None),
        Place::Device(target) => Ok(Some(target)),
        Place::Host(_) => Err(PyBufferError::new_err(
            "NVMMU moves between files and devices, and this memory is the host's: spinio.open() reads and writes it",
        )),
    }
}

fn dictionary<'py>(py: Python<'py>, done: &Done) -> PyResult<Bound<'py, PyDict>> {
    let said = PyDict::new(py);
    let report = &done.report;
    said.set_item("uploaded", report.uploaded)?;
    said.set_item("downloaded", report.downloaded)?;
    said.set_item("promise", &done.promise)?;
    said.set_item("whole", report.whole)?;
    said.set_item("neighbours", report.neighbours)?;
    said.set_item("loose", report.loose)?;
    said.set_item("read_ahead", report.read_ahead)?;
    Ok(said)
}

fn error(errno: Errno, text: String) -> Error {
    let errno: c_int = errno.raw_os_error();
    Error { errno, text, path: None }
}
