//! Many pieces of the page cache, read by threads that do nothing else.
//!
//! ```text
//!   host ── empty page ──>  reader: pread, pread, pread ...   in a descriptor table of its own
//!        <── full page ───  reader: pread, pread, pread ...   likewise
//!     └─ launch: each piece to its place
//! ```
//!
//! A `pread` costs a microsecond, more or less, but a thread that shares its descriptor table has to
//! count its use of the open file up and down, so that nobody closes it meanwhile, and all threads count in one word.
//! Seen (H200, 1 M reads out of 8 GiB by threads that share a table): 512 bytes at 1.7 GB/s with 6 threads and 1.9 with
//! 12 or 15, 4 KiB at 10.4, 16.0 and 15.2 GB/s, and from 6 threads to 15 twice the time of the CPU. Of a table that one
//! thread alone has the kernel knows that nobody can close anything (`fdget`), and counts nothing.
//!
//! So each reader has a table of its own and, for the time of a batch, the program's descriptors in it: the same open
//! files (`pidfd_getfd`), so that rights, modes and leases are the program's. It must not call a device: its driver would
//! look for its descriptors in that table. It gets empty pages from a host, which may, and hands in full ones
//! (exchange.rs).
//!
//! Host is the caller, and while he registers memory nobody else: the driver has one lock, which is not fair. Seen (H200)
//! while one thread registers piece after piece, 8 or 128 MiB at a time: a copy that another thread issues takes 3 us else
//! and then up to 60 ms, until nearly all is registered. So pages ran out with a host beside him, and 12 threads that
//! copied while one registered brought less (12 to 13 GB/s of 4 KiB pieces) than without (14 to 18). Between two parts he
//! lends empty pages and launches full ones, and each reader has a page in reserve for the time of a part. Only where he
//! waits for storage, which has to be launched too, another thread is host beside him.
//!
//! Where a sandbox refuses `pidfd_getfd` (Docker's own does, without CAP_SYS_PTRACE) readers open the files anew, by what
//! /proc says of the program's descriptors, unless the program has a lease that this would break.
//!
//! While no reader is there (all are at work for another batch, or none can be had) the caller reads itself.
//!
//! Known flaws: whoever watches a file (inotify) sees it opened by readers that open it anew. The open file's read-ahead state is still one word for all. On XFS each read counts in a lock of the inode.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use spinio_device::DeviceError;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use crate::copies::{Copies, Opens, STEP, Sheet};
use crate::exchange::{Exchange, Next, Reader};
use spinio_host::task_scope::Gate;
use crate::outlet::Page;
use crate::work::{HOST, Item};
use spinio_host::pool::Task;
use spinio_host::syscalls::Kernel;
use spinio_host::lock;
use spinio_files::is_own;
use spinio_transfer::bounce::{Block, Staging};

/// Fewer threads are not worth a host.
const FEW: usize = 4;

/// Files that a reader has open at once.
const MOST_OPEN: usize = 64;

/// Readers of one batch.
pub(crate) struct Readers {
    copies: Arc<Copies>,
    /// The only outlet.
    outlet: u16,
    /// Whose descriptors the batch is about.
    tid: u32,
    /// Files are opened anew.
    anew: bool,
    exchange: Exchange<Page, Sheet>,
    /// What readers took and could not read.
    left: Mutex<Vec<Item>>,
    /// What the caller has open, who alone uses it.
    opens: Mutex<Opens>,
    inside: Gate,
    hosts: Gate,
    done: AtomicBool,
}

/// The thread beside the caller that is host while he waits for storage.
struct Beside(Arc<Readers>);

impl Readers {
    /// Readers that a large batch of one file and device has at most, out of so many threads.
    pub(crate) fn most(threads: usize) -> usize {
        if threads < FEW { 0 } else { threads - 1 }
    }

    /// Calls readers, if so many are of use; the caller must be a thread of the program.
    pub(crate) fn call(copies: &Arc<Copies>) -> Option<Arc<Readers>> {
        let (work, wanted) = (&copies.work, copies.wanted().min(copies.work.ctx.reader.files.workers().batch_threads()));
        let outlet = copies.items.first()?.outlet;
        let one = (work.alike || copies.items.iter().all(|item| item.outlet == outlet)) && outlet != HOST;
        let anew = work.ctx.reader.files.workers().pidfd_getfd_denied.load(Relaxed);
        let barred = |fd: Fd| is_own(fd) || anew && work.ctx.reader.files.sys().is_leased(fd);
        if work.sources.iter().any(|source| barred(source.fd)) {
            return None;
        }
        if wanted < FEW || !one || !work.outlets[outlet as usize].device.abilities().copies {
            return None;
        }
        let crew = work.ctx.reader.files.workers().batch_readers()?;
        let readers = Arc::new(Readers {
            copies: Arc::clone(copies),
            outlet,
            tid: linux::gettid(),
            anew,
            exchange: Exchange::new(),
            left: Mutex::default(),
            opens: Mutex::new(copies.open()),
            inside: Gate::new(),
            hosts: Gate::new(),
            done: AtomicBool::new(false),
        });
        crew.post(Arc::clone(&readers) as Arc<dyn Task>, wanted - 1);
        Some(readers)
    }

