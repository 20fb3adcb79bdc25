//! Acquires after CPU programs changed single pages all over a file.

mod common;

use std::os::unix::fs::FileExt;

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
