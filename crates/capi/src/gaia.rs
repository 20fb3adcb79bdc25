//! Files in device memory, declared in `include/spinio_gaia.h`.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicIsize, Ordering::Release};

use spinio_device::{Device, StreamId, registry};
use spinio_gaia::{Access, Advice, Error, Info, StreamRelease};
use spinio_io::program_fd;

use crate::ffi_guard::{self as guard, Failure};
use crate::fill_struct;

/// `SPINIO_GAIA_READ`, `SPINIO_GAIA_WRITE`
const READ: c_uint = 1;
const WRITE: c_uint = 2;
const OVERWRITE: c_uint = 4;
/// `SPINIO_GAIA_IN_PLACE`
const IN_PLACE: c_uint = 8;
/// `SPINIO_GAIA_DISCARD`
const DISCARD: c_uint = 32;
/// `SPINIO_GAIA_HANDOFF`
const HANDOFF: c_uint = 64;
/// `SPINIO_GAIA_RANDOM`, `SPINIO_GAIA_SEQUENTIAL`, `SPINIO_GAIA_WILLNEED`, `SPINIO_GAIA_DONTNEED`
const RANDOM: c_int = 1;
const SEQUENTIAL: c_int = 2;
const WILLNEED: c_int = 3;
const DONTNEED: c_int = 4;
const LEND: c_int = 16;
/// `MAP_ONGPU`: MAP_SHARED_VALIDATE and a bit that Linux does not know.
const MAP_ONGPU: c_int = 0x200_0003;

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

/// What an acquire is for: `None` is to overwrite the range.
fn parse_purpose(access: c_uint) -> Result<Option<Access>, Failure> {
    if access & OVERWRITE != 0 && access & !(OVERWRITE | READ | WRITE) == 0 {
        Ok(None)
    } else {
        parse_access(access).map(Some)
    }
}

/// What a release does.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReleaseKind {
    Publish,
    /// Publishes, and may hand device memory over.
    HandOver,
    Discard,
}

fn parse_release_flags(flags: c_uint) -> Result<ReleaseKind, Failure> {
    match flags {
        0 => Ok(ReleaseKind::Publish),
        DISCARD => Ok(ReleaseKind::Discard),
        HANDOFF => Ok(ReleaseKind::HandOver),
        _ => Err(invalid("The flags of a release are 0, SPINIO_GAIA_DISCARD or SPINIO_GAIA_HANDOFF")),
    }
}

/// Whether these flags of `mmap` ask for device memory.
#[inline(always)]
pub fn is_on_gpu(flags: c_int) -> bool {
    flags & MAP_ONGPU == MAP_ONGPU
}

/// `mmap` with MAP_ONGPU.
pub fn map_on_gpu(size: usize, protection: c_int, flags: c_int, fd: c_int, offset: i64) -> *mut c_void {
    let mapped = guard::run(|| {
        if flags != MAP_ONGPU {
            let sentence = format!("With MAP_ONGPU, mmap takes no other flags, and not {:#x}", flags & !MAP_ONGPU);
            return Err(Failure::Message(libc::EOPNOTSUPP, sentence));
        }
        let access = match protection {
            libc::PROT_READ => Access::Read,
            _ if protection & !libc::PROT_READ == libc::PROT_WRITE => Access::Write,
            _ => return Err(invalid("Device memory is mapped with PROT_READ, PROT_WRITE or both")),
        };
        map(fd, offset, size, access)
    });
    mapped.map_or(libc::MAP_FAILED, |address| address as *mut c_void)
}

/// Whether a range may touch a map. For any thread at any time: it takes no lock and allocates nothing.
#[inline(always)]
pub fn touches_map(address: *mut c_void, size: usize) -> bool {
    spinio_gaia::touches_map(address as u64, size as u64)
}

/// `munmap` of a range that touches a map; `None` if it touches none that this process has made.
pub fn unmap_on_gpu(address: *mut c_void, size: usize) -> Option<c_int> {
    match guard::run(|| Ok(spinio_gaia::unmap_range(address as u64, size as u64).transpose()?)) {
        Some(None) => None,
        Some(Some(())) => Some(0),
        None => Some(-1),
    }
}

fn map(fd: c_int, offset: i64, size: usize, access: Access) -> Result<u64, Failure> {
    let (fd, offset) = (program_fd(fd), u64::try_from(offset).map_err(|_| invalid("The offset of a map is negative"))?);
    Ok(spinio_gaia::map(fd, offset, size as u64, access, current_device("map into")?, &spinio_runtime::Routes)?)
}

fn map_in_place(fd: c_int, offset: i64, size: usize, access: c_uint) -> Result<u64, Failure> {
    let access = parse_access(access & !IN_PLACE)?;
    let (fd, offset) = (program_fd(fd), u64::try_from(offset).map_err(|_| invalid("The offset of a map is negative"))?);
    Ok(spinio_gaia::map_in_place(fd, offset, size as u64, access, current_device("map into")?)?)
}

/// The device in use; `purpose` is what a caller without one cannot do.
pub(crate) fn current_device(purpose: &str) -> Result<&'static dyn Device, Failure> {
    let none = || Failure::Message(libc::ENODEV, format!("No device is in use, so there is none to {purpose}"));
    registry::current_device().ok_or_else(none)
}

