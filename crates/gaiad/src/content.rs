//! The content of files: the seam between the FUSE handlers and the page table.
//!
//! ```text
//!   READ  WRITE  SETATTR(size)  FALLOCATE  FSYNC  last FORGET  unmount        handlers/data.rs, attributes.rs
//!     │     │         │             │        │         │          │
//!     ▼     ▼         ▼             ▼        ▼         ▼          ▼
//!   read  write    truncate      allocate  fsync    forget     finish         here: which bytes a page has now
//!     │     │         │             │        │         │          │
//!     ├─────┴─────────┴── no table? ┴────────┴──> backing file    │
//!     └─────────────── files/: page table ────────────────────────┘  <── clients.rs: acquire, release
//! ```
//!
//! Calls come from all handler threads at once, also for one file. None may wait for an invalidation, for a client or for
//! bytes from a device: the error [`ARRIVING`](crate::late::ARRIVING) says that the request is to be tried again (late.rs).

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use spinio_pagecache::{Backing as _, PAGE, ReadInto, SlotMemory, Slots, WriteFrom, offset_of};

use crate::backing::Backing;
use crate::copiers::Copiers;
use crate::file_backing::{self, FileBacking, errno};
use crate::files::{File, Files, Others};
use crate::lent::LentReads;
use crate::slot_memory::PageSlots;
use crate::state::StateMemory;

/// A READ that was overtaken by releases this often is done under the lock.
const READS_WITHOUT_LOCK: usize = 3;
/// Pages that one thread copies in less time than another takes to begin.
const LEAST_COPY: usize = 128;
/// Released pages are written to the file after this time.
const WRITE_OUT_AFTER: Duration = Duration::from_secs(5);

/// The content of all files of a mount.
#[derive(Debug)]
pub struct Content {
    files: Files,
    memory: Arc<PageSlots>,
    copiers: Copiers,
    lent: Arc<LentReads>,
}

impl Content {
    /// Over the page table in the state memory: that of an earlier server, or a new one.
    ///
    /// # Errors
    /// EINVAL: the state memory is of another version. ENOMEM and the like: another server may succeed.
    pub fn attach(state: Arc<StateMemory>, backing: Arc<Backing>) -> Result<Content, Errno> {
        let memory = Arc::new(PageSlots::new(state));
        // The first word is the mark of a memory that was laid out.
        let (table, recovered) = if memory.load(0) == 0 {
            (Slots::format(memory.clone()).map_err(|_| Errno::INVAL)?, Vec::new())
        } else {
            Slots::recover(memory.clone()).map_err(|_| Errno::INVAL)?
        };
        // As much as for released pages.
        table.limit_copies(memory.slots() as usize);
        let copiers = Copiers::default();
        Ok(Content { files: Files::new(table, recovered, backing)?, memory, copiers, lent: LentReads::new()? })
    }

    /// Pages that can be released and not yet written out.
    pub(crate) fn slots(&self) -> u32 {
        self.memory.slots()
    }

    /// Where the bytes of a slot are in the state memory.
    pub(crate) fn slot_offset(&self, slot: u32) -> u64 {
        self.memory.file_offset(slot)
    }

    /// Whether these bytes of the state memory are released pages of a file.
    pub(crate) fn has_snapshots(&self, bytes: Range<u64>, node: u64) -> bool {
        let is_snapshot =
            |slot: u64| u32::try_from(slot).is_ok_and(|slot| self.files.slots().is_snapshot_of(slot, node));
        bytes.start >= self.memory.file_offset(0) && self.memory.slots_at(bytes).all(is_snapshot)
    }

