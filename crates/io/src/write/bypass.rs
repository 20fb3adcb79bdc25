//! Writes that bypass the page cache, and peer-to-peer writes, which bypass host memory too.
//!
//! ```text
//!   own O_DIRECT descriptor    p2p where storage can DMA out of the device; else staged, as any other write
//!   any other descriptor       by cost (plan/src/write.rs): page cache, or through a shadow descriptor
//!                                direct   bounce buffers ──O_DIRECT──> storage
//!                                p2p      device memory ──O_DIRECT──> storage
//! ```
//!
//! The page cache is the default. A shadow descriptor is opened for one write and closed after it, since it is an open
//! for writing like any other: a program that watches the directory sees the open and the close, and the file cannot be
//! executed meanwhile. Direct writes are not atomic with respect to other writers either: the kernel runs two
//! overlapping ones concurrently and mixes their bytes. So the bypass is for
//!
//! - writes larger than the staging memory, which are cut anyway, where storage is faster than a copying thread, or
//!   which wait for storage in any case (O_SYNC, O_DSYNC) and find no page cached;
//! - device memory that only the CPU or storage can read.
//!
//! It excludes each write that needs the program's own descriptor or thread: O_APPEND, `RWF_*`, a lease, a size limit
//! (RLIMIT_FSIZE) that the write can reach.
//!
//! A peer-to-peer write up to the staging limit is a single system call too, so it must be aligned as a whole. A larger
//! one is cut: its edges go through the page cache, the middle bypasses it.
//!
//! Peer-to-peer is not trusted at first: the bytes of the first such write of a file system and device are read back
//! with O_DIRECT and compared with the device. A P2P write that fails or ends short is redone as a whole, staged and
//! through the program's own descriptor: how much of it reached storage is unknown. A write that has to reach more than
//! one disk never uses P2P: Linux (7.3) completes a write to a mirror although one side could not fetch the bytes.
//!
//! Known flaws:
//! - Two peer-to-peer writes that overlap may be mixed.
//! - Reading back needs permission to read the file.
//! - inotify reports IN_CLOSE_WRITE for the shadow descriptor, while the program still has the file open.

#![expect(unsafe_code, reason = "system calls into bounce buffers and device memory")]

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spinio_device::{Device, FenceGuard, Target, WaitMode};
use spinio_plan::{Reason, Route, split_aligned};
use spinio_sys::Errno;
use spinio_sys::linux;

use super::decide::{MIN_DIRECT, MIN_P2P, SYNC_FLAGS, WriteQuery};
use super::write_once::WriteVia;
use super::{Part, Result, WriteRequest, staging_limit};
use spinio_files::FileState;
use spinio_files::P2pTrust;
use spinio_host::shadow_fd::ShadowFd;
use spinio_transfer::AlignedBuf;
use spinio_transfer::Error;
use spinio_transfer::bounce::BUFFER_SIZE;

/// How long to wait for the close of the shadow descriptor.
const CLOSE_WAIT: Duration = Duration::from_millis(20);

