//! Everything that acts in the model, and the server that is killed and started again.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::PAGES;
use super::gpu::Gpu;
use super::kernel::Kernel;
use super::machine::{Disk, Killed, Machine};
use super::oracle::{Agent, BYTES_OF_PAGE, Oracle, StoreId, offset};
use super::random::Random;
use crate::page::{PAGE, PageBytes, ZEROS};
use crate::{Backing, Ended, FilePages, KernelPages, ReadInto, Release, Slots};

pub(super) const FILE: u64 = 7;

/// An invalidation that goes on in a thread of the server.
pub(super) struct Inval {
    pub(super) release: Release,
    pub(super) pages: VecDeque<usize>,
}

/// A release whose client waits for the reply, or has died since.
pub(super) struct Reply {
    pub(super) release: Option<Release>,
    pub(super) stores: Vec<StoreId>,
    pub(super) pages: Range<u64>,
    pub(super) gpu: Option<usize>,
}

pub(super) struct Server {
    pub(super) slots: Arc<Slots>,
    pub(super) pages: FilePages,
    pub(super) invals: Vec<Inval>,
    /// Pages that are taken from the kernel before a commit: all, and those that INVAL has not passed yet.
    pub(super) drops: Option<(Vec<Range<u64>>, VecDeque<usize>)>,
}

/// What a schedule has more of: most outcomes need many events on few bytes.
pub(super) struct Bias {
    /// The only page that is used.
    page: Option<usize>,
    /// Bytes that are used of each page.
    positions: usize,
    /// One step of so many kills the server.
    kills: usize,
    /// Invalidations take long.
    slow_inval: bool,
    /// GPUs do most of it, on one byte, and take pages from each other whenever they can.
    pub(super) gpus: bool,
    /// How often the file is cut, extended, punched and written directly.
    pub(super) changes: Changes,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Changes {
    None,
    Some,
    Often,
    /// The file grows often, and is never cut.
    Growth,
}

impl Bias {
    fn new(random: &mut Random) -> Bias {
        let gpus = random.below(6) == 0;
        if gpus {
            let (page, changes) = (Some(0), Changes::None);
            return Bias { page, positions: 1, kills: usize::MAX, slow_inval: false, gpus, changes };
        }
        Bias {
            page: (random.below(3) == 0).then(|| random.below(PAGES)),
            positions: [1, 2, BYTES_OF_PAGE, BYTES_OF_PAGE][random.below(4)],
            kills: [usize::MAX, 60, 60, 16][random.below(4)],
            slow_inval: random.below(3) == 0,
            gpus,
            changes: [Changes::None, Changes::Some, Changes::Often, Changes::Growth][random.below(4)],
        }
    }
}

pub(super) struct World {
    pub(super) random: Random,
    pub(super) now: u64,
    pub(super) machine: Arc<Machine>,
    pub(super) disk: Disk,
    pub(super) server: Option<Server>,
    pub(super) kernel: Kernel,
    pub(super) gpus: Vec<Gpu>,
    pub(super) replies: Vec<Reply>,
    pub(super) oracle: Oracle,
    pub(super) next_value: u8,
    /// Every store has a value of its own, while there are enough.
    pub(super) unique: bool,
    pub(super) next_owner: u64,
    pub(super) next_id: u64,
    /// Nothing more goes wrong: the schedule comes to its end.
    pub(super) calm: bool,
    /// Every open file has O_DIRECT: home cannot tell what READ is for.
    pub(super) vague: bool,
    pub(super) bias: Bias,
    pub(super) trace: Option<Vec<String>>,
    pub(super) failure: Option<String>,
}

macro_rules! note {
    ($world:expr, $($arg:tt)*) => {
        if $world.trace.is_some() {
            let line = format!("{:4} {}", $world.now, format_args!($($arg)*));
            $world.trace.iter_mut().for_each(|trace| trace.push(line.clone()));
        }
    };
}
pub(super) use note;

impl World {
    pub(super) fn new(seed: u64, trace: bool) -> World {
        let mut random = Random::new(seed);
        let machine = Machine::new(5 + random.below(14) as u32);
        let bias = Bias::new(&mut random);
        let size = match bias.changes {
            Changes::Growth => bias.page.unwrap_or(1) * PAGE,
            _ => [PAGES * PAGE, PAGES * PAGE, 2 * PAGE + 100, PAGE + 1][random.below(4)],
        } as u64;
        let disk = Disk::new(Arc::clone(&machine), size);
        let slots = Slots::format(machine.clone()).unwrap();
        let pages = FilePages::new(Arc::clone(&slots), FILE, KernelPages::None, size);
        let vague = random.below(4) == 0;
        let mut world = World {
            unique: random.below(2) == 0 && !bias.gpus,
            random,
            now: 1,
            machine,
            disk,
            server: Some(Server { slots, pages, invals: Vec::new(), drops: None }),
            kernel: Kernel::new(size),
            gpus: Vec::new(),
            replies: Vec::new(),
            oracle: Oracle::new(),
            next_value: 0,
            next_owner: 0,
            next_id: 0,
            calm: false,
            vague,
            bias,
            trace: trace.then(Vec::new),
            failure: None,
        };
        for index in 0..3 {
            let owner = world.add_owner();
            world.gpus.push(Gpu::new(index, owner));
        }
        world
    }

