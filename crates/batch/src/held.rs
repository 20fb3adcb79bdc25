//! Pieces of held files: a kernel gathers them straight out of the registered pages.
//!
//! ```text
//!   piece i ── same file, same allocation as the last, inside one pin? ── yes ──> an entry of the list: 5 ns
//!         └─ no ──> the long way round: which file, which memory, cut where a pin ends
//!
//!   list [from, to, len] [from, to, len] ...   32768 entries, then a launch; the next are written meanwhile
//! ```
//!
//! This is all that the processor does for such a piece: it never sees the bytes.
//!
//! What was gathered counts once its file was still held when everything had arrived; if not, the whole batch is read
//! once more, on other routes.

use std::sync::Arc;
use std::time::Instant;

use spinio_sys::linux::Fd;

use crate::list::List;
use crate::outlet::{Outlet, Page, Pen};
use crate::work::Source;
use crate::ctx::BatchCtx;
use spinio_io::Using;

/// Entries of a launch.
const ENTRIES: usize = 32 << 10;

/// Bytes of an entry at most: longer ones keep one warp busy while others have nothing to do.
const LONGEST: u64 = 64 << 10;

/// What the last piece has in common with the next, probably.
struct Common {
    fd: Fd,
    size: u64,
    /// The allocation.
    start: u64,
    end: u64,
    /// Where the device finds each piece of the file, and how long these are: a power of two.
    views: *const u64,
    shift: u32,
}

/// A file that is held, on a device.
struct Lane {
    source: u16,
    outlet: u16,
    fd: Fd,
    /// `None`: it is not.
    using: Option<Using>,
    bytes: u64,
}

/// A device that pieces are gathered into.
struct Open {
    outlet: u16,
    pen: Pen,
    page: Option<Page>,
    entries: usize,
    /// The first piece in the page.
    first: usize,
}

/// The held part of a batch.
pub(crate) struct Held {
    on: bool,
    /// Before the lanes: where this is dropped, by a panic, the device has to be done before the pages may go.
    open: Vec<Open>,
    lanes: Vec<Lane>,
    common: Option<(Common, usize, usize)>,
    broken: Option<usize>,
    pub(crate) begun: Instant,
}

// SAFETY: the pointer leads into the views of a `Using` of `lanes`, which stays as long.
unsafe impl Send for Held {}

impl Held {
    pub(crate) fn new(on: bool) -> Held {
        Held { on, open: Vec::new(), lanes: Vec::new(), common: None, broken: None, begun: Instant::now() }
    }

    /// Whether a file might be held.
    #[inline(always)]
    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// Takes pieces from `i` on as long as they are like the last; the first that is not.
    pub(crate) fn run(&mut self, list: &List, mut i: usize) -> usize {
        let Some((common, open, lane)) = &self.common else { return i };
        let (mask, shift) = ((1u64 << common.shift) - 1, common.shift);
        let open = &mut self.open[*open];
        let mut bytes = 0;
        let n = list.len();
        while let Some(page) = &mut open.page
            && i < n
        {
            // As many as the page takes.
            let end = n.min(i + ENTRIES - open.entries);
            let begun = i;
            while i < end {
                let asked = list.get(i);
                let inside = asked.fd == common.fd
                    && asked.len.wrapping_sub(1) < LONGEST
                    && asked.offset < common.size
                    && asked.len <= common.size - asked.offset
                    && (asked.offset & mask) + asked.len <= mask + 1
                    && asked.address >= common.start
                    && asked.address < common.end
                    && asked.len <= common.end - asked.address;
                if !inside {
                    break;
                }
                // SAFETY: the offset lies in the file, which the views cover; they stay with the lane's `Using`.
                let view = unsafe { *common.views.add((asked.offset >> shift) as usize) };
                page.list(view + (asked.offset & mask), asked.address, asked.len);
                list.set(i, asked.len as i64);
                bytes += asked.len;
                i += 1;
            }
            open.entries += i - begun;
            if open.entries < ENTRIES {
                break;
            }
            if open.send().is_err() || open.renew(i).is_err() {
                self.broken = Some(open.first);
                break;
            }
        }
        self.lanes[*lane].bytes += bytes;
        i
    }

