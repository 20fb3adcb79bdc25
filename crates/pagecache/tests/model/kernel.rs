//! The Linux kernel's page cache of the mount, and the CPU programs that use it.
//!
//! ```text
//!   absent ─fault─> locked: READ sent ─> planned ─> copied ─> replied ─> clean <─> dirty (stores)
//!                                                              reclaim, INVAL: absent  │
//!                                            under write-back: WRITE sent ─> done <────┘   (no stores meanwhile)
//! ```
//!
//! INVAL waits for a locked page, writes a dirty one back and waits for that, then drops it. One request at a time
//! holds the inode's lock: SETATTR(size), which also holds write-back, FALLOCATE, or a direct write. A request without
//! a reply is sent again to a new server.

use std::ops::Range;

use super::PAGES;
use super::oracle::{Agent, BYTES_OF_PAGE, POSITIONS, StoreId, byte, offset};
use super::world::{Changes, World, note};
use crate::page::{PAGE, PageBytes, ZEROS, bytes_inside};
use crate::{Backing, ReadInto, ReadPlan, WriteFrom};

enum Read {
    Sent,
    Planned(ReadPlan),
    /// The first half of the bytes was copied.
    Half(ReadPlan, Box<PageBytes>),
    Copied(ReadPlan, Box<PageBytes>),
    Replied(Box<PageBytes>),
}

struct Write {
    bytes: Box<PageBytes>,
    len: usize,
    done: bool,
}

#[derive(Default)]
struct Page {
    copy: Option<Box<PageBytes>>,
    dirty: bool,
    read: Option<Read>,
    write: Option<Write>,
}

#[derive(Clone, Debug)]
enum What {
    Size(u64),
    Hole(Range<u64>),
    Direct(u64, Vec<u8>),
}

/// The request that holds the inode's lock.
struct Change {
    what: What,
    stores: Vec<StoreId>,
    /// The server has got it, once or more.
    sent: bool,
    done: bool,
}

pub(super) struct Kernel {
    size: u64,
    /// Stores, holes and direct writes: what takes a descriptor that is open for writing.
    pub(super) stores: u64,
    pages: [Page; PAGES],
    change: Option<Change>,
}

impl Kernel {
    pub(super) fn new(size: u64) -> Kernel {
        Kernel { size, stores: 0, pages: Default::default(), change: None }
    }

    pub(super) fn clean_page(&self, page: usize) -> Option<&PageBytes> {
        self.pages[page].copy.as_deref().filter(|_| !self.pages[page].dirty)
    }

    fn start(page: usize) -> u64 {
        (page * PAGE) as u64
    }

    /// Whether a hole or a direct write keeps programs from this page.
    fn blocked(&self, page: usize) -> bool {
        let bytes = match self.change.as_ref().map(|change| &change.what) {
            Some(What::Hole(bytes)) => bytes.clone(),
            Some(What::Direct(offset, bytes)) => *offset..offset + bytes.len() as u64,
            _ => return false,
        };
        bytes.start < Self::start(page + 1) && Self::start(page) < bytes.end
    }

    /// Whether no program may have the file open for writing: the last close has written back its pages.
    pub(super) fn is_without_writers(&self) -> bool {
        let at_rest = |page: &Page| !page.dirty && page.write.is_none();
        let change = self.change.as_ref().map(|change| &change.what);
        self.pages.iter().all(at_rest) && matches!(change, None | Some(What::Size(_)))
    }

    fn holds_write_back(&self) -> bool {
        matches!(&self.change, Some(Change { what: What::Size(_), .. }))
    }

    /// Not locked, not under write-back.
    fn at_rest(&self, page: usize) -> bool {
        self.pages[page].read.is_none() && self.pages[page].write.is_none()
    }

    pub(super) fn is_dirty(&self, page: usize) -> bool {
        self.pages[page].dirty
    }

    pub(super) fn is_under_write_back(&self, page: usize) -> bool {
        self.pages[page].write.is_some()
    }