    /// A step of a random actor.
    pub(super) fn step(&mut self) {
        if self.below(self.bias.kills) == 0 {
            if self.below(3) == 0 {
                note!(self, "server killed");
                self.restart();
            } else {
                let stores = self.below(24) as i64;
                note!(self, "server will be killed after {stores} stores");
                self.machine.set_fuse(stores);
            }
        }
        for _ in 0..8 {
            let actor = if self.bias.gpus && self.below(16) != 0 { 7 + self.below(2) } else { self.below(10) };
            let acted = match actor {
                0..=4 => self.kernel_step(),
                5..=7 => {
                    let gpu = self.below(self.gpus.len());
                    self.gpu_step(gpu)
                }
                8 if !self.bias.gpus && self.below(3) == 0 => self.drop_step(),
                8 => (!self.bias.slow_inval || self.below(6) == 0) && self.inval_step(),
                _ => self.below(3) == 0 && self.write_out(),
            };
            if acted {
                break;
            }
        }
    }

    /// Takes pages from the kernel, as before a commit.
    pub(super) fn drop_step(&mut self) -> bool {
        let next = match &self.server().drops {
            Some((_, left)) => left.front().copied(),
            None => {
                let first = self.below(PAGES) as u64;
                let runs =
                    self.call(|pages, disk| pages.begin_drop(disk, std::iter::once(first..PAGES as u64)).unwrap());
                let Some(runs) = runs else { return true };
                note!(self, "begin to drop {runs:?}");
                let left = runs.iter().cloned().flatten().map(|page| page as usize).collect();
                self.server().drops = Some((runs, left));
                return true;
            }
        };
        if let Some(page) = next {
            let dropped = self.kernel_drops(page);
            if let Some((_, left)) = self.server().drops.as_mut().filter(|_| dropped) {
                left.pop_front();
            }
            return dropped;
        }
        let (runs, _) = self.server().drops.take().unwrap_or_default();
        note!(self, "dropped {runs:?}");
        self.call(|pages, _| pages.dropped(&runs));
        true
    }

    /// fsync, or the timer.
    fn write_out(&mut self) -> bool {
        let (page, all) = (self.below(PAGES) as u64, self.below(2) == 0);
        let mut dirty: Vec<u64> = self.server().pages.dirty().collect();
        dirty.retain(|dirty| all || *dirty == page);
        if !dirty.is_empty() {
            note!(self, "write out {dirty:?}");
            self.call(|pages, disk| pages.write_out(disk, &dirty).unwrap());
        }
        !dirty.is_empty()
    }

    pub(super) fn below(&mut self, bound: usize) -> usize {
        self.random.below(bound)
    }

    /// A page that is used.
    pub(super) fn page(&mut self) -> usize {
        let page = self.below(PAGES);
        self.bias.page.unwrap_or(page)
    }

    /// The place of a byte that is used, in its page.
    pub(super) fn position(&mut self) -> usize {
        self.below(self.bias.positions)
    }

    /// What the next store stores.
    pub(super) fn value(&mut self) -> u8 {
        if self.unique && self.next_value < 250 {
            self.next_value += 1;
            self.next_value
        } else {
            self.random.below(3) as u8
        }
    }