    /// Calls a host beside the caller, who will be busy for long. Not while he registers memory.
    pub(crate) fn call_host(self: &Arc<Self>) {
        // What fails on its way it reads itself, through the program's descriptors.
        if let Some(mates) = self.copies.work.ctx.reader.files.workers().batch_copy()
            && mates.shares_my_table() != Some(false)
        {
            mates.post(Arc::new(Beside(Arc::clone(self))), 1);
        }
    }

    /// What a host does who has other work: lends what is wanted, sends what is full, and waits for nothing.
    pub(crate) fn serve(&self) {
        let mut opens = lock(&self.opens);
        self.lend();
        while let Some(sheet) = self.exchange.ready() {
            self.copies.send(self.copies.pen(&mut opens, self.outlet), sheet);
            self.lend();
        }
    }

    /// Whether their blocks are of this outlet's ring.
    pub(crate) fn serves(&self, outlet: u16) -> bool {
        outlet == self.outlet
    }

    /// A block of the ring for the caller himself. His readers may have all the others, so he does not wait for it
    /// as others do: what they hand in meanwhile he sends.
    pub(crate) fn block(&self) -> Result<Block, DeviceError> {
        let mut opens = lock(&self.opens);
        loop {
            if let Some(block) = self.staging().try_take()? {
                return Ok(block);
            }
            if let Some(page) = self.exchange.take_back() {
                return Ok(page.into_block());
            }
            match self.exchange.next(true) {
                Next::Send(sheet) => self.copies.send(self.copies.pen(&mut opens, self.outlet), sheet),
                Next::Wait => {}
                // Who has the others is no reader of this batch.
                Next::Alone => self.staging().wait(),
            }
        }
    }

    /// Works until everything is done, and returns what nobody could read.
    pub(crate) fn finish(&self) -> Vec<Item> {
        // Whatever happens to the caller, the others are out before he is.
        let worked = catch_unwind(AssertUnwindSafe(|| self.work()));
        self.exchange.starve();
        self.done.store(true, Relaxed);
        let gates = catch_unwind(AssertUnwindSafe(|| self.inside.close()));
        self.hosts.close();
        self.give_back();
        while let Next::Send(sheet) = self.exchange.next(true) {
            // Only of a batch that panicked.
            self.staging().give_back(sheet.into_block());
        }
        if let Err(panic) = worked.and(gates) {
            std::panic::resume_unwind(panic);
        }
        std::mem::take(&mut lock(&self.left))
    }

    /// The caller: host while there are readers, else reader.
    fn work(&self) {
        let mut opens = std::mem::take(&mut *lock(&self.opens));
        loop {
            if self.host(&mut opens) {
                continue;
            }
            // Whoever waits for pages must not keep any, and here nobody is who would fill them.
            self.give_back();
            // Who came meanwhile may have taken what was left.
            if !self.copies.step(&mut opens) && self.exchange.close() {
                break;
            }
        }
        self.copies.close(opens);
    }

    /// One step of a host; false while there are no readers.
    fn host(&self, opens: &mut Opens) -> bool {
        let dry = !self.lend();
        if dry {
            self.copies.send_all(opens);
        }
        match self.exchange.next(dry) {
            Next::Send(sheet) => self.copies.send(self.copies.pen(opens, self.outlet), sheet),
            Next::Wait => {}
            Next::Alone => return false,
        }
        true
    }

    /// Lends what is wanted; false if the ring has no more to lend now.
    fn lend(&self) -> bool {
        let outlet = &self.copies.work.outlets[self.outlet as usize];
        while self.exchange.wants() {
            match outlet.staging.try_take() {
                Ok(Some(block)) => self.exchange.lend(Page::new(outlet, block)),
                Ok(None) => return false,
                Err(_) => self.exchange.starve(),
            }
        }
        true
    }