    /// Reads runs of pages of a file, each from an offset, into slots that no page refers to.
    pub(crate) fn read_into_slots(&self, file: &Arc<OwnedFd>, runs: Vec<(u64, Range<u32>)>) -> Result<(), Errno> {
        let pages: usize = runs.iter().map(|(_, slots)| slots.len()).sum();
        let each = pages.div_ceil(Copiers::width()).max(LEAST_COPY);
        let mut pieces: Vec<Vec<(u64, Range<u32>)>> = Vec::new();
        let mut room = 0;
        for (mut offset, mut slots) in runs {
            while !slots.is_empty() {
                if room == 0 {
                    pieces.push(Vec::new());
                    room = each;
                }
                let part = slots.start..slots.start + slots.len().min(room) as u32;
                room -= part.len();
                slots.start = part.end;
                let next = offset + offset_of(part.len() as u64);
                if let Some(piece) = pieces.last_mut() {
                    piece.push((offset, part));
                }
                offset = next;
            }
        }
        let read = |piece: Vec<(u64, Range<u32>)>| {
            let (memory, file) = (Arc::clone(&self.memory), Arc::clone(file));
            move || piece.iter().try_for_each(|(offset, slots)| memory.read_from(file.as_fd(), *offset, slots.clone()))
        };
        self.copiers.run(pieces.into_iter().map(read).collect())
    }

    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// CPU reads from GPU memory.
    pub(crate) fn lent(&self) -> &Arc<LentReads> {
        &self.lent
    }

    /// Reads up to the length of `buffer`; less only at the end of the file. The kernel may keep the bytes. `direct`: it
    /// may have pages of the range besides, since the file is open with O_DIRECT.
    ///
    /// # Errors
    /// Of the backing file. [`ARRIVING`](crate::late::ARRIVING), as of all that follow.
    pub fn read(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        buffer: &mut [u8],
        direct: bool,
    ) -> Result<usize, Errno> {
        let into = if direct { ReadInto::Unknown } else { ReadInto::PageCache };
        self.files.with(node, &pages_of(offset, buffer.len() as u64), |found| match found {
            Some(found) => {
                read_pages(&self.lent, found, FileBacking(file), offset, buffer, into).map_err(|e| errno(&e))
            }
            None => file_backing::read(file, offset, buffer).map(Some),
        })
    }

    /// Writes all bytes. `cached`: whole pages of the page cache (short at the end of the file), of which a program may
    /// have written only some bytes; else exactly the bytes that a program wrote.
    ///
    /// # Errors
    /// Of the backing file.
    pub fn write(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        offset: u64,
        bytes: &[u8],
        cached: bool,
    ) -> Result<usize, Errno> {
        let from = if cached { WriteFrom::PageCache } else { WriteFrom::Program };
        let changed = pages_of(offset, bytes.len() as u64);
        self.files.with(node, &changed, |found| {
            let written = self.files.times().keep_if_written(node, file, || match found {
                Some(found) => {
                    write_pages(found, FileBacking(file), &changed, offset, bytes, from).map_err(|e| errno(&e))
                }
                None => file_backing::write(file, offset, bytes).map(Some),
            })?;
            if let Some(found) = found.filter(|_| cached && written.is_some()) {
                found.small_writes().count(offset, bytes.len());
            }
            Ok(written.map(|()| bytes.len()))
        })
    }

    /// Sets the size; bytes past it are gone.
    ///
    /// # Errors
    /// Of the backing file.
    pub fn truncate(&self, node: u64, file: BorrowedFd<'_>, size: u64) -> Result<(), Errno> {
        let changed = size / PAGE as u64..u64::MAX;
        self.files.with(node, &changed, |found| match found {
            Some(found) => {
                let Some(mut pages) = found.pages_to_change_if_there(&changed) else { return Ok(None) };
                pages.truncate(&FileBacking(file), size).map(Some).map_err(|e| errno(&e))
            }
            None => rustix::io::retry_on_intr(|| rustix::fs::ftruncate(file, size)).map(Some),
        })
    }

