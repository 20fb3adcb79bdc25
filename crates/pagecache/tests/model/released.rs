//! Released pages that are not written out yet, and that other owners acquire and programs read.

use std::ops::Range;
use std::sync::Arc;

use super::machine::{Disk, Machine};
use crate::entry_run::EntryRun;
use crate::file::Entry;
use crate::page::{PAGE, PageBytes, ZEROS, offset_of};
use crate::{Access, Backing, FilePages, Fill, KernelPages, OwnerId, ReadInto, Slots};

const A: OwnerId = OwnerId(1);
const B: OwnerId = OwnerId(2);
const PAGES: u64 = 2048;

/// Bytes of the table, without those of its owners, by page.
fn bytes_per_page(pages: &FilePages) -> f64 {
    let entries = pages.entries.len() * size_of::<(u64, Entry)>() + pages.runs.len() * size_of::<(u64, EntryRun)>();
    entries as f64 / PAGES as f64
}

struct Test {
    slots: Arc<Slots>,
    pages: FilePages,
    disk: Disk,
}

impl Test {
    /// With room for so many slots more than pages.
    fn new(more: u64) -> Test {
        let machine = Machine::new((PAGES + more) as u32);
        let slots = Slots::format(machine.clone()).unwrap();
        let mut pages = FilePages::new(Arc::clone(&slots), 7, KernelPages::None, offset_of(PAGES));
        pages.add_owner(A, 0..PAGES);
        pages.add_owner(B, 0..PAGES);
        Test { slots, pages, disk: Disk::new(machine, offset_of(PAGES)) }
    }

    /// Releases pages by runs, each with its number and `salt` in its bytes.
    fn release(&mut self, owner: OwnerId, range: Range<u64>, salt: u64) {
        self.pages.open(&self.disk, owner, range.clone(), Access::Write).unwrap();
        assert!(self.pages.filled(owner, range.clone()).unwrap().is_empty());
        let (mut staged, mut first) = (Vec::new(), range.start);
        for run in self.slots.stage_runs((range.end - range.start) as usize).unwrap() {
            (0..run.slots().len() as u32).for_each(|at| run.write(at, &bytes_of(first + u64::from(at), salt)));
            let count = run.slots().len() as u64;
            staged.push((first, run));
            first += count;
        }
        let commit = self.pages.commit_unseen(&self.disk, owner, salt, &mut staged).unwrap().unwrap();
        assert!(self.pages.invalidated(commit.release).is_empty());
    }
}

fn bytes_of(page: u64, salt: u64) -> PageBytes {
    let mut bytes = ZEROS;
    bytes.as_chunks_mut::<16>().0.iter_mut().for_each(|bytes| {
        bytes[..8].copy_from_slice(&page.to_ne_bytes());
        bytes[8..].copy_from_slice(&salt.to_ne_bytes());
    });
    bytes
}

/// What a client gets, page by page.
fn check(mut fills: Vec<Fill>, expected: Range<u64>, salt: u64) {
    let mut pages = expected;
    for fill in &mut fills {
        while !fill.pages.is_empty() {
            let mut bytes = ZEROS;
            let one = fill.split_to(1);
            assert!(one.source.copy(&mut bytes) && one.pages.start == pages.start);
            assert!(bytes == bytes_of(pages.start, salt), "page {}", pages.start);
            pages.start += 1;
        }
    }
    assert!(pages.is_empty());
}

#[test]
fn acquires_and_reads_of_released_pages_take_no_entry_for_each() {
    let mut test = Test::new(0);
    test.release(A, 0..PAGES, 1);
    // Also where pages are acquired and read in parts, in any order.
    for part in [1024..PAGES, 0..500, 500..1024] {
        let fills = test.pages.open(&test.disk, B, part.clone(), Access::Write).unwrap();
        assert!(fills.len() <= 2, "{} fills", fills.len());
        check(fills, part.clone(), 1);
        assert!(test.pages.filled(B, part).unwrap().is_empty());
    }
    let mut bytes = vec![0; 100 * PAGE];
    for first in (0..PAGES - 100).step_by(100) {
        // Not at the begin of a page.
        let at = offset_of(first) + 24;
        assert_eq!(test.pages.read(&test.disk, at, &mut bytes, ReadInto::PageCache).unwrap(), bytes.len());
        assert!(bytes[..PAGE - 24] == bytes_of(first, 1)[24..] && bytes[99 * PAGE..] == read_at(first + 99, 24));
    }
    assert!(bytes_per_page(&test.pages) < 1.0, "{}", bytes_per_page(&test.pages));
    // While both owners have them.
    test.pages.write_out_all(&test.disk, 0..PAGES).unwrap();
    assert!(bytes_per_page(&test.pages) < 1.0, "{}", bytes_per_page(&test.pages));
    assert_eq!(test.slots.free_slots() as u64, PAGES);
    let mut page = ZEROS;
    test.disk.read(offset_of(77), &mut page).unwrap();
    assert!(page == bytes_of(77, 1));
}

/// The last page of a read that began `from` bytes after the begin of its first one.
fn read_at(page: u64, from: usize) -> PageBytes {
    let mut bytes = ZEROS;
    bytes[..PAGE - from].copy_from_slice(&bytes_of(page, 1)[from..]);
    bytes[PAGE - from..].copy_from_slice(&bytes_of(page + 1, 1)[..from]);
    bytes
}

#[test]
fn slots_that_are_read_are_not_used_anew() {
    let mut test = Test::new(300);
    test.release(A, 0..PAGES, 1);
    let fills = test.pages.open(&test.disk, B, 100..200, Access::Read).unwrap();
    let plan = test.pages.read_plan(150..260);
    // Written out, and divided by a write.
    test.pages.write_out(&test.disk, &(0..180).collect::<Vec<_>>()).unwrap();
    test.pages.write(&test.disk, offset_of(190), &ZEROS[..7], crate::WriteFrom::Program).unwrap();
    test.pages.write_out_all(&test.disk, 0..PAGES).unwrap();
    assert_eq!(test.slots.free_slots() as u64, PAGES + 300 - 160);
    // As many as there are.
    test.release(A, 300..PAGES, 2);
    let others = test.slots.stage_runs(test.slots.free_slots()).unwrap();
    others.iter().for_each(|run| (0..run.slots().len() as u32).for_each(|at| run.write(at, &[9; PAGE])));
    check(fills.clone(), 100..200, 1);
    let mut page = ZEROS;
    assert!(plan.runs[0].1.copy_part(59 * PAGE, &mut page) && page == bytes_of(209, 1));
    drop((others, fills));
    assert_eq!(test.slots.free_slots() as u64, PAGES + 300 - (PAGES - 300) - 110, "those of the READ");
    drop(plan);
    assert_eq!(test.slots.free_slots() as u64, 600);
}
