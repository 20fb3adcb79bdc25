//! The operations one by one, where the outcome is plain. The model (tests/model) has the races.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;
use std::sync::Mutex;

use spinio_pagecache::*;

/// State memory in a vector.
struct Memory {
    slots: u32,
    words: Mutex<Vec<u64>>,
    bytes: Mutex<Vec<PageBytes>>,
}

impl Memory {
    fn new(slots: u32) -> Arc<Memory> {
        let words = Mutex::new(vec![0; words(slots, 4)]);
        Arc::new(Memory { slots, words, bytes: Mutex::new(vec![ZEROS; slots as usize]) })
    }
}

impl SlotMemory for Memory {
    fn slots(&self) -> u32 {
        self.slots
    }
    fn records(&self) -> u32 {
        4
    }
    fn load(&self, index: usize) -> u64 {
        self.words.lock().unwrap()[index]
    }
    fn store(&self, index: usize, value: u64) {
        self.words.lock().unwrap()[index] = value;
    }
    fn read(&self, slot: u32, bytes: &mut PageBytes) {
        *bytes = self.bytes.lock().unwrap()[slot as usize];
    }
    fn write(&self, slot: u32, at: usize, bytes: &[u8]) {
        self.bytes.lock().unwrap()[slot as usize][at..at + bytes.len()].copy_from_slice(bytes);
    }
}

/// A backing file in a vector.
#[derive(Default)]
struct File(RefCell<Vec<u8>>);

