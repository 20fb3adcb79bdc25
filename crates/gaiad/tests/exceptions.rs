//! What the Linux kernel does not pass to a FUSE file system, or does itself: the calls that do not do below a mount what they do
//! on ext4. docs/semantics.md lists them; all other calls here have the same result.

mod common;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, SystemTime};

use rustix::fs::{AtFlags, FallocateFlags, OFlags, StatxFlags, fallocate};
use rustix::io::{Errno, ReadWriteFlags, preadv2, pwritev2};
use spinio_sys::linux::{self, fs_magic};

use crate::common::TestMount;

const PAGE: usize = 4096;
const LEN: u64 = 1 << 20;
/// More than a file of ext4 has.
const TOO_FAR: u64 = 17 << 40;
const DONTCACHE: u32 = 0x80;
const DIOALIGN: u32 = 0x2000;
const GET_FLAGS: u32 = 0x8008_6601;
const GET_EXTENTS: u32 = 0xc020_660b;

/// Each call, and what it returns below the mount where that differs from ext4.
const EXCEPTIONS: [(&str, i64); 12] = [
    ("collapse a range", -95),
    ("insert a range", -95),
    ("read without waiting", -95),
    ("read without keeping", -95),
    ("write without keeping", -95),
    ("extents", -95),
    ("attribute flags", -25),
    ("direct read of odd bytes", 100),
    ("direct write of odd bytes", 100),
    // The page cache has them; only storage finds out.
    ("write past the largest file", 10),
    ("modification time after 2446", 1 << 34),
    ("alignment of direct requests", 0),
];

#[test]
fn server_role() {
    common::server_role();
}

/// What a call returned, or its negative errno.
fn result<T: TryInto<i64>>(done: Result<T, Errno>) -> i64 {
    done.map_or_else(|errno| -i64::from(errno.raw_os_error()), |value| value.try_into().unwrap_or(i64::MAX))
}

fn of_std<T: TryInto<i64>>(done: std::io::Result<T>) -> i64 {
    result(done.map_err(|error| Errno::from_io_error(&error).unwrap()))
}

fn outcomes(dir: &Path) -> Vec<(&'static str, i64)> {
    let path = dir.join("file");
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    file.write_all_at(&vec![1; LEN as usize], 0).unwrap();
    file.sync_all().unwrap();
    let direct =
        OpenOptions::new().read(true).write(true).custom_flags(OFlags::DIRECT.bits() as i32).open(&path).unwrap();
    let allocate = |mode, at, len| result(fallocate(&file, mode, at, len).map(|()| 0));
    let read = |flags: u32| {
        let mut page = [0; PAGE];
        result(preadv2(&file, &mut [IoSliceMut::new(&mut page)], 0, ReadWriteFlags::from_bits_retain(flags)))
    };
    let write =
        |flags: u32| result(pwritev2(&file, &[IoSlice::new(&[2; PAGE])], 0, ReadWriteFlags::from_bits_retain(flags)));
    // From the first byte to the last one; how many there are.
    let mut extents: [u8; 32] = std::array::from_fn(|at| if (8..16).contains(&at) { 0xff } else { 0 });
    let extents = linux::ioctl_read(file.as_raw_fd(), GET_EXTENTS, &mut extents);
    let flags = linux::ioctl_read(file.as_raw_fd(), GET_FLAGS, &mut [0; 8]);
    let page = PAGE as u64;
    let mut outcomes = vec![
        ("collapse a range", allocate(FallocateFlags::COLLAPSE_RANGE, page, 2 * page)),
        ("insert a range", allocate(FallocateFlags::INSERT_RANGE, page, 2 * page)),
        ("punch a hole", allocate(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, page, page)),
        ("punch a hole, and the size", allocate(FallocateFlags::PUNCH_HOLE, page, page)),
        ("zeros", allocate(FallocateFlags::ZERO_RANGE, 100, 5000)),
        ("allocate nothing", allocate(FallocateFlags::empty(), 0, 0)),
        ("allocate too far", allocate(FallocateFlags::empty(), TOO_FAR, 1)),
        ("read", read(0)),
        ("read without waiting", read(ReadWriteFlags::NOWAIT.bits())),
        ("read without keeping", read(DONTCACHE)),
        ("write to storage", write(ReadWriteFlags::DSYNC.bits())),
        ("write at the end", write(ReadWriteFlags::APPEND.bits())),
        ("write without keeping", write(DONTCACHE)),
        ("extents", result(extents.map(|()| 0))),
        ("attribute flags", result(flags.map(|()| 0))),
        ("direct read of odd bytes", of_std(direct.read_at(&mut [0; 100], 3))),
        ("direct write of odd bytes", of_std(direct.write_at(&[3; 100], 3))),
        ("cut too far", of_std(file.set_len(TOO_FAR).map(|()| 0))),
    ];
    outcomes.push(("write past the largest file", of_std(file.write_at(&[4; 10], TOO_FAR))));
    // What it did is over when the size is set.
    let _ = file.sync_all();
    outcomes.push(("fsync after the report", of_std(file.sync_all().map(|()| 0))));
    outcomes.push(("cut", of_std(file.set_len(LEN).map(|()| 0))));
    outcomes.push(("size", file.metadata().unwrap().size() as i64));
    let late = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 34);
    file.set_modified(late).unwrap();
    outcomes.push(("modification time after 2446", file.metadata().unwrap().mtime()));
    let statx = rustix::fs::statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::from_bits_retain(DIOALIGN)).unwrap();
    outcomes.push(("alignment of direct requests", i64::from(statx.stx_mask & DIOALIGN)));
    outcomes
}

#[test]
fn calls_that_differ_from_ext4_are_these() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let reference = tempfile::tempdir().unwrap();
    let on = rustix::fs::statfs(reference.path()).unwrap();
    if on.f_type as u64 != fs_magic::EXT4 {
        return eprintln!("skipped: {} is not on ext4", reference.path().display());
    }
    let (below, here) = (outcomes(reference.path()), outcomes(&mount.dir));
    let exceptions = HashMap::from(EXCEPTIONS);
    for ((call, below), (_, here)) in below.into_iter().zip(here) {
        match exceptions.get(call) {
            Some(differs) => assert_eq!(here, *differs, "{call}: below the mount"),
            None => assert_eq!(here, below, "{call}: here, and on ext4"),
        }
    }
}

/// That error comes late, but it comes: once, by fsync.
#[test]
fn bytes_past_the_largest_file_are_an_error_of_fsync() {
    let Some(mount) = TestMount::new(|_| ()) else { return };
    let path = mount.dir.join("file");
    let file = File::create(&path).unwrap();
    if rustix::fs::ftruncate(&file, TOO_FAR).is_ok() {
        return eprintln!("skipped: this file system has larger files");
    }
    file.write_all_at(b"0123456789", TOO_FAR).unwrap();
    let error = file.sync_all().unwrap_err();
    assert_eq!(Errno::from_io_error(&error), Some(Errno::FBIG));
    file.sync_all().unwrap();
    drop(file);
    let (below, _root) = mount.unmount();
    assert_eq!(std::fs::metadata(below.join("file")).unwrap().len(), 0);
}
