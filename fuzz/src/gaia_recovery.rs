//! State memory with anything in it: a server that takes it over goes on, whatever an earlier one has left.
#![no_main]

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use libfuzzer_sys::fuzz_target;
use spinio_pagecache::{
    Access, Backing, Commit, Ended, Error, FilePages, OwnerId, PAGE, PageBytes, SlotMemory, Slots, words,
};

const SLOTS: u32 = 6;
const RECORDS: u32 = 3;
/// Pages that the file has at first, and that the owner maps.
const PAGES: u64 = 3;
/// A file that grows further is not kept in memory.
const LARGEST: u64 = 1 << 20;

struct Memory {
    words: Vec<AtomicU64>,
    bytes: Mutex<Vec<PageBytes>>,
}

impl SlotMemory for Memory {
    fn slots(&self) -> u32 {
        SLOTS
    }

    fn records(&self) -> u32 {
        RECORDS
    }

    fn load(&self, index: usize) -> u64 {
        self.words[index].load(SeqCst)
    }

    fn store(&self, index: usize, value: u64) {
        self.words[index].store(value, SeqCst);
    }

    fn read(&self, slot: u32, bytes: &mut PageBytes) {
        *bytes = self.bytes.lock().expect("no panic")[slot as usize];
    }

    fn write(&self, slot: u32, at: usize, bytes: &[u8]) {
        self.bytes.lock().expect("no panic")[slot as usize][at..at + bytes.len()].copy_from_slice(bytes);
    }
}

struct File(Mutex<Vec<u8>>);

impl Backing for File {
    fn size(&self) -> std::io::Result<u64> {
        Ok(self.0.lock().expect("no panic").len() as u64)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> std::io::Result<usize> {
        let file = self.0.lock().expect("no panic");
        bytes.fill(0);
        let start = file.len().min(usize::try_from(offset).unwrap_or(usize::MAX));
        let inside = bytes.len().min(file.len() - start);
        bytes[..inside].copy_from_slice(&file[start..start + inside]);
        Ok(inside)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= LARGEST);
        let end = end.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::FileTooLarge))? as usize;
        let mut file = self.0.lock().expect("no panic");
        if file.len() < end {
            file.resize(end, 0);
        }
        file[offset as usize..end].copy_from_slice(bytes);
        Ok(())
    }

    fn set_size(&self, size: u64) -> std::io::Result<()> {
        self.0.lock().expect("no panic").resize(size.min(LARGEST) as usize, 0);
        Ok(())
    }

    fn punch(&self, bytes: Range<u64>) -> std::io::Result<()> {
        let mut file = self.0.lock().expect("no panic");
        let end = file.len().min(bytes.end as usize);
        file[end.min(bytes.start as usize)..end].fill(0);
        Ok(())
    }
}

fuzz_target!(|bytes: &[u8]| {
    // A word for each two bytes: small numbers, and such that fill a word.
    let count = words(SLOTS, RECORDS);
    let mut given = bytes.chunks(2).map(|pair| {
        let [low, high] = [pair[0], pair.get(1).copied().unwrap_or(0)].map(u64::from);
        match high >> 6 {
            0 => low,
            1 => low << (high & 63),
            2 => u64::MAX - (low << (high & 63)),
            // A tag: kind, record, sequence.
            _ => (high & 15) << 18 | (low >> 2 & 7) << 2 | low & 3,
        }
    });
    let memory = Arc::new(Memory {
        words: (0..count).map(|_| AtomicU64::new(0)).collect(),
        bytes: Mutex::new((0..SLOTS).map(|slot| [slot as u8 + 1; PAGE]).collect()),
    });
    assert!(matches!(Slots::recover(memory.clone()), Err(Error::Layout)));
    Slots::format(memory.clone()).expect("a size that is allowed");
    for index in 8..count {
        memory.store(index, given.next().unwrap_or(0));
    }
    let (slots, files) = Slots::recover(memory.clone()).expect("the header is right");
    let mut used = 0;
    for (number, recovered) in files.into_iter().enumerate() {
        if number % 4 == 3 {
            recovered.discard(&slots);
            continue;
        }
        let file = File(Mutex::new(vec![9; PAGES as usize * PAGE - 100]));
        let mut pages = FilePages::recover(slots.clone(), recovered, &file).expect("the file can be read");
        settle(&mut pages);
        use_file(&mut pages, &file, number as u64 + 1);
        used += 1;
    }
    drop(slots);
    let (slots, files) = Slots::recover(memory).expect("as before");
    assert!(slots.free_slots() <= SLOTS as usize && files.len() <= used * 2 + (SLOTS + RECORDS) as usize);
});

/// As the server does for each release that an earlier one has not settled.
fn settle(pages: &mut FilePages) {
    for (release, runs) in pages.pending() {
        assert!(runs.iter().all(|run| run.start < run.end));
        for _ in 0..4 {
            if pages.invalidated(release).is_empty() {
                break;
            }
        }
    }
}

fn use_file(pages: &mut FilePages, file: &File, id: u64) {
    let owner = OwnerId(id);
    pages.add_owner(owner, 0..PAGES);
    let fills = pages.open(file, owner, 0..PAGES, Access::Write).expect("the file can be read");
    for fill in fills {
        let _ = pages.filled(owner, fill.pages);
    }
    let bytes = [200; PAGE];
    match pages.commit(file, owner, id, [(0, &bytes)].into_iter()) {
        Ok(Commit { release, .. }) => {
            let _ = pages.invalidated(release);
        }
        Err(Error::NoSpace | Error::Busy) => {}
        Err(other) => panic!("{other}"),
    }
    let _ = pages.end_epoch(owner, 0..PAGES, Ended::Abandoned);
    pages.drop_owner(owner);
    pages.punch(file, 10..5000).expect("no failure");
    pages.truncate(file, 100).expect("no failure");
}
