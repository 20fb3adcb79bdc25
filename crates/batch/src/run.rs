//! A batch from its pieces to its end: sorted, and then each part by its route.

use std::sync::Arc;

use spinio_device::{Allocation, Wait};
use spinio_plan::{Reason, Residency, Route};
use spinio_sys::Errno;

use crate::copies::Copies;
use crate::held::Held;
use crate::list::{List, Many, Piece};
use spinio_host::panic_relay::Panics;
use crate::readers::Readers;
use crate::register::Registered;
use crate::residency::Where;
use crate::sort::{Sample, Sorter};
use crate::storage::Storage;
use crate::work::{HOST, Item, Work};
use crate::ctx::BatchCtx;
use crate::{lay, register, residency};
use spinio_stats::{Direction, Watch};
use spinio_device::Target;
use spinio_transfer::Error;

/// How a batch went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Bytes that arrived.
    pub bytes: u64,
    /// Pieces that failed: their results are below zero.
    pub failed: usize,
}

/// A batch whose pieces are sorted.
pub(crate) struct Sorted {
    pub(crate) work: Arc<Work>,
    items: Vec<Item>,
    /// Pieces to be read one at a time, and where to.
    plain: Vec<(u32, Option<Target>)>,
    /// First byte of each allocation, the one behind its last, and its outlet; sorted.
    places: Vec<(u64, u64, u16)>,
    samples: Vec<Sample>,
    /// What was gathered out of held files already, while it was sorted.
    held: Held,
    known: Vec<Allocation>,
    /// Storage may reach where some items go.
    p2p: bool,
    /// Bytes of all items.
    bytes: u64,
}

/// Sorts the pieces, on the program's thread: here and now is their place in the order of the device.
pub(crate) fn begin(ctx: &Arc<BatchCtx>, list: List, known: &[Allocation], holds: bool) -> Result<Sorted, Error> {
    if u32::try_from(list.len()).is_err() {
        return Err(Error::kernel(Errno::INVAL, "read a batch", 0, 0));
    }
    let fd = if list.len() > 0 { list.get(0).fd } else { -1 };
    let watch: Watch = ctx.reader.files.stats().begin(Direction::Batch, fd, None, 0);
    // Made by a thread of the program, whose descriptors they see.
    ctx.reader.files.workers().batch_copy();
    let mut sorter = Sorter::new(ctx, list, known, holds);
    sorter.sort();
    let alone = std::mem::take(&mut sorter.plain);
    let plain = alone.into_iter().map(|i| (i, sorter.target(i as usize))).collect();
    let Sorter { sources, outlets, items, places, samples, held, alike, p2p, bytes, .. } = sorter;
    if u32::try_from(items.len()).is_err() {
        return Err(Error::kernel(Errno::INVAL, "read a batch", 0, 0));
    }
    let watch = watch.asking(|| (0..list.len()).map(|i| list.get(i).len).fold(0, u64::saturating_add));
    let watch = match outlets.first() {
        Some(outlet) => watch.on(outlet.device),
        None => watch,
    };
    let places = places.values().map(|p| (p.start, p.end, p.outlet)).collect();
    let (work, known) = (Arc::new(Work::new(ctx, watch, list, sources, outlets, alike)), known.to_vec());
    Ok(Sorted { work, items, plain, places, samples, held, known, p2p, bytes })
}

impl Sorted {
    /// Moves everything and waits. Where that panics, no piece counts as read.
    pub(crate) fn run(self) -> Done {
        let work = Arc::clone(&self.work);
        let mut panics = Panics::default();
        let done = panics.keep(|| self.move_all());
        if done.is_none() {
            let (list, errno) = (work.list, Errno::IO);
            (0..list.len()).for_each(|i| list.set(i, -i64::from(errno.raw_os_error())));
            work.ctx.reader.files.stats().end(&work.watch, &Err(errno));
        }
        panics.go_on();
        done.unwrap_or_default()
    }