impl Backing for File {
    fn size(&self) -> std::io::Result<u64> {
        Ok(self.0.borrow().len() as u64)
    }
    fn read(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<usize> {
        let file = self.0.borrow();
        let inside = &file[file.len().min(offset as usize)..file.len().min(offset as usize + bytes.len())];
        bytes.fill(0);
        bytes[..inside.len()].copy_from_slice(inside);
        Ok(inside.len())
    }
    fn write(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        let mut file = self.0.borrow_mut();
        let end = offset as usize + bytes.len();
        if file.len() < end {
            file.resize(end, 0);
        }
        file[offset as usize..end].copy_from_slice(bytes);
        Ok(())
    }
    fn set_size(&self, size: u64) -> std::io::Result<()> {
        self.0.borrow_mut().resize(size as usize, 0);
        Ok(())
    }
    fn punch(&self, bytes: Range<u64>) -> std::io::Result<()> {
        let mut file = self.0.borrow_mut();
        let end = file.len().min(bytes.end as usize);
        file[bytes.start as usize..end].fill(0);
        Ok(())
    }
}

const A: OwnerId = OwnerId(1);
const B: OwnerId = OwnerId(2);

fn start(size: usize, slots: u32) -> (Arc<Slots>, FilePages, File) {
    let slots = Slots::format(Memory::new(slots)).unwrap();
    let mut pages = FilePages::new(Arc::clone(&slots), 7, KernelPages::None, size as u64);
    pages.add_owner(A, 0..8);
    pages.add_owner(B, 0..8);
    (slots, pages, File(RefCell::new(vec![b'.'; size])))
}

/// Acquires one page for writing, and returns its bytes.
fn acquire(pages: &mut FilePages, file: &File, owner: OwnerId, page: u64) -> PageBytes {
    let mut bytes = ZEROS;
    for fill in pages.open(file, owner, page..page + 1, Access::Write).unwrap() {
        assert_eq!((fill.pages.clone(), fill.base.is_none()), (page..page + 1, true));
        if !fill.source.copy(&mut bytes) {
            file.read(offset_of(page), &mut bytes).unwrap();
        }
    }
    assert!(pages.filled(owner, page..page + 1).unwrap().is_empty());
    bytes
}

fn release(pages: &mut FilePages, file: &File, owner: OwnerId, page: u64, bytes: &PageBytes) -> Commit {
    let commit = pages.commit(file, owner, 1, [(page, bytes)]).unwrap();
    assert!(pages.invalidated(commit.release).is_empty());
    commit
}

fn list(runs: Vec<Range<u64>>) -> Vec<u64> {
    runs.into_iter().flatten().collect()
}

fn byte(pages: &mut FilePages, file: &File, offset: u64) -> u8 {
    let mut byte = [0];
    assert_eq!(pages.read(file, offset, &mut byte, ReadInto::Unknown).unwrap(), 1);
    byte[0]
}

#[test]
fn released_byte_is_read_and_written_out() {
    let (slots, mut pages, file) = start(2 * PAGE, 4);
    let mut copy = acquire(&mut pages, &file, A, 1);
    copy[5] = b'a';
    let commit = release(&mut pages, &file, A, 1, &copy);
    assert_eq!((commit.published, commit.invalidate.len(), commit.merged.len()), (1, 0, 0));
    assert_eq!(byte(&mut pages, &file, offset_of(1) + 5), b'a');
    assert_eq!(file.0.borrow()[PAGE + 5], b'.');
    assert_eq!(pages.dirty().collect::<Vec<_>>(), [1]);
    pages.write_out_all(&file, 0..8).unwrap();
    assert_eq!(file.0.borrow()[PAGE + 5], b'a');
    assert_eq!(slots.free_slots(), 4);
    assert!(slots.was_committed(1) && !slots.was_committed(2));
}

#[test]
fn two_owners_of_a_page_keep_each_others_bytes() {
    let (_, mut pages, file) = start(PAGE, 4);
    let (mut a, mut b) = (acquire(&mut pages, &file, A, 0), acquire(&mut pages, &file, B, 0));
    (a[0], b[1]) = (b'a', b'b');
    release(&mut pages, &file, A, 0, &a);
    let commit = release(&mut pages, &file, B, 0, &b);
    assert_eq!(list(commit.merged), [0]);
    assert_eq!([byte(&mut pages, &file, 0), byte(&mut pages, &file, 1)], *b"ab");
    assert_eq!(&acquire(&mut pages, &file, A, 0)[..3], b"ab.");
    assert_eq!(&acquire(&mut pages, &file, B, 0)[..3], b"ab.");
}

#[test]
fn write_back_of_an_older_page_keeps_released_bytes() {
    let (_, mut pages, file) = start(PAGE, 4);
    let mut cpu = [0; PAGE];
    pages.read(&file, 0, &mut cpu, ReadInto::PageCache).unwrap();
    let mut gpu = acquire(&mut pages, &file, A, 0);
    (cpu[0], gpu[1]) = (b'c', b'g');
    let commit = pages.commit(&file, A, 1, [(0, &gpu)]).unwrap();
    assert_eq!(list(commit.invalidate), [0]);
    pages.write(&file, 0, &cpu, WriteFrom::PageCache).unwrap();
    assert_eq!([byte(&mut pages, &file, 0), byte(&mut pages, &file, 1)], *b"cg");
    assert_eq!(list(pages.invalidated(commit.release)), [0]);
    assert!(pages.invalidated(commit.release).is_empty());
    assert!(pages.pending().is_empty());
}

#[test]
fn release_without_a_free_slot_changes_nothing() {
    let (slots, mut pages, file) = start(2 * PAGE, 1);
    let copies = [acquire(&mut pages, &file, A, 0), acquire(&mut pages, &file, A, 1)].map(|mut copy| {
        copy[0] = b'a';
        copy
    });
    let both = || (0..).zip(&copies);
    assert!(matches!(pages.commit(&file, A, 1, both()), Err(Error::NoSpace)));
    assert_eq!((slots.free_slots(), slots.was_committed(1), pages.dirty().count()), (1, false, 0));
    for (page, copy) in both() {
        release(&mut pages, &file, A, page, copy);
        pages.write_out(&file, &[page]).unwrap();
    }
    assert_eq!([byte(&mut pages, &file, 0), byte(&mut pages, &file, offset_of(1))], *b"aa");
}

#[test]
fn dropped_stores_and_copies_are_fetched_again() {
    let (_, mut pages, file) = start(3 * PAGE, 4);
    let mut copy = acquire(&mut pages, &file, A, 0);
    acquire(&mut pages, &file, A, 1);
    pages.end_epoch(A, 1..2, Ended::Unchanged).unwrap();
    // Page 0 is open, page 1 is valid, page 2 absent.
    let fetched = |pages: &mut FilePages| -> Vec<u64> {
        let fills = pages.open(&file, A, 0..3, Access::Read).unwrap();
        pages.filled(A, 0..3).unwrap();
        fills.into_iter().flat_map(|fill| fill.pages).collect()
    };
    pages.drop_copies(A, 0..8).unwrap();
    assert_eq!(fetched(&mut pages), [1, 2], "the open page stays");
    copy[0] = b'a';
    pages.end_epoch(A, 0..8, Ended::Abandoned).unwrap();
    assert!(matches!(pages.commit(&file, A, 1, [(0, &copy)]), Err(Error::NotOpen)));
    assert_eq!(fetched(&mut pages), [0], "the others have no stores");
    assert_eq!(byte(&mut pages, &file, 0), b'.');
    assert!(matches!(pages.drop_copies(OwnerId(9), 0..1), Err(Error::NotOpen)));
}

#[test]
fn pages_that_are_not_open_are_refused() {
    let (_, mut pages, file) = start(2 * PAGE, 4);
    let copy = acquire(&mut pages, &file, A, 0);
    let refused = |pages: &mut FilePages, owner, list: &[u64]| {
        let result = pages.commit(&file, owner, 1, list.iter().map(|page| (*page, &copy)));
        assert!(matches!(result, Err(Error::NotOpen)), "{result:?}");
    };
    refused(&mut pages, A, &[1]);
    refused(&mut pages, A, &[0, 0]);
    refused(&mut pages, A, &[0, 100]);
    refused(&mut pages, B, &[0]);
    refused(&mut pages, OwnerId(9), &[0]);
    assert!(matches!(pages.open(&file, A, 7..9, Access::Read), Err(Error::NotOpen)));
    pages.end_epoch(A, 0..8, Ended::Unchanged).unwrap();
    refused(&mut pages, A, &[0]);
}

#[test]
fn stores_past_the_end_are_dropped() {
    let (_, mut pages, file) = start(PAGE + 10, 4);
    let mut copies = [acquire(&mut pages, &file, A, 1), acquire(&mut pages, &file, A, 2)];
    (copies[0][9], copies[0][10], copies[1][0]) = (b'a', b'b', b'c');
    let commit = pages.commit(&file, A, 1, (1..).zip(&copies)).unwrap();
    assert_eq!((commit.published, list(commit.merged)), (1, vec![1, 2]));
    pages.write_out_all(&file, 0..8).unwrap();
    assert_eq!(file.0.borrow()[PAGE + 8..], *b".a");
    pages.truncate(&file, 3 * PAGE as u64).unwrap();
    assert_eq!(acquire(&mut pages, &file, A, 1)[8..12], *b".a\0\0");
}

/// No owner has a copy of the pages that are added.
#[test]
fn each_change_of_the_size_counts() {
    let (_, mut pages, file) = start(PAGE, 4);
    acquire(&mut pages, &file, A, 0);
    let mut counted = pages.changes();
    let mut is_counted = |pages: &FilePages| std::mem::replace(&mut counted, pages.changes()) < pages.changes();
    pages.write(&file, 2 * PAGE as u64, b"ab", WriteFrom::Program).unwrap();
    assert!(is_counted(&pages));
    pages.write(&file, 2 * PAGE as u64, b"cd", WriteFrom::Program).unwrap();
    assert!(!is_counted(&pages), "the size is as it was");
    pages.write(&file, 2 * PAGE as u64 + 1, b"ef", WriteFrom::Program).unwrap();
    assert!(is_counted(&pages));
    for counts in [true, false] {
        assert!(pages.begin_overwrite(&file, 3 * PAGE as u64, PAGE).unwrap());
        assert_eq!(is_counted(&pages), counts);
        file.write(3 * PAGE as u64, &ZEROS).unwrap();
    }
    pages.allocate(|| file.set_size(5 * PAGE as u64)).unwrap();
    assert!(is_counted(&pages));
    pages.truncate(&file, 6 * PAGE as u64).unwrap();
    assert!(is_counted(&pages));
}

#[test]
fn dead_owner_leaves_nothing() {
    let (slots, mut pages, file) = start(PAGE, 4);
    let (mut a, mut b) = (acquire(&mut pages, &file, A, 0), acquire(&mut pages, &file, B, 0));
    (a[0], b[1]) = (b'a', b'b');
    release(&mut pages, &file, A, 0, &a);
    pages.drop_owner(B);
    assert!(matches!(pages.commit(&file, B, 2, [(0, &b)]), Err(Error::NotOpen)));
    pages.write_out_all(&file, 0..8).unwrap();
    pages.drop_owner(A);
    assert!(pages.is_idle() && slots.free_slots() == 4);
    assert_eq!(file.0.borrow()[..3], *b"a..");
}

#[test]
fn owner_whose_bases_need_too_much_memory_is_forgotten() {
    let (slots, mut pages, file) = start(4 * PAGE, 4);
    slots.limit_copies(1);
    for page in 0..2 {
        acquire(&mut pages, &file, A, page);
    }
    acquire(&mut pages, &file, B, 0);
    // One copy serves both owners of page 0; there is none for page 1.
    pages.write(&file, 5, b"x", WriteFrom::Program).unwrap();
    assert!(pages.is_owner(A) && pages.is_owner(B));
    let changes = pages.changes();
    pages.write(&file, PAGE as u64, b"y", WriteFrom::Program).unwrap();
    assert!(!pages.is_owner(A) && pages.is_owner(B));
    // Nothing counts the changes of A's pages any more.
    assert!(pages.changes() > changes);
    assert!(matches!(pages.commit(&file, A, 1, [(0, &ZEROS)]), Err(Error::NotOpen)));
    assert_eq!((pages.counters().bases_copied, pages.counters().owners_lost), (1, 1));
    // Owner B has its base still: only its own store is released.
    let mut bytes = [b'.'; PAGE];
    bytes[6] = b'b';
    release(&mut pages, &file, B, 0, &bytes);
    let mut read = [0; 8];
    pages.read(&file, 0, &mut read, ReadInto::PageCache).unwrap();
    assert_eq!(&read, b".....xb.");
    // The copy is free again.
    acquire(&mut pages, &file, B, 1);
    pages.write(&file, PAGE as u64, b"z", WriteFrom::Program).unwrap();
    assert!(pages.is_owner(B));
}

#[test]
fn staged_pages_of_a_failed_release_are_committed_by_the_next_attempt() {
    let (slots, mut pages, file) = start(4 * PAGE, 4);
    let mut gpu = acquire(&mut pages, &file, A, 0);
    let mut other = acquire(&mut pages, &file, B, 0);
    (gpu[1], other[0]) = (b'g', b'o');
    release(&mut pages, &file, B, 0, &other);
    let staged = [(0, slots.stage().unwrap())];
    staged[0].1.write(&gpu);
    // The merged page takes one more slot, and there is none.
    let held: Vec<_> = (0..2).map(|_| slots.stage().unwrap()).collect();
    assert!(matches!(pages.commit_staged(&file, A, 1, &staged), Err(Error::NoSpace)));
    drop(held);
    pages.write(&file, 2, b"c", WriteFrom::Program).unwrap();
    let commit = pages.commit_staged(&file, A, 1, &staged).unwrap();
    assert_eq!((commit.published, list(commit.merged)), (1, vec![0]));
    drop(staged);
    let mut read = [0; 4];
    pages.read(&file, 0, &mut read, ReadInto::PageCache).unwrap();
    assert_eq!((&read, slots.free_slots()), (b"ogc.", 3));
    assert!(slots.stage().is_ok_and(|staged| staged.slot() < 4) && slots.free_slots() == 3);
}

/// What a user's release takes counts for that user until it is free, whatever becomes of its pages.
#[test]
fn slots_of_a_user_are_counted_until_they_are_free_and_are_not_more_than_its_share() {
    let (slots, mut pages, file) = start(8 * PAGE, 8);
    let user = Share::new(4);
    let mut gpu = acquire(&mut pages, &file, A, 0);
    let mut other = acquire(&mut pages, &file, B, 0);
    (gpu[1], other[0]) = (b'g', b'o');
    release(&mut pages, &file, B, 0, &other);
    assert!(matches!(slots.stage_runs_of(&user, 5), Err(Error::NoSpace)) && user.used() == 0);
    let mut staged = StagedPages::default();
    let held = slots.stage_runs_of(&user, 3).unwrap();
    let [run] = <[_; 1]>::try_from(slots.stage_runs_of(&user, 1).unwrap()).unwrap();
    run.write(0, &gpu);
    staged.push(0, run);
    // The merged page takes one more slot, of the user too.
    assert!(matches!(pages.commit_all(&file, A, 1, &mut staged), Err(Error::NoSpace)));
    assert_eq!((user.used(), slots.free_slots()), (4, 3));
    drop(held);
    assert_eq!(user.used(), 1);
    let commit = pages.commit_all(&file, A, 1, &mut staged).unwrap();
    drop(staged);
    assert_eq!((commit.published, user.used()), (1, 1), "the merged page");
    pages.write_out(&file, &[0]).unwrap();
    assert_eq!((user.used(), slots.free_slots()), (0, 8));
    // Of a run that is divided, each part.
    let [mut run] = <[_; 1]>::try_from(slots.stage_runs_of(&user, 4).unwrap()).unwrap();
    let rest = run.split_off(2);
    drop(run);
    assert_eq!(user.used(), 2);
    let mut singles = rest.into_pages();
    drop(singles.next());
    assert_eq!(user.used(), 1);
    drop(singles.next());
    assert_eq!((user.used(), slots.free_slots()), (0, 8));
}

#[test]
fn pages_are_committed_unseen_only_if_nothing_has_to_look_at_them() {
    // The last page is a part of one.
    let size = 2 * PAGE + 10;
    let (memory, file) = (Memory::new(5), File(RefCell::new(vec![b'.'; size])));
    let slots = Slots::format(memory.clone()).unwrap();
    let mut pages = FilePages::new(Arc::clone(&slots), 7, KernelPages::None, size as u64);
    pages.add_owner(A, 0..8);
    pages.add_owner(B, 0..8);
    for page in 0..3 {
        acquire(&mut pages, &file, A, page);
    }
    let other = acquire(&mut pages, &file, B, 1);
    let stage = |first: u64, count: usize| {
        let mut next = first;
        let place = |run: StagedRun| {
            let first = next;
            next += run.slots().len() as u64;
            (first, run)
        };
        slots.stage_runs(count).unwrap().into_iter().map(place).collect::<Vec<_>>()
    };
    let staged = stage(0, 3);
    assert_eq!(staged.len(), 1, "side by side");
    assert!(matches!(slots.stage_runs(3), Err(Error::NoSpace)));
    assert_eq!(slots.free_slots(), 2);
    // The kernel has one, another release has changed one, one is in no epoch, one has stores of two.
    pages.read(&file, 0, &mut [0; 4], ReadInto::PageCache).unwrap();
    assert!(pages.commit_unseen(&file, A, 1, &mut { staged }).unwrap().is_none());
    assert!(pages.commit_unseen(&file, A, 1, &mut stage(1, 1)).unwrap().is_none());
    release(&mut pages, &file, B, 1, &other);
    assert!(pages.commit_unseen(&file, A, 1, &mut stage(1, 1)).unwrap().is_none());
    assert!(pages.commit_unseen(&file, B, 1, &mut stage(2, 1)).unwrap().is_none());
    assert_eq!(slots.free_slots(), 4);
    // All or none, and nothing has changed. The bytes come later.
    let mut staged = stage(2, 1);
    let slot = staged[0].1.slots().start;
    staged[0].1.write(0, &ZEROS);
    let commit = pages.commit_unseen(&file, A, 9, &mut staged).unwrap().unwrap();
    assert_eq!((commit.published, list(commit.merged), list(commit.invalidate)), (1, vec![], vec![]));
    assert!(slots.was_committed(9) && slots.is_snapshot_of(slot, 7));
    assert!(!slots.is_snapshot_of(slot, 8) && !slots.is_snapshot_of(slot + 1, 7) && !slots.is_snapshot_of(u32::MAX, 7));
    let mut late = ZEROS;
    late[..10].fill(b'l');
    memory.write(slot, 0, &late);
    let mut read = [0; 10];
    pages.read(&file, 2 * PAGE as u64, &mut read, ReadInto::PageCache).unwrap();
    assert_eq!(&read, b"llllllllll");
}

/// A release of all pages of a file without a look at them; page n has bytes n + 1.
fn hand_over(pages: &mut FilePages, file: &File, slots: &Arc<Slots>, count: u64) -> Commit {
    for page in 0..count {
        acquire(pages, file, A, page);
    }
    let mut staged = slots.stage_runs(count as usize).unwrap();
    let run = staged.pop().unwrap();
    (0..count as u32).for_each(|at| run.write(at, &[at as u8 + 1; PAGE]));
    pages.commit_unseen(file, A, 9, &mut vec![(0, run)]).unwrap().unwrap()
}

#[test]
fn run_of_pages_is_divided_by_what_changes_one() {
    let (slots, mut pages, file) = start(8 * PAGE, 16);
    let commit = hand_over(&mut pages, &file, &slots, 8);
    assert!(pages.invalidated(commit.release).is_empty());
    assert_eq!((pages.dirty().count(), slots.free_slots()), (8, 8));
    // A program writes one page, and one is written out.
    pages.write(&file, offset_of(3) + 5, b"c", WriteFrom::Program).unwrap();
    pages.write_out(&file, &[6]).unwrap();
    assert_eq!((pages.dirty().collect::<Vec<_>>(), slots.free_slots()), (vec![0, 1, 2, 4, 5, 7], 10));
    assert_eq!(
        (file.0.borrow()[3 * PAGE + 4..3 * PAGE + 7].to_vec(), file.0.borrow()[6 * PAGE]),
        (b"\x04c\x04".to_vec(), 7)
    );
    let bytes = |pages: &mut FilePages| [0, 1, 2, 3, 4, 5, 6, 7].map(|page| byte(pages, &file, offset_of(page)));
    assert_eq!(bytes(&mut pages), [1, 2, 3, 4, 5, 6, 7, 8]);
    pages.truncate(&file, offset_of(5)).unwrap();
    assert_eq!((pages.dirty().collect::<Vec<_>>(), slots.free_slots()), (vec![0, 1, 2, 4], 12));
    pages.write_out_all(&file, 0..8).unwrap();
    pages.drop_owner(A);
    pages.drop_owner(B);
    assert!(pages.is_idle() && slots.free_slots() == 16);
    assert_eq!([0, 1, 2, 3, 4].map(|page| file.0.borrow()[page * PAGE]), [1, 2, 3, 4, 5]);
}

#[test]
fn run_of_pages_is_found_by_the_next_server() {
    let memory = Memory::new(16);
    let file = File(RefCell::new(vec![b'.'; 8 * PAGE]));
    let slots = Slots::format(memory.clone()).unwrap();
    let mut pages = FilePages::new(Arc::clone(&slots), 7, KernelPages::None, 8 * PAGE as u64);
    pages.add_owner(A, 0..8);
    // Not settled, and divided since.
    hand_over(&mut pages, &file, &slots, 8);
    pages.write_out(&file, &[2, 3]).unwrap();
    drop((pages, slots));
    let (slots, mut files) = Slots::recover(memory).unwrap();
    let mut pages = FilePages::recover(Arc::clone(&slots), files.pop().unwrap(), &file).unwrap();
    assert_eq!((pages.dirty().collect::<Vec<_>>(), slots.free_slots()), (vec![0, 1, 4, 5, 6, 7], 10));
    assert!(slots.was_committed(9));
    for (release, _) in pages.pending() {
        assert!(pages.invalidated(release).is_empty());
    }
    pages.write_out_all(&file, 0..8).unwrap();
    assert_eq!([0, 1, 2, 7].map(|page| file.0.borrow()[page * PAGE]), [1, 2, 3, 8]);
    assert_eq!(slots.free_slots(), 16);
}

/// The second page of a file finds no space on the disk.
struct FullDisk<'a>(&'a File);

