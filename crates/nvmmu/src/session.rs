//! A session: between `begin` and `end`.

use std::ffi::c_void;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spinio_device::{DeviceAddr, StreamId, registry, set_thread_stream, thread_stream};
use spinio_io::settings::SMALL_REQUEST_MAX;
use spinio_io::{AsyncResult, ParityArray, Runtime, ShadowFile, Target};
use spinio_sys::Errno;
use spinio_sys::linux;

use crate::files::{Files, Purpose, c_path};
use crate::moves::{next_request, write_all};
use crate::output::Output;
use crate::{Direction, Error, ErrorKind, OutputMode, Report, Ticket};

/// Moves between files and devices, and the file that results are written to.
pub struct Session {
    runtime: &'static Runtime,
    files: Files,
    output: Option<Output>,
    /// Moves that may be in progress, and those that have failed; the end waits for them.
    pending_moves: Vec<Ticket>,
    /// Bytes of the moves that are complete.
    uploaded: u64,
    downloaded: u64,
    /// The process that began it: a forked child has none of the threads that serve the session.
    process: u32,
}

impl Session {
    /// Begins; `output` is the file that the results will be written to, created if it does not exist.
    pub fn begin(runtime: &'static Runtime, output: Option<&Path>) -> Result<Session, Error> {
        Session::begin_with(runtime, output, None)
    }

    /// For tests: the output is written as if an array with stripes of `width` bytes were under it.
    #[doc(hidden)]
    pub fn begin_with_stripes(
        runtime: &'static Runtime,
        output: &Path,
        width: u64,
        phase: u64,
    ) -> Result<Session, Error> {
        Session::begin_with(runtime, Some(output), Some(ParityArray { width, phase }))
    }

    fn begin_with(
        runtime: &'static Runtime,
        output: Option<&Path>,
        assumed_array: Option<ParityArray>,
    ) -> Result<Session, Error> {
        let output = output.map(|path| Output::begin(runtime, path, assumed_array)).transpose()?;
        Ok(Session {
            runtime,
            files: Files::new(runtime),
            output,
            pending_moves: Vec::new(),
            uploaded: 0,
            downloaded: 0,
            process: std::process::id(),
        })
    }

    fn is_forked_child(&self) -> bool {
        self.process != std::process::id()
    }

    /// Fails in a forked child.
    fn check_process(&self, operation: &'static str) -> Result<(), Error> {
        let why = "a process that was forked meanwhile has no session: its parent has";
        if self.is_forked_child() { Err(Error::new(ErrorKind::NoSession, operation, why)) } else { Ok(()) }
    }

    /// Announces where in the output downloads will be written, as early as that is known: stripes that they cover in
    /// part are read while the GPU kernel runs. May be called several times; a download elsewhere is correct too, but
    /// not prepared.
    pub fn hint_range(&mut self, offset: u64, len: u64) {
        if self.check_process("expect a download").is_ok()
            && let Some(output) = &mut self.output
        {
            output.hint_range(offset, len);
        }
    }