    pub(super) fn fail(&mut self, why: String) {
        note!(self, "FAILURE: {why}");
        self.failure.get_or_insert(why);
    }

    /// A value that a program loaded.
    pub(super) fn check(&mut self, what: &str, byte: usize, agent: Agent, start: u64, value: u8) {
        if !self.oracle.allows(byte, agent, start, value) {
            let list = self.oracle.list(byte);
            self.fail(format!(
                "{what}: byte {} at {:#x} is {value}, since {start}; stores:\n{list}",
                byte,
                offset(byte)
            ));
        }
    }

    pub(super) fn server(&mut self) -> &mut Server {
        self.server.as_mut().expect("the server runs")
    }

    /// A call into the server, which may be killed in it.
    pub(super) fn call<R>(&mut self, call: impl FnOnce(&mut FilePages, &dyn Backing) -> R) -> Option<R> {
        let server = self.server.as_mut().expect("the server runs");
        let disk = &self.disk;
        match catch_unwind(AssertUnwindSafe(|| call(&mut server.pages, disk))) {
            Ok(result) => Some(result),
            Err(payload) if payload.is::<Killed>() => {
                note!(self, "killed in this call");
                self.restart();
                None
            }
            Err(payload) => resume_unwind(payload),
        }
    }

    pub(super) fn add_owner(&mut self) -> crate::OwnerId {
        self.next_owner += 1;
        let owner = crate::OwnerId(self.next_owner);
        self.server().pages.add_owner(owner, 0..PAGES as u64);
        owner
    }

    /// SIGKILL, and a new server.
    pub(super) fn restart(&mut self) {
        self.machine.set_dead(true);
        self.server = None;
        let server = loop {
            self.machine.set_dead(false);
            let again = !self.calm && self.below(4) == 0;
            let fuse = if again { self.below(20) as i64 } else { -1 };
            self.machine.set_fuse(fuse);
            match catch_unwind(AssertUnwindSafe(|| self.recover())) {
                Ok(server) => break server,
                Err(payload) if payload.is::<Killed>() => note!(self, "killed while it recovers"),
                Err(payload) => resume_unwind(payload),
            }
        };
        self.machine.set_fuse(-1);
        self.server = Some(server);
        self.resend();
        for index in 0..self.gpus.len() {
            self.reattach(index);
        }
        let pending = self.server().pages.pending();
        note!(self, "new server, pending: {pending:?}");
        for reply in &mut self.replies {
            reply.release = None;
        }
        let runs = |runs: Vec<Range<u64>>| runs.into_iter().flatten().map(|page| page as usize).collect();
        self.server().invals =
            pending.into_iter().map(|(release, pages)| Inval { release, pages: runs(pages) }).collect();
        self.reply();
    }

    fn recover(&self) -> Server {
        let (slots, mut found) = Slots::recover(self.machine.clone()).unwrap();
        let pages = match found.pop() {
            Some(recovered) => FilePages::recover(Arc::clone(&slots), recovered, &self.disk).unwrap(),
            None => FilePages::new(Arc::clone(&slots), FILE, KernelPages::Any, self.disk.len()),
        };
        assert!(found.is_empty());
        Server { slots, pages, invals: Vec::new(), drops: None }
    }

    /// One step of an invalidation: false if it waits.
    pub(super) fn inval_step(&mut self) -> bool {
        let count = self.server().invals.len();
        if count == 0 {
            return false;
        }
        let index = self.below(count);
        let inval = &self.server().invals[index];
        let release = inval.release;
        if let Some(page) = inval.pages.front().copied() {
            if !self.kernel_drops(page) {
                return false;
            }
            self.server().invals[index].pages.pop_front();
            return true;
        }
        let Some(again) = self.call(|pages, _| pages.invalidated(release)) else { return true };
        note!(self, "invalidated: {release:?}, again {again:?}");
        if again.is_empty() {
            self.server().invals.remove(index);
            self.reply();
        } else {
            self.server().invals[index].pages = again.into_iter().flatten().map(|page| page as usize).collect();
        }
        true
    }