impl Backing for FullDisk<'_> {
    fn size(&self) -> std::io::Result<u64> {
        self.0.size()
    }
    fn read(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.0.read(offset, bytes)
    }
    fn write(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        let taken = (PAGE as u64).saturating_sub(offset).min(bytes.len() as u64) as usize;
        let is_above = offset >= 2 * PAGE as u64;
        self.0.write(offset, if is_above { bytes } else { &bytes[..taken] })?;
        if is_above || taken == bytes.len() { Ok(()) } else { Err(std::io::ErrorKind::StorageFull.into()) }
    }
    fn set_size(&self, size: u64) -> std::io::Result<()> {
        self.0.set_size(size)
    }
    fn punch(&self, bytes: Range<u64>) -> std::io::Result<()> {
        self.0.punch(bytes)
    }
}

#[test]
fn pages_beside_one_that_finds_no_space_are_written_out() {
    let (slots, mut pages, file) = start(4 * PAGE, 8);
    for page in 0..4 {
        let mut copy = acquire(&mut pages, &file, A, page);
        copy[0] = b'a';
        release(&mut pages, &file, A, page, &copy);
    }
    let all: Vec<u64> = pages.dirty().collect();
    assert!(matches!(pages.write_out(&FullDisk(&file), &all), Err(Error::Backing(_))));
    assert_eq!((pages.dirty().collect::<Vec<_>>(), slots.free_slots()), (vec![1], 7));
    let firsts = |file: &File| [0, 1, 2, 3].map(|page| file.0.borrow()[page * PAGE]);
    assert_eq!(firsts(&file), *b"a.aa");
    pages.write_out(&file, &all).unwrap();
    assert_eq!((firsts(&file), slots.free_slots()), (*b"aaaa", 8));
}

