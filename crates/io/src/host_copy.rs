//! Copies between host and device memory: for stdio streams that the hooks buffer, for tools that compare, and for the
//! C API.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use spinio_device::{StreamOrder, Target, WaitMode};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::ctx::Writer;
use spinio_host::settings::SMALL_REQUEST_MAX;
use spinio_stats::Direction;
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

impl Writer {
    /// Copies host bytes into device memory, in the stream order of a small read. The bytes may be reused when this
    /// returns.
    pub fn copy_to_device(&self, to: Target, bytes: &[u8]) -> Result<(), Error> {
        let stats = self.files.stats();
        let span = stats.begin(Direction::Read, -1, None, bytes.len() as u64).with_device(to.allocation.device);
        let done = self.stage_to_device(to, bytes);
        if done.is_ok() {
            stats.record_piece(&span, Route::Copy, Reason::Stream, 0, bytes.len() as u64, span.start());
        }
        stats.end(&span, &done.as_ref().map(|()| bytes.len()).map_err(Error::errno));
        done
    }

    fn stage_to_device(&self, to: Target, bytes: &[u8]) -> Result<(), Error> {
        let len = bytes.len();
        let device = to.allocation.device;
        let fail = |e| Error::device(e, "copy to the device", 0, len as u64);
        if len as u64 > to.allocation.bytes_left(to.addr) {
            return Err(Error::kernel(Errno::FAULT, "copy to the device", 0, len as u64));
        }
        let pool = self.bounce.sync(device);
        let app = device.app_stream();
        let stream = app.id();
        let mut done = 0;
        while done < len {
            let n = (len - done).min(BUFFER_SIZE);
            let buffer = pool.acquire().map_err(fail)?;
            // SAFETY: no other thread uses the buffer, and it has `BUFFER_SIZE` bytes.
            unsafe { core::ptr::copy_nonoverlapping(bytes[done..done + n].as_ptr(), buffer.ptr(), n) };
            // SAFETY: the buffer is reused only after the copy; the bytes are inside the allocation.
            match unsafe { device.copy_in(stream, to.addr.offset(done as u64), buffer.ptr(), n) } {
                Ok(()) => pool.release_after(buffer, stream),
                Err(e) => {
                    pool.release(buffer);
                    return Err(fail(e));
                }
            }
            done += n;
        }
        if len > 0 && (len > SMALL_REQUEST_MAX || self.policy.must_wait(app)) {
            device.synchronize(stream, WaitMode::Context).map_err(fail)?;
        }
        Ok(())
    }

    /// Copies device memory into the host buffer of a stdio stream. It counts as a write, as [`Writer::copy_to_device`]
    /// counts as a read.
    pub fn copy_from_device(&self, from: Target, into: &mut [u8]) -> Result<(), Error> {
        let stats = self.files.stats();
        let span = stats.begin(Direction::Write, -1, None, into.len() as u64).with_device(from.allocation.device);
        let done = self.read_back(from, into);
        if done.is_ok() {
            stats.record_piece(&span, Route::Copy, Reason::Stream, 0, into.len() as u64, span.start());
        }
        stats.end(&span, &done.as_ref().map(|()| into.len()).map_err(Error::errno));
        done
    }

    /// Copies host memory into the device as a program without SPIN does: without a bounce buffer, and waits. For tools
    /// that compare.
    pub fn copy_unstaged(&self, to: Target, bytes: &[u8]) -> Result<(), Error> {
        let device = to.allocation.device;
        let fail = |e| Error::device(e, "copy to the device", 0, bytes.len() as u64);
        if bytes.len() as u64 > to.allocation.bytes_left(to.addr) {
            return Err(Error::kernel(Errno::FAULT, "copy to the device", 0, bytes.len() as u64));
        }
        let stream = StreamOrder::app(device);
        // SAFETY: `bytes` is borrowed until `synchronize` below returns, and the range is inside one allocation.
        let copied = unsafe { device.copy_in(stream.id(), to.addr, bytes.as_ptr(), bytes.len()) };
        let synchronized = stream.synchronize(WaitMode::Context);
        copied.and(synchronized).map_err(fail)
    }

    /// Has the Linux kernel read into host-mapped device memory, as a `pread` without SPIN does. With an O_DIRECT
    /// descriptor and P2P-mapped memory this is a peer-to-peer transfer. For tools that compare.
    pub fn pread_host_mapped(&self, fd: Fd, at: u64, to: Target, len: usize) -> Result<usize, Error> {
        let fail = |e| Error::kernel(e, "read", at, len as u64);
        if !to.allocation.host_mapped || len as u64 > to.allocation.bytes_left(to.addr) {
            return Err(fail(Errno::FAULT));
        }
        // SAFETY: host-mapped device memory inside its allocation, which the caller provides for this read.
        unsafe { linux::pread(fd, to.addr.0 as *mut u8, len, at) }.map_err(fail)
    }

    /// Copies device memory into host memory, after the work that this thread has queued before, and waits.
    pub fn read_back(&self, from: Target, into: &mut [u8]) -> Result<(), Error> {
        let device = from.allocation.device;
        let len = into.len() as u64;
        let fail = |e| Error::device(e, "copy out of the device", 0, len);
        if from.allocation.bytes_left(from.addr) < len {
            let outside = spinio_device::DeviceError::new(spinio_device::ErrorKind::BadAddress, "copy out");
            return Err(fail(outside));
        }
        let stream = StreamOrder::app(device);
        // SAFETY: `into` is borrowed until `synchronize` below returns, and the range is inside one allocation.
        let copied = unsafe { device.copy_out(stream.id(), into.as_mut_ptr(), from.addr, into.len()) };
        // A failed copy may have queued its first part: no copy may write to `into` after this function returns.
        let synchronized = stream.synchronize(WaitMode::Context);
        copied.and(synchronized).map_err(fail)
    }
}
