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

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use spinio_device::{Device, Wait};
use spinio_plan::{Reason, Route, write_cut};
use spinio_sys::Errno;
use spinio_sys::linux;

use super::choice::{LEAST_DIRECT, LEAST_P2P, Prospect, SYNC};
use super::whole::Hand;
use super::{Part, Result, Write, bound};
use spinio_files::Verdict;
use spinio_host::shadow_fd::PrivateFd;
use spinio_files::File;
use spinio_transfer::bounce::BLOCK;
use spinio_device::Target;
use spinio_transfer::Error;
use spinio_transfer::AlignedBuf;

/// Bytes of one P2P call at most.
const P2P_CALL: usize = 0x7fff_f000;

/// How long the twin's end is waited for.
const PARTING: Duration = Duration::from_millis(20);

impl Write<'_> {
    /// Whether going around the page cache is worth a look. Cheap: most writes end here.
    pub(super) fn may_go_around(&self, flags: i32) -> bool {
        let flags = flags as u32;
        let settings = &self.ctx.policy;
        if self.flags != 0 || flags & linux::O_APPEND != 0 || (self.len as u64) < LEAST_P2P {
            return false;
        }
        let may_be_direct = self.may_be_cut() && self.len as u64 >= LEAST_DIRECT && settings.allows(Route::Direct);
        let direct = flags & linux::O_DIRECT == 0 && may_be_direct;
        direct || (self.mapped().is_some() && settings.allows(Route::P2p))
    }

    /// The device memory of a write that storage might fetch by itself. Memory of both kinds is never mixed in a vector.
    fn mapped(&self) -> Option<Target> {
        match *self.parts {
            [Part::Device(from, _)] if from.allocation.p2p_mapped => Some(from),
            _ => None,
        }
    }

    /// The first device that it takes bytes from.
    fn device(&self) -> Option<&'static dyn Device> {
        self.parts.iter().find_map(|part| match part {
            Part::Device(from, _) => Some(from.allocation.device),
            Part::Host(..) => None,
        })
    }

    /// The write, at a known offset, by the cheapest way.
    pub(super) fn around(&self, flags: i32) -> Result<usize> {
        let (Some(offset), Some(device)) = (self.at, self.device()) else {
            return self.plain();
        };
        // Any opening would break it, also one that only looks.
        if self.ctx.files.sys().is_leased(self.fd) {
            return self.plain();
        }
        let Ok(file) = self.ctx.files.get(self.fd, self.stat) else { return self.plain() };
        let mut prospect = Prospect {
            ctx: self.ctx,
            file: &file,
            device,
            fd: self.fd,
            offset,
            len: self.len as u64,
            flags: flags as u32,
            into_cache: self.cache_route(),
            in_parts: self.may_be_cut(),
            p2p: Ok(()),
            twin: self.may_open_twin(&file, offset),
        };
        prospect.p2p = self.p2p(&file, offset, prospect.unit());
        let way = prospect.way();
        if let Some(reason) = way.refused {
            self.ctx.files.stats().refused(reason, self.len as u64);
        }
        let own = flags as u32 & linux::O_DIRECT != 0;
        if way.route.from_cache() || (own && way.route == Route::Direct) {
            return self.plain();
        }
        let twin = if own { None } else { self.twin(&file, flags) };
        if !own && twin.is_none() {
            return self.plain();
        }
        let hand = Hand { twin: twin.as_ref().map(PrivateFd::get), route: way.route, reason: way.reason };
        let (front, middle) = write_cut(offset, self.len as u64, prospect.unit());
        let wrote = self.cut(&file, hand, front as usize, (front + middle) as usize);
        if twin.is_some() {
            drop(twin);
            // Not there any more when the call returns, unless a server is slow.
            self.ctx.files.shadow_workers().into_iter().for_each(|workers| workers.await_burials(PARTING));
        }
        wrote
    }

    /// Edges through the page cache, the middle by `hand`.
    fn cut(&self, file: &Arc<File>, hand: Hand, front: usize, end: usize) -> Result<usize> {
        let edge = Hand { reason: Reason::Edge, ..self.own_hand() };
        let mut done = 0;
        for (range, hand) in [(0..front, edge), (front..end, hand), (end..self.len, edge)] {
            if range.is_empty() {
                continue;
            }
            let wanted = range.len();
            let wrote = match hand.route {
                Route::P2p => self.out_of_device(file, range, hand),
                Route::Direct if hand.twin.is_some() => self.through_twin(range, hand),
                _ => self.portions(range, hand),
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
    fn through_twin(&self, range: Range<usize>, hand: Hand) -> Result<usize> {
        let all = range.len() == self.len && self.staged() <= bound(self.ctx);
        let wrote = if all { self.whole(Some(hand)) } else { self.portions(range.clone(), hand) };
        match wrote {
            Ok(wrote) => Ok(wrote),
            Err(_) if all => self.whole(Some(Hand { reason: Reason::FellBack, ..self.own_hand() })),
            Err(_) => self.portions(range, Hand { reason: Reason::FellBack, ..self.own_hand() }),
        }
    }

    /// Whether a descriptor of ours may write here.
    fn may_open_twin(&self, file: &File, offset: u64) -> core::result::Result<(), Reason> {
        file.direct.as_ref().map_err(|reason| *reason)?;
        if offset + self.len as u64 <= linux::file_size_limit() { Ok(()) } else { Err(Reason::OwnOnly) }
    }

    /// A descriptor for this write alone.
    fn twin(&self, file: &File, flags: i32) -> Option<PrivateFd> {
        let keepers = self.ctx.files.shadow_workers()?;
        let (kernel, fd, tid) = (self.ctx.files.sys(), self.fd, linux::gettid());
        let flags = linux::O_WRONLY | linux::O_DIRECT | linux::O_NONBLOCK | flags as u32 & SYNC;
        let (key, graves) = (file.key(), keepers.graveyard());
        keepers.call(move || {
            let twin = PrivateFd::new(kernel.open_again(tid, fd, flags as i32).ok()?, graves);
            let same = kernel.names(twin.get(), key);
            same.then_some(twin)
        })?
    }

    /// Whether storage of the file may fetch these bytes.
    fn p2p(&self, file: &File, offset: u64, unit: u64) -> core::result::Result<(), Reason> {
        let from = self.mapped().ok_or(Reason::NoP2pMapping)?;
        if !self.ctx.policy.allows(Route::P2p) {
            return Err(Reason::Forced);
        }
        file.direct.as_ref().map_err(|reason| *reason)?;
        if !file.geometry().writes_once() {
            return Err(Reason::P2pMirror);
        }
        let memory = u64::from(file.align.memory).max(1);
        let (front, _) = write_cut(offset, self.len as u64, unit);
        if !(from.addr.0 + front).is_multiple_of(memory) {
            return Err(Reason::P2pMisaligned);
        }
        let device = from.allocation.device;
        if device.program_queue().1 {
            // Nothing can be ordered behind what is being captured.
            return Err(Reason::Capturing);
        }
        self.ctx.files.p2p.verdict(file.storage, device).unwrap_or(Verdict::Trusted).allows()
    }

    /// Peer-to-peer; what cannot go this way is redone whole.
    fn out_of_device(&self, file: &Arc<File>, range: Range<usize>, hand: Hand) -> Result<usize> {
        let Some(from) = self.mapped() else { return self.portions(range, self.own_hand()) };
        let device = from.allocation.device;
        let fail = |e| Error::device(e, "write", self.at.unwrap_or(0), self.len as u64);
        // Storage keeps no order with the device's queues: what was queued before has to be done.
        let fence = device.fence(device.program_queue().0).map_err(fail)?;
        let waited = device.wait(&fence, Wait::Context);
        device.release_fence(fence);
        waited.map_err(fail)?;
        let mut done = range.start;
        while done < range.end {
            let begun = Instant::now();
            let len = (range.end - done).min(P2P_CALL);
            let at = self.at.map(|at| at + done as u64);
            let source = from.addr.offset(done as u64);
            let wrote = self.call(hand, &[[source.0 as usize, len]], at);
            let right = wrote == Ok(len) && self.arrived(file, Target { addr: source, ..from }, at.unwrap_or(0), len);
            if !right {
                if matches!(wrote, Err(Errno::REMOTEIO | Errno::INVAL | Errno::OPNOTSUPP)) {
                    self.ctx.files.p2p.set(file.storage, device, Verdict::Unreachable);
                }
                let again = Hand { reason: Reason::FellBack, ..self.own_hand() };
                let rest = if range.len() == self.len && done == 0 && self.staged() <= bound(self.ctx) {
                    self.whole(Some(again))
                } else {
                    self.portions(done..range.end, again)
                };
                return match rest {
                    Ok(wrote) => Ok(done - range.start + wrote),
                    Err(error) if done == range.start => Err(error),
                    Err(_) => Ok(done - range.start),
                };
            }
            self.ctx.files.stats().piece(&self.watch, hand.route, hand.reason, done as u64, len as u64, begun);
            done += len;
        }
        Ok(range.len())
    }

    /// Whether storage has what the device has: asked once for each file system and device.
    fn arrived(&self, file: &Arc<File>, source: Target, offset: u64, len: usize) -> bool {
        let device = source.allocation.device;
        if self.ctx.files.p2p.verdict(file.storage, device).is_some() {
            return true;
        }
        let len = len.min(BLOCK);
        let Some(keepers) = self.ctx.files.shadow_workers() else { return false };
        // Twice: somebody else may have written there since.
        for _ in 0..2 {
            let (kernel, theirs) = (self.ctx.files.sys(), Arc::clone(file));
            let stored = keepers.call(move || {
                let twin = theirs.direct.as_ref().ok()?;
                let mut bytes = AlignedBuf::zeroed(len);
                // SAFETY: `bytes` has `len` bytes.
                let got = unsafe { kernel.pread(Route::Direct, twin.get(), bytes.as_mut_ptr(), len, offset, 0) };
                (got == Ok(len)).then_some(bytes)
            });
            let mut sent = vec![0u8; len];
            if let Some(Some(stored)) = stored
                && self.fetch(source, &mut sent)
                && *stored == *sent
            {
                self.ctx.files.p2p.set(file.storage, device, Verdict::Trusted);
                return true;
            }
        }
        self.ctx.files.p2p.set(file.storage, device, Verdict::Untrusted);
        false
    }

    /// Bytes of the device, by way of the device.
    fn fetch(&self, from: Target, into: &mut [u8]) -> bool {
        let device = from.allocation.device;
        let queue = device.program_queue().0;
        // SAFETY: `into` is borrowed until the drain below returns, and the range lies in the write's allocation.
        let copied = unsafe { device.copy_out(queue, into.as_mut_ptr(), from.addr, into.len()) };
        let drained = device.drain(queue, Wait::Context);
        copied.is_ok() && drained.is_ok()
    }
}
