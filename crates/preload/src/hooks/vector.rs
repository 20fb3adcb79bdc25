//! Hooks of `readv` and `preadv`, whose vectors may mix host and device buffers.
//!
//! ```text
//!   all host                        the next function, untouched
//!   a file with offsets             part by part at explicit offsets, until one comes back short; many device parts in
//!                                   a row as one batch
//!   a pipe, socket, terminal        one read: the kernel fills host parts itself, and a bounce buffer for device parts
//!   flags (RWF_*)                   as a stream, in windows: the kernel sees all flags
//! ```
//!
//! A read at the file's own offset first claims its range with one relative `lseek`, so that another process that
//! shares the offset continues after it, and then moves the offset back by what the file did not have.
//!
//! Known flaws:
//! - A call is served in parts, so it is not atomic with respect to a writer, nor to another reader that moves the
//!   shared offset back.
//! - From a pipe or a socket, one call reads at most 1 MiB into device parts and ends there: a short read, as is
//!   allowed for these.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::c_int;

use libc::iovec;
use spinio_batch::{Batches, ReadOp};
use spinio_device::{Allocation, registry};
use spinio_io::settings::SMALL_REQUEST_MAX;
use spinio_io::{AlignedBuf, SameFile, program_fd, runtime};
use spinio_sys::linux::{self, MAX_RW_COUNT};

use super::single::{is_in_address_space, is_in_file};
use super::{device_owner, device_owner_after_fault, hook, target};
use crate::ffi_guard::{self as guard, Failure};
use crate::{caller, disabled, errno, next_symbol as next};

/// The most vectors of one call.
const IOV_MAX: c_int = 1024;
/// The most host memory that replaces device parts.
const BOUNCE_MAX: usize = 1 << 20;
/// The number of consecutive device parts from which they are read as a batch.
const BATCH_MIN_PARTS: usize = 8;
/// How `preadv2` names the file's own offset.
const FILE_OFFSET: i64 = -1;

hook! {
    fn readv(fd: c_int, vectors: *const iovec, count: c_int) -> isize, caller in "rcx" =>
        serve(fd, vectors, count, FilePosition::FileOffset, 0, caller, read_parts, || next::READV.get()(fd, vectors, count));
    fn preadv(fd: c_int, vectors: *const iovec, count: c_int, offset: i64) -> isize, caller in "r8" =>
        serve(fd, vectors, count, FilePosition::Offset(offset), 0, caller, read_parts,
            || next::PREADV.get()(fd, vectors, count, offset));
    fn preadv64(fd: c_int, vectors: *const iovec, count: c_int, offset: i64) -> isize, caller in "r8" =>
        serve(fd, vectors, count, FilePosition::Offset(offset), 0, caller, read_parts,
            || next::PREADV64.get()(fd, vectors, count, offset));
    fn preadv2(fd: c_int, vectors: *const iovec, count: c_int, offset: i64, flags: c_int) -> isize, caller in "r9" =>
        serve(fd, vectors, count, FilePosition::of_preadv2(offset), flags, caller, read_parts,
            || next::PREADV2.get()(fd, vectors, count, offset, flags));
    fn preadv64v2(fd: c_int, vectors: *const iovec, count: c_int, offset: i64, flags: c_int) -> isize, caller in "r9" =>
        serve(fd, vectors, count, FilePosition::of_preadv2(offset), flags, caller, read_parts,
            || next::PREADV64V2.get()(fd, vectors, count, offset, flags));
}

/// The position in the file.
#[derive(Clone, Copy)]
pub(super) enum FilePosition {
    FileOffset,
    Offset(i64),
}

impl FilePosition {
    pub(super) fn of_preadv2(offset: i64) -> FilePosition {
        if offset == FILE_OFFSET { FilePosition::FileOffset } else { FilePosition::Offset(offset) }
    }
}

/// Serves a call that has device memory among its vectors.
pub(super) type VectorHandler = fn(c_int, *const iovec, c_int, FilePosition, c_int) -> isize;