#[test]
fn page_of_a_full_disk_is_cut_in_part() {
    let (slots, mut pages, file) = start(2 * PAGE, 8);
    let mut copy = acquire(&mut pages, &file, A, 1);
    copy[..20].fill(b'a');
    release(&mut pages, &file, A, 1, &copy);
    let full = FullDisk(&file);
    pages.punch(&full, PAGE as u64 + 5..PAGE as u64 + 10).unwrap();
    pages.truncate(&full, PAGE as u64 + 15).unwrap();
    let mut read = [1; 15];
    assert_eq!(pages.read(&full, PAGE as u64, &mut read, ReadInto::Unknown).unwrap(), 15);
    assert_eq!(&read, b"aaaaa\0\0\0\0\0aaaaa");
    assert_eq!((pages.dirty().collect::<Vec<_>>(), slots.free_slots()), (vec![1], 7));
    // Without a free slot the page has to be written out.
    let held: Vec<_> = (0..7).map(|_| slots.stage().unwrap()).collect();
    assert!(matches!(pages.truncate(&full, PAGE as u64 + 3), Err(Error::Backing(_))));
    drop(held);
    pages.write_out_all(&file, 0..8).unwrap();
    assert_eq!((&file.0.borrow()[PAGE..], slots.free_slots()), (&read[..], 8));
}