impl WriteRequest<'_> {
    /// Whether bypassing the page cache is worth considering. Cheap: most writes stop here.
    pub(super) fn may_bypass_cache(&self, flags: i32) -> bool {
        let flags = flags as u32;
        let policy = &self.ctx.policy;
        if self.flags != 0 || flags & linux::O_APPEND != 0 || (self.len as u64) < MIN_P2P {
            return false;
        }
        let may_be_direct = self.needs_chunks() && self.len as u64 >= MIN_DIRECT && policy.allows(Route::Direct);
        let direct = flags & linux::O_DIRECT == 0 && may_be_direct;
        direct || (self.p2p_source().is_some() && policy.allows(Route::P2p))
    }

    /// The device memory of a write that storage might DMA from. Only for a write of one device part: one vector never
    /// has memory of both kinds.
    fn p2p_source(&self) -> Option<Target> {
        match *self.parts {
            [Part::Device(from, _)] if from.allocation.p2p_mapped => Some(from),
            _ => None,
        }
    }

    /// The first device whose memory the write has.
    fn first_device(&self) -> Option<&'static dyn Device> {
        self.parts.iter().find_map(|part| match part {
            Part::Device(from, _) => Some(from.allocation.device),
            Part::Host(..) => None,
        })
    }

    /// Does the write, at a known offset, by the cheapest route.
    pub(super) fn bypass_cache(&self, flags: i32) -> Result<usize> {
        let (Some(offset), Some(device)) = (self.at, self.first_device()) else {
            return self.write_app_fd();
        };
        // Any open of the file would break the lease, also one that only reads its state.
        if self.ctx.files.sys().is_leased(self.fd) {
            return self.write_app_fd();
        }
        let Ok(file) = self.ctx.files.get(self.fd, self.stat) else { return self.write_app_fd() };
        let mut query = WriteQuery {
            ctx: self.ctx,
            file: &file,
            device,
            fd: self.fd,
            offset,
            len: self.len as u64,
            flags: flags as u32,
            cache_route: self.cache_route(),
            chunked: self.needs_chunks(),
            p2p: Ok(()),
            shadow: self.may_open_shadow(&file, offset),
        };
        query.p2p = self.check_p2p(&file, offset, query.alignment());
        let decision = query.decide();
        if let Some(reason) = decision.refused {
            self.ctx.files.stats().record_refusal(reason, self.len as u64);
        }
        let app_direct = flags as u32 & linux::O_DIRECT != 0;
        if decision.route.from_cache() || (app_direct && decision.route == Route::Direct) {
            return self.write_app_fd();
        }
        let shadow = if app_direct { None } else { self.open_shadow(&file, flags) };
        if !app_direct && shadow.is_none() {
            return self.write_app_fd();
        }
        let via =
            WriteVia { shadow_fd: shadow.as_ref().map(ShadowFd::get), route: decision.route, reason: decision.reason };
        let (front, middle) = split_aligned(offset, self.len as u64, query.alignment());
        let wrote = self.write_split(&file, via, front as usize, (front + middle) as usize);
        if shadow.is_some() {
            drop(shadow);
            // The shadow descriptor is closed before the call returns, unless a server is slow.
            self.ctx
                .files
                .shadow_workers()
                .into_iter()
                .for_each(|workers| workers.wait_closed(Some(file.storage), CLOSE_WAIT));
        }
        wrote
    }

    /// Writes the edges through the page cache, and the middle by `via`.
    fn write_split(&self, file: &Arc<FileState>, via: WriteVia, front: usize, end: usize) -> Result<usize> {
        let edge = WriteVia { reason: Reason::Edge, ..self.via_app_fd() };
        let mut done = 0;
        for (range, via) in [(0..front, edge), (front..end, via), (end..self.len, edge)] {
            if range.is_empty() {
                continue;
            }
            let wanted = range.len();
            let wrote = match via.route {
                Route::P2p => self.p2p_write(file, range, via),
                Route::Direct if via.shadow_fd.is_some() => self.write_via_shadow_fd(range, via),
                _ => self.write_chunks(range, via),
            };
            match wrote {
                Ok(wrote) => done += wrote,
                Err(error) if done == 0 => return Err(error),
                Err(_) => break,
            }
            if wrote.is_ok_and(|wrote| wrote < wanted) {
                break;
            }
        }
        Ok(done)
    }

    /// Writes staged bytes with O_DIRECT. If that fails before any byte was written, the program's own descriptor is
    /// used, whose error is then returned.
    fn write_via_shadow_fd(&self, range: Range<usize>, via: WriteVia) -> Result<usize> {
        let single_call = range.len() == self.len && self.staged_bytes() <= staging_limit(self.ctx);
        let wrote = if single_call { self.write_once(Some(via)) } else { self.write_chunks(range.clone(), via) };
        match wrote {
            Ok(wrote) => Ok(wrote),
            Err(_) if single_call => self.write_once(Some(WriteVia { reason: Reason::Fallback, ..self.via_app_fd() })),
            Err(_) => self.write_chunks(range, WriteVia { reason: Reason::Fallback, ..self.via_app_fd() }),
        }
    }

    /// Whether a shadow descriptor may write this range.
    fn may_open_shadow(&self, file: &FileState, offset: u64) -> core::result::Result<(), Reason> {
        file.direct_fd.as_ref().map_err(|reason| *reason)?;
        if offset + self.len as u64 <= linux::file_size_limit() { Ok(()) } else { Err(Reason::AppFdOnly) }
    }

    /// Opens a shadow descriptor for this write only.
    fn open_shadow(&self, file: &FileState, flags: i32) -> Option<ShadowFd> {
        let workers = self.ctx.files.shadow_workers()?.for_key(file.storage);
        let (kernel, fd, tid) = (self.ctx.files.sys(), self.fd, linux::gettid());
        let flags = linux::O_WRONLY | linux::O_DIRECT | linux::O_NONBLOCK | flags as u32 & SYNC_FLAGS;
        let (key, close_queue) = (file.key(), workers.close_queue());
        workers.run_blocking(move || {
            let shadow = ShadowFd::new(kernel.reopen(tid, fd, flags as i32).ok()?, close_queue);
            let same_file = kernel.is_file(shadow.get(), key);
            same_file.then_some(shadow)
        })?
    }

    /// Whether the storage of the file may DMA from this memory.
    fn check_p2p(&self, file: &FileState, offset: u64, unit: u64) -> core::result::Result<(), Reason> {
        let from = self.p2p_source().ok_or(Reason::NoP2pMapping)?;
        if !self.ctx.policy.allows(Route::P2p) {
            return Err(Reason::BySetting);
        }
        file.direct_fd.as_ref().map_err(|reason| *reason)?;
        if !file.block_stack().writes_single_disk() {
            return Err(Reason::P2pMirror);
        }
        let memory = u64::from(file.direct_align.memory).max(1);
        let (front, _) = split_aligned(offset, self.len as u64, unit);
        if !(from.addr.0 + front).is_multiple_of(memory) {
            return Err(Reason::P2pMisaligned);
        }
        let device = from.allocation.device;
        if device.app_stream().is_capturing() {
            // No work can be ordered after a stream that is being captured.
            return Err(Reason::Capturing);
        }
        self.ctx.files.p2p_trust.p2p_trust(file.storage, device).unwrap_or(P2pTrust::Trusted).allows()
    }

    /// Writes a range peer-to-peer. After a failure the rest is redone as a whole, staged.
    fn p2p_write(&self, file: &Arc<FileState>, range: Range<usize>, via: WriteVia) -> Result<usize> {
        let Some(from) = self.p2p_source() else { return self.write_chunks(range, self.via_app_fd()) };
        let device = from.allocation.device;
        let fail = |e| Error::device(e, "write", self.at.unwrap_or(0), self.len as u64);
        // Storage is not ordered with the device's streams: work queued before must be complete.
        let fence = FenceGuard::new(device, device.app_stream().id());
        fence.and_then(|fence| fence.wait(WaitMode::Context)).map_err(fail)?;
        let mut done = range.start;
        while done < range.end {
            let started = Instant::now();
            let len = (range.end - done).min(linux::MAX_RW_COUNT);
            let at = self.at.map(|at| at + done as u64);
            let source = from.addr.offset(done as u64);
            let wrote = self.write_vectors(via, &[[source.0 as usize, len]], at);
            let complete =
                wrote == Ok(len) && self.verify_p2p(file, Target { addr: source, ..from }, at.unwrap_or(0), len);
            if !complete {
                if matches!(wrote, Err(Errno::REMOTEIO | Errno::INVAL | Errno::OPNOTSUPP)) {
                    self.ctx.files.p2p_trust.set(file.storage, device, P2pTrust::Unreachable);
                }
                let fallback = WriteVia { reason: Reason::Fallback, ..self.via_app_fd() };
                let rest = if range.len() == self.len && done == 0 && self.staged_bytes() <= staging_limit(self.ctx) {
                    self.write_once(Some(fallback))
                } else {
                    self.write_chunks(done..range.end, fallback)
                };
                return match rest {
                    Ok(wrote) => Ok(done - range.start + wrote),
                    Err(error) if done == range.start => Err(error),
                    Err(_) => Ok(done - range.start),
                };
            }
            self.ctx.files.stats().record_piece(&self.span, via.route, via.reason, done as u64, len as u64, started);
            done += len;
        }
        Ok(range.len())
    }

    /// Whether the bytes on storage equal those in the device: checked once for each file system and device.
    fn verify_p2p(&self, file: &Arc<FileState>, source: Target, offset: u64, len: usize) -> bool {
        let device = source.allocation.device;
        if self.ctx.files.p2p_trust.p2p_trust(file.storage, device).is_some() {
            return true;
        }
        let len = len.min(BUFFER_SIZE);
        let Some(workers) = self.ctx.files.shadow_workers() else { return false };
        // Twice: another writer may have written there since.
        for _ in 0..2 {
            let (kernel, file_ref) = (self.ctx.files.sys(), Arc::clone(file));
            let on_disk = workers.for_key(file.storage).run_blocking(move || {
                let shadow = file_ref.direct_fd.as_ref().ok()?;
                let mut bytes = AlignedBuf::zeroed(len);
                // SAFETY: `bytes` has `len` bytes.
                let got = unsafe { kernel.pread(Route::Direct, shadow.get(), bytes.as_mut_ptr(), len, offset, 0) };
                (got == Ok(len)).then_some(bytes)
            });
            let mut in_device = vec![0u8; len];
            if let Some(Some(stored)) = on_disk
                && self.ctx.read_back(source, &mut in_device).is_ok()
                && *stored == *in_device
            {
                self.ctx.files.p2p_trust.set(file.storage, device, P2pTrust::Trusted);
                return true;
            }
        }
        self.ctx.files.p2p_trust.set(file.storage, device, P2pTrust::Untrusted);
        false
    }
}