    fn move_all(mut self) -> Done {
        let work = Arc::clone(&self.work);
        let ctx = &work.ctx;
        {
            let _request = ctx.reader.files.unpin().begin_request();
            let items = std::mem::take(&mut self.items);
            let items = self.in_order(items);
            let (mut cached, absent) = self.split(items);
            let parts = lay::lay(&work, &mut cached);
            let storage = (!absent.is_empty()).then(|| Storage::new(&work, absent));
            let copies = (!cached.is_empty()).then(|| Copies::new(&work, cached, parts.floor, Reason::Cached));
            let readers = copies.as_ref().and_then(Readers::call);
            // Helpers launch for themselves, which they cannot while somebody registers.
            let helped = |yes: bool| {
                if let (Some(copies), None, true) = (&copies, &readers, yes) {
                    copies.call_helpers();
                }
            };
            helped(parts.is_empty());
            // From here on helpers may be at work.
            let mut panics = Panics::default();
            let gather = || copies.as_ref().map(|copies| register::gather(copies, &parts, readers.as_deref()));
            let registered = panics.keep(gather).flatten();
            helped(!parts.is_empty() && !panics.any());
            let mut missed = Vec::new();
            if !panics.any()
                && let Some(storage) = storage
            {
                if let Some(readers) = &readers {
                    readers.call_host();
                }
                missed.extend(panics.keep(|| storage.finish(readers.as_deref())).unwrap_or_default());
            }
            if let (true, Some(copies)) = (panics.any(), &copies) {
                copies.leave_the_rest();
            }
            match (readers, copies) {
                (Some(readers), _) => missed.extend(panics.keep(|| readers.finish()).unwrap_or_default()),
                (None, Some(copies)) => drop(panics.keep(|| copies.finish())),
                (None, None) => {}
            }
            missed.extend(panics.keep(|| registered.map_or(Vec::new(), Registered::finish)).unwrap_or_default());
            panics.go_on();
            if !missed.is_empty() {
                let rest = Copies::new(&work, missed, 0, Reason::FellBack);
                rest.call_helpers();
                rest.finish();
            }
        }
        self.one_by_one();
        let (begun, stats) = (self.held.begun, ctx.reader.files.stats());
        let told = |bytes| stats.piece(&work.watch, Route::Gather, Reason::Held, 0, bytes, begun);
        let held = std::mem::replace(&mut self.held, Held::new(false));
        if !held.finish(ctx, told)
            && let Ok(again) = begin(ctx, work.list, &self.known, false)
        {
            // Somebody may have written a held file meanwhile.
            return again.run();
        }
        self.done()
    }

    /// Devices that the CPU or storage writes into keep no order by themselves: what was queued before has to be done.
    fn in_order(&mut self, mut items: Vec<Item>) -> Vec<Item> {
        let work = &self.work;
        for (which, outlet) in work.outlets.iter().enumerate() {
            let ours = |i: &Item| i.outlet as usize == which;
            if outlet.device.abilities().copies && !(self.p2p && items.iter().any(|i| ours(i) && i.p2p)) {
                continue;
            }
            if let Err(e) = outlet.wait_for_order() {
                outlet.fail(e);
                items.retain(|i| !ours(i));
                self.bytes = items.iter().map(|i| u64::from(i.len)).sum();
            }
        }
        items
    }