fn invalid(sentence: &str) -> Failure {
    Failure::Message(libc::EINVAL, sentence.into())
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_map(fd: c_int, offset: i64, size: usize, access: c_uint) -> *mut c_void {
    guard::cancellation_point();
    let mapped = guard::run(|| match access & IN_PLACE {
        0 => map(fd, offset, size, parse_access(access)?),
        _ => map_in_place(fd, offset, size, access),
    });
    mapped.map_or(core::ptr::null_mut(), |address| address as *mut c_void)
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_unmap(address: *mut c_void) -> c_int {
    guard::status(|| Ok(spinio_gaia::unmap(address as u64)?))
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_acquire(address: *mut c_void, size: usize, access: c_uint) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let purpose = parse_purpose(access)?;
        let acquire = |map: &spinio_gaia::FileMap, offset| match purpose {
            Some(access) => map.acquire(offset, size as u64, access),
            None => map.overwrite(offset, size as u64),
        };
        Ok(spinio_gaia::with_map(address as u64, acquire)? as usize)
    })
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_release(address: *mut c_void, size: usize, flags: c_uint) -> isize {
    guard::cancellation_point();
    guard::call(|| {
        let wanted = parse_release_flags(flags)?;
        let release = |map: &spinio_gaia::FileMap, offset| match wanted {
            ReleaseKind::Discard => map.discard(offset, size as u64).map(|()| 0),
            ReleaseKind::Publish => map.release(offset, size as u64),
            ReleaseKind::HandOver => map.release_handing_over(offset, size as u64),
        };
        Ok(spinio_gaia::with_map(address as u64, release)? as usize)
    })
}

#[unsafe(no_mangle)]
extern "C" fn spinio_gaia_acquire_async(
    address: *mut c_void,
    size: usize,
    access: c_uint,
    stream: *mut c_void,
) -> c_int {
    guard::status(|| {
        let (purpose, stream) = (parse_purpose(access)?, StreamId(stream as u64));
        let acquire = |map: &spinio_gaia::FileMap, offset| match purpose {
            Some(access) => map.acquire_async(offset, size as u64, access, stream),
            None => map.overwrite_async(offset, size as u64, stream),
        };
        Ok(spinio_gaia::with_map(address as u64, acquire)?)
    })
}

/// Where to store the result of a release: bytes published, or a negative errno.
struct Published(*const AtomicIsize);

// SAFETY: it points to an atomic word, which the program keeps until the result is stored.
unsafe impl Send for Published {}

impl Published {
    fn store(&self, result: &Result<u64, Error>) {
        if !self.0.is_null() {
            let value = result.as_ref().map_or_else(|e| -(e.errno.raw_os_error() as isize), |bytes| *bytes as isize);
            // SAFETY: not null, and the header requires the program to keep the word.
            unsafe { &*self.0 }.store(value, Release);
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_gaia_release_async(
    address: *mut c_void,
    size: usize,
    flags: c_uint,
    stream: *mut c_void,
    published: *mut isize,
) -> c_int {
    let published = Published(published.cast::<AtomicIsize>().cast_const());
    guard::status(|| {
        // Nothing is handed over in stream order.
        let (discard, stream) = (parse_release_flags(flags)? == ReleaseKind::Discard, StreamId(stream as u64));
        let release = |map: &spinio_gaia::FileMap, offset| {
            let release = StreamRelease::new(stream, move |result| published.store(result));
            map.release_async(offset, size as u64, if discard { release.discarding() } else { release })
        };
        Ok(spinio_gaia::with_map(address as u64, release)?)
    })
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_sync(address: *mut c_void, size: usize) -> c_int {
    guard::cancellation_point();
    let sync = |map: &spinio_gaia::FileMap, offset| map.sync(offset, size as u64);
    guard::status(|| Ok(spinio_gaia::with_map(address as u64, sync)?))
}

#[unsafe(no_mangle)]
extern "C-unwind" fn spinio_gaia_advise(address: *mut c_void, size: usize, advice: c_int) -> c_int {
    guard::status(|| {
        let advice = match advice {
            RANDOM => Advice::Random,
            SEQUENTIAL => Advice::Sequential,
            WILLNEED => Advice::WillNeed,
            DONTNEED => Advice::DontNeed,
            LEND => Advice::Lend,
            _ => return Err(invalid(&format!("{advice} is no advice for maps"))),
        };
        Ok(spinio_gaia::with_map(address as u64, |map, offset| map.advise(offset, size as u64, advice))?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_gaia_info(address: *const c_void, out: *mut c_void, size: usize) -> c_int {
    guard::status(|| {
        if out.is_null() {
            return Err(Failure::Message(libc::EFAULT, "There is no memory for the result: out is NULL".into()));
        }
        let info: Info = spinio_gaia::with_map(address as u64, |map, _| Ok(map.info()))?;
        // SAFETY: the header requires `size` bytes at `out`; the struct has no padding.
        unsafe { fill_struct(out.cast(), size, &info) };
        Ok(())
    })
}
