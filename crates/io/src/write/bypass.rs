//! Writes that go around the page cache, or past the host's memory.
//!
//! ```text
//!   own O_DIRECT descriptor    p2p where storage can fetch out of the device; else staging, as any other write
//!   any other descriptor       by cost (plan/src/write.rs): page cache, or through a twin
//!                                direct   staging ──O_DIRECT──> storage
//!                                p2p      device memory ──O_DIRECT──> storage
//! ```
//!
//! The page cache is the rule. A twin is opened for one write and closed behind it, since it is an open for writing like
//! any other: whoever watches the directory sees it come and go, and nothing of the program can be executed from such a
//! file meanwhile. Nor are direct writes one step for others: the kernel lets two of them that overlap go on side by side, and
//! mixes them. So it is for writes larger than the staging memory, which are cut anyway, where storage is faster than a thread
//! that copies, or they wait for storage in any case (O_SYNC, O_DSYNC) and find nothing cached; and for device memory that
//! only the CPU or storage can read. It takes no write that needs the program's own descriptor or thread: O_APPEND,
//! `RWF_*`, a lease, a size limit (RLIMIT_FSIZE) in reach.
//!
//! A peer-to-peer write up to the staging bound is one call too, so it must be aligned as a whole. A larger one is cut:
//! edges through the page cache, the middle around it.
//!
//! Peer-to-peer is not believed at first: what the first such write of a file system and device has written is read back
//! around the page cache and compared with the device. A P2P write that fails or ends short is redone whole, through
//! staging and the program's own descriptor: how much of it reached storage cannot be known. Where a write has to reach
//! more than one disk, none goes this way: Linux (7.3) calls a write to a mirror done when one side could not fetch it.
//!
//! Known flaws: two peer-to-peer writes that overlap may be mixed. Reading back needs permission to read the file. inotify reports IN_CLOSE_WRITE for the twin, while the
//! program still has the file open.

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

/// Bytes of one P2P call at most.
const MAX_P2P_CALL: usize = 0x7fff_f000;

/// How long the twin's end is waited for.
const CLOSE_WAIT: Duration = Duration::from_millis(20);

