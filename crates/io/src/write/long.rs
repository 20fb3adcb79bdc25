//! Writes of files that are larger than the staging memory: in portions, each one call of the kernel.
//!
//! ```text
//!   device   copy 0 │ copy 1 │ copy 2 ...
//!   kernel          │ write 0 ......... │ write 1 .........
//! ```
//!
//! At the descriptor's own offset the whole range is taken first, with one relative `lseek`, so that who shares the
//! offset goes on behind it; what was not written is given back.

use std::time::Instant;

use spinio_plan::Reason;
use spinio_sys::linux;

use super::gather::{Gathered, Into, Order};
use super::{Result, Write, bound, reason};
use crate::Error;
use crate::read::large::{reserve, unreserve};
use crate::staging::BLOCK;

/// Bytes of a portion at most: storage is busy with several requests all the time, and the next portion has room.
const PORTION: u64 = 32 << 20;

/// Bytes of the first one, which nothing is written beside.
const FIRST: usize = 8 << 20;

const RWF_APPEND: u32 = 0x10;

impl Write<'_> {
    /// Portion by portion; the unbroken front that was written.
    pub(super) fn long(&self) -> Result<usize> {
        let flags = self.core.kernel.flags(self.fd).map_err(|e| self.kernel_error(e, 0))?;
        let appends = flags & linux::O_APPEND as i32 != 0 || self.flags & RWF_APPEND != 0;
        if self.at.is_some() || appends {
            return self.portions(self.at);
        }
        match reserve(self.core, self.fd, self.len as u64) {
            Ok(start) => {
                let wrote = self.portions(Some(start));
                unreserve(self.core, self.fd, (self.len - *wrote.as_ref().unwrap_or(&0)) as u64);
                wrote
            }
            // The offset cannot be moved that far (the end of a block device, the largest file): the kernel says why.
            Err(_) => self.portions(None),
        }
    }

    fn portions(&self, start: Option<u64>) -> Result<usize> {
        let device_error = |e| Error::device(e, "write", start.unwrap_or(0), self.len as u64);
        let order = Order::leased(self.parts).map_err(device_error)?;
        let (route, why) = self.route();
        let why = if why == Reason::IntoCache { Reason::InParts } else { why };
        let most = (bound(self.core) / 2).min(PORTION) as usize / BLOCK * BLOCK;
        let gather = |from: usize, most: usize| {
            let parts = self.portion(from, most);
            Gathered::begin(self.core, &order, &parts, Into::Ring, start.unwrap_or(0) + from as u64)
        };
        let mut done = 0;
        let mut next = Some(gather(0, most.min(FIRST)));
        let ended = loop {
            let Some(portion) = next.take() else { break Ok(()) };
            let begun = Instant::now();
            let at = start.map(|start| start + done as u64);
            let portion = portion.and_then(|mut portion| portion.wait(at.unwrap_or(0)).map(|()| portion));
            let portion = match portion {
                Ok(portion) => portion,
                Err(error) => break Err(error),
            };
            if done > 0 && !self.is_same_file() {
                break Ok(());
            }
            let end = done + portion.len;
            next = (end < self.len).then(|| gather(end, most));
            match self.call(&portion, route, at, done) {
                Ok(wrote) => {
                    let why = reason(portion.is_pinned(), why);
                    self.core.stats().piece(&self.watch, route, why, done as u64, wrote as u64, begun);
                    done += wrote;
                    if wrote < portion.len {
                        break Ok(());
                    }
                }
                Err(error) => break Err(error),
            }
        };
        match ended {
            Err(error) if done == 0 => Err(error),
            _ => Ok(done),
        }
    }
}