    /// Moves `len` bytes between a file, from `offset` on, and device memory at `address`. The bytes moved: fewer only
    /// where an upload reaches the end of its file.
    pub fn move_range(
        &mut self,
        path: &Path,
        address: *mut c_void,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<u64, Error> {
        let Some(target) = self.device_range(path, address, offset, len, direction)? else { return Ok(0) };
        match direction {
            Direction::Upload => self.upload(path, target, offset, len),
            Direction::Download => self.download(path, target, offset, len),
        }
    }

    /// The device memory of a move, if it moves anything.
    fn device_range(
        &self,
        path: &Path,
        address: *mut c_void,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<Option<Target>, Error> {
        self.check_process(direction.verb())?;
        let fail = |kind, why: String| Error::new(kind, direction.verb(), why).with_path(path).with_range(offset, len);
        if len == 0 {
            return Ok(None);
        }
        if offset.checked_add(len).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(fail(ErrorKind::BadRange, "a file cannot be that long".to_owned()));
        }
        device_memory(address, len).map(Some).map_err(|why| fail(ErrorKind::NotDeviceMemory, why))
    }

    /// As [`Session::move_range`], in the order of a stream: it begins when the work queued there before is done, and
    /// work queued after it finds the bytes on the device, or may reuse the memory. Where that is not possible (an
    /// output on an array with parity, a file without a size, a device that calls no host functions) the move is complete
    /// when this returns.
    pub fn move_async(
        &mut self,
        path: &Path,
        address: *mut c_void,
        offset: u64,
        len: u64,
        direction: Direction,
        stream: StreamId,
    ) -> Result<Ticket, Error> {
        let process = self.process;
        let ticket =
            |on_its_way, len| Ticket { result: on_its_way, direction, path: path.to_owned(), offset, len, process };
        let Some(target) = self.device_range(path, address, offset, len, direction)? else {
            return Ok(ticket(AsyncResult::ready(0), 0));
        };
        let fail = |e| Error::from_io(&e, direction.verb(), path);
        if target.allocation.device.is_capturing(stream) {
            // A download into stripes would copy on another stream, now, and find what was there before.
            let busy = Error::new(ErrorKind::Failed(Errno::BUSY), direction.verb(), "its stream is being captured");
            return Err(busy.with_path(path).with_range(offset, len));
        }
        self.count_finished();
        let made = match direction {
            Direction::Upload => {
                let file = self.input(path)?;
                let refused = |e| Error::from_errno(e, "upload", path);
                if self.runtime.is_stream(file.fd()).map_err(refused)? {
                    // It has no size, by which a stream-ordered read knows how much it will move: procfs, /dev/zero.
                    let done = self.after_stream(stream, |session| session.upload(path, target, offset, len))?;
                    return Ok(ticket(AsyncResult::ready(done as usize), done));
                }
                let size = self.runtime.size_of(&file).map_err(refused)?;
                let len = len.min(size.saturating_sub(offset));
                let on = self.runtime.read_on_stream(&file, offset, target, len as usize, stream).map_err(fail)?;
                ticket(on, len)
            }
            Direction::Download => {
                let file = match &mut self.output {
                    Some(output) if output.is_same_file(path) => output.passthrough_file(offset, len),
                    _ => Some(self.files.get(path, Purpose::Download).map_err(|e| Error::from_errno(e, "open", path))?),
                };
                let on = match file {
                    Some(file) => {
                        self.runtime.write_on_stream(&file, offset, target, len as usize, stream).map_err(fail)?
                    }
                    // Stripes are assembled now.
                    None => {
                        let done = self.after_stream(stream, |session| session.download(path, target, offset, len))?;
                        return Ok(ticket(AsyncResult::ready(done as usize), done));
                    }
                };
                ticket(on, len)
            }
        };
        self.pending_moves.push(made.clone());
        Ok(made)
    }

    /// Makes a move now, after the work that is queued on a stream.
    fn after_stream<T>(&mut self, stream: StreamId, make: impl FnOnce(&mut Session) -> T) -> T {
        let before = thread_stream();
        set_thread_stream(stream);
        let made = make(self);
        set_thread_stream(before);
        made
    }

    /// Counts and forgets the stream-ordered moves that are complete, without a wait. Those that failed stay: the end
    /// reports them, in case their tickets were dropped.
    fn count_finished(&mut self) {
        let Session { pending_moves, uploaded, downloaded, .. } = self;
        pending_moves.retain(|ticket| {
            let Some(Ok(moved)) = ticket.is_done().then(|| ticket.wait()) else { return true };
            match ticket.direction {
                Direction::Upload => *uploaded += moved,
                Direction::Download => *downloaded += moved,
            }
            false
        });
    }

    /// Waits for all stream-ordered moves, and counts them. An upload that reached the end of its file is not an error:
    /// its ticket has the count.
    pub(crate) fn wait_pending(&mut self) -> Result<(), Error> {
        let mut settled = Ok(());
        for ticket in &self.pending_moves {
            settled = settled.and(ticket.wait().map(drop));
        }
        self.count_finished();
        self.pending_moves.clear();
        settled
    }

    /// A file to be read, with all bytes that this session wrote to it.
    fn input(&mut self, path: &Path) -> Result<Arc<ShadowFile>, Error> {
        if self.pending_moves.iter().any(|t| t.direction == Direction::Download && is_same_file(&t.path, path)) {
            self.wait_pending()?;
        }
        if let Some(output) = &mut self.output
            && output.is_same_file(path)
        {
            // Downloaded bytes must be in the file.
            output.flush()?;
            output.release_lease();
        }
        self.files.get(path, Purpose::Upload).map_err(|e| Error::from_errno(e, "open", path))
    }

    fn upload(&mut self, path: &Path, to: Target, offset: u64, len: u64) -> Result<u64, Error> {
        let file = self.input(path)?;
        let mut done = 0;
        while done < len {
            let piece = next_request(len - done);
            let to = Target { addr: DeviceAddr(to.addr.0 + done), ..to };
            let moved = self.runtime.read(file.fd(), Some(offset + done), to, piece as usize);
            // A short read may have ended before an error, which the next one returns.
            let got = moved.map_err(|e| Error::from_io(&e, "upload", path))? as u64;
            if got == 0 {
                break;
            }
            if len > SMALL_REQUEST_MAX as u64 && piece <= SMALL_REQUEST_MAX as u64 {
                // Such a read returns when its bytes are queued; a move of this length promises that they have arrived.
                let arrived = self.runtime.wait_arrived(to, "upload", offset, len);
                arrived.map_err(|e| Error::from_io(&e, "upload", path))?;
            }
            done += got;
            if done < len && spinio_io::is_cancelled() {
                let cancelled = spinio_io::Error::kernel(Errno::INTR, "read", offset + done, len - done);
                return Err(Error::from_io(&cancelled, "upload", path));
            }
        }
        self.uploaded += done;
        Ok(done)
    }

    fn download(&mut self, path: &Path, from: Target, offset: u64, len: u64) -> Result<u64, Error> {
        match &mut self.output {
            Some(output) if output.is_same_file(path) => output.write(from, offset, len)?,
            _ => {
                let file = self.files.get(path, Purpose::Download).map_err(|e| Error::from_errno(e, "open", path))?;
                write_all(self.runtime, file.fd(), from, offset, len)
                    .map_err(|e| Error::from_io(&e, "download", path))?;
            }
        }
        self.downloaded += len;
        Ok(len)
    }

    /// Writes the gathered bytes, so that other processes find them in the output.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.check_process("flush")?;
        let settled = self.wait_pending();
        let flushed = self.output.as_mut().map_or(Ok(()), Output::flush);
        settled.and(flushed)
    }