    /// Begins write-back of a dirty page: false if it cannot now.
    pub(super) fn write_back(&mut self, page: usize) -> bool {
        let held = self.holds_write_back();
        let len = bytes_inside(page as u64, self.size);
        let Page { copy: Some(copy), dirty: true, write: write @ None, .. } = &mut self.pages[page] else {
            return false;
        };
        if held {
            return false;
        }
        if len > 0 {
            *write = Some(Write { bytes: copy.clone(), len, done: false });
        }
        self.pages[page].dirty = false;
        true
    }

    fn cut(&mut self, bytes: Range<u64>) {
        for (page, state) in self.pages.iter_mut().enumerate() {
            let (start, end) = (Self::start(page), Self::start(page + 1));
            let (from, to) = (bytes.start.clamp(start, end) - start, bytes.end.clamp(start, end) - start);
            if to - from == PAGE as u64 {
                state.copy = None;
                state.dirty = false;
            } else if let Some(copy) = &mut state.copy {
                copy[from as usize..to as usize].fill(0);
            }
        }
    }
}

impl World {
    /// One thing that the kernel or a CPU program does: false if it cannot now.
    pub(super) fn kernel_step(&mut self) -> bool {
        let page = self.page();
        if self.bias.changes == Changes::Growth && self.below(10) == 0 {
            return if self.below(2) == 0 { self.append() } else { self.change_size() };
        }
        if self.bias.changes == Changes::Often && self.below(8) == 0 {
            return match self.below(4) {
                0 => self.change_size(),
                1 => self.punch(page),
                2 => self.direct_write(page),
                _ => self.overwrite(page),
            };
        }
        match self.below(34) {
            0..=2 => self.fault(page),
            3..=8 => self.cpu_store(page),
            9..=10 => self.cpu_load(page),
            11 => self.overwrite(page),
            12 => self.append(),
            13..=14 => self.kernel.write_back(page),
            15 => self.reclaim(page),
            16..=22 => self.read_step(page),
            23..=26 => self.write_step(page),
            27 => self.change_size(),
            28 => self.punch(page),
            29 | 31 | 32 => self.direct_write(page),
            30 => self.direct_read(page),
            _ => self.change_step(),
        }
    }

    /// A step of every request; false if there is none.
    pub(super) fn kernel_progress(&mut self) -> bool {
        let mut busy = self.kernel.change.is_some();
        self.change_step();
        for page in 0..PAGES {
            busy |= self.kernel.is_dirty(page) || !self.kernel.at_rest(page);
            self.kernel.write_back(page);
            self.write_step(page);
            self.read_step(page);
        }
        busy
    }

    fn fault(&mut self, page: usize) -> bool {
        let here = self.kernel.pages[page].copy.is_some() || !self.kernel.at_rest(page);
        if here || Kernel::start(page) >= self.kernel.size || self.kernel.blocked(page) {
            return false;
        }
        note!(self, "cpu: fault on page {page}");
        self.kernel.pages[page].read = Some(Read::Sent);
        true
    }

    fn cpu_store(&mut self, page: usize) -> bool {
        let position = self.position();
        let byte = byte(page, position);
        let inside = offset(byte) < self.kernel.size;
        if !inside || self.kernel.blocked(page) || self.kernel.pages[page].write.is_some() {
            return false;
        }
        if self.kernel.pages[page].copy.is_none() {
            return false;
        }
        let value = self.value();
        let now = self.now;
        let copy = self.kernel.pages[page].copy.as_mut().expect("it is there");
        let old = std::mem::replace(&mut copy[POSITIONS[position]], value);
        self.kernel.pages[page].dirty = true;
        self.kernel.stores += 1;
        note!(self, "cpu: page {page} byte {position}: {old} -> {value}");
        let loaded = (!self.vague).then_some(old);
        self.cpu_check("cpu load before store", byte, old);
        self.oracle.store(byte, Agent::Cpu, now, now, value, loaded);
        true
    }

    fn cpu_load(&mut self, page: usize) -> bool {
        let position = self.position();
        let byte = byte(page, position);
        let Some(copy) = &self.kernel.pages[page].copy else { return false };
        if offset(byte) >= self.kernel.size {
            return false;
        }
        let value = copy[POSITIONS[position]];
        self.cpu_check("cpu load", byte, value);
        true
    }