    /// Replies to clients whose release is over. Those of an earlier server wait for all invalidations.
    pub(super) fn reply(&mut self) {
        let server = self.server.as_ref().expect("the server runs");
        let busy: Vec<Release> = server.invals.iter().map(|inval| inval.release).collect();
        let waits = |reply: &Reply| match reply.release {
            Some(release) => busy.contains(&release),
            None => !busy.is_empty(),
        };
        let (wait, over): (Vec<Reply>, Vec<Reply>) = self.replies.drain(..).partition(waits);
        self.replies = wait;
        for reply in over {
            // If the client died, a program that looks for its release waits as it would have.
            let owner = reply.gpu.map(|gpu| self.gpus[gpu].owner);
            let pages = &mut self.server().pages;
            let busy = match (owner, reply.release) {
                (_, None) => false,
                (Some(owner), _) => pages.end_epoch(owner, reply.pages.clone(), Ended::Unchanged).is_err(),
                (None, _) => pages.entries.range(reply.pages.clone()).any(|(_, entry)| entry.twin.is_some()),
            };
            if busy {
                self.replies.push(reply);
                continue;
            }
            note!(self, "release of gpu {:?} returns", reply.gpu);
            reply.stores.iter().for_each(|id| self.oracle.set_end(*id, self.now));
            if let Some(gpu) = reply.gpu {
                self.gpus[gpu].released();
            }
        }
    }

    /// Runs what is under way to its end, and compares all copies.
    pub(super) fn finish(&mut self) {
        self.calm = true;
        self.machine.set_fuse(-1);
        for gpu in 0..self.gpus.len() {
            self.abandon(gpu);
        }
        for _ in 0..10_000 {
            self.now += 1;
            let busy = self.progress();
            if self.failure.is_some() {
                return;
            }
            if !busy {
                break;
            }
        }
        if self.progress() {
            return self.fail("the schedule does not come to its end".into());
        }
        self.compare();
    }

    /// One step of everything that is under way; false if nothing is.
    fn progress(&mut self) -> bool {
        let mut busy = self.kernel_progress();
        while self.inval_step() {
            busy = true;
        }
        busy || !self.server().invals.is_empty() || !self.replies.is_empty()
    }

    fn home(&mut self, page: usize) -> PageBytes {
        let mut bytes = ZEROS;
        self.call(|pages, disk| pages.read(disk, (page * PAGE) as u64, &mut bytes, ReadInto::Unknown).unwrap());
        bytes
    }

    fn compare(&mut self) {
        let size = PAGES * PAGE;
        if self.disk.len() < size as u64 {
            self.call(|pages, disk| pages.truncate(disk, size as u64).unwrap());
        }
        for page in 0..PAGES {
            let home = self.home(page);
            for byte in page * BYTES_OF_PAGE..(page + 1) * BYTES_OF_PAGE {
                let value = home[offset(byte) as usize % PAGE];
                self.check("in the end", byte, Agent::Cpu, self.now, value);
            }
            if let Some(bytes) = self.kernel.clean_page(page)
                && *bytes != home
            {
                self.fail(format!("page {page}: the kernel's copy differs from home"));
            }
            for gpu in 0..self.gpus.len() {
                if self.refresh(gpu, page) != home {
                    self.fail(format!("page {page}: the replica of gpu {gpu} differs from home"));
                }
            }
        }
        let before: Vec<PageBytes> = (0..PAGES).map(|page| self.home(page)).collect();
        self.call(|pages, disk| pages.write_out_all(disk, 0..u64::MAX).unwrap());
        for (page, before) in before.iter().enumerate() {
            let mut written = ZEROS;
            self.disk.read((page * PAGE) as u64, &mut written).unwrap();
            if written != *before {
                self.fail(format!("page {page}: the backing file differs from home"));
            }
        }
        for gpu in 0..self.gpus.len() {
            let owner = self.gpus[gpu].owner;
            self.server().pages.drop_owner(owner);
        }
        let server = self.server();
        let entries = server.pages.entries.len() + server.pages.runs.len();
        let (idle, free) = (server.pages.is_idle(), server.slots.free_slots());
        if !idle || entries != 0 || free != crate::SlotMemory::slots(&*self.machine) as usize {
            self.fail(format!("not idle in the end: {idle}, {entries} entries, {free} slots free"));
        }
    }
}
