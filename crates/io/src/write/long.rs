//! Writes of files that are larger than the staging memory: in portions, each one call of the kernel.
//!
//! ```text
//!   device   copy 0 │ copy 1 │ copy 2 ...
//!   kernel          │ write 0 ......... │ write 1 .........
//! ```
//!
//! Around the page cache a portion ends where a stripe of the array does, so that a RAID-5 is spared reading old parity.
//!
//! At the descriptor's own offset the whole range is taken first, with one relative `lseek`, so that who shares the
//! offset goes on behind it; what was not written is given back.

use std::ops::Range;
use std::time::Instant;

use spinio_plan::geometry::Stripe;
use spinio_plan::{Reason, Route};
use spinio_sys::linux::{self, FileKind};

use super::gather::{Gathered, Into, Order};
use super::whole::Hand;
use super::{Result, Write, bound, reason};
use crate::Error;
use crate::read::large::{reserve, unreserve};
use crate::staging::BLOCK;

/// Bytes of a portion at most: enough to keep storage busy, and the next portion has room beside it.
const PORTION: u64 = 32 << 20;

/// Bytes of the first one, which nothing is written beside.
const FIRST: usize = 8 << 20;

const RWF_APPEND: u32 = 0x10;

impl Write<'_> {
    /// Portion by portion; the unbroken front that was written.
    pub(super) fn long(&self) -> Result<usize> {
        let hand = self.own_hand();
        let why = if hand.reason == Reason::IntoCache { Reason::InParts } else { hand.reason };
        let hand = Hand { reason: why, stripe: self.stripe(hand), ..hand };
        if self.appends() {
            return self.portions(0..self.len, hand);
        }
        self.at_offset(|write| write.portions(0..write.len, hand))
    }

    /// The stripes under a file that the program writes directly. What goes into the page cache the kernel gathers anyway.
    fn stripe(&self, hand: Hand) -> Option<Stripe> {
        let keepers = self.core.keepers().filter(|_| hand.route == Route::Direct)?;
        self.core.files.get(self.core.kernel, keepers, self.fd, self.stat).ok()?.geometry().stripe()
    }

    /// Whether the bytes go to the end of the file, wherever that is.
    pub(super) fn appends(&self) -> bool {
        let flags = self.core.kernel.flags(self.fd).unwrap_or(0);
        flags & linux::O_APPEND as i32 != 0 || self.flags & RWF_APPEND != 0
    }

    /// The same write at an offset that is known, whether or not it was.
    pub(super) fn at_offset(&self, write: impl FnOnce(&Write<'_>) -> Result<usize>) -> Result<usize> {
        if self.at.is_some() {
            return write(self);
        }
        match reserve(self.core, self.fd, self.len as u64) {
            Ok(start) => {
                let wrote = write(&Write { at: Some(start), ..*self });
                unreserve(self.core, self.fd, (self.len - *wrote.as_ref().unwrap_or(&0)) as u64);
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

    /// `most`, or less so that a portion from `from` on ends where a stripe does, and direct I/O still may.
    fn up_to_stripe(&self, stripe: Option<Stripe>, from: usize, most: usize) -> usize {
        let (Some(stripe), Some(start)) = (stripe, self.at) else { return most };
        let at = start + from as u64;
        let end = stripe.cut(at, most as u64);
        if end.is_multiple_of(linux::PAGE as u64) { (end - at) as usize } else { most }
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
        let most = (bound(self.core) / 2).min(PORTION) as usize / BLOCK * BLOCK;
        let gather = |from: usize, most: usize| {
            let most = self.up_to_stripe(hand.stripe, from, most);
            let parts = self.portion(from, most.min(range.end - from));
            Gathered::fenced(self.core, order, &parts, Into::Ring, self.at.unwrap_or(0) + from as u64)
        };
        let mut done = range.start;
        let mut next = (!range.is_empty()).then(|| gather(done, most.min(FIRST)));
        let ended = loop {
            let Some(portion) = next.take() else { break Ok(()) };
            let begun = Instant::now();
            let at = self.at.map(|start| start + done as u64);
            let portion = portion.and_then(|mut portion| portion.wait(at.unwrap_or(0)).map(|()| portion));
            let portion = match portion {
                Ok(portion) => portion,
                Err(error) => break Err(error),
            };
            let end = done + portion.len;
            next = (end < range.end).then(|| gather(end, most));
            match self.call(hand, &portion.vectors, at) {
                Ok(wrote) => {
                    let why = reason(portion.is_pinned(), hand.reason);
                    self.core.stats().piece(&self.watch, hand.route, why, done as u64, wrote as u64, begun);
                    done += wrote;
                    if wrote < portion.len {
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
