//! Outputs on an array with parity, as far as that can be tested without one: the same code over the extents of an
//! ordinary file, with stripes of an assumed width. The virtual machine has real arrays.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

mod leases;
mod model;

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use spinio_io::Settings;
use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_nvmmu::Direction::Download;
use spinio_nvmmu::{OutputMode, Session};
use spinio_plan::Route;
use spinio_sys::{Errno, linux};
use spinio_testkit::{mount_fixture, wait_exclusive};

use crate::common::{Buffer, FileSizeLimit, bytes, leak_runtime, runtime};

/// A directory with direct I/O, extents and leases, if there is one.
fn folder() -> Option<tempfile::TempDir> {
    let folder = tempfile::Builder::new().prefix("nvmmu-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let probe = folder.path().join("probe");
    File::create(&probe).unwrap();
    if let Err(why) = wait_exclusive(&probe) {
        eprintln!("skipped: no leases in {}: {why}", folder.path().display());
        return None;
    }
    let mut session = Session::begin_with_stripes(runtime(), &probe, 4096, 0).unwrap();
    let device = Buffer::with_bytes(&bytes(8192, 0));
    session.move_range(&probe, device.at(0), 0, 8192, Download).unwrap();
    let report = session.end().unwrap();
    if matches!(report.mode, OutputMode::Passthrough(_)) || report.full_stripe == 0 {
        eprintln!("skipped: no stripes can be had in {}: {}", folder.path().display(), report.mode);
        return None;
    }
    assert_eq!(report.mode, OutputMode::Preread, "no other process has the file open");
    Some(folder)
}

const WIDTH: u64 = 3 * 16384;

fn begin(path: &Path) -> Session {
    Session::begin_with_stripes(runtime(), path, WIDTH, 8192).unwrap()
}

/// As [`begin`], once no child of another test has the file open.
fn begin_exclusive(path: &Path) -> Session {
    wait_exclusive(path).unwrap();
    begin(path)
}

/// The extents of a file on the device: beginnings and lengths.
fn device_extents(file: &File) -> Vec<(u64, u64)> {
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    let mut end = None;
    for extent in linux::fiemap_extents(file.as_raw_fd(), 0, u64::MAX, 4096).unwrap() {
        match pieces.last_mut() {
            Some(last) if end == Some(extent.logical) && last.0 + last.1 == extent.physical => last.1 += extent.len,
            _ => pieces.push((extent.physical, extent.len)),
        }
        end = Some(extent.logical + extent.len);
    }
    pieces
}

/// A file of this length, in one extent if possible.
fn some_file(path: PathBuf, len: usize) -> (PathBuf, File) {
    let file = File::create(&path).unwrap();
    if len > 0 {
        let _ = linux::preallocate(file.as_raw_fd(), 0, len as u64, true);
    }
    file.write_all_at(&bytes(len, 1), 0).unwrap();
    file.sync_all().unwrap();
    (path, file)
}

/// A file in one extent. Files with several extents are kept until then, so that the next one is allocated elsewhere.
fn contiguous_file(folder: &Path, len: usize) -> Option<PathBuf> {
    const TRIES: usize = 200;
    let attempt = |number| some_file(folder.join(format!("try{number}")), len);
    let found = (0..TRIES).map(attempt).find(|(_, file)| device_extents(file).len() <= 1);
    let Some((found, _)) = found else {
        eprintln!("skipped: of {TRIES} files none is in one piece in {}", folder.display());
        return None;
    };
    let path = folder.join("out");
    fs::rename(found, &path).unwrap();
    for entry in fs::read_dir(folder).unwrap() {
        let leftover = entry.unwrap().path();
        if leftover != path {
            fs::remove_file(leftover).unwrap();
        }
    }
    Some(path)
}

/// The file has the expected bytes; else panics with the first and the last byte that differ.
fn assert_same_bytes(path: &Path, model: &[u8], when: &str) {
    let file = fs::read(path).unwrap();
    assert_eq!(file.len(), model.len(), "{when}");
    let differ = |(a, b): (&u8, &u8)| a != b;
    let first = file.iter().zip(model).position(differ);
    let last = file.iter().zip(model).rposition(differ);
    assert!(first.is_none(), "{when}: bytes {first:?} to {last:?} differ");
}

#[test]
fn adjacent_moves_become_full_stripes() {
    let Some(folder) = folder() else { return };
    let path = folder.path().join("new");
    let source = bytes(20 * WIDTH as usize, 4);
    let device = Buffer::with_bytes(&source);
    let mut session = begin(&path);
    for at in (0..source.len() as u64).step_by(4096) {
        session.move_range(&path, device.at(at), at, 4096, Download).unwrap();
    }
    let report = session.end().unwrap();
    assert!(fs::read(&path).unwrap() == source);
    assert_eq!(report.downloaded, 20 * WIDTH);
    // The file system chooses its extents: each of them begins and ends within stripes.
    let straddling = 2 * WIDTH * device_extents(&File::open(&path).unwrap()).len() as u64;
    assert_eq!(report.full_stripe + report.unaligned, 20 * WIDTH, "{report:?}");
    assert!(report.unaligned <= straddling && report.full_stripe.is_multiple_of(WIDTH), "{report:?}");
}

#[test]
fn partial_stripe_is_completed_from_preread_bytes() {
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), 10 * WIDTH as usize) else { return };
    let device = Buffer::with_bytes(&bytes(9000, 6));
    let mut session = begin_exclusive(&path);
    let at = 4 * WIDTH + 5;
    session.hint_range(at, 9000);
    session.move_range(&path, device.at(0), at, 9000, Download).unwrap();
    let report = session.end().unwrap();
    let mut expected = bytes(10 * WIDTH as usize, 1);
    expected[at as usize..at as usize + 9000].copy_from_slice(&bytes(9000, 6));
    assert!(fs::read(&path).unwrap() == expected);
    assert_eq!(report.mode, OutputMode::Preread);
    assert_eq!((report.unaligned, report.full_stripe % WIDTH), (0, 0), "{report:?}");
    assert_eq!(report.full_stripe - report.filler, 9000);
    assert!(report.read_ahead >= report.filler, "{report:?}");
    // The next session knows where the last one wrote.
    let mut session = begin_exclusive(&path);
    session.move_range(&path, device.at(0), at, 9000, Download).unwrap();
    let report = session.end().unwrap();
    assert_eq!((report.mode, report.unaligned), (OutputMode::Preread, 0));
}