#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "the call's own five, and its handler")]
pub(super) unsafe fn serve(
    fd: c_int,
    vectors: *const iovec,
    count: c_int,
    at: FilePosition,
    flags: c_int,
    caller: usize,
    handler: VectorHandler,
    next: impl Fn() -> isize,
) -> isize {
    let entry = errno::Saved::now();
    // SAFETY: `any_device` checks the address before it reads the vectors.
    let is_device = registry::any_device() && unsafe { any_device(vectors, count, at, caller, device_owner) };
    // A query of the driver may have changed errno.
    entry.restore();
    if is_device {
        return handler(fd, vectors, count, at, flags);
    }
    let moved = next();
    if moved == -1
        && errno::get() == libc::EFAULT
        // SAFETY: as above.
        && unsafe { any_device(vectors, count, at, caller, device_owner_after_fault) }
    {
        entry.restore();
        return handler(fd, vectors, count, at, flags);
    }
    moved
}

/// Whether a part is device memory. False where the kernel would refuse the call for any parts.
///
/// Safety
/// Only this: the program must not unmap the vectors during the call.
unsafe fn any_device(
    vectors: *const iovec,
    count: c_int,
    at: FilePosition,
    caller: usize,
    owner: impl Fn(*const u8, usize, usize) -> Option<Allocation>,
) -> bool {
    if count <= 0 || count > IOV_MAX || disabled::is_disabled() || caller::is_driver(caller) {
        return false;
    }
    let bytes = count as usize * size_of::<iovec>();
    if !vectors.is_aligned() || !(is_near_stack(vectors.cast()) || linux::is_readable(vectors.cast(), bytes)) {
        return false;
    }
    // SAFETY: aligned, and readable a moment ago.
    let vectors = unsafe { core::slice::from_raw_parts(vectors, count as usize) };
    // A single vector is truncated before its end is checked; of several, each must end in the address space.
    let fits = |v: &iovec| match count {
        1 => v.iov_len <= isize::MAX as usize,
        _ => is_in_address_space(v.iov_base.cast(), v.iov_len),
    };
    let total = vectors.iter().fold(0usize, |sum, v| sum.saturating_add(v.iov_len)).min(MAX_RW_COUNT);
    let offset = match at {
        FilePosition::FileOffset => None,
        FilePosition::Offset(offset) => Some(offset),
    };
    vectors.iter().all(fits)
        && is_in_file(offset, total)
        && vectors.iter().any(|v| v.iov_len != 0 && owner(v.iov_base.cast(), v.iov_len, caller).is_some())
}

/// Whether an address is a little above the current frame, where almost every caller keeps its vectors: no system call
/// is needed to know that it is readable.
fn is_near_stack(address: *const u8) -> bool {
    let frame = 0u8;
    (address as usize).wrapping_sub(&raw const frame as usize) < 16 << 10
}

/// A part of the call: what is left of one vector.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) at: *mut u8,
    pub(super) len: usize,
    pub(super) device: Option<Allocation>,
}

#[cold]
#[inline(never)]
fn read_parts(fd: c_int, vectors: *const iovec, count: c_int, at: FilePosition, flags: c_int) -> isize {
    guard::cancellation_point();
    let fd = program_fd(fd);
    guard::call(|| {
        // SAFETY: `any_device` has looked at the same vectors in this call.
        let vectors = unsafe { core::slice::from_raw_parts(vectors, count as usize) };
        let stream = runtime().is_stream(fd)?;
        let parts = parts(vectors)?;
        let total: usize = parts.iter().map(|p| p.len).sum();
        match at {
            // A stream has no offsets: the kernel returns ESPIPE, or ignores the offset (some devices).
            FilePosition::Offset(offset) if stream => windows(fd, &parts, offset, flags),
            FilePosition::Offset(offset) => read_at(fd, &parts, offset as u64, flags),
            FilePosition::FileOffset if stream => windows(fd, &parts, FILE_OFFSET, flags),
            FilePosition::FileOffset => {
                // The offset cannot be moved that far (the end of a block device, the largest offset of a file system), or
                // the descriptor cannot be read: the kernel returns the error.
                let Ok(reserved) = runtime().reserve(fd, total as u64) else {
                    return windows(fd, &parts, FILE_OFFSET, flags);
                };
                let result = read_at(fd, &parts, reserved.start, flags);
                runtime().unreserve(fd, &reserved, (total - result.as_ref().copied().unwrap_or(0)) as u64);
                result
            }
        }
    })
}