    /// Empty pages, to who may need them more.
    fn give_back(&self) {
        while let Some(page) = self.exchange.take_back() {
            self.staging().give_back(page.into_block());
        }
    }

    fn staging(&self) -> &Staging {
        &self.copies.work.outlets[self.outlet as usize].staging
    }

    /// A reader.
    fn read(&self) {
        let Some(reader) = self.exchange.enter() else { return };
        let mut files = Files::new(self);
        let mut sheet: Option<Sheet> = None;
        while let Some(range) = self.copies.frontier.back(self.step()) {
            for at in range {
                let fd = files.get(self.copies.items[at].source);
                let read = fd.is_some_and(|fd| self.one(&reader, &mut sheet, fd, at));
                if !read {
                    lock(&self.left).push(self.copies.items[at]);
                }
            }
        }
        if let Some(sheet) = sheet {
            reader.hand_in(sheet);
        }
    }

    /// Items that a reader takes at once: many while many are left, so that readers are in different parts of the file.
    /// Two in one part meet in the same folios, each of whose counters is one word; and one alone finds there in its
    /// caches what it needed for the piece before.
    fn step(&self) -> u32 {
        let threads = u32::try_from(self.copies.work.ctx.reader.files.workers().batch_threads()).unwrap_or(u32::MAX);
        (self.copies.frontier.left() / threads.saturating_mul(4)).clamp(STEP, 16 * STEP)
    }

    /// Reads an item into a page; false if there is none to be had.
    fn one(&self, reader: &Reader<'_, Page, Sheet>, sheet: &mut Option<Sheet>, fd: Fd, at: usize) -> bool {
        if let Some(open) = sheet
            && open.add(&self.copies, fd, at)
        {
            return true;
        }
        if let Some(full) = sheet.take() {
            reader.hand_in(full);
        }
        reader.page().is_some_and(|page| sheet.insert(Sheet::new(page)).add(&self.copies, fd, at))
    }
}

/// The program's open files in the table of a reader.
struct Files<'a> {
    readers: &'a Readers,
    kernel: &'static dyn Kernel,
    /// By the number of the source; `None` inside: it could not be had.
    open: Vec<Option<Option<Fd>>>,
    count: usize,
}

impl Files<'_> {
    fn new(readers: &Readers) -> Files<'_> {
        let work = &readers.copies.work;
        Files { readers, kernel: work.ctx.reader.files.sys(), open: vec![None; work.sources.len()], count: 0 }
    }

    fn get(&mut self, source: u16) -> Option<Fd> {
        if let Some(known) = self.open[source as usize] {
            return known;
        }
        if self.count >= MOST_OPEN {
            self.close();
        }
        let found = self.fetch(source);
        self.count += usize::from(found.is_some());
        self.open[source as usize] = Some(found);
        found
    }

    fn fetch(&self, source: u16) -> Option<Fd> {
        let work = &self.readers.copies.work;
        let source = &work.sources[source as usize];
        let Readers { tid, anew, .. } = *self.readers;
        let found = match anew {
            false => self.kernel.share(tid, source.fd),
            true => self.kernel.open_again(tid, source.fd, linux::O_RDONLY as i32),
        };
        if let (false, Err(Errno::PERM | Errno::NOSYS)) = (anew, found) {
            // A sandbox: the next batch does not try.
            work.ctx.reader.files.workers().pidfd_getfd_denied.store(true, Relaxed);
        }
        let fd = found.ok()?;
        // The program may have closed it under its own batch, and opened another file as the same number.
        let same = self.kernel.names(fd, source.file.key());
        if !same {
            self.kernel.close(fd);
        }
        same.then_some(fd)
    }

    fn close(&mut self) {
        for file in &mut self.open {
            if let Some(fd) = file.take().flatten() {
                self.kernel.close(fd);
            }
        }
        self.count = 0;
    }
}

impl Drop for Files<'_> {
    fn drop(&mut self) {
        self.close();
    }
}

impl Task for Readers {
    fn help(&self) {
        if let Some(_inside) = self.inside.enter() {
            self.read();
        }
    }
}

impl Task for Beside {
    fn help(&self) {
        let readers = &self.0;
        let Some(_host) = readers.hosts.enter() else { return };
        if !readers.copies.can_be_seen() {
            return;
        }
        let mut opens = readers.copies.open();
        while !readers.done.load(Relaxed) {
            if !readers.host(&mut opens) {
                // The caller may be waiting for a page, or another batch.
                readers.give_back();
                // They come or are gone; who has just left needs nobody.
                if readers.copies.frontier.is_met() {
                    break;
                }
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        readers.copies.close(opens);
    }
}
