//! Files in device memory, declared in `include/spinio_gaia.h`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_uint, c_void};

use spinio_device::registry;
use spinio_gaia::{Access, Error, Info};

use crate::ffi_guard::{self as guard, Failure};

/// `SPINIO_GAIA_READ`, `SPINIO_GAIA_WRITE`
const READ: c_uint = 1;
const WRITE: c_uint = 2;
/// `SPINIO_GAIA_DISCARD`
const DISCARD: c_uint = 32;

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Message(error.errno.raw_os_error(), error.to_string())
    }
}

fn parse_access(access: c_uint) -> Result<Access, Failure> {
    match access {
        READ => Ok(Access::Read),
        WRITE | 3 => Ok(Access::Write),
        _ => Err(Failure::Message(libc::EINVAL, format!("{access:#x} is no access: read is {READ}, write {WRITE}"))),
    }
}

fn invalid(sentence: &str) -> Failure {
    Failure::Message(libc::EINVAL, sentence.into())
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_map(fd: c_int, offset: i64, size: usize, access: c_uint) -> *mut c_void {
    guard::cancellation_point();
    let mapped = guard::run(|| {
        let offset = u64::try_from(offset).map_err(|_| invalid("The offset of a map is negative"))?;
        let access = parse_access(access)?;
        let device = registry::current_device().ok_or_else(|| {
            Failure::Message(libc::ENODEV, "No device is in use, so there is none to map into".into())
        })?;
        Ok(spinio_gaia::map(fd, offset, size as u64, access, device, &spinio_runtime::Routes)?)
    });
    mapped.map_or(core::ptr::null_mut(), |address| address as *mut c_void)
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_unmap(address: *mut c_void) -> c_int {
    guard::run(|| Ok(spinio_gaia::unmap(address as u64)?)).map_or(-1, |()| 0)
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_acquire(address: *mut c_void, size: usize, access: c_uint) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let access = parse_access(access)?;
        let acquire = |map: &spinio_gaia::FileMap, offset| map.acquire(offset, size as u64, access);
        Ok(spinio_gaia::with_map(address as u64, acquire)? as usize)
    })
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_release(address: *mut c_void, size: usize, flags: c_uint) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let release = |map: &spinio_gaia::FileMap, offset| match flags {
            DISCARD => map.discard(offset, size as u64).map(|()| 0),
            _ => map.release(offset, size as u64),
        };
        match flags {
            0 | DISCARD => Ok(spinio_gaia::with_map(address as u64, release)? as usize),
            _ => Err(invalid("The flags of a release are 0 or SPINIO_GAIA_DISCARD")),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_gaia_info(address: *const c_void, out: *mut c_void, size: usize) -> c_int {
    let done = guard::run(|| {
        if out.is_null() {
            return Err(Failure::Message(libc::EFAULT, "There is no memory for the result: out is NULL".into()));
        }
        let fields = fields(&spinio_gaia::with_map(address as u64, |map, _| Ok(map.info()))?);
        let known = size.min(size_of_val(&fields));
        // SAFETY: the header requires `size` bytes at `out`.
        unsafe {
            core::ptr::copy_nonoverlapping(fields.as_ptr().cast::<u8>(), out.cast::<u8>(), known);
            core::ptr::write_bytes(out.cast::<u8>().add(known), 0, size - known);
        }
        Ok(())
    });
    done.map_or(-1, |()| 0)
}

/// `struct spinio_gaia_info`, field by field.
fn fields(info: &Info) -> [u64; 12] {
    let Info {
        file_size,
        acquires,
        releases,
        bytes_from_file,
        bytes_from_snapshots,
        pages_patched,
        bytes_published,
        pages_committed,
        pages_merged,
        reattached,
        releases_recovered,
        bytes_shared,
    } = *info;
    [
        file_size,
        acquires,
        releases,
        bytes_from_file,
        bytes_from_snapshots,
        pages_patched,
        bytes_published,
        pages_committed,
        pages_merged,
        reattached,
        releases_recovered,
        bytes_shared,
    ]
}
