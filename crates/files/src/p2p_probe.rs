//! The P2P probe: before storage is trusted to DMA into a device, one range is read both ways.
//!
//! ```text
//!   O_DIRECT into the device ──┐
//!                              ├── equal? ── yes: trusted for this (file system, device)
//!   O_DIRECT into host memory ─┘          └─ no: read both again (the file may be changing);
//!                                             still no: never trusted
//! ```
//!
//! The range is part of the request, so the device receives no bytes that were not requested. It is as long as the
//! request allows, up to a bounce buffer or a whole stripe of the array under the file, because not all members may
//! reach the device.
//!
//! Known flaw: a shorter request, or an array whose stripes are not known, can pass while one member cannot reach the
//! device; the engine finds that later (the read fails) and the trust is revoked.

#![expect(unsafe_code, reason = "system calls into buffers, mappings")]

use std::sync::Arc;

use spinio_plan::Route;
use spinio_sys::Errno;

use spinio_device::Target;

use crate::ctx::FilesCtx;
use crate::p2p_trust::P2pTrust;
use crate::state::FileState;
use spinio_host::syscalls::Syscalls;
use spinio_transfer::AlignedBuf;
use spinio_transfer::bounce::BUFFER_SIZE;

/// Bytes of the widest stripe that is read whole.
const MAX_STRIPE: u64 = 32 << 20;

/// Reads part of the request both ways; `None` if nothing could be compared.
pub fn verify(
    ctx: &FilesCtx,
    file: &Arc<FileState>,
    to: Target,
    offset: u64,
    len: u64,
    align: u64,
) -> Option<P2pTrust> {
    let first = offset.next_multiple_of(align);
    let stripe = file.block_stack().stripe().map_or(0, |s| s.width()).min(MAX_STRIPE);
    let max_len = (BUFFER_SIZE as u64).max(stripe.next_multiple_of(align));
    let bytes = ((offset + len).saturating_sub(first) / align * align).min(max_len) as usize;
    if bytes == 0 {
        return None;
    }
    let at = to.addr.offset(first - offset).0;
    let (sys, worker_file) = (ctx.sys, Arc::clone(file));
    ctx.workers.shadow()?.for_key(file.storage).run_blocking(move || compare(sys, &worker_file, at, first, bytes))?
}

fn compare(sys: &dyn Syscalls, file: &FileState, device: u64, offset: u64, bytes: usize) -> Option<P2pTrust> {
    let direct_fd = file.direct_fd.as_ref().ok()?;
    let mut host = AlignedBuf::zeroed(bytes);
    for _ in 0..2 {
        // SAFETY: `host` has `bytes` bytes.
        let buffered = unsafe { sys.pread(Route::Direct, direct_fd.get(), host.as_mut_ptr(), bytes, offset, 0) };
        // Zeros may be a hole, which Linux fills in without reading storage.
        if buffered != Ok(bytes) || host.iter().all(|&b| b == 0) {
            return None;
        }
        // SAFETY: P2P-mapped memory is host-mapped, and the request's bytes lie inside its allocation; the program
        // has passed it to this call, and no other reference to it exists.
        let mapped = unsafe { core::slice::from_raw_parts_mut(device as *mut u8, bytes) };
        // The memory may already contain these bytes, from an earlier read; so their complement is written first.
        mapped.iter_mut().zip(host.iter()).for_each(|(to, from)| *to = !from);
        // SAFETY: as above.
        let p2p = unsafe { sys.pread(Route::P2p, direct_fd.get(), device as *mut u8, bytes, offset, 0) };
        match p2p {
            Ok(n) if n == bytes => {}
            Err(Errno::REMOTEIO | Errno::INVAL | Errno::OPNOTSUPP) => return Some(P2pTrust::Unreachable),
            _ => return None,
        }
        if *mapped == *host {
            return Some(P2pTrust::Trusted);
        }
    }
    Some(P2pTrust::Untrusted)
}