/// Counts reads, which all fail.
struct UnreadableDisk<'a>(&'a File, Cell<usize>);

impl Backing for UnreadableDisk<'_> {
    fn size(&self) -> std::io::Result<u64> {
        self.0.size()
    }
    fn read(&self, _: u64, _: &mut [u8]) -> std::io::Result<usize> {
        self.1.set(self.1.get() + 1);
        Err(std::io::Error::from_raw_os_error(5))
    }
    fn write(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        self.0.write(offset, bytes)
    }
    fn set_size(&self, size: u64) -> std::io::Result<()> {
        self.0.set_size(size)
    }
    fn punch(&self, bytes: Range<u64>) -> std::io::Result<()> {
        self.0.punch(bytes)
    }
}

#[test]
fn pages_that_cannot_be_read_are_cut_off() {
    const PAGES: u64 = 64;
    let (slots, mut pages, file) = start(PAGES as usize * PAGE, 3 * PAGES as u32);
    pages.drop_owner(B);
    pages.add_owner(B, 0..PAGES);
    pages.cached(0..PAGES);
    let change = |page| {
        let mut copy = acquire(&mut pages, &file, B, page);
        copy[0] = b'b';
        copy
    };
    let changed: Vec<PageBytes> = (0..PAGES).map(change).collect();
    // Each page keeps its twin: the kernel has not dropped its copy yet.
    let commit = pages.commit(&file, B, 1, (0..PAGES).zip(&changed)).unwrap();
    pages.write_out_all(&file, 0..PAGES).unwrap();
    assert_eq!(slots.free_slots(), 2 * PAGES as usize);
    let disk = UnreadableDisk(&file, Cell::new(0));
    pages.truncate(&disk, PAGE as u64 + 5).unwrap();
    assert!((1..=16).contains(&disk.1.get()), "{} reads", disk.1.get());
    assert_eq!(file.size().unwrap(), PAGE as u64 + 5);
    assert!(pages.invalidated(commit.release).is_empty());
    assert_eq!(slots.free_slots(), 3 * PAGES as usize);
}