    /// `fallocate`. With PUNCH_HOLE or ZERO_RANGE the bytes of the range become zeros; the kernel has written back its
    /// pages of the range before.
    ///
    /// # Errors
    /// Of the backing file.
    pub fn allocate(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        mode: FallocateFlags,
        offset: u64,
        length: u64,
    ) -> Result<(), Errno> {
        let allocate = || rustix::io::retry_on_intr(|| rustix::fs::fallocate(file, mode, offset, length));
        self.files.with(node, &(offset / PAGE as u64..u64::MAX), |found| {
            self.files.times().keep_time(node, file, || match found {
                Some(found) => allocate_pages(found, FileBacking(file), mode, offset, length, allocate),
                None => allocate().map(Some),
            })
        })
    }

    /// Sets times of a file, that of its modification among them or not, by `call`.
    ///
    /// # Errors
    /// Of the call.
    pub fn set_times(
        &self,
        node: u64,
        file: BorrowedFd<'_>,
        sets_modified: bool,
        call: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        self.files.times().set(node, file, sets_modified, call)
    }

    /// Changes the mode of a file, by `call`: to this one, or if it is `None`, to one that the call decides.
    ///
    /// # Errors
    /// Of the call.
    pub fn set_mode(
        &self,
        node: u64,
        mode: Option<u32>,
        call: impl FnOnce() -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        self.files.times().set_mode(node, mode, call)
    }

    /// What was written or released before is on storage afterwards.
    ///
    /// # Errors
    /// Of the backing file. Where others are not waited for, EAGAIN: a client holds a lease on it; and
    /// [`ARRIVING`](crate::late::ARRIVING): bytes of it are on their way from a device.
    pub(crate) fn fsync(&self, node: u64, file: BorrowedFd<'_>, data_only: bool, others: Others) -> Result<(), Errno> {
        // What has arrived is written while the rest is on its way.
        let found = self.files.hold_now(node).file().cloned();
        if let Some(found) = found {
            self.files.write_out_to_storage(&found, others)?;
        }
        if data_only { rustix::fs::fdatasync(file) } else { rustix::fs::fsync(file) }
    }

    /// How often released bytes of a file were lost since a program was told, which the caller does. Also of a file that has
    /// no table any more, or not with this server.
    pub(crate) fn lost(&self, node: u64) -> u64 {
        self.files.nodes().lost(node)
    }

    /// Whether a program was told of so many, after [`Content::lost`] has returned them.
    pub(crate) fn lost_is_told(&self, node: u64, lost: u64, told: bool) {
        if lost > 0 {
            self.files.nodes().lost_is_told(node, lost, told);
        }
    }

    /// Writes released pages of a file to the file below.
    ///
    /// # Errors
    /// As of [`Content::fsync`].
    pub(crate) fn write_out_node(&self, node: u64, others: Others) -> Result<(), Errno> {
        // Without the guard, since this may take long. A file that loses its table meanwhile has nothing to write out.
        let found = self.files.hold_now(node).file().cloned();
        found.map_or(Ok(()), |found| match others {
            Others::Wait => self.files.write_out(&found),
            Others::Fail => self.files.write_out_now(&found),
        })
    }

    /// What [`Content::forget`] would wait for, if so: EAGAIN, a client's lease; or [`ARRIVING`](crate::late::ARRIVING).
    pub fn forget_waits(&self, node: u64) -> Option<Errno> {
        self.files.forget_waits(node)
    }

    /// The kernel has no page of the node any more.
    pub fn forget(&self, node: u64) {
        self.files.forget(node);
    }

    /// Writes out released pages that are old, and all if slots are short. To be called every second.
    pub fn write_out(&self) {
        let free = self.files.slots().free_slots() as u64;
        let short = free < u64::from(self.slots()) / 8 * 7;
        self.files.write_out_older(if short { Duration::ZERO } else { WRITE_OUT_AFTER });
    }

    /// The file system is unmounted.
    pub fn finish(&self) {
        self.files.finish();
    }
}