/// A session guesses that it writes what the last one wrote; hints replace the guess.
#[test]
fn guess_does_not_hide_hinted_range() {
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), 10 * WIDTH as usize) else { return };
    let device = Buffer::with_bytes(&bytes(10 * WIDTH as usize, 6));
    for _ in 0..10 {
        let mut session = begin_exclusive(&path);
        session.move_range(&path, device.at(0), 0, 10 * WIDTH, Download).unwrap();
        session.end().unwrap();
        let mut session = begin_exclusive(&path);
        session.hint_range(4 * WIDTH + 5, 9000);
        session.move_range(&path, device.at(0), 4 * WIDTH + 5, 9000, Download).unwrap();
        let report = session.end().unwrap();
        assert_eq!((report.mode.clone(), report.unaligned), (OutputMode::Preread, 0), "{report:?}");
    }
}

#[test]
fn filler_is_not_written_if_others_have_file_open() {
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), 10 * WIDTH as usize) else { return };
    let device = Buffer::with_bytes(&bytes(9000, 6));
    let at = 4 * WIDTH + 5;
    for opened_later in [false, true] {
        wait_exclusive(&path).unwrap();
        let reader = if opened_later { None } else { Some(File::open(&path).unwrap()) };
        let mut session = begin(&path);
        session.hint_range(at, 9000);
        session.move_range(&path, device.at(0), at, 9000, Download).unwrap();
        // Concurrently with the download, in the same stripe.
        let later = fs::OpenOptions::new().write(true).open(&path).unwrap();
        later.write_all_at(b"mine", 4 * WIDTH + 20_000).unwrap();
        let report = session.end().unwrap();
        let why = if opened_later { "another process opened the file" } else { "another process has the file open" };
        assert_eq!(report.mode, OutputMode::Aligned(why.to_owned()));
        assert_eq!((report.filler, report.unaligned), (0, 9000));
        let mut expected = bytes(10 * WIDTH as usize, 1);
        expected[at as usize..at as usize + 9000].copy_from_slice(&bytes(9000, 6));
        expected[4 * WIDTH as usize + 20_000..][..4].copy_from_slice(b"mine");
        assert!(fs::read(&path).unwrap() == expected);
        drop(reader);
    }
}