impl WriteRequest<'_> {
    /// Whether going around the page cache is worth a look. Cheap: most writes end here.
    pub(super) fn may_bypass_cache(&self, flags: i32) -> bool {
        let flags = flags as u32;
        let settings = &self.ctx.policy;
        if self.flags != 0 || flags & linux::O_APPEND != 0 || (self.len as u64) < MIN_P2P {
            return false;
        }
        let may_be_direct = self.needs_chunks() && self.len as u64 >= MIN_DIRECT && settings.allows(Route::Direct);
        let direct = flags & linux::O_DIRECT == 0 && may_be_direct;
        direct || (self.p2p_source().is_some() && settings.allows(Route::P2p))
    }

    /// The device memory of a write that storage might fetch by itself. Memory of both kinds is never mixed in a vector.
    fn p2p_source(&self) -> Option<Target> {
        match *self.parts {
            [Part::Device(from, _)] if from.allocation.p2p_mapped => Some(from),
            _ => None,
        }
    }

    /// The first device that it takes bytes from.
    fn first_device(&self) -> Option<&'static dyn Device> {
        self.parts.iter().find_map(|part| match part {
            Part::Device(from, _) => Some(from.allocation.device),
            Part::Host(..) => None,
        })
    }

    /// The write, at a known offset, by the cheapest way.
    pub(super) fn bypass_cache(&self, flags: i32) -> Result<usize> {
        let (Some(offset), Some(device)) = (self.at, self.first_device()) else {
            return self.write_app_fd();
        };
        // Any opening would break it, also one that only looks.
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
            // Not there any more when the call returns, unless a server is slow.
            self.ctx
                .files
                .shadow_workers()
                .into_iter()
                .for_each(|workers| workers.wait_closed(Some(file.storage), CLOSE_WAIT));
        }
        wrote
    }

    /// Edges through the page cache, the middle by `hand`.
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

    /// Staged bytes around the page cache. What fails there before it has written anything is for the program's own
    /// descriptor, which then says why.
    fn write_via_shadow_fd(&self, range: Range<usize>, via: WriteVia) -> Result<usize> {
        let single_call = range.len() == self.len && self.staged_bytes() <= staging_limit(self.ctx);
        let wrote = if single_call { self.write_once(Some(via)) } else { self.write_chunks(range.clone(), via) };
        match wrote {
            Ok(wrote) => Ok(wrote),
            Err(_) if single_call => self.write_once(Some(WriteVia { reason: Reason::Fallback, ..self.via_app_fd() })),
            Err(_) => self.write_chunks(range, WriteVia { reason: Reason::Fallback, ..self.via_app_fd() }),
        }
    }

    /// Whether a descriptor of ours may write here.
    fn may_open_shadow(&self, file: &FileState, offset: u64) -> core::result::Result<(), Reason> {
        file.direct_fd.as_ref().map_err(|reason| *reason)?;
        if offset + self.len as u64 <= linux::file_size_limit() { Ok(()) } else { Err(Reason::AppFdOnly) }
    }

    /// A descriptor for this write alone.
    fn open_shadow(&self, file: &FileState, flags: i32) -> Option<ShadowFd> {
        let shadow = self.ctx.files.shadow_workers()?.for_key(file.storage);
        let (kernel, fd, tid) = (self.ctx.files.sys(), self.fd, linux::gettid());
        let flags = linux::O_WRONLY | linux::O_DIRECT | linux::O_NONBLOCK | flags as u32 & SYNC_FLAGS;
        let (key, close_queue) = (file.key(), shadow.close_queue());
        shadow.run_blocking(move || {
            let shadow = ShadowFd::new(kernel.reopen(tid, fd, flags as i32).ok()?, close_queue);
            let same_file = kernel.is_file(shadow.get(), key);
            same_file.then_some(shadow)
        })?
    }

    /// Whether storage of the file may fetch these bytes.
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
            // Nothing can be ordered behind what is being captured.
            return Err(Reason::Capturing);
        }
        self.ctx.files.p2p_trust.p2p_trust(file.storage, device).unwrap_or(P2pTrust::Trusted).allows()
    }

    /// Peer-to-peer; what cannot go this way is redone whole.
    fn p2p_write(&self, file: &Arc<FileState>, range: Range<usize>, via: WriteVia) -> Result<usize> {
        let Some(from) = self.p2p_source() else { return self.write_chunks(range, self.via_app_fd()) };
        let device = from.allocation.device;
        let fail = |e| Error::device(e, "write", self.at.unwrap_or(0), self.len as u64);
        // Storage keeps no order with the device's streams: what was queued before has to be done.
        let fence = FenceGuard::new(device, device.app_stream().id());
        fence.and_then(|fence| fence.wait(WaitMode::Context)).map_err(fail)?;
        let mut done = range.start;
        while done < range.end {
            let started = Instant::now();
            let len = (range.end - done).min(MAX_P2P_CALL);
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

    /// Whether storage has what the device has: asked once for each file system and device.
    fn verify_p2p(&self, file: &Arc<FileState>, source: Target, offset: u64, len: usize) -> bool {
        let device = source.allocation.device;
        if self.ctx.files.p2p_trust.p2p_trust(file.storage, device).is_some() {
            return true;
        }
        let len = len.min(BUFFER_SIZE);
        let Some(shadow) = self.ctx.files.shadow_workers() else { return false };
        // Twice: somebody else may have written there since.
        for _ in 0..2 {
            let (kernel, file_ref) = (self.ctx.files.sys(), Arc::clone(file));
            let on_disk = shadow.for_key(file.storage).run_blocking(move || {
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