/// The vectors as parts, truncated where the kernel truncates a call, and where the first device part leaves its
/// allocation: bytes that a stream has given for what lies behind that could not be stored, and would be lost. Adjacent
/// host parts are not merged: the kernel takes them as a vector anyway.
pub(super) fn parts(vectors: &[iovec]) -> Result<Vec<Part>, Failure> {
    let mut room = MAX_RW_COUNT;
    let mut parts = Vec::with_capacity(vectors.len());
    for vector in vectors.iter().filter(|v| v.iov_len != 0) {
        let wanted = vector.iov_len.min(room);
        if wanted == 0 {
            break;
        }
        room -= wanted;
        let at = vector.iov_base.cast::<u8>();
        let device = registry::find(at, wanted);
        let available = device.map_or(u64::MAX, |allocation| allocation.bytes_left(target(allocation, at).addr));
        let len = wanted.min(usize::try_from(available).unwrap_or(usize::MAX));
        if len > 0 {
            parts.push(Part { at, len, device });
        }
        if len < wanted {
            break;
        }
    }
    if parts.is_empty() { Err(Failure::Errno(libc::EFAULT)) } else { Ok(parts) }
}

/// A file with offsets: until a part comes back short, or fails after others have succeeded.
fn read_at(fd: c_int, parts: &[Part], start: u64, flags: c_int) -> Result<usize, Failure> {
    let mut done = 0;
    let mut rest = parts.to_vec();
    let sys = runtime().reader().files.sys();
    // A single part is one read, which checks the file itself.
    let file = (parts.len() > 1 || flags != 0).then(|| SameFile::of(sys, fd));
    while let Some(first) = rest.first().copied() {
        let offset = start + done as u64;
        let devices = rest.iter().take_while(|p| p.device.is_some()).count();
        let (wanted, got) = match first.device {
            Some(_) if flags == 0 && devices >= BATCH_MIN_PARTS => {
                let wanted = rest[..devices].iter().map(|p| p.len).sum();
                (wanted, batch(fd, &rest[..devices], offset))
            }
            Some(allocation) if flags == 0 => {
                let read = runtime().read(fd, Some(offset), target(allocation, first.at), first.len);
                (first.len, read.map_err(Failure::Io))
            }
            _ => {
                // With flags, everything up to the end of the bounce buffer; without, the host parts up to the next
                // device part.
                let hosts = rest.iter().take_while(|p| p.device.is_none()).count();
                let parts = if flags == 0 { &rest[..hosts] } else { &rest[..] };
                match window(fd, parts, offset as i64, flags) {
                    Ok(window) => (window.wanted, Ok(window.got)),
                    Err(failure) => (0, Err(failure)),
                }
            }
        };
        match got {
            Ok(got) => {
                // Another thread may have reused the number for another file since the last part, or since this one:
                // only parts of one file count.
                let same = got == rest.iter().map(|p| p.len).sum::<usize>() && done == 0
                    || file.is_some_and(|file| file.is_same(sys));
                if done == 0 || same {
                    done += got;
                }
                if got < wanted || !same {
                    break;
                }
                advance(&mut rest, got);
            }
            Err(failure) if done == 0 => return Err(failure),
            Err(_) => break,
        }
    }
    // A single part is one read, which waits itself.
    if file.is_some() { wait_arrived(parts, done, |part| part.len <= SMALL_REQUEST_MAX) } else { Ok(done) }
}

/// Takes `bytes` off the front.
fn advance(parts: &mut Vec<Part>, mut bytes: usize) {
    let whole = parts
        .iter()
        .take_while(|p| {
            let fits = p.len <= bytes;
            bytes -= if fits { p.len } else { 0 };
            fits
        })
        .count();
    parts.drain(..whole);
    if let Some(first) = parts.first_mut() {
        first.at = first.at.wrapping_add(bytes);
        first.len -= bytes;
    }
}