#[test]
fn output_is_bound_to_file_not_name() {
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), 10 * WIDTH as usize) else { return };
    let (linked, moved) = (folder.path().join("linked"), folder.path().join("moved"));
    let device = Buffer::with_bytes(&bytes(9000, 6));
    fs::hard_link(&path, &linked).unwrap();
    let at = 4 * WIDTH + 5;
    let mut session = begin(&path);
    session.move_range(&path, device.at(0), at, 4000, Download).unwrap();
    session.move_range(&linked, device.at(4000), at + 4000, 5000, Download).unwrap();
    assert_eq!(session.report().unaligned + session.report().full_stripe, 0, "gathered, by either name");
    // Another file gets the name: later moves are not for the output.
    fs::rename(&path, &moved).unwrap();
    session.move_range(&path, device.at(0), 3, 9000, Download).unwrap();
    session.end().unwrap();
    let mut expected = bytes(10 * WIDTH as usize, 1);
    expected[at as usize..][..9000].copy_from_slice(&bytes(9000, 6));
    assert_same_bytes(&moved, &expected, "after it was renamed");
    assert!(fs::read(&path).unwrap()[3..] == bytes(9000, 6));
    // A file that has no name does not lose its gathered bytes either.
    let mut session = begin(&moved);
    session.move_range(&moved, device.at(0), 5 * WIDTH, 9000, Download).unwrap();
    fs::remove_file(&moved).unwrap();
    session.end().unwrap();
    expected[5 * WIDTH as usize..][..9000].copy_from_slice(&bytes(9000, 6));
    assert_same_bytes(&linked, &expected, "without its name");
}

#[test]
fn file_ends_at_last_byte() {
    let Some(folder) = folder() else { return };
    for (old, at, len) in [(0, 0, 1), (0, 3 * WIDTH + 7, 100_000), (5 * WIDTH, 4 * WIDTH, 3 * WIDTH - 1), (100, 50, 10)]
    {
        let (path, _) = some_file(folder.path().join("out"), old as usize);
        let device = Buffer::with_bytes(&bytes(len as usize, 8));
        let mut session = begin_exclusive(&path);
        session.hint_range(at, len);
        session.move_range(&path, device.at(0), at, len, Download).unwrap();
        session.end().unwrap();
        let got = fs::read(&path).unwrap();
        assert_eq!(got.len() as u64, old.max(at + len));
        assert!(got[at as usize..(at + len) as usize] == bytes(len as usize, 8));
        // And no space is left reserved past the end.
        use std::os::unix::fs::MetadataExt;
        assert!(fs::metadata(&path).unwrap().blocks() * 512 <= got.len() as u64 + (1 << 20));
    }
}

#[test]
fn partially_refused_stripe_is_written_unaligned() {
    let Some(folder) = folder() else { return };
    let path = folder.path().join("out");
    let base = 1u64 << 30;
    File::create(&path).unwrap().set_len(base).unwrap();
    // The last stripe extends past the maximum file size, the bytes do not.
    let device = Buffer::with_bytes(&bytes(9000, 6));
    for at in [base, base + WIDTH / 2] {
        let mut session = begin_exclusive(&path);
        session.hint_range(at, 9000);
        let limit = FileSizeLimit::set(at + 9000);
        let moved = session.move_range(&path, device.at(0), at, 9000, Download);
        let ended = session.end();
        drop(limit);
        let report = moved.and(ended).unwrap();
        assert_eq!((report.mode, report.unaligned, report.filler), (OutputMode::Preread, 9000, 0));
        assert_eq!(fs::metadata(&path).unwrap().len(), at + 9000);
        let mut got = vec![0; 9000];
        File::open(&path).unwrap().read_exact_at(&mut got, at).unwrap();
        assert!(got == bytes(9000, 6));
    }
}

