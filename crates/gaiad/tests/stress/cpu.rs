//! CPU programs, which know nothing of GAIA: one stores through a mapping, one calls `write`, one cuts, one makes holes.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use rustix::fs::{Advice, FallocateFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

use spinio_pagecache::messages::{REFUSALS_IOCTL, REFUSALS_REPLY};
use spinio_sys::linux;

use crate::board::{Board, Counter};
use crate::common::both::Random;
use crate::layout::{self, CELL_PAGES, CUT_FROM, KEPT_FROM, LEN, PAGE, PUNCHERS, TRUNCATERS};
use crate::worker::Life;

/// A shared mapping of the file.
pub(crate) struct Mapping(*mut u8);

// SAFETY: plain bytes that other processes change too.
unsafe impl Send for Mapping {}

impl Mapping {
    pub(crate) fn new(file: &File) -> Mapping {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN, protection, MapFlags::SHARED, file, 0) };
        Mapping(at.unwrap().cast())
    }

    /// Of the pages that no program cuts.
    pub(crate) fn get(&self, at: usize) -> u8 {
        assert!(at < CUT_FROM);
        // SAFETY: inside the mapping, and inside the file.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < CUT_FROM);
        // SAFETY: as above.
        unsafe { self.0.add(at).write_volatile(byte) };
    }

    /// A store by the Linux kernel, for this process: it fails where a store would raise SIGBUS.
    fn set_or_fail(&self, at: usize, values: &File, byte: u8) {
        assert!(at < LEN);
        // SAFETY: inside the mapping; bytes of it may change at any time.
        let to = unsafe { std::slice::from_raw_parts_mut(self.0.add(at), 1) };
        match rustix::io::pread(values, to, byte.into()) {
            Ok(1) | Err(Errno::FAULT) => {}
            other => panic!("store at {at}: {other:?}"),
        }
    }

    fn sync(&self, file: &File) {
        unless_kernel(file, || {
            // SAFETY: of the mapping.
            unsafe { rustix::mm::msync(self.0.cast(), LEN, MsyncFlags::SYNC) }
        });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: made by `new`.
        let _ = unsafe { rustix::mm::munmap(self.0.cast(), LEN) };
    }
}

/// A call that may report what the Linux kernel keeps when a program is killed while it unmaps the file, though no byte is
/// lost and the server has refused nothing (docs/gaia.md): repeated then, as a program may.
fn unless_kernel(file: &File, call: impl Fn() -> Result<(), Errno>) {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            Err(Errno::IO) => {
                let mut refusals = [0; REFUSALS_REPLY];
                linux::ioctl_read(file.as_raw_fd(), REFUSALS_IOCTL, &mut refusals).unwrap();
                assert_eq!(u64::from_ne_bytes(refusals), 0, "the server has refused to write");
                eprintln!("an error of the Linux kernel's own: repeated");
            }
            result => return result.unwrap(),
        }
    }
}

fn pause(random: &mut Random) {
    std::thread::sleep(Duration::from_micros(random.range(50, 600)));
}

