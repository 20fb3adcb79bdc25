//! Host memory to the device and out of it again: for streams that the hooks buffer, tools that compare, and the C API.

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
    /// Copies host bytes into device memory, in the order of a small read; the bytes may be reused at once.
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
        let staging = self.bounce.sync(device);
        let app = device.app_stream();
        let stream = app.id();
        let mut done = 0;
        while done < len {
            let n = (len - done).min(BUFFER_SIZE);
            let block = staging.acquire().map_err(fail)?;
            // SAFETY: the block is ours alone and has `BLOCK` bytes.
            unsafe { core::ptr::copy_nonoverlapping(bytes[done..done + n].as_ptr(), block.ptr(), n) };
            // SAFETY: the block is retired behind the copy; the bytes lie inside the allocation.
            match unsafe { device.copy_in(stream, to.addr.offset(done as u64), block.ptr(), n) } {
                Ok(()) => staging.release_after(block, stream),
                Err(e) => {
                    staging.release(block);
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

    /// Copies device memory into host memory that a stream takes: a write, as [`Writer::put`] is a read.
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

    /// Copies host memory into the device as a program without SPIN does: from where it lies, and waits. For tools that
    /// compare.
    pub fn copy_unstaged(&self, to: Target, bytes: &[u8]) -> Result<(), Error> {
        let device = to.allocation.device;
        let fail = |e| Error::device(e, "copy to the device", 0, bytes.len() as u64);
        if bytes.len() as u64 > to.allocation.bytes_left(to.addr) {
            return Err(Error::kernel(Errno::FAULT, "copy to the device", 0, bytes.len() as u64));
        }
        let stream = StreamOrder::app(device);
        // SAFETY: `bytes` is borrowed until the drain below returns, and the range lies in one allocation.
        let copied = unsafe { device.copy_in(stream.id(), to.addr, bytes.as_ptr(), bytes.len()) };
        let drained = stream.synchronize(WaitMode::Context);
        copied.and(drained).map_err(fail)
    }

    /// Lets the kernel itself read into host-mapped device memory, as a `pread` without SPIN does; with an O_DIRECT
    /// descriptor and P2P-mapped memory that is a peer-to-peer transfer. For tools that compare.
    pub fn pread_host_mapped(&self, fd: Fd, at: u64, to: Target, len: usize) -> Result<usize, Error> {
        let fail = |e| Error::kernel(e, "read", at, len as u64);
        if !to.allocation.host_mapped || len as u64 > to.allocation.bytes_left(to.addr) {
            return Err(fail(Errno::FAULT));
        }
        // SAFETY: host-mapped device memory inside its allocation, which the caller has lent for this.
        unsafe { linux::pread(fd, to.addr.0 as *mut u8, len, at) }.map_err(fail)
    }

    /// Copies device memory into host memory and waits, behind what this thread has queued before.
    pub fn read_back(&self, from: Target, into: &mut [u8]) -> Result<(), Error> {
        let device = from.allocation.device;
        let len = into.len() as u64;
        let fail = |e| Error::device(e, "copy out of the device", 0, len);
        if from.allocation.bytes_left(from.addr) < len {
            let outside = spinio_device::DeviceError::new(spinio_device::ErrorKind::BadAddress, "copy out");
            return Err(fail(outside));
        }
        let stream = StreamOrder::app(device);
        // SAFETY: `into` is borrowed until the drain below returns, and the range lies in one allocation.
        let copied = unsafe { device.copy_out(stream.id(), into.as_mut_ptr(), from.addr, into.len()) };
        // A failed copy may have queued its first part: nothing may write to `into` after we return.
        let drained = stream.synchronize(WaitMode::Context);
        copied.and(drained).map_err(fail)
    }
}
