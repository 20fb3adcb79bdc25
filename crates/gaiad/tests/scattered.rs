//! Acquires after CPU programs changed single pages all over a file, and while they do.

mod common;

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use spinio_sys::linux::{fs_magic, is_in_large_folio};

use crate::common::TestMount;
use crate::common::gpu::{Gpu, PAGE, open};

const PAGES: usize = 2048;
/// Between changed pages.
const STEP: usize = 16;

#[test]
fn server_role() {
    common::server_role();
}

#[test]
fn changed_pages_are_fetched_and_later_stores_to_them_are_found_without_a_scan() {
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![1; PAGES * PAGE]).unwrap()) else {
        return;
    };
    let file = open(&mount.dir.join("file"));
    let gpu = Gpu::new(&file, PAGES);
    gpu.acquire();
    gpu.release();
    let before = gpu.1.info();
    for round in 2..5u8 {
        (0..PAGES).step_by(STEP).for_each(|page| file.write_all_at(&[round], (page * PAGE + 9) as u64).unwrap());
        gpu.acquire();
        assert!((0..PAGES).step_by(STEP).all(|page| gpu.load(page * PAGE + 9) == round));
        // Of two pages that were fetched and of one that was not.
        [STEP, 5 * STEP, 5 * STEP + 1].into_iter().for_each(|page| gpu.store(page * PAGE + 20, &[round]));
        gpu.release();
        let mut bytes = [0; 3];
        [STEP, 5 * STEP, 5 * STEP + 1].into_iter().zip(&mut bytes).for_each(|(page, byte)| {
            file.read_exact_at(std::slice::from_mut(byte), (page * PAGE + 20) as u64).unwrap();
        });
        assert_eq!(bytes, [round; 3]);
    }
    let after = gpu.1.info();
    assert_eq!(after.pages_committed - before.pages_committed, 3 * 3, "pages without a store are not released");
    assert_eq!(after.bytes_from_file - before.bytes_from_file, (3 * PAGES / STEP * PAGE) as u64);
    assert_eq!(after.scan_ns, before.scan_ns, "the device looks at no page");
}

/// On ext4 each write to a page of a large folio takes several times longer.
#[test]
fn large_folios_of_the_file_below_are_split_where_single_pages_are_written_often() {
    let bytes: Vec<u8> = (0..PAGES * PAGE).map(|n| (n % 251) as u8).collect();
    let mut below = None;
    let Some(mount) = TestMount::new(|dir| {
        std::fs::write(dir.join("file"), &bytes).unwrap();
        below = File::open(dir.join("file")).ok();
        below.as_ref().unwrap().sync_all().unwrap();
    }) else {
        return;
    };
    let below = below.unwrap();
    let is_large = |page: usize| is_in_large_folio(below.as_raw_fd(), page as u64);
    let is_ext4 = rustix::fs::fstatfs(&below).unwrap().f_type as u64 == fs_magic::EXT4;
    // The first is written, the last one not.
    let (often, never) = (PAGES / 4, PAGES / 4 * 3);
    if !is_ext4 || [often, never].map(is_large) != [Some(true); 2] {
        eprintln!("skipped: no large folios, or not ext4, or not root");
        return;
    }
    let file = open(&mount.dir.join("file"));
    let gpu = Gpu::new(&file, PAGES);
    let give_up = Instant::now() + Duration::from_secs(60);
    for round in 0.. {
        file.write_all_at(&[round as u8], (often * PAGE + 9) as u64).unwrap();
        gpu.acquire();
        assert_eq!(gpu.load(often * PAGE + 9), round as u8);
        gpu.release();
        if is_large(often) == Some(false) {
            break;
        }
        assert!(Instant::now() < give_up, "it stays large");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(is_large(never), Some(true));
    let mut now = vec![0; bytes.len()];
    file.read_exact_at(&mut now, 0).unwrap();
    now[often * PAGE + 9] = bytes[often * PAGE + 9];
    assert!(now == bytes);
}

#[repr(align(4096))]
struct Page([u8; PAGE]);

/// Whole pages are written to the file without the lock of its pages.
#[test]
fn acquired_page_is_one_of_those_that_were_written_whole() {
    const WRITERS: usize = 4;
    const WRITES: u64 = 200;
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![0; 8 * PAGE]).unwrap()) else {
        return;
    };
    let path = mount.dir.join("file");
    let gpu = Gpu::new(&open(&path), 8);
    let (begun, done): ([AtomicU64; WRITERS], [AtomicU64; WRITERS]) = Default::default();
    std::thread::scope(|scope| {
        for page in 0..WRITERS {
            let file = OpenOptions::new().write(true).custom_flags(0o40000).open(&path).unwrap();
            let (begun, done) = (&begun[page], &done[page]);
            scope.spawn(move || {
                for n in 1..=WRITES {
                    begun.store(n, SeqCst);
                    assert_eq!(file.write_at(&Page([n as u8; PAGE]).0, (page * PAGE) as u64).unwrap(), PAGE);
                    done.store(n, SeqCst);
                }
            });
        }
        loop {
            let before = [0, 1, 2, 3].map(|page: usize| done[page].load(SeqCst));
            gpu.acquire();
            for page in 0..WRITERS {
                let bytes = [0, 1, 2047, 4000, 4095].map(|at| gpu.load(page * PAGE + at));
                let after = begun[page].load(SeqCst);
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page}: {bytes:?}");
                let is_new = (before[page]..=after).contains(&u64::from(bytes[0]));
                assert!(is_new, "page {page}: {} of {before:?} to {after}", bytes[0]);
            }
            gpu.release();
            if before == [WRITES; WRITERS] {
                break;
            }
        }
    });
    drop(gpu);
    let (dir, _kept) = mount.unmount();
    let below = std::fs::read(dir.join("file")).unwrap();
    assert!(below[..WRITERS * PAGE].iter().all(|byte| u64::from(*byte) == WRITES));
}