/// A file system that runs out of space during a reservation leaves all of it allocated to the file.
#[test]
fn preallocation_leaves_space_on_full_disk() {
    const MIB: u64 = 1 << 20;
    let place = match mount_fixture::create_small("ext4", 96 * MIB) {
        Ok(place) => place,
        Err(why) => return eprintln!("skipped: {why}"),
    };
    let path = place.file("out");
    let free = || linux::available_bytes(File::open(place.path()).unwrap().as_raw_fd()).unwrap();
    File::create(&path).unwrap();
    let before = free();
    let source = bytes(before as usize + 8 * MIB as usize, 6);
    let device = Buffer::with_bytes(&source);

    // The hint is far larger than the free space, and the download is small.
    let mut session = begin_exclusive(&path);
    session.hint_range(0, 1 << 40);
    if let OutputMode::Passthrough(why) = session.report().mode {
        return eprintln!("skipped: no stripes can be had there: {why}");
    }
    assert!(free() > before / 2, "{} of {before} bytes are left for others", free());
    session.move_range(&path, device.at(0), 0, MIB, Download).unwrap();
    session.end().unwrap();
    assert!(fs::read(&path).unwrap() == source[..MIB as usize]);
    assert!(free() + 2 * MIB > before, "{} of {before} bytes are left for others", free());

    // There is space for the download, and for no more.
    let len = before - 10 * MIB;
    let mut session = begin_exclusive(&path);
    session.hint_range(0, len);
    session.move_range(&path, device.at(0), 0, len, Download).unwrap();
    session.end().unwrap();
    assert!(fs::read(&path).unwrap() == source[..len as usize]);
    assert!(free() + len + 2 * MIB > before, "{} of {before} bytes are left for others", free());

    // It does not fit: an error is reported, and the file has the downloaded bytes or none of them.
    fs::remove_file(&path).unwrap();
    File::create(&path).unwrap();
    let mut session = begin_exclusive(&path);
    session.hint_range(0, source.len() as u64);
    let moved = session.move_range(&path, device.at(0), 0, source.len() as u64, Download);
    let error = moved.and_then(|_| session.end().map(drop)).unwrap_err();
    assert_eq!(error.kind.errno(), Errno::NOSPC, "{error}");
    let got = fs::read(&path).unwrap();
    assert!(got.iter().zip(&source).all(|(got, source)| got == source || *got == 0));
}

/// A new file system, on which files are allocated in order: in one extent, at a known position.
fn mount_fresh() -> Option<mount_fixture::MountFixture> {
    match mount_fixture::create_small("ext4", 160 << 20) {
        Ok(place) => Some(place),
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}

#[test]
fn long_output_is_written_in_full_stripes() {
    let Some(place) = mount_fresh() else { return };
    let path = place.file("out");
    let source = bytes(50 << 20, 4);
    let device = Buffer::with_bytes(&source);
    // If another process has it open, space is reserved for each download alone, and none is left over.
    for other in [false, true] {
        let _ = fs::remove_file(&path);
        File::create(&path).unwrap();
        wait_exclusive(&path).unwrap();
        let reader = other.then(|| File::open(&path).unwrap());
        let mut session = begin(&path);
        for at in (0..source.len() as u64).step_by(1 << 20) {
            session.move_range(&path, device.at(at), at, 1 << 20, Download).unwrap();
        }
        let report = session.end().unwrap();
        assert_eq!(matches!(report.mode, OutputMode::Preread), !other, "{}", report.mode);
        assert_same_bytes(&path, &source, "at the end");
        let torn = 2 * WIDTH * device_extents(&File::open(&path).unwrap()).len() as u64;
        assert!(other || report.unaligned <= torn && report.full_stripe > 40 << 20, "{report:?} in {torn}");
        let blocks = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&path).unwrap());
        assert!(blocks * 512 <= source.len() as u64 + (1 << 20), "{blocks} blocks");
        drop(reader);
    }
}