    /// A load by the CPU. While a hole waits for its reply, the kernel has the bytes from before; a GPU that has seen
    /// the zeros and stores zeros changes nothing, so its release does not bring them to the CPU. The reply does.
    fn cpu_check(&mut self, what: &str, byte: usize, value: u8) {
        if !self.oracle.is_in_flight(byte) {
            self.check(what, byte, Agent::Cpu, self.now, value);
        }
    }

    /// write(2) of a whole page: the kernel does not read it first.
    fn overwrite(&mut self, page: usize) -> bool {
        let reach = Kernel::start(page) <= self.kernel.size;
        if self.kernel.change.is_some() || !self.kernel.at_rest(page) || !reach {
            return false;
        }
        let mut bytes = Box::new(ZEROS);
        for (position, at) in POSITIONS.into_iter().enumerate() {
            bytes[at] = self.value();
            self.oracle.store(byte(page, position), Agent::Cpu, self.now, self.now, bytes[at], None);
        }
        note!(self, "cpu: page {page} overwritten: {:?}", POSITIONS.map(|at| bytes[at]));
        self.kernel.pages[page].copy = Some(bytes);
        self.kernel.pages[page].dirty = true;
        self.kernel.stores += 1;
        self.kernel.size = self.kernel.size.max(Kernel::start(page + 1));
        true
    }

    /// write(2) of one byte past the end of the file.
    fn append(&mut self) -> bool {
        let page = (self.kernel.size / PAGE as u64) as usize;
        if page >= PAGES || self.kernel.change.is_some() || !self.kernel.at_rest(page) {
            return false;
        }
        let Some(position) = (0..BYTES_OF_PAGE).find(|position| offset(byte(page, *position)) >= self.kernel.size)
        else {
            return false;
        };
        if self.kernel.pages[page].copy.is_none() {
            if !self.kernel.size.is_multiple_of(PAGE as u64) {
                return false;
            }
            self.kernel.pages[page].copy = Some(Box::new(ZEROS));
        }
        let value = self.value();
        self.oracle.store(byte(page, position), Agent::Cpu, self.now, self.now, value, None);
        self.kernel.pages[page].copy.as_mut().expect("it is there")[POSITIONS[position]] = value;
        self.kernel.pages[page].dirty = true;
        self.kernel.stores += 1;
        self.kernel.size = offset(byte(page, position)) + 1;
        note!(self, "cpu: page {page} byte {position} appended: {value}, size {}", self.kernel.size);
        true
    }

    fn reclaim(&mut self, page: usize) -> bool {
        let state = &mut self.kernel.pages[page];
        !state.dirty && state.write.is_none() && state.copy.take().is_some()
    }

    fn read_step(&mut self, page: usize) -> bool {
        let into = if self.vague { ReadInto::Unknown } else { ReadInto::PageCache };
        let pages = page as u64..page as u64 + 1;
        let next = match self.kernel.pages[page].read.take() {
            None => return false,
            Some(Read::Sent) => {
                let Some(plan) = self.call(|home, _| home.read_plan(pages)) else { return true };
                note!(self, "READ {page} planned: {:?}", plan.runs);
                Read::Planned(plan)
            }
            Some(Read::Planned(plan)) => {
                let bytes = self.source_bytes(page, &plan);
                Read::Half(plan, bytes)
            }
            Some(Read::Half(plan, mut bytes)) => {
                let later = self.source_bytes(page, &plan);
                bytes[PAGE / 2..].copy_from_slice(&later[PAGE / 2..]);
                Read::Copied(plan, bytes)
            }
            Some(Read::Copied(plan, bytes)) => {
                // Should the server be killed in this call, the request is without a reply.
                self.kernel.pages[page].read = Some(Read::Sent);
                let Some(valid) = self.call(|home, _| home.read_done(&plan, into)) else { return true };
                note!(self, "READ {page} done: {valid}");
                if valid { Read::Replied(bytes) } else { Read::Sent }
            }
            Some(Read::Replied(bytes)) => {
                let inside = bytes_inside(page as u64, self.kernel.size);
                let state = &mut self.kernel.pages[page];
                state.copy = (inside > 0).then_some(bytes);
                note!(self, "READ {page} arrives");
                return true;
            }
        };
        self.kernel.pages[page].read = Some(next);
        true
    }