    /// Cached and absent items.
    fn split(&self, mut items: Vec<Item>) -> (Vec<Item>, Vec<Item>) {
        let work = &self.work;
        let ctx = &work.ctx;
        let direct = ctx.reader.policy.allows(Route::Direct);
        let reachable = self.reachable();
        // From here on those of one file and device lie together.
        let whose = |i: &Item| (i.source, i.outlet);
        if !work.alike && !items.is_sorted_by_key(whose) {
            items.sort_by_key(whose);
        }
        let mut found: Vec<Where> = work.sources.iter().map(|_| Where::Cached).collect();
        let mut rest = &items[..];
        while let Some(Item { source: which, .. }) = rest.first() {
            let here = |end: &dyn Fn(&Item) -> bool| if work.alike { rest.len() } else { rest.partition_point(end) };
            let (some, behind) = rest.split_at(here(&|i| i.source == *which));
            rest = behind;
            // Those that go to memory of the host lie last.
            let of = &some[..some.partition_point(|i| i.outlet != HOST)];
            if direct || reachable.iter().any(|&(source, _)| source == *which) {
                found[*which as usize] = residency::ask(ctx, &work.sources[*which as usize], of);
            }
        }
        let stats = ctx.reader.files.stats();
        if found.iter().all(|w| matches!(w, Where::Cached)) {
            stats.seen(Residency::Clean, self.bytes);
            return (items, Vec::new());
        }
        let copies: Vec<bool> = work.outlets.iter().map(|o| o.device.abilities().copies).collect();
        let mut absent = Vec::new();
        items.retain_mut(|item| {
            item.p2p &= reachable.contains(&(item.source, item.outlet));
            let staged = item.outlet != HOST && direct && copies[item.outlet as usize];
            let away = (staged || item.p2p) && found[item.source as usize].is_absent(item);
            if away {
                absent.push(*item);
            }
            !away
        });
        let away = absent.iter().map(|i| u64::from(i.len)).sum();
        stats.seen(Residency::Clean, self.bytes - away);
        stats.seen(Residency::Absent, away);
        (items, absent)
    }

    /// Which files' storage may DMA into which devices.
    fn reachable(&self) -> Vec<(u16, u16)> {
        let may = |s: &&Sample| {
            let (work, captured) = (&self.work, !self.work.outlets[s.outlet as usize].is_ordered());
            work.ctx.reader.p2p(&work.sources[s.source as usize].file, s.to, s.offset, s.len, captured).is_ok()
        };
        self.samples.iter().filter(may).map(|s| (s.source, s.outlet)).collect()
    }

    /// Pieces that know no better.
    fn one_by_one(&mut self) {
        let ctx = &self.work.ctx;
        let list = self.work.list;
        for (i, to) in &self.plain {
            let asked = list.get(*i as usize);
            let len = usize::try_from(asked.len).unwrap_or(usize::MAX);
            let offset = i64::try_from(asked.offset).map_err(|_| Errno::INVAL);
            let got = offset.and_then(|_| match to {
                Some(to) => ctx.reader.read(asked.fd, Some(asked.offset), *to, len).map_err(|e| e.kind.errno()),
                // SAFETY: memory of the host, for the kernel to judge.
                None => unsafe {
                    ctx.reader.files.sys().pread(Route::Copy, asked.fd, asked.address as *mut u8, len, asked.offset, 0)
                },
            });
            list.set(*i as usize, got.map_or_else(|errno| -i64::from(errno.raw_os_error()), |n| n as i64));
        }
        // Small ones are only queued when they return.
        let devices = self.plain.iter().filter_map(|(_, to)| to.as_ref().map(|t| t.allocation.device));
        let mut waited: Vec<*const ()> = Vec::new();
        for device in devices {
            let known = core::ptr::from_ref(device).cast::<()>();
            if !waited.contains(&known) {
                waited.push(known);
                let (queue, _) = device.program_queue();
                let _ = device.drain(queue, Wait::Context);
            }
        }
    }

    fn done(self) -> Done {
        let work = &self.work;
        let list = work.list;
        work.settle();
        for (which, outlet) in work.outlets.iter().enumerate() {
            let Some(error) = outlet.failure() else { continue };
            let result = -i64::from(Error::device(error, "copy", 0, 0).kind.errno().raw_os_error());
            let of = |at: u64| {
                let before = self.places.partition_point(|p| p.0 <= at);
                self.places[..before].last().is_some_and(|p| p.2 as usize == which && at < p.1)
            };
            for i in 0..list.len() {
                if list.result(i) > 0 && of(list.get(i).address) {
                    list.set(i, result);
                }
            }
        }
        let mut done = Done::default();
        for i in 0..list.len() {
            match u64::try_from(list.result(i)) {
                Ok(bytes) => done.bytes += bytes,
                Err(_) => done.failed += 1,
            }
        }
        let stats = work.ctx.reader.files.stats();
        stats.end(&work.watch, &Ok(done.bytes as usize));
        work.ctx.reader.files.ctx.home.update_gauges();
        done
    }
}