/// A block is removed from the beginning of the file: every stripe then begins elsewhere in the file. Bytes gathered
/// before are older than the next ones, and are written first.
#[test]
fn gathered_bytes_are_written_before_stripes_move() {
    let Some(place) = mount_fresh() else { return };
    let device = Buffer::with_bytes(&bytes(9000, 6));
    let later = Buffer::with_bytes(&bytes(9000, 7));
    let mut cases = 0;
    for at in [100, 4 * WIDTH + 100] {
        for second in [4000, 60_000] {
            let (path, file) = some_file(place.file(&format!("out{at}-{second}")), 10 * WIDTH as usize);
            let [(physical, _)] = device_extents(&file)[..] else { continue };
            cases += 1;
            // The file's first byte begins a stripe.
            let phase = WIDTH - physical % WIDTH;
            let cut = OpenOptions::new().read(true).write(true).open(&path).unwrap();
            let mut session = Session::begin_with_stripes(runtime(), &path, WIDTH, phase).unwrap();
            session.move_range(&path, device.at(0), at, 9000, Download).unwrap();
            let report = session.report();
            assert_eq!((report.unaligned, report.full_stripe), (0, 0), "it is gathered");
            // SAFETY: no memory is involved.
            let done = unsafe { libc::fallocate(cut.as_raw_fd(), libc::FALLOC_FL_COLLAPSE_RANGE, 0, 4096) };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            // Far away, so that the stripes here are looked up again.
            let far = 100 << 20;
            session.move_range(&path, device.at(0), far, 1, Download).unwrap();
            let whole = Buffer::with_bytes(&vec![9; second]);
            let source = if second > 9000 { &whole } else { &later };
            session.move_range(&path, source.at(0), at + 1000, second as u64, Download).unwrap();
            session.end().unwrap();
            let mut expected = bytes(10 * WIDTH as usize, 1)[4096..].to_vec();
            expected[at as usize..][..9000].copy_from_slice(&bytes(9000, 6));
            let bytes_over = if second > 9000 { vec![9; second] } else { bytes(9000, 7)[..second].to_vec() };
            expected[at as usize + 1000..][..second].copy_from_slice(&bytes_over);
            let mut got = vec![0; expected.len()];
            File::open(&path).unwrap().read_exact_at(&mut got, 0).unwrap();
            let differ = got.iter().zip(&expected).position(|(a, b)| a != b);
            assert_eq!(differ, None, "from {at}, {second} bytes later");
        }
    }
    assert!(cases > 0, "no file in one piece");
}

/// Storage that refuses direct writes.
#[derive(Default)]
struct NoDirectWrites {
    refused: AtomicUsize,
}

impl Syscalls for NoDirectWrites {
    unsafe fn pwritev(
        &self,
        route: Route,
        fd: i32,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize, Errno> {
        if route == Route::Direct {
            self.refused.fetch_add(1, Relaxed);
            return Err(Errno::IO);
        }
        // SAFETY: passed on to the caller.
        unsafe { LinuxSyscalls.pwritev(route, fd, vectors, at, flags) }
    }
}

#[test]
fn assembled_stripe_survives_refused_direct_write() {
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), 10 * WIDTH as usize) else { return };
    let kernel: &NoDirectWrites = Box::leak(Box::default());
    let device = Buffer::with_bytes(&bytes(5 * WIDTH as usize, 6));
    let mut session =
        Session::begin_with_stripes(leak_runtime(Settings::default(), kernel), &path, WIDTH, 8192).unwrap();
    for at in (2 * WIDTH..6 * WIDTH).step_by(WIDTH as usize / 2) {
        session.move_range(&path, device.at(at - 2 * WIDTH), at, WIDTH / 2, Download).unwrap();
    }
    session.end().unwrap();
    let mut expected = bytes(10 * WIDTH as usize, 1);
    expected[2 * WIDTH as usize..6 * WIDTH as usize]
        .copy_from_slice(&bytes(5 * WIDTH as usize, 6)[..4 * WIDTH as usize]);
    assert_same_bytes(&path, &expected, "at the end");
    assert!(kernel.refused.load(Relaxed) > 0, "no stripe was put together");
}

#[test]
fn dropped_session_writes_gathered_bytes() {
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), 10 * WIDTH as usize) else { return };
    let device = Buffer::with_bytes(&bytes(5000, 2));
    let mut session = begin(&path);
    session.move_range(&path, device.at(0), 4 * WIDTH, 5000, Download).unwrap();
    let report = session.report();
    assert_eq!((report.unaligned, report.full_stripe), (0, 0), "it is gathered");
    drop(session);
    let mut expected = bytes(10 * WIDTH as usize, 1);
    expected[4 * WIDTH as usize..][..5000].copy_from_slice(&bytes(5000, 2));
    assert_same_bytes(&path, &expected, "at the end");
}