pub(crate) fn mapping(life: &Life, board: &Board, file: &File, mut random: Random) {
    let values = rustix::fs::memfd_create("values", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let values = File::from(values);
    values.write_all_at(&(0..=255).collect::<Vec<u8>>(), 0).unwrap();
    let (mut mapping, mut round) = (Mapping::new(file), 0);
    while !board.is_over() {
        life.count(board, Counter::Alive, 1);
        let done = board.rounds(Counter::Done);
        if round % 8 == 0 {
            let compared = layout::compare(&|at| mapping.get(at), &done, board, None);
            life.count(board, Counter::Compared, compared);
        }
        round += 1;
        life.counter(board, Counter::Begun).store(round, SeqCst);
        for cell in (0..CELL_PAGES).filter(|cell| layout::touches(life.worker, *cell, round)) {
            mapping.set(layout::cell(life.worker, life.number, cell), round as u8);
        }
        life.counter(board, Counter::Done).store(round, SeqCst);
        for _ in 0..random.range(0, 3) {
            let offset = layout::for_mappings(layout::wild_offset(random.next(), LEN));
            mapping.set_or_fail(offset, &values, layout::wild(life.worker, offset));
        }
        match random.range(0, 60) {
            0 => mapping.sync(file),
            1 => mapping = Mapping::new(file),
            _ => {}
        }
        pause(&mut random);
    }
}

pub(crate) fn writing(life: &Life, board: &Board, file: &File, mut random: Random) {
    let mut round = 0;
    while !board.is_over() {
        life.count(board, Counter::Alive, 1);
        if round % 8 == 0 {
            let compared = read_and_compare(board, file);
            life.count(board, Counter::Compared, compared);
        }
        round += 1;
        life.counter(board, Counter::Begun).store(round, SeqCst);
        for cell in (0..CELL_PAGES).filter(|cell| layout::touches(life.worker, *cell, round)) {
            file.write_all_at(&[round as u8], layout::cell(life.worker, life.number, cell) as u64).unwrap();
        }
        life.counter(board, Counter::Done).store(round, SeqCst);
        for _ in 0..random.range(0, 3) {
            let offset = layout::wild_offset(random.next(), LEN);
            file.write_all_at(&[layout::wild(life.worker, offset)], offset as u64).unwrap();
        }
        match random.range(0, 40) {
            0 => unless_kernel(file, || rustix::fs::fsync(file)),
            1 => unless_kernel(file, || rustix::fs::fdatasync(file)),
            2 | 3 => rustix::fs::fadvise(file, 0, None, Advice::DontNeed).unwrap(),
            _ => {}
        }
        pause(&mut random);
    }
}

/// Reads the whole file as a program does.
pub(crate) fn read_and_compare(board: &Board, file: &File) -> u64 {
    let done = board.rounds(Counter::Done);
    let bytes = read(file, 0..LEN);
    layout::compare_wild(&bytes, 0);
    layout::compare(&|at| bytes[at], &done, board, None)
}

/// Bytes of a range; those past the end are missing.
fn read(file: &File, range: Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    let mut len = 0;
    while len < bytes.len() {
        match file.read_at(&mut bytes[len..], (range.start + len) as u64).unwrap() {
            0 => break,
            more => len += more,
        }
    }
    bytes.truncate(len);
    bytes
}

/// The bytes of the truncater or of the puncher.
fn own(place: usize, range: Range<usize>) -> impl Iterator<Item = usize> {
    range.filter(move |offset| offset % 16 == place)
}

/// Writes some bytes of its own, cuts, extends: its bytes past the cut are zeros, also where a GPU process or the Linux
/// kernel had copies of the page.
pub(crate) fn truncater(life: &Life, board: &Board, file: &File, mut random: Random) {
    let mut value = 0u8;
    while !board.is_over() {
        life.count(board, Counter::Alive, 1);
        value = value % 255 + 1;
        let written: Vec<usize> = own(TRUNCATERS, CUT_FROM..LEN).filter(|_| random.range(0, 60) == 0).collect();
        written.iter().for_each(|offset| file.write_all_at(&[value], *offset as u64).unwrap());
        pause(&mut random);
        let size = random.range(CUT_FROM as u64, LEN as u64) as usize;
        unless_kernel(file, || rustix::fs::ftruncate(file, size as u64));
        if random.range(0, 2) == 0 {
            pause(&mut random);
        }
        if random.range(0, 4) != 0 {
            unless_kernel(file, || rustix::fs::ftruncate(file, LEN as u64));
        }
        for _ in 0..2 {
            let bytes = read(file, CUT_FROM..LEN);
            for offset in own(TRUNCATERS, CUT_FROM..CUT_FROM + bytes.len()) {
                let byte = bytes[offset - CUT_FROM];
                assert!(byte == 0 || offset < size, "byte {offset} is {byte} after a cut at {size} (round {value})");
            }
            pause(&mut random);
        }
        life.count(board, Counter::Compared, 1);
    }
}

/// Writes bytes of its own, and makes holes: it knows each of its bytes where no program cuts, and past that the holes.
///
/// Except in pages that a program stores to through a mapping: the Linux kernel does not exclude page faults while FUSE
/// makes a hole (Linux 6.18, `fuse_file_fallocate`). A store in between makes the page dirty with the bytes from before,
/// and if it is written back before the kernel drops it, they are back: with any FUSE file system.
pub(crate) fn puncher(life: &Life, board: &Board, file: &File, mut random: Random) {
    let mut known = vec![0u8; LEN];
    let mut ever = vec![[false; 256]; LEN];
    while !board.is_over() {
        life.count(board, Counter::Alive, 1);
        let value = random.range(1, 256) as u8;
        for offset in own(PUNCHERS, KEPT_FROM..LEN).filter(|_| random.range(0, 100) == 0).collect::<Vec<_>>() {
            file.write_all_at(&[value], offset as u64).unwrap();
            known[offset] = value;
            ever[offset][value as usize] = true;
        }
        pause(&mut random);
        let start = random.range(KEPT_FROM as u64, LEN as u64 - 1);
        let mut end = random.range(start + 1, LEN as u64).min(start + 3 * PAGE as u64);
        let mut start = start;
        if random.range(0, 3) == 0 {
            start = (start / PAGE as u64 * PAGE as u64).max(KEPT_FROM as u64);
            end = end.next_multiple_of(PAGE as u64);
        }
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        unless_kernel(file, || rustix::fs::fallocate(file, mode, start, end - start));
        known[start as usize..end as usize].fill(0);
        for _ in 0..2 {
            let bytes = read(file, KEPT_FROM..LEN);
            for offset in own(PUNCHERS, KEPT_FROM..KEPT_FROM + bytes.len()) {
                let (byte, known) = (bytes[offset - KEPT_FROM], known[offset]);
                let cut = offset >= CUT_FROM && byte == 0;
                let back = layout::is_for_mappings(offset) && ever[offset][byte as usize];
                assert!(
                    byte == known || cut || back,
                    "byte {offset} is {byte}, not {known}, after a hole {start}..{end}"
                );
            }
            pause(&mut random);
        }
        life.count(board, Counter::Compared, 1);
    }
}