#[test]
fn file_that_is_dropped_keeps_its_slots() {
    let (slots, mut pages, file) = start(PAGE, 4);
    let mut copy = acquire(&mut pages, &file, A, 0);
    copy[0] = b'a';
    release(&mut pages, &file, A, 0, &copy);
    assert!(!pages.is_idle());
    drop(pages);
    assert_eq!(slots.free_slots(), 3);
}

#[test]
fn deleted_file_frees_its_slots() {
    let (slots, mut pages, file) = start(PAGE, 4);
    pages.cached(0..1);
    let mut copy = acquire(&mut pages, &file, A, 0);
    copy[0] = b'a';
    let commit = pages.commit(&file, A, 1, [(0, &copy)]).unwrap();
    assert_eq!((slots.free_slots(), list(commit.invalidate)), (2, vec![0]));
    pages.discard();
    assert_eq!(slots.free_slots(), 4);
}

#[test]
fn memory_of_another_layout_is_refused() {
    let memory = Memory::new(4);
    assert!(matches!(Slots::recover(memory.clone()), Err(Error::Layout)));
    Slots::format(memory.clone()).unwrap();
    assert!(Slots::recover(memory).unwrap().1.is_empty());
}

#[test]
fn what_no_server_has_written_is_not_recovered() {
    let memory = Memory::new(4);
    Slots::format(memory.clone()).unwrap();
    // Slots begin after 8 words and 4 records of 4 words: tag (a snapshot of no record), file, page, version.
    for (slot, label) in [[7, 0, 5], [7, u64::MAX, 5], [7, 0, u64::MAX], [7, 1, 5]].into_iter().enumerate() {
        let at = 8 + 4 * 4 + slot * 4;
        memory.store(at, 1);
        (0..3).for_each(|word| memory.store(at + 1 + word, label[word]));
    }
    let (slots, files) = Slots::recover(memory).unwrap();
    assert_eq!((slots.free_slots(), files.len()), (2, 1));
    let file = File(RefCell::new(vec![0; 2 * PAGE]));
    for recovered in files {
        let pages = FilePages::recover(slots.clone(), recovered, &file).unwrap();
        assert_eq!(pages.dirty().collect::<Vec<_>>(), [0, 1]);
    }
}