/// Storage that is full at times.
#[derive(Default)]
struct FullAtTimes {
    is_full: AtomicBool,
}

impl Syscalls for FullAtTimes {
    unsafe fn pwritev(
        &self,
        route: Route,
        fd: i32,
        vectors: &[[usize; 2]],
        at: Option<u64>,
        flags: u32,
    ) -> Result<usize, Errno> {
        if self.is_full.load(Relaxed) {
            return Err(Errno::NOSPC);
        }
        // SAFETY: passed on to the caller.
        unsafe { LinuxSyscalls.pwritev(route, fd, vectors, at, flags) }
    }
}

/// A download that fails, and a flush that does, leave the bytes of earlier downloads to be written later.
#[test]
fn failed_write_keeps_gathered_bytes() {
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), 10 * WIDTH as usize) else { return };
    let kernel: &FullAtTimes = Box::leak(Box::default());
    let (old, new) = (Buffer::with_bytes(&bytes(5000, 2)), Buffer::with_bytes(&bytes(4 * WIDTH as usize, 3)));
    let runtime = leak_runtime(Settings::default(), kernel);
    let refused = |result: Result<(), spinio_nvmmu::Error>| {
        let error = result.unwrap_err();
        assert_eq!(error.kind.errno(), Errno::NOSPC, "{error}");
    };
    for filler in [false, true] {
        wait_exclusive(&path).unwrap();
        let mut session = Session::begin_with_stripes(runtime, &path, WIDTH, 8192).unwrap();
        if filler {
            session.hint_range(4 * WIDTH, 5000);
        }
        session.move_range(&path, old.at(0), 4 * WIDTH, 5000, Download).unwrap();
        assert_eq!(session.report().unaligned, 0, "it is gathered");
        kernel.is_full.store(true, Relaxed);
        // One that covers the stripe which has these bytes.
        refused(session.move_range(&path, new.at(0), 2 * WIDTH, 4 * WIDTH, Download).map(drop));
        refused(session.flush());
        kernel.is_full.store(false, Relaxed);
        session.end().unwrap();
        let got = fs::read(&path).unwrap();
        assert!(got[4 * WIDTH as usize..][..5000] == bytes(5000, 2), "the bytes of the first download are lost");
        // Of the one that failed any part may be there.
        let mut expected = bytes(10 * WIDTH as usize, 1);
        expected[2 * WIDTH as usize..6 * WIDTH as usize].copy_from_slice(&got[2 * WIDTH as usize..6 * WIDTH as usize]);
        assert_same_bytes(&path, &expected, "at the end");
        File::options().write(true).open(&path).unwrap().write_all_at(&bytes(10 * WIDTH as usize, 1), 0).unwrap();
    }
}

/// Where nothing can be written, gathered bytes are kept up to a limit, and a download beyond it fails and leaves
/// nothing.
#[test]
fn failed_writes_bound_gathered_bytes() {
    const WIDTH: u64 = 1 << 20;
    const STRIPES: u64 = 80;
    let Some(folder) = folder() else { return };
    let Some(path) = contiguous_file(folder.path(), (STRIPES * WIDTH) as usize) else { return };
    let kernel: &FullAtTimes = Box::leak(Box::default());
    let new = Buffer::with_bytes(&bytes(5000, 2));
    wait_exclusive(&path).unwrap();
    let runtime = leak_runtime(Settings::default(), kernel);
    let mut session = Session::begin_with_stripes(runtime, &path, WIDTH, 0).unwrap();
    kernel.is_full.store(true, Relaxed);
    let mut download = |stripe| session.move_range(&path, new.at(0), stripe * WIDTH, 5000, Download);
    let refused: Vec<u64> = (0..STRIPES).filter(|&stripe| download(stripe).is_err()).collect();
    assert!((60..70).contains(&(STRIPES - refused.len() as u64)), "gathered: all but {refused:?}");
    kernel.is_full.store(false, Relaxed);
    session.end().unwrap();
    let mut expected = bytes((STRIPES * WIDTH) as usize, 1);
    for stripe in (0..STRIPES).filter(|stripe| !refused.contains(stripe)) {
        expected[(stripe * WIDTH) as usize..][..5000].copy_from_slice(&bytes(5000, 2));
    }
    assert_same_bytes(&path, &expected, "after the end");
}