/// `fallocate` of a file with a page table; `allocate` is the call on the backing file. As all that follow, `None` if bytes
/// are on their way.
fn allocate_pages(
    file: &File,
    backing: FileBacking<'_>,
    mode: FallocateFlags,
    offset: u64,
    length: u64,
    allocate: impl FnOnce() -> Result<(), Errno>,
) -> Result<Option<()>, Errno> {
    let end = offset.checked_add(length).ok_or(Errno::FBIG)?;
    let keeps_size = mode.contains(FallocateFlags::KEEP_SIZE);
    let Some(mut pages) = file.pages_to_change_if_there(&(offset / PAGE as u64..u64::MAX)) else { return Ok(None) };
    let done = match mode - FallocateFlags::KEEP_SIZE {
        FallocateFlags::PUNCH_HOLE | FallocateFlags::ZERO_RANGE => {
            let size = backing.size().map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
            let inside = offset..end.min(size);
            // The range keeps its space, or gets it, as with the file system itself.
            let keep_space = || {
                let keep = || rustix::fs::fallocate(backing.0, FallocateFlags::KEEP_SIZE, offset, length);
                match rustix::io::retry_on_intr(keep) {
                    // There zeros are written.
                    Err(Errno::OPNOTSUPP) => Ok(()),
                    kept => kept,
                }
            };
            let zeros = mode.contains(FallocateFlags::ZERO_RANGE);
            if zeros {
                // Where there is no space nothing has changed.
                keep_space()?;
            }
            if !inside.is_empty() {
                pages.punch(&backing, inside).map_err(|e| errno(&e))?;
            }
            if zeros {
                keep_space()?;
            }
            if end > size && !keeps_size {
                pages.truncate(&backing, end).map_err(|e| errno(&e))?;
            }
            Ok(())
        }
        // A larger file has zeros at its end, as after a truncation.
        mode if mode.is_empty() => pages.allocate(allocate),
        _ => Err(Errno::OPNOTSUPP),
    };
    done.map(Some)
}

/// A READ of a file with a page table. The bytes are copied without a lock, and again if a page has a new version.
fn read_pages(
    lent: &Arc<LentReads>,
    file: &File,
    backing: FileBacking<'_>,
    offset: u64,
    buffer: &mut [u8],
    into: ReadInto,
) -> spinio_pagecache::Result<Option<usize>> {
    let end = offset + buffer.len() as u64;
    let wanted = pages_of(offset, buffer.len() as u64);
    for _ in 0..READS_WITHOUT_LOCK {
        let Some(mut pages) = file.pages_if_there(&wanted) else { return Ok(None) };
        let plan = pages.read_plan(wanted.clone());
        drop(pages);
        let inside = backing.size()?.saturating_sub(offset).min(buffer.len() as u64) as usize;
        for (pages, source) in &plan.runs {
            let first = offset_of(pages.start).max(offset);
            let last = offset_of(pages.end).min(end);
            let part = &mut buffer[(first - offset) as usize..(last - offset) as usize];
            let from = (first - offset_of(pages.start)) as usize;
            if !source.copy_part(from, part) && !lent.read(file.lent(), backing.0, first, part) {
                backing.read(first, part)?;
            }
        }
        // It looks at no bytes.
        if file.pages_now().read_done(&plan, into) {
            return Ok(Some(inside));
        }
    }
    let Some(mut pages) = file.pages_if_there(&wanted) else { return Ok(None) };
    pages.read(&backing, offset, buffer, into).map(Some)
}

/// A WRITE of a file with a page table: of whole pages that need no look without the lock ([`crate::overwrites`]).
fn write_pages(
    file: &File,
    backing: FileBacking<'_>,
    pages: &Range<u64>,
    offset: u64,
    bytes: &[u8],
    from: WriteFrom,
) -> spinio_pagecache::Result<Option<()>> {
    let Some(mut table) = file.pages_to_change_if_there(pages) else { return Ok(None) };
    if file.overwrites().is_waited_for() || !table.begin_overwrite(&backing, offset, bytes.len())? {
        return table.write(&backing, offset, bytes, from).map(Some);
    }
    let _overwrite = file.overwrites().begin(pages);
    drop(table);
    backing.write(offset, bytes)?;
    Ok(Some(()))
}

