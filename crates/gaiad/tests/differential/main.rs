//! A mount behaves as the file system below it: random operations on both, with and without servers that are killed, and
//! with and without GPU programs that write the same files (epochs.rs).
//!
//! SPINIO_GAIA_OPERATIONS makes it longer, SPINIO_GAIA_SEED another one.

#![expect(unsafe_code, reason = "device memory")]

#[path = "../common/mod.rs"]
mod common;
mod epochs;

use std::collections::{HashMap, VecDeque};

use common::both::{Block, Op, Outcome, Random, Side, any_op, direct, tree, tree_with, write_block};
use common::{Killer, TestMount, audit};

#[test]
fn server_role() {
    common::server_role();
}

/// Operations of one run.
fn operations(otherwise: u64) -> u64 {
    std::env::var("SPINIO_GAIA_OPERATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(otherwise)
}

/// Of one mount.
const MOST: u64 = 25_000;

/// The operations of a test, mount by mount: a number that no other has, and how many.
fn mounts(operations: u64) -> impl Iterator<Item = (u64, u64)> {
    (0..operations.div_ceil(MOST)).map(move |number| (number, MOST.min(operations - number * MOST)))
}

fn seed() -> u64 {
    std::env::var("SPINIO_GAIA_SEED").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

/// Of all modes.
const ALL: u32 = 0o7777;
/// Of a mount whose servers are killed: one that has not the capability may lose these in a write (times.rs).
fn bits() -> u32 {
    if rustix::process::geteuid().is_root() { ALL } else { ALL & !0o6000 }
}

/// Does one operation on both sides, which must return the same, or what `may_return` says.
struct Compared<'a> {
    sides: [Side; 2],
    past: VecDeque<String>,
    done: u64,
    seed: u64,
    may_return: &'a dyn Fn(&Op, &Outcome, &Outcome) -> bool,
}

impl<'a> Compared<'a> {
    fn new(mount: &TestMount, seed: u64, may_return: &'a dyn Fn(&Op, &Outcome, &Outcome) -> bool) -> Compared<'a> {
        let sides = [Side::new(&mount.reference), Side::new(&mount.dir)];
        Compared { sides, past: VecDeque::new(), done: 0, seed, may_return }
    }

    fn run(&mut self, op: &Op) {
        let [expected, got] = self.sides.each_mut().map(|side| side.run(op));
        if self.past.len() == 40 {
            self.past.pop_front();
        }
        self.past.push_back(format!("{}: {op:?} = {expected:?}", self.done));
        self.done += 1;
        if !(self.may_return)(op, &expected, &got) {
            let past: Vec<_> = self.past.iter().map(String::as_str).collect();
            panic!("seed {}\n{}\nbut through the mount: {got:?}", self.seed, past.join("\n"));
        }
    }
}

/// `bits`: of modes that are set.
fn compare(mount: &TestMount, seed: u64, bits: u32, operations: u64) {
    let mut random = Random::new(seed);
    let is_equal = |_: &Op, expected: &Outcome, got: &Outcome| expected == got;
    let mut both = Compared::new(mount, seed, &is_equal);
    for _ in 0..operations {
        both.run(&any_op_with(&mut random, bits));
    }
    assert_eq!(tree(&mount.reference), tree(&mount.dir), "seed {seed}");
}

fn any_op_with(random: &mut Random, bits: u32) -> Op {
    let mut op = any_op(random);
    if let Op::Chmod { mode, .. } = &mut op {
        *mode &= bits;
    }
    op
}

fn compare_below(mount: TestMount) {
    let expected = tree(&mount.reference);
    audit::nothing_is_left(&mount, mount.servers() as usize);
    let (below, _root) = audit::unmount_and_look(mount);
    assert_eq!(expected, tree(&below), "after unmount");
}

#[test]
fn mount_equals_file_system_below() {
    for (number, operations) in mounts(operations(6000)) {
        let Some(mount) = TestMount::new(|_| ()) else { return };
        compare(&mount, seed() + number, ALL, operations);
        assert_eq!(mount.servers(), 1, "a server died");
        compare_below(mount);
    }
}

#[test]
fn killed_servers_change_nothing() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let killer = mount.killer(seed(), 5..60);
    // The same names again and again, until enough servers have died.
    for round in 0.. {
        compare(&mount, seed() + 1000 + round, bits(), 6000);
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

/// The same while a GPU program writes these files, and servers are killed until `killer` is dropped.
fn compare_beside_kernels(mount: TestMount, seed: u64, operations: u64, killer: Option<Killer>) -> String {
    let turn = epochs::Turn::default();
    std::thread::scope(|scope| {
        scope.spawn(|| epochs::run(&mount.dir, &mount.reference, &turn, Random::new(seed + 1)));
        let _ending = epochs::Ending(&turn);
        let mut random = Random::new(seed);
        let mut both = Compared::new(&mount, seed, &epochs::may_return);
        for _ in 0..operations {
            let op = epochs::beside_kernels(any_op_with(&mut random, bits()));
            let _turn = turn.of_cpu();
            both.run(&op);
        }
    });
    drop(killer);
    let mut contents = HashMap::new();
    let wanted = tree_with(&mount.reference, |name, bytes| {
        contents.insert(name.to_owned(), bytes.to_vec());
        String::new()
    });
    let now = tree_with(&mount.dir, |name, bytes| {
        let may_be = contents.get(name).is_some_and(|wanted| epochs::agree(0, wanted, bytes));
        assert!(may_be, "{}, seed {seed}", name.display());
        String::new()
    });
    assert_eq!(wanted, now, "seed {seed}");
    let seen = tree(&mount.dir);
    sync_all(&mount.dir);
    audit::nothing_is_left(&mount, mount.servers() as usize);
    let (below, _root) = audit::unmount_and_look(mount);
    assert_eq!(seen, tree(&below), "after unmount");
    turn.report()
}

/// So that nothing that was released waits to be written, but for files that this user may not read.
fn sync_all(root: &std::path::Path) {
    for entry in std::fs::read_dir(root).into_iter().flatten() {
        let (path, kind) = entry.map(|entry| (entry.path(), entry.file_type().unwrap())).unwrap();
        if kind.is_dir() {
            sync_all(&path);
        } else if kind.is_file()
            && let Ok(file) = std::fs::File::open(&path)
        {
            file.sync_all().unwrap();
        }
    }
}

#[test]
fn kernels_beside_a_cpu_program_change_their_bytes_only() {
    for (number, operations) in mounts(operations(10_000)) {
        let (Some(mount), seed) = (TestMount::new(|_| ()), 1000 * seed() + number) else { return };
        let report = compare_beside_kernels(mount, seed, operations, None);
        println!("GAIA: {operations} operations beside a GPU program, seed {seed}: {report}");
    }
}

#[test]
fn kernels_beside_a_cpu_program_survive_killed_servers() {
    // Fewer: most of the time is for the servers.
    for (number, operations) in mounts(operations(15_000) / 5) {
        let (Some(mount), seed) = (TestMount::new(|_| ()), 1000 * seed() + number) else { return };
        let killer = mount.killer(seed, 20..200);
        let report = compare_beside_kernels(mount, seed, operations, Some(killer));
        println!("GAIA: {operations} operations beside a GPU program, servers killed, seed {seed}: {report}");
    }
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
