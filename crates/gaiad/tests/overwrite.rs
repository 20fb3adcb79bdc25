//! Epochs whose pages are overwritten by the device, and not fetched.

mod common;

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use spinio_gaia::Access;

use crate::common::TestMount;
use crate::common::gpu::{Gpu, PAGE, open};

const PAGES: usize = 40;
const LEN: usize = PAGES * PAGE;

#[test]
fn server_role() {
    common::server_role();
}

fn mounted() -> Option<(TestMount, PathBuf)> {
    let mount = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![1; LEN]).unwrap())?;
    let path = mount.dir.join("file");
    Some((mount, path))
}

/// Pages are released although nothing was fetched, and nothing else of the file changes.
#[test]
fn whole_pages_are_not_fetched_and_parts_of_pages_keep_the_rest() {
    let Some((_mount, path)) = mounted() else { return };
    let gpu = Gpu::new(&open(&path), PAGES);
    let (start, end) = (PAGE + 100, 30 * PAGE + 7);
    let inside = gpu.1.overwrite(start as u64, (end - start) as u64).unwrap();
    assert_eq!(inside as usize, end - start);
    // The pages in which the range begins and ends.
    assert_eq!(gpu.1.info().bytes_from_file as usize + gpu.1.info().bytes_from_snapshots as usize, 2 * PAGE);
    gpu.store(start, &vec![7; end - start]);
    let published = gpu.1.release(start as u64, (end - start) as u64).unwrap();
    assert_eq!(published as usize, 30 * PAGE);
    let mut expected = vec![1; LEN];
    expected[start..end].fill(7);
    assert!(std::fs::read(&path).unwrap() == expected);
}

/// What was not stored to is released too: the program has said that it stores to all.
#[test]
fn acquire_inside_the_epoch_does_not_make_pages_unchanged() {
    let Some((_mount, path)) = mounted() else { return };
    let gpu = Gpu::new(&open(&path), PAGES);
    gpu.acquire();
    gpu.store(0, &[9; LEN]);
    gpu.1.discard(0, LEN as u64).unwrap();
    gpu.1.overwrite(0, LEN as u64).unwrap();
    gpu.1.acquire(0, LEN as u64, Access::Write).unwrap();
    assert_eq!(gpu.1.info().bytes_from_file, LEN as u64, "only by the first");
    assert_eq!(gpu.1.release(0, LEN as u64).unwrap() as usize, LEN);
    assert!(std::fs::read(&path).unwrap() == vec![9; LEN]);
    // The next epoch is an ordinary one.
    gpu.acquire();
    gpu.store(5 * PAGE, &[8]);
    assert_eq!(gpu.1.release(0, LEN as u64).unwrap() as usize, PAGE);
}

#[test]
fn writers_of_other_pages_and_bytes_lose_nothing() {
    let Some((_mount, path)) = mounted() else { return };
    let file = open(&path);
    let (one, two) = (Gpu::new(&file, PAGES), Gpu::new(&file, PAGES));
    two.acquire();
    two.store(20 * PAGE + 5, &[2]);
    file.write_all_at(&[3], 21 * PAGE as u64).unwrap();
    one.1.overwrite(0, 20 * PAGE as u64).unwrap();
    one.store(0, &vec![7; 20 * PAGE]);
    one.1.release(0, 20 * PAGE as u64).unwrap();
    two.release();
    let mut expected = vec![1; LEN];
    expected[..20 * PAGE].fill(7);
    expected[20 * PAGE + 5] = 2;
    expected[21 * PAGE] = 3;
    assert!(std::fs::read(&path).unwrap() == expected);
    two.acquire();
    assert_eq!((two.load(0), two.load(20 * PAGE - 1), two.load(21 * PAGE)), (7, 7, 3));
}

#[test]
fn stores_of_a_discarded_or_lost_epoch_are_gone() {
    let Some((mount, path)) = mounted() else { return };
    let gpu = Gpu::new(&open(&path), PAGES);
    gpu.1.overwrite(0, LEN as u64).unwrap();
    gpu.store(0, &[7; LEN]);
    gpu.1.discard(0, LEN as u64).unwrap();
    gpu.acquire();
    assert_eq!((gpu.load(0), gpu.load(LEN - 1)), (1, 1));
    gpu.release();
    gpu.1.overwrite(0, LEN as u64).unwrap();
    gpu.store(0, &[7; LEN]);
    mount.kill_server();
    assert_eq!(gpu.1.release(0, LEN as u64).unwrap_err().errno, rustix::io::Errno::STALE);
    gpu.acquire();
    assert_eq!((gpu.load(0), gpu.load(LEN - 1)), (1, 1));
    assert!(std::fs::read(&path).unwrap() == vec![1; LEN]);
}