/// Device parts that are contiguous in the file, all at once; the bytes up to the first that came back short.
fn batch(fd: c_int, parts: &[Part], offset: u64) -> Result<usize, Failure> {
    let mut offset = offset;
    let piece = |part: &Part| {
        let piece = ReadOp { fd, offset, len: part.len as u64, address: part.at as u64, ..ReadOp::default() };
        offset += piece.len;
        piece
    };
    let mut pieces: Vec<ReadOp> = parts.iter().map(piece).collect();
    let mut known: Vec<Allocation> = parts.iter().filter_map(|p| p.device).collect();
    known.dedup_by_key(|a| a.start);
    runtime().batch_with_allocations(&mut pieces, &known)?;
    let mut done = 0;
    for piece in &pieces {
        match usize::try_from(piece.result) {
            Ok(got) => done += got,
            Err(_) if done > 0 => break,
            Err(_) => return Err(Failure::Errno(-piece.result as i32)),
        }
        if (piece.result as u64) < piece.len {
            break;
        }
    }
    Ok(done)
}

/// A stream. From a pipe or a socket, as much as one call returns: a second one might block. A character device, or a
/// file whose size is not known (procfs), is read up to the requested length, window by window.
fn windows(fd: c_int, parts: &[Part], offset: i64, flags: c_int) -> Result<usize, Failure> {
    let fills = runtime().fills_buffers(fd)?;
    let mut rest = parts.to_vec();
    let mut done = 0;
    loop {
        let offset = if offset == FILE_OFFSET { offset } else { offset + done as i64 };
        match window(fd, &rest, offset, flags) {
            Ok(window) => {
                done += window.got;
                advance(&mut rest, window.got);
                if window.got < window.wanted || rest.is_empty() || !fills {
                    break;
                }
            }
            Err(failure) if done == 0 => return Err(failure),
            Err(_) => break,
        }
    }
    // The end of a window is the end of a bounce buffer, anywhere in a part.
    wait_arrived(parts, done, |_| true)
}

/// Small parts are only queued, but a call that has moved more than a small read can promises that all its bytes have
/// arrived. `is_queued`: of parts that got bytes, not all of which were waited for. The bytes moved.
fn wait_arrived(parts: &[Part], moved: usize, is_queued: impl Fn(&Part) -> bool) -> Result<usize, Failure> {
    let mut waited: Vec<*const ()> = Vec::new();
    let mut left = if moved > SMALL_REQUEST_MAX { moved } else { 0 };
    for part in parts {
        if left == 0 {
            break;
        }
        left -= left.min(part.len);
        let Some(allocation) = part.device.filter(|_| is_queued(part)) else { continue };
        let device = core::ptr::from_ref(allocation.device).cast();
        if !waited.contains(&device) {
            waited.push(device);
            runtime().wait_arrived(target(allocation, part.at), "read", 0, moved as u64)?;
        }
    }
    Ok(moved)
}

struct BounceRead {
    wanted: usize,
    got: usize,
}

/// One system call for the front parts, with a bounce buffer for device parts.
fn window(fd: c_int, parts: &[Part], offset: i64, flags: c_int) -> Result<BounceRead, Failure> {
    let device: usize = parts.iter().filter(|p| p.device.is_some()).map(|p| p.len).sum();
    let mut bounce = AlignedBuf::zeroed(device.min(BOUNCE_MAX));
    let (mut used, mut wanted) = (0, 0);
    let mut vectors = Vec::with_capacity(parts.len());
    for part in parts {
        let (at, len) = match part.device {
            None => (part.at, part.len),
            Some(_) => (bounce.as_mut_ptr().wrapping_add(used), part.len.min(bounce.len() - used)),
        };
        if len > 0 {
            vectors.push([at as usize, len]);
        }
        wanted += len;
        used += if part.device.is_some() { len } else { 0 };
        if len < part.len {
            break;
        }
    }
    // SAFETY: host parts are the program's own, which the kernel validates; the others are in `bounce`, which outlives
    // this.
    let got = unsafe { linux::preadv(fd, &vectors, offset, flags as u32) }?;

    let (mut left, mut from) = (got, 0);
    for part in parts {
        let len = part.len.min(left);
        if let Some(allocation) = part.device {
            let len = len.min(bounce.len() - from);
            if len > 0 {
                runtime().put(target(allocation, part.at), &bounce[from..from + len])?;
            }
            from += len;
            left -= len;
        } else {
            left -= len;
        }
        if left == 0 {
            break;
        }
    }
    Ok(BounceRead { wanted, got })
}
