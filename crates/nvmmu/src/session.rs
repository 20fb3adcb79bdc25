//! A session: between `begin` and `end`.

use std::ffi::c_void;
use std::path::{Path, PathBuf};

use spinio_device::{DeviceAddr, registry};
use spinio_io::{Runtime, Target};

use crate::files::{Files, Use};
use crate::output::{Array, Output};
use crate::{Error, ErrorKind, Promise, Report};

/// Bytes moved in one request of `io`: a kernel call moves a little less than 2 GiB.
const PIECE: u64 = 1 << 30;

/// Which way a move goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file to the device.
    Upload,
    /// From the device to the file.
    Download,
}

impl Direction {
    fn verb(self) -> &'static str {
        match self {
            Direction::Upload => "upload",
            Direction::Download => "download",
        }
    }
}

/// Moves between files and devices, and the file that is to be written.
pub struct Session {
    runtime: &'static Runtime,
    files: Files,
    output: Option<Output>,
    uploaded: u64,
    downloaded: u64,
}

impl Session {
    /// Begins; `output` is the file that the results will go to, which is made if it is not there.
    pub fn begin(runtime: &'static Runtime, output: Option<&Path>) -> Result<Session, Error> {
        Session::with(runtime, output, None)
    }

    /// For tests: the output is written as if an array with stripes of `width` bytes were under it.
    #[doc(hidden)]
    pub fn begin_as_if_striped(
        runtime: &'static Runtime,
        output: &Path,
        width: u64,
        phase: u64,
    ) -> Result<Session, Error> {
        Session::with(runtime, Some(output), Some(Array { width, phase }))
    }

    fn with(runtime: &'static Runtime, output: Option<&Path>, as_if: Option<Array>) -> Result<Session, Error> {
        let output = output.map(|path| Output::begin(runtime, path, as_if)).transpose()?;
        Ok(Session { runtime, files: Files::new(runtime), output, uploaded: 0, downloaded: 0 })
    }

    /// Says where in the output downloads will go, as early as that is known: what stripes they cover in part is read
    /// while the kernel runs. May be said several times; a download elsewhere is right too, but not prepared.
    pub fn expect(&mut self, offset: u64, len: u64) {
        if let Some(output) = &mut self.output {
            output.expect(offset, len);
        }
    }

    /// Moves `len` bytes between a file, from `offset` on, and device memory at `address`. The bytes moved: fewer only
    /// where an upload meets the end of its file.
    pub fn move_range(
        &mut self,
        path: &Path,
        address: *mut c_void,
        offset: u64,
        len: u64,
        direction: Direction,
    ) -> Result<u64, Error> {
        let about = |error: Error| error.of(path).at(offset, len);
        if len == 0 {
            return Ok(0);
        }
        if offset.checked_add(len).is_none_or(|end| i64::try_from(end).is_err()) {
            return Err(about(Error::new(ErrorKind::BadRange, direction.verb(), "a file cannot be that long")));
        }
        let target = device_memory(address, len)
            .map_err(|why| about(Error::new(ErrorKind::NotDeviceMemory, direction.verb(), why)))?;
        match direction {
            Direction::Upload => self.upload(path, target, offset, len),
            Direction::Download => self.download(path, target, offset, len),
        }
    }

    fn upload(&mut self, path: &Path, to: Target, offset: u64, len: u64) -> Result<u64, Error> {
        if let Some(output) = &mut self.output
            && output.is(path)
        {
            // What was downloaded into it has to be there.
            output.flush()?;
            output.give_way();
        }
        let file = self.files.get(path, Use::Upload).map_err(|e| Error::kernel(e, "open", path))?;
        let mut done = 0;
        while done < len {
            let piece = PIECE.min(len - done);
            let to = Target { addr: DeviceAddr(to.addr.0 + done), ..to };
            let got = self.runtime.read(file.fd(), Some(offset + done), to, piece as usize);
            let got = got.map_err(|e| Error::io(&e, "upload", path))? as u64;
            done += got;
            if got < piece {
                break;
            }
        }
        self.uploaded += done;
        Ok(done)
    }

    fn download(&mut self, path: &Path, from: Target, offset: u64, len: u64) -> Result<u64, Error> {
        match &mut self.output {
            Some(output) if output.is(path) => output.write(from, offset, len)?,
            _ => {
                let file = self.files.get(path, Use::Download).map_err(|e| Error::kernel(e, "open", path))?;
                write_all(self.runtime, file.fd(), from, offset, len).map_err(|e| Error::io(&e, "download", path))?;
            }
        }
        self.downloaded += len;
        Ok(len)
    }

    /// Writes what is still gathered, so that others find it in the output.
    pub fn flush(&mut self) -> Result<(), Error> {
        self.output.as_mut().map_or(Ok(()), Output::flush)
    }

    /// As [`Session::flush`], and waits until the storage has it.
    pub fn sync(&mut self) -> Result<(), Error> {
        self.output.as_mut().map_or(Ok(()), Output::sync)
    }

    /// The file named at the beginning.
    pub fn output(&self) -> Option<PathBuf> {
        self.output.as_ref().map(|o| o.path().to_owned())
    }

    /// What was done so far; waits for the preparation to be over.
    pub fn report(&mut self) -> Report {
        let (uploaded, downloaded) = (self.uploaded, self.downloaded);
        let none = Report {
            uploaded,
            downloaded,
            promise: Promise::NoOutput,
            whole: 0,
            neighbours: 0,
            loose: 0,
            read_ahead: 0,
            read_late: 0,
        };
        self.output.as_mut().map_or(none, |output| Report { uploaded, downloaded, ..output.report() })
    }

    /// Ends: what is gathered is written, every file closed.
    pub fn end(mut self) -> Result<Report, Error> {
        self.flush()?;
        Ok(self.report())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Whoever lets go of a session without ending it loses no bytes, only the error.
        let _ = self.flush();
    }
}

/// The device memory of a range that begins at an address, or what is wrong with it.
fn device_memory(address: *mut c_void, len: u64) -> Result<Target, String> {
    let at = address.cast_const().cast::<u8>();
    let want = usize::try_from(len).unwrap_or(usize::MAX);
    let found = registry::find(at, want).or_else(|| registry::find_after_fault(at, want));
    let Some(allocation) = found else { return Err(format!("{address:p} is no device memory")) };
    let addr = DeviceAddr(address as u64);
    match allocation.room(addr) {
        room if room < len => Err(format!("the device memory at {address:p} ends after {room} bytes")),
        _ => Ok(Target { allocation, addr }),
    }
}

/// Writes all of a range.
pub(crate) fn write_all(
    runtime: &Runtime,
    fd: spinio_sys::linux::Fd,
    from: Target,
    offset: u64,
    len: u64,
) -> Result<(), spinio_io::Error> {
    let mut done = 0;
    while done < len {
        let piece = PIECE.min(len - done);
        let from = Target { addr: DeviceAddr(from.addr.0 + done), ..from };
        match runtime.write(fd, Some(offset + done), from, piece as usize)? as u64 {
            0 => return Err(spinio_io::Error::kernel(spinio_sys::Errno::IO, "write", offset + done, piece)),
            wrote => done += wrote,
        }
    }
    Ok(())
}
