//! Writes of files that are larger than the staging memory: in portions, each one call of the kernel.
//!
//! ```text
//!   device   copy 0 │ copy 1 │ copy 2 ...
//!   kernel          │ write 0 ......... │ write 1 .........
//! ```
//!
//! Where nothing can be lacking, portions of the program's own O_DIRECT descriptor are under way side by side: `abreast.rs`.
//!
//! Around the page cache a portion ends where a stripe of an array with parity does, so that the array is spared reading
//! old parity. Stripes lie on the device, not in the file: file/stripes.rs knows where.
//!
//! At the descriptor's own offset the whole range is taken first, with one relative `lseek`, so that who shares the
//! offset goes on behind it; what was not written is given back.
//!
//! A misaligned O_DIRECT write is for the kernel to refuse, or to take all the same (btrfs does), but not to take in part.
//! So its first portion ends as the whole write does, that many bytes behind a unit: who takes the one takes the other.
//!
//! Known flaw: where a file has no byte yet, nobody knows where on the device its first ones will be. So the first two
//! portions of a new file end anywhere in a stripe, and the others where its beginning lets expect an end.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use spinio_plan::{Reason, Route};
use spinio_sys::linux::{self, FileKind};

use super::gather::{Gathered, Into, Order};
use super::whole::Hand;
use super::{Result, Write, bound, reason};
use spinio_transfer::Error;
use spinio_files::File;
use spinio_files::stripes::Surveyed;
use spinio_host::is_interrupted;
use crate::read::large::{reserve, unreserve};
use spinio_transfer::bounce::BLOCK;

/// Bytes of a portion at most: enough to keep storage busy, and the next portion has room beside it.
const PORTION: u64 = 32 << 20;

/// Bytes of the first one, which nothing is written beside.
const FIRST: usize = 8 << 20;

const RWF_APPEND: u32 = 0x10;

/// A file on an array with parity, and what is known of where it lies there.
struct Ends {
    file: Arc<File>,
    known: Option<Arc<Surveyed>>,
}