    /// As [`Session::flush`], and waits until the storage has it.
    pub fn sync(&mut self) -> Result<(), Error> {
        self.flush()?;
        self.output.as_mut().map_or(Ok(()), Output::sync)
    }

    /// The output file, if any.
    pub fn output(&self) -> Option<PathBuf> {
        self.output.as_ref().map(|o| o.path().to_owned())
    }

    /// What was done so far, without the moves that are in progress; waits for the preparation to complete.
    pub fn report(&mut self) -> Report {
        self.count_finished();
        let (uploaded, downloaded) = (self.uploaded, self.downloaded);
        let none = Report {
            uploaded,
            downloaded,
            mode: OutputMode::NoOutput,
            full_stripe: 0,
            filler: 0,
            unaligned: 0,
            read_ahead: 0,
        };
        let output = self.output.as_mut().filter(|_| self.process == std::process::id());
        output.map_or(none, |output| Report { uploaded, downloaded, ..output.report() })
    }

    /// Ends: gathered bytes are written, every file is closed.
    pub fn end(mut self) -> Result<Report, Error> {
        self.flush()?;
        Ok(self.report())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.is_forked_child() {
            // The output is the parent's to write and to close; its locks may be held forever here.
            std::mem::forget(self.output.take());
            std::mem::forget(std::mem::replace(&mut self.files, Files::new(self.runtime)));
            std::mem::forget(std::mem::take(&mut self.pending_moves));
            return;
        }
        // A session that is dropped without `end` loses no bytes, only the error.
        let _ = self.flush();
    }
}

/// Whether two paths refer to one file now.
fn is_same_file(first: &Path, second: &Path) -> bool {
    let names = |path: &Path| c_path(path).and_then(|name| linux::key_of_path(&name)).ok();
    first == second || names(first).is_some_and(|file| Some(file) == names(second))
}

/// The device memory of a range that begins at an address, or the error.
fn device_memory(address: *mut c_void, len: u64) -> Result<Target, String> {
    let at = address.cast_const().cast::<u8>();
    let want = usize::try_from(len).unwrap_or(usize::MAX);
    let Some(allocation) = registry::find_or_query(at, want) else {
        return Err(format!("{address:p} is no device memory"));
    };
    let addr = DeviceAddr(address as u64);
    match allocation.bytes_left(addr) {
        room if room < len => Err(format!("the device memory at {address:p} ends after {room} bytes")),
        _ => Ok(Target { allocation, addr }),
    }
}
