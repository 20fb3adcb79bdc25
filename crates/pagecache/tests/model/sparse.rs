//! A sparse file that is larger than the memory of the home.

use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::machine::Machine;
use crate::page::{PAGE, offset_of};
use crate::{Access, Backing, Ended, FilePages, KernelPages, OwnerId, Slots};

/// A file of holes.
struct Holes(Cell<u64>);

impl Backing for Holes {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.get())
    }
    fn read(&self, _: u64, bytes: &mut [u8]) -> io::Result<usize> {
        bytes.fill(0);
        Ok(bytes.len())
    }
    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        Ok(())
    }
    fn set_size(&self, size: u64) -> io::Result<()> {
        self.0.set(size);
        Ok(())
    }
    fn punch(&self, _: Range<u64>) -> io::Result<()> {
        Ok(())
    }
}

const PAGES: u64 = 1 << 30;
const OWNER: OwnerId = OwnerId(1);

fn entries(pages: &FilePages) -> usize {
    pages.entries.len() + pages.runs.len()
}

/// The owner fetches all pages, which end as many runs.
fn acquire(pages: &mut FilePages, file: &Holes, range: Range<u64>, access: Access) -> usize {
    let fills = pages.open(file, OWNER, range.clone(), access).unwrap();
    assert!(pages.filled(OWNER, range).unwrap().is_empty());
    fills.len()
}

#[test]
fn large_sparse_file_that_an_owner_has_is_cut_with_few_entries() {
    let slots = Slots::format(Machine::new(5)).unwrap();
    slots.limit_copies(1000);
    let file = Holes(Cell::new(offset_of(PAGES)));
    let mut pages = FilePages::new(Arc::clone(&slots), 7, KernelPages::None, offset_of(PAGES));
    let owned = 0..5 << 20;
    pages.add_owner(OWNER, owned.clone());
    acquire(&mut pages, &file, owned.clone(), Access::Read);
    pages.punch(&file, 5..offset_of(owned.end) - 5).unwrap();
    assert!(entries(&pages) <= 3, "{}", entries(&pages));
    assert_eq!(acquire(&mut pages, &file, owned.clone(), Access::Read), 1, "all pages are fetched again");
    // Pages that are written by whole pages have few too.
    for at in 0..64 {
        assert!(pages.begin_overwrite(&file, at << 20, 1 << 20).unwrap());
    }
    assert!(entries(&pages) <= 70, "{}", entries(&pages));
    pages.truncate(&file, 4096).unwrap();
    assert!(entries(&pages) <= 4, "{}", entries(&pages));
    // Each base takes an entry: few are kept, and of many the owner is forgotten.
    pages.truncate(&file, offset_of(PAGES)).unwrap();
    acquire(&mut pages, &file, 0..500, Access::Write);
    pages.truncate(&file, PAGE as u64).unwrap();
    assert!(pages.is_owner(OWNER) && (499..510).contains(&entries(&pages)), "{}", entries(&pages));
    pages.end_epoch(OWNER, 0..500, Ended::Unchanged).unwrap();
    pages.truncate(&file, offset_of(PAGES)).unwrap();
    acquire(&mut pages, &file, owned, Access::Write);
    pages.truncate(&file, PAGE as u64).unwrap();
    assert!(!pages.is_owner(OWNER) && entries(&pages) == 0 && pages.is_idle());
}
