//! From pieces to items: whose descriptor, whose memory, how many bytes, and what that says already.
//!
//! Most pieces of a batch are of the file and go to the allocation of the piece before, so both are remembered; a
//! million pieces are sorted in about ten milliseconds. Where there are so many that are alike, and each is one item,
//! threads share them (share.rs):
//!
//! ```text
//!   pieces   first | like it ........................ | another | like that ......
//!   items    by the long way | by all threads, each into its place | and so on
//! ```

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use spinio_device::{Allocation, Device, DeviceAddr, registry};
use spinio_plan::Reason;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use spinio_device::Target;
use spinio_transfer::Kept;
use crate::held::Held;
use crate::list::List;
use crate::outlet::Outlet;
use spinio_host::parallel::{self, Room};
use crate::work::{CUT, HOST, Item, Source};
use crate::ctx::BatchCtx;
use spinio_files::FdIdentity;

/// Pieces from here on are requests of their own.
const BIG: u64 = 4 << 20;

/// Pieces of a batch from which a kernel is worth having if its code has to be made first.
const WORTH: usize = 64;

/// How often threads are called for pieces that are alike: what is mixed one thread sorts.
const TURNS: usize = 4;

/// What a descriptor is good for.
#[derive(Clone, Copy)]
enum Kind {
    Refused(Errno),
    /// Only reads one at a time know what to do with it.
    Plain,
    /// Which of the sources.
    File(u16),
}

/// Where addresses lead.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) outlet: u16,
    p2p: bool,
    pub(crate) allocation: Option<Allocation>,
    refused: Option<Errno>,
}

impl Place {
    #[inline(always)]
    fn holds(&self, address: u64, want: u64) -> bool {
        self.start <= address && address.checked_add(want).is_some_and(|end| end <= self.end)
    }
}

/// An item whose storage might DMA into its device: the first of its file and device.
pub(crate) struct Sample {
    pub(crate) source: u16,
    pub(crate) outlet: u16,
    pub(crate) to: Target,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

/// Pieces, sorted.
pub(crate) struct Sorter<'a> {
    ctx: &'a Arc<BatchCtx>,
    list: List,
    known: &'a [Allocation],
    kinds: HashMap<Fd, Kind>,
    last: Option<(Fd, Kind)>,
    /// Of devices, by their first byte.
    pub(crate) places: BTreeMap<u64, Place>,
    here: Option<Place>,
    pub(crate) sources: Vec<Source>,
    pub(crate) outlets: Vec<Arc<Outlet>>,
    pub(crate) items: Vec<Item>,
    /// Pieces that are read one at a time.
    pub(crate) plain: Vec<u32>,
    pub(crate) samples: Vec<Sample>,
    pub(crate) held: Held,
    /// All items are of one file and go to one device.
    pub(crate) alike: bool,
    /// Storage may reach where some of them go.
    pub(crate) p2p: bool,
    /// Bytes of all items.
    pub(crate) bytes: u64,
    turns: usize,
}