    /// What a READ copies, without a lock.
    fn source_bytes(&self, page: usize, plan: &ReadPlan) -> Box<PageBytes> {
        let mut bytes = Box::new(ZEROS);
        if !plan.runs[0].1.copy(&mut bytes) {
            self.disk.read(Kernel::start(page), &mut *bytes).unwrap();
        }
        bytes
    }

    fn write_step(&mut self, page: usize) -> bool {
        let Some(write) = &self.kernel.pages[page].write else { return false };
        if write.done {
            self.kernel.pages[page].write = None;
            return true;
        }
        let bytes = write.bytes[..write.len].to_vec();
        note!(self, "WRITE {page}, {} bytes", bytes.len());
        let offset = Kernel::start(page);
        let unseen = self.below(2) == 0;
        let done = self.call(|home, disk| match unseen && home.begin_overwrite(disk, offset, bytes.len()).unwrap() {
            // Nothing looks at the page in between.
            true => disk.write(offset, &bytes).unwrap(),
            false => home.write(disk, offset, &bytes, WriteFrom::PageCache).unwrap(),
        });
        if let Some(write) = &mut self.kernel.pages[page].write {
            write.done |= done.is_some();
        }
        true
    }

    fn begin_change(&mut self, what: What, zeros: Range<u64>) {
        let inside = zeros.start..zeros.end.min(self.kernel.size);
        let zeroed = (0..PAGES * BYTES_OF_PAGE).filter(|byte| inside.contains(&offset(*byte)));
        let stores = zeroed.map(|byte| self.oracle.request(byte, self.now, 0)).collect();
        note!(self, "cpu: {what:?}");
        self.kernel.stores += u64::from(matches!(what, What::Hole(_)));
        self.kernel.change = Some(Change { what, stores, sent: false, done: false });
    }

    fn change_size(&mut self) -> bool {
        let page = PAGE as u64;
        let size = [0, 1, 2, page, page + 1, page + 5, 2 * page, 3 * page][self.below(8)];
        let writing = (0..PAGES).any(|page| self.kernel.is_under_write_back(page));
        let allowed = match self.bias.changes {
            Changes::None => false,
            Changes::Some | Changes::Often => true,
            Changes::Growth => size > self.kernel.size,
        };
        if self.kernel.change.is_some() || writing || !allowed {
            return false;
        }
        self.begin_change(What::Size(size), size..u64::MAX);
        true
    }

    fn punch(&mut self, page: usize) -> bool {
        let start = Kernel::start(page);
        let bytes = match self.below(3) {
            0 => start..start + PAGE as u64,
            1 => start + 1..start + 2,
            _ => start + 1..(start + PAGE as u64 + 1).min(Kernel::start(PAGES)),
        };
        let quiet = |page: usize| self.kernel.at_rest(page) && !self.kernel.is_dirty(page);
        let last = (bytes.end - 1) as usize / PAGE;
        let allowed = matches!(self.bias.changes, Changes::Some | Changes::Often);
        if self.kernel.change.is_some() || !(page..=last).all(quiet) || !allowed {
            return false;
        }
        self.begin_change(What::Hole(bytes.clone()), bytes);
        true
    }

    fn direct_write(&mut self, page: usize) -> bool {
        let position = self.position();
        let byte = byte(page, position);
        let absent = self.kernel.pages[page].copy.is_none() && self.kernel.at_rest(page);
        if self.kernel.change.is_some() || !absent || offset(byte) >= self.kernel.size {
            return false;
        }
        let value = self.value();
        let store = self.oracle.request(byte, self.now, value);
        note!(self, "cpu: page {page} byte {position}: {value}, a direct write");
        let what = What::Direct(offset(byte), vec![value]);
        self.kernel.stores += 1;
        self.kernel.change = Some(Change { what, stores: vec![store], sent: false, done: false });
        true
    }

