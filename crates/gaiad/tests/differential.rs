//! A mount behaves as the file system below it: random operations on both, with and without servers that are killed.

mod common;

use common::TestMount;
use common::both::{Block, Op, Random, Side, any_op, direct, tree, write_block};

#[test]
fn server_role() {
    common::server_role();
}

/// Operations of one run; SPINIO_GAIA_OPERATIONS for more.
fn operations() -> u64 {
    std::env::var("SPINIO_GAIA_OPERATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(6000)
}

fn seed() -> u64 {
    std::env::var("SPINIO_GAIA_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

/// Of all modes.
const ALL: u32 = 0o7777;

/// `bits`: of modes that are set.
fn compare(mount: &TestMount, seed: u64, bits: u32) {
    let mut random = Random::new(seed);
    let mut sides = [Side::new(&mount.reference), Side::new(&mount.dir)];
    let mut past = Vec::new();
    for number in 0..operations() {
        let mut op = any_op(&mut random);
        if let Op::Chmod { mode, .. } = &mut op {
            *mode &= bits;
        }
        let [expected, got] = sides.each_mut().map(|side| side.run(&op));
        past.push(format!("{number}: {op:?} = {expected:?}"));
        if expected != got {
            let from = past.len().saturating_sub(40);
            panic!("seed {seed}\n{}\nbut through the mount: {got:?}", past[from..].join("\n"));
        }
    }
    assert_eq!(tree(&mount.reference), tree(&mount.dir), "seed {seed}");
}

fn compare_below(mount: TestMount) {
    let expected = tree(&mount.reference);
    let (below, _root) = mount.unmount();
    assert_eq!(expected, tree(&below), "after unmount");
}

#[test]
fn mount_equals_file_system_below() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    compare(&mount, seed(), ALL);
    assert_eq!(mount.servers(), 1, "a server died");
    compare_below(mount);
}

#[test]
fn killed_servers_change_nothing() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    // A server that has not the capability may lose these in a write (times.rs).
    let bits = if rustix::process::geteuid().is_root() { ALL } else { ALL & !0o6000 };
    let killer = mount.killer(seed(), 5..60);
    // The same names again and again, until enough servers have died.
    for round in 0.. {
        compare(&mount, seed() + 1000 + round, bits);
        if mount.servers() > 20 {
            break;
        }
        assert!(round < 100, "only {} servers", mount.servers());
        for dir in [&mount.dir, &mount.reference] {
            let _ = std::fs::remove_dir_all(dir.join("d0"));
        }
    }
    drop(killer);
    compare_below(mount);
}

#[test]
fn direct_io_and_page_cache_agree() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let path = mount.dir.join("file");
    let file = direct(&path).unwrap();
    let cached = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    for round in 0..50u8 {
        let again = write_block(&file, &Block([round; 4096]), 4096 * u64::from(round % 5));
        assert!(again.0.iter().all(|b| *b == round));
        let mut bytes = [0; 4096];
        std::os::unix::fs::FileExt::read_exact_at(&cached, &mut bytes, 4096 * u64::from(round % 5)).unwrap();
        assert!(bytes.iter().all(|b| *b == round));
        std::os::unix::fs::FileExt::write_all_at(&cached, &[round ^ 0xff], 4096 * u64::from(round % 5)).unwrap();
        let mut block = Block([0; 4096]);
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut block.0, 4096 * u64::from(round % 5)).unwrap();
        assert_eq!(block.0[..2], [round ^ 0xff, round]);
    }
}
