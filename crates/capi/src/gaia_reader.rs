//! On-demand reads from kernels, declared in `include/spinio_gaia.h`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Once;

use spinio_gaia::reader::{self, Handle};
use spinio_io::program_fd;

use crate::ffi_guard::{self as guard, Failure};
use crate::fill_struct;
use crate::gaia::current_device;

/// `SPINIO_GAIA_RANDOM`: nothing is requested ahead.
const RANDOM: c_uint = 1;

static AT_EXIT: Once = Once::new();

extern "C" fn stop_readers() {
    reader::stop_all();
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_gaia_reader_open(
    fd: c_int,
    cache: usize,
    page: c_uint,
    advice: c_uint,
    out: *mut Handle,
) -> c_int {
    guard::cancellation_point();
    guard::status(|| {
        if out.is_null() {
            return Err(Failure::Message(libc::EFAULT, "There is no memory for the reader: out is NULL".into()));
        }
        if advice & !RANDOM != 0 {
            return Err(Failure::Message(libc::EINVAL, format!("{advice} is no advice for readers")));
        }
        let device = current_device("read into")?;
        let (fd, routes) = (program_fd(fd), &spinio_runtime::Routes);
        let handle = reader::open(fd, cache as u64, u64::from(page), advice & RANDOM == 0, device, routes)?;
        // After the driver's own handlers, and so called before them.
        AT_EXIT.call_once(|| {
            // SAFETY: a function of this library, which stays loaded.
            let _ = unsafe { libc::atexit(stop_readers) };
        });
        // SAFETY: not null, and the header requires a struct there.
        unsafe { out.write(handle) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C-unwind" fn spinio_gaia_reader_close(reader: *const Handle) -> c_int {
    guard::status(|| Ok(reader::close(id(reader)?)?))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_gaia_reader_stats(reader: *const Handle, out: *mut c_void, size: usize) -> c_int {
    guard::status(|| {
        if out.is_null() {
            return Err(Failure::Message(libc::EFAULT, "There is no memory for the result: out is NULL".into()));
        }
        let stats = reader::stats(id(reader)?)?;
        // SAFETY: the header requires `size` bytes at `out`; the struct has no padding.
        unsafe { fill_struct(out.cast(), size, &stats) };
        Ok(())
    })
}

fn id(reader: *const Handle) -> Result<u64, Failure> {
    // SAFETY: the header requires a struct of spinio_gaia_reader_open(), or NULL.
    let handle = unsafe { reader.as_ref() };
    handle.map(|handle| handle.id).ok_or_else(|| Failure::Message(libc::EFAULT, "The reader is NULL".into()))
}
