//! What `explain` reported is what the read then did: the same bytes by the same routes for the same reasons.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use spinio_io::{Buffer as Explained, Explanation, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::linux::{self, Advice};
use spinio_testkit::buffer::{Buffer, emulated};
use spinio_testkit::{Rng, file};

const MIB: u64 = 1 << 20;

type Bytes = BTreeMap<(Route, Reason), u64>;

fn explained(explanation: &Explanation) -> Bytes {
    let mut bytes = Bytes::new();
    for s in &explanation.schedule.segments {
        *bytes.entry((s.route, s.reason)).or_default() += s.len;
    }
    bytes
}

fn counted(runtime: &Runtime) -> Bytes {
    let rows = runtime.stats().rows;
    let mut bytes = Bytes::new();
    for row in rows.iter().filter(|row| row.bytes > 0) {
        *bytes.entry((row.route, row.reason)).or_default() += row.bytes;
    }
    bytes
}

/// Whether each page of a file is cached; `None`: this kernel does not say, or the file has no pages.
fn residency(file: &File) -> Option<Vec<bool>> {
    const PAGE: u64 = 4096;
    let cached = |page| linux::cachestat(file.as_raw_fd(), page * PAGE, PAGE).map(|pages| pages.cached > 0);
    (0..file.metadata().unwrap().len().div_ceil(PAGE)).map(|page| cached(page).ok()).collect()
}

/// Whether pages that were cached are not, or were not cached and are although no read was made.
fn has_changed(before: &Option<Vec<bool>>, now: &Option<Vec<bool>>, was_read: bool) -> bool {
    let (Some(before), Some(now)) = (before, now) else { return false };
    before.iter().zip(now).any(|(&before, &now)| before != now && (before || !was_read))
}

/// Explains a read, makes it, and compares. `set_up` makes the residency: again if Linux has dropped pages between the two,
/// for lack of memory.
fn check(runtime: &Runtime, file: &File, to: &Buffer, (offset, len): (u64, u64), what: &str, mut set_up: impl FnMut()) {
    for _ in 0..20 {
        set_up();
        if explains_read(runtime, file, to, (offset, len), what, || ()) {
            return;
        }
    }
    println!("skipped: {what}: this machine drops pages of the page cache by itself");
}

/// Whether a read could be compared with what was explained of it before, and `between` the two something happened: not if
/// pages were dropped meanwhile.
fn explains_read(
    runtime: &Runtime,
    file: &File,
    to: &Buffer,
    (offset, len): (u64, u64),
    what: &str,
    between: impl FnOnce(),
) -> bool {
    let (before, pages) = (counted(runtime), residency(file));
    let explanation = runtime.explain(file.as_raw_fd(), offset, len, Explained::at(to.target(0))).unwrap();
    assert_eq!(counted(runtime), before, "explain moved bytes");
    between();
    let pages_explained = residency(file);
    let got = runtime.read(file.as_raw_fd(), Some(offset), to.target(0), len as usize).unwrap();
    assert_eq!(got as u64, explanation.len, "{what}: bytes");
    if has_changed(&pages, &pages_explained, false) || has_changed(&pages, &residency(file), true) {
        return false;
    }
    let mut done = counted(runtime);
    for (of, bytes) in before {
        *done.get_mut(&of).unwrap() -= bytes;
    }
    // The driver refuses to register under a small RLIMIT_MEMLOCK, which shows only when it is asked to.
    let refused = done.remove(&(Route::Copy, Reason::PinRefused)).unwrap_or(0);
    *done.entry((Route::Dma, Reason::CachedLarge)).or_default() += refused;
    done.retain(|_, bytes| *bytes > 0);
    assert_eq!(explained(&explanation), done, "{what}: {offset}+{len}, explained and done");
    true
}

/// A file where O_DIRECT works, as the build's file system has it.
fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn read_does_what_explain_reported() {
    let folder = folder();
    let path = folder.path().join("file");
    let mut rng = Rng::new(0x5eed);
    let size = 24 * MIB + 777;
    let source = file::create_filled(&path, size);
    source.sync_all().unwrap();
    for case in 0..60 {
        let device = emulated(["size=64M", "size=64M", "size=96M,bar=32M,p2p=1"][case % 3]);
        let to = if case % 3 == 2 { Buffer::host_mapped(device, 26 << 20) } else { Buffer::new(device, 26 << 20) };
        let mut settings = Settings { dma_min: [1 << 20, 4 << 20, 1 << 40][case % 3], ..Settings::default() };
        if case % 5 == 4 {
            settings.routes.retain(|route| *route != Route::Direct);
        }
        let runtime = Runtime::new(settings);
        let read_only = File::open(&path).unwrap();
        let offset = if case % 4 == 0 { 0 } else { rng.below(size) };
        let len = [size, rng.below(size) + 1, rng.below(2 * MIB) + 1, rng.below(100 << 10) + 1][case / 4 % 4];
        check(&runtime, &read_only, &to, (offset, len), &format!("case {case}"), || {
            file::randomize_residency(&path, &source, &mut rng);
            // Clean pages: else their state changes when Linux writes them.
            source.sync_all().unwrap();
        });
    }
}