    fn direct_read(&mut self, page: usize) -> bool {
        if self.kernel.change.is_some() || self.kernel.is_dirty(page) || !self.kernel.at_rest(page) {
            return false;
        }
        let mut bytes = ZEROS;
        let start = Kernel::start(page);
        let read = self.call(|home, disk| home.read(disk, start, &mut bytes, ReadInto::Unknown).unwrap());
        for (position, at) in POSITIONS.into_iter().enumerate() {
            if read.is_some_and(|inside| at < inside) {
                self.cpu_check("direct read", byte(page, position), bytes[at]);
            }
        }
        true
    }

    /// The request that holds the inode's lock: the server works on it, or its reply arrives.
    fn change_step(&mut self) -> bool {
        let Some(change) = &mut self.kernel.change else { return false };
        let what = change.what.clone();
        if !change.done {
            let sent = std::mem::replace(&mut change.sent, true);
            if let What::Hole(bytes) = &what
                && !sent
                && self.hole_fails(bytes.clone())
            {
                return true;
            }
            let done = self.call(|home, disk| match what {
                What::Size(size) => home.truncate(disk, size).unwrap(),
                What::Hole(bytes) => home.punch(disk, bytes).unwrap(),
                What::Direct(offset, bytes) => home.write(disk, offset, &bytes, WriteFrom::Program).unwrap(),
            });
            if let Some(change) = &mut self.kernel.change {
                change.done |= done.is_some();
            }
            return true;
        }
        match what {
            What::Size(size) => {
                let locked = |page: usize| self.kernel.pages[page].read.is_some() && Kernel::start(page + 1) > size;
                if (0..PAGES).any(locked) {
                    return false;
                }
                self.kernel.cut(size..u64::MAX);
                self.kernel.size = size;
            }
            What::Hole(bytes) => self.kernel.cut(bytes),
            What::Direct(..) => {}
        }
        let change = self.kernel.change.take().expect("it is there");
        note!(self, "reply to {:?}", change.what);
        change.stores.into_iter().for_each(|store| self.oracle.set_end(store, self.now));
        true
    }

    /// A hole that the disk makes only in part; false, and nothing is done, if it makes all of it.
    ///
    /// Only of pages that the kernel has no copy of: it gets none of the zeros.
    fn hole_fails(&mut self, bytes: Range<u64>) -> bool {
        let pages = bytes.start / PAGE as u64..bytes.end.div_ceil(PAGE as u64);
        let is_absent = |page: u64| self.kernel.pages[page as usize].copy.is_none();
        if self.calm || !pages.clone().all(is_absent) || self.below(3) != 0 {
            return false;
        }
        let after = [0, 1, 2, PAGE as u64][self.below(4)];
        note!(self, "the hole fails after {after} bytes");
        self.disk.hole_fails.set(Some(after));
        let done = self.call(|home, disk| home.punch(disk, bytes.clone()).unwrap_err());
        self.disk.hole_fails.set(None);
        if done.is_none() {
            return true;
        }
        for store in self.kernel.change.take().map_or_else(Vec::new, |change| change.stores) {
            let at = offset(store.0);
            let in_slot = self.server().pages.dirty().any(|page| page == at / PAGE as u64);
            match at < bytes.start + after && !in_slot {
                true => self.oracle.set_end(store, self.now),
                false => self.oracle.lose(store),
            }
        }
        true
    }

    /// INVAL of one page: true once the page is absent.
    pub(super) fn kernel_drops(&mut self, page: usize) -> bool {
        if !self.kernel.at_rest(page) {
            return false;
        }
        if self.kernel.is_dirty(page) {
            self.kernel.write_back(page);
            return false;
        }
        note!(self, "INVAL drops page {page}");
        self.kernel.pages[page].copy = None;
        true
    }

    /// A new server is sent every request without a reply. Whether one that was done had its reply is left to chance.
    pub(super) fn resend(&mut self) {
        for page in 0..PAGES {
            let lost = self.below(2) == 0;
            let state = &mut self.kernel.pages[page];
            state.read = state.read.take().map(|read| match read {
                Read::Replied(bytes) if !lost => Read::Replied(bytes),
                _ => Read::Sent,
            });
            let lost = self.below(2) == 0;
            if let Some(write) = &mut self.kernel.pages[page].write {
                write.done &= !lost;
            }
        }
        let lost = self.below(2) == 0;
        if let Some(change) = &mut self.kernel.change {
            change.done &= !lost;
        }
    }
}