    /// A launch failed: the first piece that has to be read again. From then on nothing is gathered.
    pub(crate) fn broken(&mut self) -> Option<usize> {
        let again = self.broken.take()?;
        self.on = false;
        self.common = None;
        Some(again)
    }

    /// Takes one piece, if its file is held on its device.
    #[expect(clippy::too_many_arguments, reason = "one piece, sorted out")]
    pub(crate) fn take(
        &mut self,
        ctx: &Arc<BatchCtx>,
        (source, from): (u16, &Source),
        (outlet, to): (u16, &Arc<Outlet>),
        (start, end): (u64, u64),
        i: usize,
        offset: u64,
        address: u64,
        len: u64,
    ) -> bool {
        self.common = None;
        if !to.gathers() {
            return false;
        }
        let lane = match self.lanes.iter().position(|l| (l.source, l.outlet) == (source, outlet)) {
            Some(lane) => lane,
            None => {
                let using = ctx.reader.pinned.enter(from.fd, from.file.key(), to.device);
                let using = using.filter(|u| u.size() == from.size && !u.on.views.is_empty());
                self.lanes.push(Lane { source, outlet, fd: from.fd, using, bytes: 0 });
                self.lanes.len() - 1
            }
        };
        let Some(using) = &self.lanes[lane].using else { return false };
        let on = Arc::clone(&using.on);
        let open = match self.open.iter().position(|o| o.outlet == outlet) {
            Some(open) => open,
            None => {
                self.open.push(Open { outlet, pen: Pen::new(to), page: None, entries: 0, first: i });
                self.open.len() - 1
            }
        };
        let mut done = 0;
        while done < len {
            let page = &mut self.open[open];
            if (page.entries == ENTRIES && page.send().is_err()) || (page.page.is_none() && page.renew(i).is_err()) {
                self.broken = Some(page.first.min(i));
                return true;
            }
            let at = offset + done;
            let within = at % on.piece;
            let part = (on.piece - within).min(len - done).min(LONGEST);
            if let Some(list) = &mut page.page {
                list.list(on.views[(at / on.piece) as usize] + within, address + done, part);
            }
            page.entries += 1;
            done += part;
        }
        self.lanes[lane].bytes += len;
        let (fd, size, shift) = (from.fd, from.size, on.piece.ilog2());
        self.common = Some((Common { fd, size, start, end, views: on.views.as_ptr(), shift }, open, lane));
        true
    }

    /// Sends what is left; the first piece that has to be read again, if that fails.
    pub(crate) fn flush(&mut self) -> Option<usize> {
        let mut again = self.broken();
        for open in &mut self.open {
            if open.send().is_err() {
                again = Some(again.map_or(open.first, |i| i.min(open.first)));
            }
        }
        self.common = None;
        self.on &= again.is_none();
        again
    }

    /// Waits until everything has arrived; whether every file was held until then. Tells the bytes of each.
    pub(crate) fn finish(self, ctx: &Arc<BatchCtx>, told: impl Fn(u64)) -> bool {
        self.open.into_iter().for_each(|open| open.pen.finish());
        self.lanes.iter().all(|lane| {
            told(lane.bytes);
            lane.using.as_ref().is_none_or(|using| lane.bytes == 0 || using.is_good(&ctx.reader.files, lane.fd))
        })
    }
}

impl Open {
    fn send(&mut self) -> Result<(), ()> {
        self.entries = 0;
        self.page.take().map_or(Ok(()), |page| self.pen.send(page).map_err(drop))
    }

    /// An empty page, whose first piece will be `i`.
    fn renew(&mut self, i: usize) -> Result<(), ()> {
        let outlet = &self.pen.outlet;
        let page = Page::new(outlet, outlet.staging.take().map_err(drop)?);
        // Memory that a kernel cannot read holds no list.
        if !page.gathers() {
            outlet.staging.give_back(page.into_block());
            return Err(());
        }
        self.first = i;
        self.page = Some(page);
        Ok(())
    }
}
