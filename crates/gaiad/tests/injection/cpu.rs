//! CPU programs: every operation that a server executes, on the mount and on an ordinary directory. Whatever is killed,
//! outcomes and trees are equal, so each operation was done exactly once.

use rustix::fs::{FallocateFlags, OFlags, RenameFlags, XattrFlags};

use crate::Step;
use crate::common::TestMount;
use crate::common::both::{Op, PAGE, Side, tree};

fn name(name: &str) -> String {
    name.to_owned()
}

fn open(slot: usize, path: &str, flags: OFlags) -> Op {
    Op::Open { slot, name: name(path), flags: OFlags::RDWR | flags, mode: 0o644 }
}

fn rename(from: &str, to: &str, flags: RenameFlags) -> Op {
    Op::Rename { from: name(from), to: name(to), flags }
}

/// Names: each kind of change, with files open whose last name goes.
pub(crate) fn names() -> Vec<Op> {
    let attribute = || name("user.one");
    let new = OFlags::CREATE | OFlags::EXCL;
    vec![
        Op::Mkfifo { name: name("pipe") },
        open(0, "a", new),
        Op::Write { slot: 0, offset: 100, len: 5000, fill: 1 },
        Op::Symlink { target: name("a"), name: name("l") },
        Op::Link { from: name("a"), to: name("b") },
        Op::SetXattr { name: name("a"), attribute: attribute(), value: 100, flags: XattrFlags::CREATE },
        Op::GetXattr { name: name("a"), attribute: attribute() },
        Op::RemoveXattr { name: name("b"), attribute: attribute() },
        rename("b", "c", RenameFlags::NOREPLACE),
        open(1, "d", new),
        Op::Write { slot: 1, offset: 0, len: 300, fill: 2 },
        rename("d", "c", RenameFlags::empty()),
        open(2, "e", new),
        Op::Write { slot: 2, offset: 0, len: 9000, fill: 3 },
        rename("c", "e", RenameFlags::EXCHANGE),
        // Open ones lose their last name.
        Op::Unlink { name: name("e") },
        Op::Read { slot: 1, offset: 0, len: 400 },
        rename("a", "c", RenameFlags::empty()),
        Op::Read { slot: 2, offset: 0, len: 9000 },
        Op::Tmpfile { slot: 3, name: String::new() },
        Op::Write { slot: 3, offset: 50, len: 10, fill: 4 },
        Op::Publish { slot: 3, name: name("t") },
        Op::Mkdir { name: name("s") },
        Op::List { name: String::new() },
        Op::Rmdir { name: name("s") },
        Op::Stat { name: name("c") },
        Op::Readlink { name: name("l") },
        Op::Unlink { name: name("pipe") },
        Op::Unlink { name: name("none") },
    ]
}

/// Content and attributes of one file.
pub(crate) fn content() -> Vec<Op> {
    let keep = FallocateFlags::KEEP_SIZE;
    let allocate = |mode, offset, len| Op::Allocate { slot: 0, mode, offset, len };
    // A user may give a file to itself.
    let uid = if rustix::process::geteuid().is_root() { 1000 } else { rustix::process::geteuid().as_raw() };
    let read = || Op::Read { slot: 0, offset: 0, len: 40_000 };
    vec![
        open(0, "f", OFlags::CREATE | OFlags::EXCL),
        Op::Write { slot: 0, offset: 100, len: 20_000, fill: 1 },
        Op::Map { slot: 0, offset: 50, len: 9000, fill: Some(2), sync: true },
        Op::Sync { slot: 0, data_only: false },
        Op::Uncache { slot: 0 },
        read(),
        Op::Truncate { slot: 0, size: 5000 },
        Op::Truncate { slot: 0, size: 30_000 },
        Op::Direct { slot: 0, page: 2, pages: 1, fill: Some(5) },
        Op::Direct { slot: 0, page: 1, pages: 2, fill: None },
        allocate(keep | FallocateFlags::PUNCH_HOLE, 6000, 3000),
        allocate(FallocateFlags::ZERO_RANGE, 20_000, 15_000),
        allocate(FallocateFlags::empty(), 0, 9 * PAGE),
        allocate(keep, 0, 20 * PAGE),
        Op::Seek { slot: 0, offset: 3 * PAGE },
        Op::Write { slot: 0, offset: 10_000, len: 300, fill: 6 },
        Op::Sync { slot: 0, data_only: true },
        Op::Close { slot: 0 },
        open(0, "f", OFlags::empty()),
        read(),
        Op::Chmod { name: name("f"), mode: 0o600 },
        Op::Chown { name: name("f"), uid },
        Op::Times { name: name("f"), seconds: 1_000_000, omit: true },
        Op::StatFile { slot: 0 },
        open(1, "f", OFlags::TRUNC),
        Op::Append { slot: 1, len: 70, fill: 7 },
        read(),
    ]
}

/// Runs the operations in directories of their own, which are gone afterwards.
pub(crate) fn run(mount: &TestMount, ops: &[Op], step: &mut Step<'_>) {
    let roots = [&mount.reference, &mount.dir].map(|root| root.join(format!("{}", step.round)));
    roots.iter().for_each(|root| std::fs::create_dir(root).unwrap());
    let mut sides = roots.each_ref().map(|root| Side::new(root));
    for op in ops {
        step.next();
        let [expected, got] = sides.each_mut().map(|side| side.run(op));
        assert_eq!(expected, got, "{op:?}, {step}");
    }
    let [expected, got] = roots.each_ref().map(|root| tree(root));
    assert_eq!(expected, got, "{step}");
    drop(sides);
    roots.iter().for_each(|root| std::fs::remove_dir_all(root).unwrap());
}