impl<'a> Sorter<'a> {
    /// `known`: allocations that need not be asked for.
    /// `holds`: whether held files are read out of their registered pages.
    pub(crate) fn new(ctx: &'a Arc<BatchCtx>, list: List, known: &'a [Allocation], holds: bool) -> Sorter<'a> {
        Sorter {
            ctx,
            list,
            known,
            kinds: HashMap::new(),
            last: None,
            places: BTreeMap::new(),
            here: None,
            sources: Vec::new(),
            outlets: Vec::new(),
            items: Vec::new(),
            plain: Vec::new(),
            samples: Vec::new(),
            held: Held::new(holds && !ctx.reader.pinned.is_empty()),
            alike: true,
            p2p: false,
            bytes: 0,
            turns: TURNS,
        }
    }

    /// Sorts every piece; those that ask for nothing, or for what cannot be, have their results.
    pub(crate) fn sort(&mut self) {
        let mut i = 0;
        while i < self.list.len() {
            let result = self.piece(i).unwrap_or_else(|errno| -i64::from(errno.raw_os_error()));
            self.list.set(i, result);
            i += 1;
            if self.turns > 0 && self.list.len() - i >= parallel::MANY && !self.held.is_on() {
                i = self.run(i);
            }
            if self.held.is_on() {
                i = self.held.run(&self.list, i);
                if let Some(again) = self.held.broken() {
                    i = again;
                }
            }
        }
        if let Some(again) = self.held.flush() {
            (again..self.list.len()).for_each(|i| {
                let result = self.piece(i).unwrap_or_else(|errno| -i64::from(errno.raw_os_error()));
                self.list.set(i, result);
            });
        }
    }

    /// Sorts pieces from `i` on as long as they are like the last, by all threads; the first that is not.
    fn run(&mut self, i: usize) -> usize {
        let (Some((fd, Kind::File(source))), Some(place)) = (self.last, self.here) else { return i };
        // What storage may reach is looked at one by one.
        if place.allocation.is_none() || place.refused.is_some() || place.outlet == HOST || place.p2p {
            return i;
        }
        let (Place { start, end, outlet, .. }, size) = (place, self.sources[source as usize].size);
        let (ctx, list) = (self.ctx, self.list);
        let (n, odd, bytes) = (list.len() - i, AtomicUsize::new(list.len()), AtomicU64::new(0));
        self.turns -= 1;
        self.items.reserve(n);
        let room = Room::of(&mut self.items);
        parallel::share(|| ctx.reader.files.workers().batch_readers(), crate::readers::Readers::most(ctx.reader.files.workers().batch_threads()), n, |chunk| {
            let mut sum = 0;
            for at in parallel::chunk(chunk, n) {
                let index = i + at;
                let asked = list.get(index);
                let (offset, len, to) = (asked.offset, asked.len, asked.address);
                let alike = asked.fd == fd
                    && len.wrapping_sub(1) < CUT
                    && offset < size
                    && len <= size - offset
                    && offset % CUT + len <= CUT
                    && start <= to
                    && to < end
                    && len <= end - to;
                if !alike {
                    odd.fetch_min(index, Relaxed);
                }
                // What lies behind it is done again.
                if !alike || (at % 1024 == 0 && odd.load(Relaxed) < index) {
                    break;
                }
                let item =
                    Item { index: index as u32, source, outlet, len: len as u32, p2p: false, within: 0, offset, to };
                // SAFETY: each place belongs to one chunk, and each chunk to one thread; the items wait.
                unsafe { room.put(at, item) };
                list.set(index, len as i64);
                sum += len;
            }
            bytes.fetch_add(sum, Relaxed);
        });
        let next = odd.into_inner();
        if next > i {
            // SAFETY: there is room for them, and every chunk has filled its places up to the first odd piece: it breaks
            // off only there, or behind it.
            unsafe { self.items.set_len(self.items.len() + next - i) };
            self.same(source, outlet);
            let all = next == list.len();
            let sum = |from: usize| self.items[from..].iter().map(|i| u64::from(i.len)).sum();
            self.bytes += if all { bytes.into_inner() } else { sum(self.items.len() - (next - i)) };
        }
        next
    }

    /// Looks whether an item is of the file and device of the others.
    #[inline(always)]
    fn same(&mut self, source: u16, outlet: u16) {
        self.alike &= self.items.first().is_none_or(|i| (i.source, i.outlet) == (source, outlet));
    }

    fn piece(&mut self, i: usize) -> Result<i64, Errno> {
        let asked = self.list.get(i);
        let kind = match self.last {
            Some((fd, kind)) if fd == asked.fd => kind,
            _ => self.kind(asked.fd),
        };
        let source = match kind {
            Kind::Refused(errno) => return Err(errno),
            Kind::Plain => {
                self.plain.push(i as u32);
                return Ok(0);
            }
            Kind::File(source) => source,
        };
        if asked.offset > i64::MAX as u64 || asked.len > i64::MAX as u64 {
            return Err(Errno::INVAL);
        }
        let within = asked.len.min(self.sources[source as usize].size.saturating_sub(asked.offset));
        if within == 0 {
            return Ok(0);
        }
        let place = self.place(asked.address, within);
        if let Some(errno) = place.refused {
            return Err(errno);
        }
        // A buffer that ends early takes what fits, as with a single read.
        let len = within.min(place.end - asked.address);
        let (outlet, p2p) = (place.outlet, place.p2p);
        if self.held.is_on() && outlet != HOST {
            let (from, to) = (&self.sources[source as usize], &self.outlets[outlet as usize]);
            let range = (place.start, place.end);
            if self.held.take(self.ctx, (source, from), (outlet, to), range, i, asked.offset, asked.address, len) {
                return Ok(len as i64);
            }
        }
        if p2p {
            self.sample(source, &place, asked.offset, asked.address, len);
        }
        if len >= BIG && outlet != HOST {
            self.plain.push(i as u32);
            return Ok(0);
        }
        if self.items.is_empty() {
            self.items.reserve(self.list.len() - i);
        }
        self.same(source, outlet);
        self.p2p |= p2p;
        self.bytes += len;
        let mut done = 0;
        while done < len {
            let offset = asked.offset + done;
            // Cut at multiples in the file, so that parts are whole units of direct I/O.
            let part = (len - done).min((offset / CUT + 1) * CUT - offset);
            let to = asked.address + done;
            self.items.push(Item { index: i as u32, source, outlet, len: part as u32, p2p, within: done, offset, to });
            done += part;
        }
        Ok(len as i64)
    }

    /// Remembers the first aligned piece of a file into a device that storage may reach.
    fn sample(&mut self, source: u16, place: &Place, offset: u64, address: u64, len: u64) {
        let align = self.sources[source as usize].file.align;
        let unit = u64::from(align.offset.max(align.memory)).max(512);
        let known = self.samples.iter().any(|s| (s.source, s.outlet) == (source, place.outlet));
        if let Some(allocation) = place.allocation.filter(|_| !known && (offset | address | len).is_multiple_of(unit)) {
            let to = Target { allocation, addr: DeviceAddr(address) };
            self.samples.push(Sample { source, outlet: place.outlet, to, offset, len });
        }
    }

    fn kind(&mut self, fd: Fd) -> Kind {
        let known = self.kinds.get(&fd).copied();
        let kind = known.unwrap_or_else(|| {
            let found = self.look(fd).unwrap_or_else(Kind::Refused);
            self.kinds.insert(fd, found);
            found
        });
        self.last = Some((fd, kind));
        kind
    }

    fn look(&mut self, fd: Fd) -> Result<Kind, Errno> {
        let kernel = self.ctx.reader.files.sys();
        let number = FdIdentity::of(fd);
        let stat = kernel.fstat(fd)?;
        let flags = kernel.flags(fd)? as u32;
        let unreadable = flags & linux::O_ACCMODE == linux::O_WRONLY || flags & linux::O_PATH != 0;
        // What these answer is the kernel's to say; so it is of files whose size says nothing.
        let odd = stat.kind == FileKind::Regular && stat.size == 0;
        if unreadable || odd || stat.kind == FileKind::Stream || flags & linux::O_DIRECT != 0 {
            return Ok(Kind::Plain);
        }
        let file = self.ctx.reader.files.shadow_workers().ok_or(Reason::NoHelpers);
        let Ok(file) = file.and_then(|crew| self.ctx.reader.files.get(fd, stat)) else {
            return Ok(Kind::Plain);
        };
        let Ok(which) = u16::try_from(self.sources.len()) else { return Ok(Kind::Plain) };
        let size = if stat.kind == FileKind::Regular { stat.size } else { file.size };
        self.sources.push(Source { fd, number, file, size });
        Ok(Kind::File(which))
    }

    /// The place of an address.
    #[inline]
    fn place(&mut self, address: u64, want: u64) -> Place {
        match &self.here {
            Some(place) if place.holds(address, want) => *place,
            _ => self.other_place(address, want),
        }
    }

    #[cold]
    fn other_place(&mut self, address: u64, want: u64) -> Place {
        let known = self.places.range(..=address).next_back().map(|(_, place)| *place);
        let place = match known.filter(|place| place.holds(address, want)) {
            Some(place) => place,
            None => {
                let place = self.find(address, want);
                if place.allocation.is_some() {
                    self.places.insert(place.start, place);
                }
                place
            }
        };
        self.here = Some(place);
        place
    }

    fn find(&mut self, address: u64, want: u64) -> Place {
        let inside = |a: &&Allocation| a.start.0 <= address && address < a.start.0 + a.len;
        let want = usize::try_from(want).unwrap_or(usize::MAX);
        let found = self.known.iter().find(inside).copied().or_else(|| {
            let at = address as *const u8;
            registry::find(at, want).or_else(|| registry::find_after_fault(at, want))
        });
        let Some(allocation) = found else {
            // The host's, for the kernel to judge.
            let end = address.saturating_add(want as u64);
            return Place { start: address, end, outlet: HOST, p2p: false, allocation: None, refused: None };
        };
        let (start, end) = (allocation.start.0, allocation.start.0 + allocation.len);
        let p2p = allocation.p2p_mapped;
        let place = Place { start, end, outlet: HOST, p2p, allocation: Some(allocation), refused: None };
        match self.outlet(allocation.device) {
            Ok(outlet) => Place { outlet, ..place },
            Err(errno) => Place { refused: Some(errno), ..place },
        }
    }

    fn outlet(&mut self, device: &'static dyn Device) -> Result<u16, Errno> {
        if let Some(at) = self.outlets.iter().position(|o| core::ptr::addr_eq(o.device, device)) {
            return Ok(at as u16);
        }
        let which = u16::try_from(self.outlets.len()).map_err(|_| Errno::NOMEM)?;
        let worth = self.list.len() >= WORTH || device.is_gather_ready();
        let gathers = worth && device.abilities().gathers && device.prepare_gather(&self.ctx.kernel_cache()).is_ok();
        let outlet = Outlet::new(self.ctx, device, gathers);
        let error = |e| spinio_transfer::Error::device(e, "read", 0, 0).kind.errno();
        self.outlets.push(Arc::new(outlet.map_err(error)?));
        Ok(which)
    }

    /// Where a piece is read to by itself.
    pub(crate) fn target(&mut self, i: usize) -> Option<Target> {
        let asked = self.list.get(i);
        let allocation = self.place(asked.address, asked.len.max(1)).allocation?;
        Some(Target { allocation, addr: DeviceAddr(asked.address) })
    }
}