impl Write<'_> {
    /// Portion by portion; the unbroken front that was written.
    pub(super) fn long(&self) -> Result<usize> {
        let hand = self.own_hand();
        let why = if hand.reason == Reason::IntoCache { Reason::InParts } else { hand.reason };
        let hand = Hand { reason: why, ..hand };
        if self.appends() {
            return self.portions(0..self.len, hand);
        }
        self.at_offset(|write| write.portions(0..write.len, hand))
    }

    /// Whether the bytes go to the end of the file, wherever that is.
    pub(super) fn appends(&self) -> bool {
        let flags = self.ctx.files.sys().flags(self.fd).unwrap_or(0);
        flags & linux::O_APPEND as i32 != 0 || self.flags & RWF_APPEND != 0
    }

    /// The same write at an offset that is known, whether or not it was.
    pub(super) fn at_offset(&self, write: impl FnOnce(&Write<'_>) -> Result<usize>) -> Result<usize> {
        if self.at.is_some() {
            return write(self);
        }
        match reserve(self.ctx.files.sys(), self.fd, self.len as u64) {
            Ok(start) => {
                let wrote = write(&Write { at: Some(start), ..*self });
                unreserve(self.ctx.files.sys(), self.fd, (self.len - *wrote.as_ref().unwrap_or(&0)) as u64);
                wrote
            }
            // The offset cannot be moved that far (the end of a block device, the largest file): the kernel says why.
            Err(_) => write(self),
        }
    }

    /// Where a range ends that RLIMIT_FSIZE cuts, as it would cut one call: the signal is for a write that begins there.
    fn within_limit(&self, range: Range<usize>) -> usize {
        let start = self.at.filter(|_| !self.appends()).unwrap_or(self.stat.size);
        let room = linux::file_size_limit().saturating_sub(start);
        match usize::try_from(room) {
            Ok(room) if self.stat.kind == FileKind::Regular && room > range.start => range.end.min(room),
            _ => range.end,
        }
    }

    /// Where portions of it should end, if that matters. What goes into the page cache the kernel gathers anyway.
    fn ends(&self, hand: Hand) -> Option<Ends> {
        self.at.filter(|_| hand.route == Route::Direct)?;
        // The twins that are opened to look would break a lease of the program's.
        if hand.twin.is_none() && self.ctx.files.sys().is_leased(self.fd) {
            return None;
        }
        let file = self.ctx.files.get(self.fd, self.stat).ok()?;
        let array = *file.stripes.array.as_ref().ok()?;
        (self.len as u64 >= array.width).then(|| Ends { known: file.stripes.kept(&self.stat), file })
    }

    /// `most`, or less so that a portion from `from` on ends where a stripe does, and direct I/O still may.
    fn up_to_stripe(&self, ends: &mut Ends, from: usize, most: usize) -> usize {
        let start = self.at.unwrap_or(0);
        let at = start + from as u64;
        let limit = at + most as u64;
        let told = |known: &Surveyed| known.range.start <= at && limit <= known.range.end;
        if !ends.known.as_deref().is_some_and(told) {
            // From the last portion on that is written for sure: what comes behind it will probably lie behind it. And up
            // to the end: the next portions need not ask again.
            let all = at.saturating_sub(PORTION).max(start)..start + self.len as u64;
            ends.known = ends.file.stripes.look(&self.ctx.files.ctx, (&ends.file.cached, ends.file.size), &self.stat, all);
        }
        let end = ends.known.as_ref().and_then(|known| known.shape.end_of_portion(at, most as u64));
        let end = end.filter(|end| end.is_multiple_of(linux::PAGE as u64));
        end.map_or(most, |end| (end - at) as usize)
    }

    /// A range of the write; how many bytes of it were written.
    pub(super) fn portions(&self, range: Range<usize>, hand: Hand) -> Result<usize> {
        let device_error = |e| Error::device(e, "write", self.at.unwrap_or(0), self.len as u64);
        let order = Order::leased(self.parts).map_err(device_error)?;
        self.portions_on(&order, range, hand)
    }

    /// All of it at once, behind what is on the given queues.
    pub(super) fn behind(&self, order: &Order) -> Result<usize> {
        self.portions_on(order, 0..self.len, self.own_hand())
    }

    fn portions_on(&self, order: &Order, range: Range<usize>, hand: Hand) -> Result<usize> {
        let range = range.start..self.within_limit(range.clone());
        let most = (bound(self.ctx) / 2).min(PORTION) as usize / BLOCK * BLOCK;
        let lacks = if hand.twin.is_none() { self.lacks(range.len()) } else { 0 };
        let mut ends = self.ends(hand).filter(|_| lacks == 0);
        let abreast = lacks == 0 && ends.is_none() && self.may_go_abreast(&range, hand);
        let mut gather = |from: usize, most: usize| {
            let most = ends.as_mut().map_or(most, |ends| self.up_to_stripe(ends, from, most));
            let parts = self.portion(from, most.min(range.end - from));
            Gathered::begin(self.ctx, order, &parts, Into::Ring, self.at.unwrap_or(0) + from as u64)?.fenced()
        };
        if abreast && let Some(wrote) = self.abreast(&range, hand, &mut gather) {
            return wrote;
        }
        let mut done = range.start;
        let mut next = (!range.is_empty()).then(|| gather(done, most.min(FIRST) - lacks));
        let ended = loop {
            let Some(portion) = next.take() else { break Ok(()) };
            let begun = Instant::now();
            let at = self.at.map(|start| start + done as u64);
            let portion = portion.and_then(|mut portion| portion.wait().map(|()| portion));
            let portion = match portion {
                Ok(portion) => portion,
                Err(error) => break Err(error),
            };
            let end = done + portion.len;
            next = (end < range.end).then(|| gather(end, most));
            match self.call(hand, &portion.vectors, at) {
                Ok(wrote) => {
                    let why = reason(portion.is_pinned(), hand.reason);
                    self.ctx.files.stats().piece(&self.watch, hand.route, why, done as u64, wrote as u64, begun);
                    done += wrote;
                    let short = wrote < portion.len;
                    // Who is asked may want staging memory too. The next portion has no more than half of it.
                    drop(portion);
                    if short || (done < range.end && is_interrupted()) {
                        break Ok(());
                    }
                }
                Err(errno) => break Err(self.kernel_error(errno, done)),
            }
        };
        match ended {
            Err(error) if done == range.start => Err(error),
            _ => Ok(done - range.start),
        }
    }
}