/// The pages of a range of bytes.
fn pages_of(offset: u64, len: u64) -> Range<u64> {
    offset / PAGE as u64..offset.saturating_add(len).div_ceil(PAGE as u64)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use std::time::Instant;

    use rustix::fs::{Mode, OFlags};
    use spinio_pagecache::{Access, FilePages, KernelPages};

    use super::*;
    use crate::handlers::{identity, stat};
    use crate::link::Link;
    use crate::nodes::Nodes;

    #[test]
    fn released_pages_are_written_before_their_time_from_an_eighth_of_the_memory_on() {
        if !rustix::process::geteuid().is_root() {
            return eprintln!("skipped: not root");
        }
        let dir = tempfile::tempdir().unwrap();
        let open = |path, flags| rustix::fs::open(path, flags, Mode::empty()).unwrap();
        let state = Arc::new(StateMemory::of(PageSlots::bytes_for(64)));
        std::fs::write(dir.path().join("file"), [1; 64 * PAGE]).unwrap();
        let below = open(dir.path().join("file"), OFlags::RDWR);
        let nodes = Arc::new(Nodes::attach(state.clone()));
        let node = nodes.look_up(&identity(&below, &stat(&below).unwrap()).unwrap()).unwrap();
        let (supervisor, _) = Link::pair().unwrap();
        let backing = Backing::new(open(dir.path().into(), OFlags::RDONLY), nodes, supervisor, 16, 4);
        let content = Content::attach(state, Arc::new(backing)).unwrap();
        let slots = u64::from(content.slots());
        let (file, owner) = (content.files().enter(node), content.files().new_owner());
        file.pages().add_owner(owner, 0..slots);
        let release = |pages: Range<u64>| {
            let (backing, mut table) = (FileBacking(below.as_fd()), file.pages());
            table.open(&backing, owner, pages.clone(), Access::Write).unwrap();
            table.filled(owner, pages.clone()).unwrap();
            table.commit(&backing, owner, pages.end, pages.map(|page| (page, &[7; PAGE]))).unwrap();
            drop(table);
            file.mark_dirty();
        };
        let unwritten = || file.pages().dirty().count() as u64;
        let begun = Instant::now();
        // Each of these pages takes a second slot, for what the kernel may have.
        let few = slots / 8 / 2;
        release(0..few);
        content.write_out();
        let was = unwritten();
        assert!(was == few || begun.elapsed() >= WRITE_OUT_AFTER, "{was} of {few}");
        release(few..few + slots / 8);
        content.write_out();
        assert_eq!(unwritten(), 0);
    }

    #[test]
    fn range_of_zeros_keeps_its_space_and_gets_what_it_lacks() {
        use FallocateFlags as Mode;
        let memory = PageSlots::new(Arc::new(StateMemory::small()));
        let slots = Slots::format(Arc::new(memory)).unwrap();
        let (size, page) = (64 * PAGE as u64, PAGE as u64);
        let file = File::new(1, FilePages::new(slots, 1, KernelPages::None, size));
        let below = tempfile::tempfile().unwrap();
        rustix::io::pwrite(&below, &vec![1; size as usize], 0).unwrap();
        let space = || rustix::fs::fstat(&below).unwrap().st_blocks as u64 * 512;
        let zero = |mode, offset, length| {
            let unused = || unreachable!("the table does it");
            allocate_pages(&file, FileBacking(below.as_fd()), mode, offset, length, unused).unwrap().unwrap();
        };
        zero(Mode::ZERO_RANGE | Mode::KEEP_SIZE, page, 32 * page);
        assert!(space() >= size, "{}", space());
        zero(Mode::ZERO_RANGE, size, 64 * page);
        assert!(space() >= 2 * size, "{}", space());
        zero(Mode::PUNCH_HOLE | Mode::KEEP_SIZE, page, 32 * page);
        assert!(space() < 2 * size, "a hole has none");
        assert_eq!(rustix::fs::fstat(&below).unwrap().st_size as u64, 2 * size);
        let mut bytes = vec![7; 2 * size as usize];
        assert_eq!(rustix::io::pread(&below, &mut bytes, 0).unwrap(), bytes.len());
        let ones =
            |pages: Range<usize>| bytes[pages.start * PAGE..pages.end * PAGE].iter().filter(|b| **b == 1).count();
        assert_eq!((ones(0..1), ones(1..33), ones(33..64), ones(64..128)), (PAGE, 0, 31 * PAGE, 0));
    }

    #[test]
    fn nothing_that_has_a_file_held_waits_for_bytes_on_their_way() {
        let memory = PageSlots::new(Arc::new(StateMemory::small()));
        let slots = Slots::format(Arc::new(memory)).unwrap();
        let file = File::new(1, FilePages::new(slots, 1, KernelPages::None, 8 * PAGE as u64));
        let below = tempfile::tempfile().unwrap();
        below.set_len(8 * PAGE as u64).unwrap();
        let backing = FileBacking(below.as_fd());
        let lent = LentReads::new().unwrap();
        file.begin_arrival(1, 2..4);
        let read = |page: u64| {
            let (at, mut bytes) = (page * PAGE as u64, [0; PAGE]);
            read_pages(&lent, &file, backing, at, &mut bytes, ReadInto::PageCache).unwrap()
        };
        let write = |page: u64| {
            let at = page * PAGE as u64;
            write_pages(&file, backing, &(page..page + 1), at, &[1; PAGE], WriteFrom::PageCache).unwrap()
        };
        let allocate = |page: u64| {
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            allocate_pages(&file, backing, punch, page * PAGE as u64, PAGE as u64, || Ok(())).unwrap()
        };
        assert_eq!((read(1), write(1), allocate(5)), (Some(PAGE), Some(()), Some(())));
        spinio_testkit::deadline::with_deadline("a call that waits", || {
            assert_eq!((read(3), write(3), allocate(1)), (None, None, None));
            assert!(file.pages_to_change_if_there(&(0..u64::MAX)).is_none());
        });
        file.end_arrival(1);
        assert_eq!((read(3), write(3), allocate(1)), (Some(PAGE), Some(()), Some(())));
    }

    #[test]
    fn overwritten_pages_are_waited_for_and_while_something_waits_the_lock_is_kept() {
        let memory = PageSlots::new(Arc::new(StateMemory::small()));
        let slots = Slots::format(Arc::new(memory)).unwrap();
        let file = File::new(1, FilePages::new(slots, 1, KernelPages::None, 8 * PAGE as u64));
        let below = tempfile::tempfile().unwrap();
        let write = |page: u64, byte| {
            let (at, bytes) = (page * PAGE as u64, [byte; PAGE]);
            let pages = page..page + 1;
            let from = WriteFrom::PageCache;
            write_pages(&file, FileBacking(below.as_fd()), &pages, at, &bytes, from).unwrap().unwrap();
        };
        let without_lock = || file.overwrites().count();
        write(1, 1);
        assert_eq!(without_lock(), 1);
        let overwrite = file.overwrites().begin(&(2..3));
        // These do not wait.
        drop(file.pages_of(&(0..2)));
        drop(file.pages_of(&(3..8)));
        std::thread::scope(|scope| {
            let (done, is_done) = mpsc::channel();
            let file = &file;
            scope.spawn(move || {
                drop(file.pages_of(&(0..4)));
                done.send(()).unwrap();
            });
            spinio_testkit::eventually("a thread waits", || file.overwrites().is_waited_for());
            write(5, 2);
            assert_eq!(without_lock(), 2, "the lock was kept");
            assert!(is_done.try_recv().is_err());
            drop(overwrite);
            is_done.recv().unwrap();
        });
        write(5, 3);
        assert_eq!(without_lock(), 3);
        let mut read = [0; 2];
        for (byte, page) in read.iter_mut().zip([1, 5]) {
            rustix::io::pread(&below, std::slice::from_mut(byte), page * PAGE as u64 + 7).unwrap();
        }
        assert_eq!(read, [1, 3]);
    }
}