#[test]
fn pages_are_explained_in_runs() {
    let (_slots, mut pages, file) = start(64 * PAGE, 8);
    const WRITER: OwnerId = OwnerId(8);
    pages.add_owner(OwnerId(7), 8..32);
    pages.add_owner(WRITER, 0..64);
    let fetch = |pages: &mut FilePages, range: Range<u64>, access| {
        pages.open(&file, OwnerId(7), range.clone(), access).unwrap();
        pages.filled(OwnerId(7), range).unwrap();
    };
    fetch(&mut pages, 8..24, Access::Read);
    fetch(&mut pages, 16..20, Access::Write);
    acquire(&mut pages, &file, WRITER, 9);
    release(&mut pages, &file, WRITER, 9, &[1; PAGE]);
    let info = |unwritten, copies: &[(OwnerId, CopyState)]| PageInfo {
        unwritten,
        invalidating: false,
        copies: copies.iter().copied().filter(|(id, _)| *id == OwnerId(7)).collect(),
    };
    let expected = vec![
        (0..8, info(false, &[])),
        (8..9, info(false, &[(OwnerId(7), CopyState::Current)])),
        (9..10, info(true, &[(OwnerId(7), CopyState::Stale)])),
        (10..16, info(false, &[(OwnerId(7), CopyState::Current)])),
        (16..20, info(false, &[(OwnerId(7), CopyState::Open)])),
        (20..24, info(false, &[(OwnerId(7), CopyState::Current)])),
        (24..64, info(false, &[])),
    ];
    let of_7 = |runs: Vec<(Range<u64>, PageInfo)>| -> Vec<(Range<u64>, PageInfo)> {
        let mut joined: Vec<(Range<u64>, PageInfo)> = Vec::new();
        for (run, seen) in runs {
            let seen = info(seen.unwritten, &seen.copies);
            match joined.last_mut() {
                Some((last, same)) if *same == seen => last.end = run.end,
                _ => joined.push((run, seen)),
            }
        }
        joined
    };
    let (runs, end) = pages.explain(0..64, 1000);
    assert_eq!((of_7(runs), end), (expected.clone(), 64));
    // In steps.
    let (mut at, mut runs) = (0, Vec::new());
    while at < 64 {
        let (more, end) = pages.explain(at..64, 1);
        assert!(end > at && more.len() == 1);
        runs.extend(more);
        at = end;
    }
    assert_eq!(of_7(runs), expected);
}