#[test]
fn read_of_several_ranges_does_what_explain_reported() {
    let folder = folder();
    let path = folder.path().join("long");
    let size = 140 * MIB;
    let source = file::create_filled(&path, size);
    let device = emulated("size=192M");
    let to = Buffer::new(device, size as usize);
    let runtime = Runtime::new(Settings::default());
    check(&runtime, &File::open(&path).unwrap(), &to, (4096, size - 4096), "140 MiB", || {
        file::evict(&source);
        file::load_pages(&path, (0..size / 4096).filter(|page| page / 2048 % 3 == 0));
    });
}

#[test]
fn read_after_pages_were_dropped_is_not_compared() {
    let folder = folder();
    let path = folder.path().join("file");
    let source = file::create_filled(&path, 8 * MIB);
    source.sync_all().unwrap();
    file::load_pages(&path, 0..2048);
    let all = residency(&source).is_some_and(|pages| pages.iter().all(|cached| *cached));
    let to = Buffer::new(emulated("size=64M"), 8 << 20);
    let compared =
        explains_read(&Runtime::new(Settings::default()), &source, &to, (0, 8 * MIB), "8 MiB", || file::evict(&source));
    let dropped = file::cached_pages(&source).is_some_and(|pages| pages < 2048);
    assert!(!(all && dropped && compared), "the read was compared with what was explained of other pages");
}

#[test]
fn special_descriptors_do_what_explain_reported() {
    let folder = folder();
    let path = folder.path().join("file");
    let source = file::create_filled(&path, 8 * MIB);
    source.sync_all().unwrap();
    let device = emulated("size=64M");
    let to = Buffer::new(device, 8 << 20);
    let runtime = Runtime::new(Settings::default());
    let direct = OpenOptions::new().read(true).custom_flags(linux::O_DIRECT as i32).open(&path);
    match direct {
        Ok(direct) => check(&runtime, &direct, &to, (MIB, 4 * MIB), "O_DIRECT", || ()),
        Err(e) => println!("skipped: no O_DIRECT here: {e}"),
    }
    check(&runtime, &source, &to, (8 * MIB - 4096, MIB), "the end of the file", || ());
    check(
        &runtime,
        &File::open("/proc/self/maps").unwrap(),
        &to,
        (8 * MIB, MIB),
        "past the end of a file without a size",
        || (),
    );
    sequential_stream(&path, &runtime, &to);

    let runtime = Runtime::new(Settings::default());
    let read_only = File::open(&path).unwrap();
    drop(source);
    match runtime.pin_file(read_only.as_raw_fd(), Some(device)) {
        Ok(_) => check(&runtime, &read_only, &to, (777, 4 * MIB), "a pinned file", || ()),
        Err(e) => println!("skipped: files cannot be pinned here: {e}"),
    }
}

/// A cold stream, which the kernel reads ahead.
fn sequential_stream(path: &Path, runtime: &Runtime, to: &Buffer) {
    let file = File::open(path).unwrap();
    linux::fadvise(file.as_raw_fd(), 0, 0, Advice::DontNeed).unwrap();
    for i in 0..16 {
        let before = counted(runtime);
        let like = Explained::at(to.target(0));
        let explanation = runtime.explain(file.as_raw_fd(), i * (128 << 10), 128 << 10, like).unwrap();
        runtime.read(file.as_raw_fd(), Some(i * (128 << 10)), to.target(0), 128 << 10).unwrap();
        // From the second request on it is a stream. What the kernel has read ahead in between changes what is cached.
        let reason = explanation.schedule.segments[0].reason;
        let done = counted(runtime);
        let grown = done.iter().any(|(of, bytes)| of.1 == reason && before.get(of).is_none_or(|old| old < bytes));
        assert!(grown, "request {i}: {reason:?}, {before:?}, {done:?}");
    }
}
