//! Disks that are full or fail, and processes that are stopped: what is reported, to whom, and that all others go on.

mod common;

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use spinio_testkit::deadline::TIMEOUT;
use spinio_testkit::{continue_process, stop_process};

use crate::common::gpu::{Client, Gpu, PAGE, open};
use crate::common::{TestMount, audit, gpu, unavailable};

#[test]
fn server_role() {
    common::server_role();
}

fn byte(file: &File, at: usize) -> u8 {
    let mut byte = [0];
    file.read_exact_at(&mut byte, at as u64).unwrap();
    byte[0]
}

fn errno(result: std::io::Result<()>) -> Option<Errno> {
    result.err().map(|error| Errno::from_io_error(&error).unwrap())
}

/// An ext4 on a loop device, whose image is on a tmpfs of this size. Everything is removed when dropped.
struct Disk {
    root: PathBuf,
    /// The tmpfs.
    below: PathBuf,
    /// The ext4.
    point: PathBuf,
}

impl Disk {
    /// `None`, and the reason is printed, where that cannot be made.
    fn new(tmpfs: &str, image: u64) -> Option<Disk> {
        if let Some(reason) = unavailable() {
            eprintln!("skipped: {reason}");
            return None;
        }
        let root = tempfile::Builder::new().prefix("spinio-gaia-").tempdir().unwrap().keep();
        let disk = Disk { below: root.join("below"), point: root.join("ext4"), root };
        std::fs::create_dir(&disk.below).unwrap();
        std::fs::create_dir(&disk.point).unwrap();
        let path = disk.below.join("image");
        let (below, point, file) = (disk.below.as_os_str(), disk.point.as_os_str(), path.as_os_str());
        let size = format!("size={tmpfs}");
        run("mount", &["-t".as_ref(), "tmpfs".as_ref(), "-o".as_ref(), size.as_ref(), "none".as_ref(), below])?;
        File::create(&path).unwrap().set_len(image).unwrap();
        // Without a journal, whose blocks could fail instead of those of a file.
        let options =
            ["-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal", "-E", "lazy_itable_init=0"].map(AsRef::as_ref);
        run("mkfs.ext4", &[&options[..], &[file]].concat())?;
        run("mount", &["-o".as_ref(), "loop".as_ref(), file, point])?;
        Some(disk)
    }

    fn dir(&self, name: &str) -> PathBuf {
        let dir = self.point.join(name);
        std::fs::create_dir(&dir).unwrap();
        dir
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        for point in [&self.point, &self.below] {
            let _ = Command::new("umount").arg("--lazy").arg(point).stderr(Stdio::null()).status();
        }
        let _ = std::fs::remove_dir_all(&self.root);
    }
}

/// Runs a command; `None`, and the reason is printed, if it fails.
fn run(program: &str, args: &[&std::ffi::OsStr]) -> Option<()> {
    let output = Command::new(program).args(args).output();
    let reason = match output {
        Ok(output) if output.status.success() => return Some(()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_owned(),
        Err(error) => error.to_string(),
    };
    eprintln!("skipped: {program}: {reason}");
    None
}

/// Writes a file until there is no space.
fn fill(path: &Path) {
    let file = File::create(path).unwrap();
    let (mut at, mut len) = (0, 1 << 20);
    while len >= 512 {
        match file.write_at(&vec![1; len], at) {
            Ok(written) => at += written as u64,
            Err(error) => {
                assert_eq!(Errno::from_io_error(&error), Some(Errno::NOSPC));
                len /= 2;
            }
        }
    }
    file.sync_all().unwrap();
}

/// Released pages that find no space stay in memory: each fsync says so, until there is space. Pages of the same file that
/// have space, and other files, are written out.
#[test]
fn full_disk_is_reported_by_fsync_until_there_is_space() {
    const PAGES: usize = 8;
    let Some(disk) = Disk::new("64M", 24 << 20) else { return };
    let dir = disk.dir("directory");
    // Holes but for the last page.
    let sparse = OpenOptions::new().read(true).write(true).create_new(true).open(dir.join("sparse")).unwrap();
    sparse.write_all_at(&[3; PAGE], ((PAGES - 1) * PAGE) as u64).unwrap();
    sparse.sync_all().unwrap();
    std::fs::write(dir.join("other"), [3; PAGES * PAGE]).unwrap();
    File::open(dir.join("other")).unwrap().sync_all().unwrap();
    let filler = disk.point.join("filler");
    fill(&filler);

    let mut mount = TestMount::over(&dir);
    let (file, other) = (open(&dir.join("sparse")), open(&dir.join("other")));
    let (gpu, gpu_of_other) = (Gpu::new(&file, PAGES), Gpu::new(&other, PAGES));
    gpu.epoch(PAGES, 7);
    assert_eq!((byte(&file, 0), byte(&file, (PAGES - 1) * PAGE)), (7, 7));
    assert_eq!(errno(file.sync_all()), Some(Errno::NOSPC));
    // As on ext4, whose page cache has it.
    let last = || byte(&sparse, (PAGES - 1) * PAGE);
    assert_eq!((byte(&sparse, 0), last()), (0, 7), "the page that has space is written out, and no other");
    for round in 10..13 {
        gpu_of_other.epoch(PAGES, round);
        assert_eq!(errno(other.sync_all()), None, "another file");
        gpu.epoch(PAGES, round);
        assert_eq!(errno(file.sync_all()), Some(Errno::NOSPC));
        assert_eq!((byte(&file, 0), byte(&other, 0), last()), (round, round, round));
    }
    mount.kill_server();
    assert_eq!(byte(&file, 0), 12);
    assert_eq!(errno(file.sync_all()), Some(Errno::NOSPC));
    let refused = spinio_gaiad::unmount(&dir).unwrap_err().to_string();
    assert!(refused.contains("sparse: 7 released pages cannot be written: No space"), "{refused}");
    std::fs::remove_file(&filler).unwrap();
    assert_eq!((errno(file.sync_all()), errno(file.sync_all())), (None, None));
    drop((gpu, gpu_of_other, file, other));
    audit::nothing_is_left(&mount, 0);
    mount.unmount_directory();
    for name in ["sparse", "other"] {
        assert!(std::fs::read(dir.join(name)).unwrap() == [12; PAGES * PAGE], "{name}");
    }
}

/// Whatever the file is called: unmounting is refused as long as released pages of it find no space.
#[test]
fn full_disk_keeps_files_of_all_names_from_unmounting() {
    const PAGES: usize = 8;
    let Some(disk) = Disk::new("64M", 24 << 20) else { return };
    let dir = disk.dir("directory");
    let filler = disk.point.join("filler");
    let long = std::iter::repeat_n("d".repeat(250), 5).collect::<PathBuf>();
    for name in [PathBuf::from(OsStr::from_bytes(b"not \xff UTF-8")), long.join("file")] {
        let below = dir.join(&name);
        std::fs::create_dir_all(below.parent().unwrap()).unwrap();
        File::create(&below).unwrap().set_len((PAGES * PAGE) as u64).unwrap();
        File::open(&dir).unwrap().sync_all().unwrap();
        fill(&filler);
        let mut mount = TestMount::over(&dir);
        let file = open(&dir.join(&name));
        let gpu = Gpu::new(&file, PAGES);
        gpu.epoch(PAGES, 7);
        drop((gpu, file));
        let refused = spinio_gaiad::unmount(&dir).unwrap_err().to_string();
        assert!(refused.contains(": 8 released pages cannot be written: No space"), "{refused}");
        std::fs::remove_file(&filler).unwrap();
        mount.unmount_directory();
        assert!(std::fs::read(&below).unwrap() == [7; PAGES * PAGE], "{}", name.display());
        std::fs::remove_file(&below).unwrap();
    }
}

/// Released pages that wait for space must not take all memory for released pages: then their file takes no more.
#[test]
fn pages_that_wait_for_space_leave_memory_to_other_files() {
    const PAGES: usize = 600;
    const EACH: usize = 10;
    const OTHER: usize = 40;
    let Some(disk) = Disk::new("64M", 24 << 20) else { return };
    let dir = disk.dir("directory");
    File::create(dir.join("sparse")).unwrap().set_len((PAGES * PAGE) as u64).unwrap();
    std::fs::write(dir.join("other"), [3; OTHER * PAGE]).unwrap();
    File::open(dir.join("other")).unwrap().sync_all().unwrap();
    fill(&disk.point.join("filler"));
    let mut mount = TestMount::over(&dir);
    let (file, other) = (open(&dir.join("sparse")), open(&dir.join("other")));
    let (gpu, gpu_of_other) = (Gpu::new(&file, PAGES), Gpu::new(&other, OTHER));
    gpu.acquire();
    let refused = (0..PAGES / EACH).find(|part| {
        gpu.store(part * EACH * PAGE, &[7; EACH * PAGE]);
        let released = gpu.1.release((part * EACH * PAGE) as u64, (EACH * PAGE) as u64);
        assert_eq!(errno(file.sync_all()), Some(Errno::NOSPC));
        gpu_of_other.epoch(OTHER, *part as u8);
        assert_eq!(byte(&other, OTHER * PAGE - 1), *part as u8);
        released.is_err_and(|error| {
            assert_eq!(error.errno, Errno::NOSPC);
            true
        })
    });
    let refused = refused.expect("a release is refused");
    assert!(refused > 1, "{refused}");
    // The epoch goes on.
    std::fs::remove_file(disk.point.join("filler")).unwrap();
    gpu.1.release((refused * EACH * PAGE) as u64, (EACH * PAGE) as u64).unwrap();
    drop((gpu, gpu_of_other, file, other));
    audit::nothing_is_left(&mount, 0);
    mount.unmount_directory();
    let mut wanted = vec![7; (refused + 1) * EACH * PAGE];
    wanted.resize(PAGES * PAGE, 0);
    assert!(std::fs::read(dir.join("sparse")).unwrap() == wanted);
    assert!(std::fs::read(dir.join("other")).unwrap() == [refused as u8; OTHER * PAGE]);
}

/// The blocks of one file cannot be written. Its fsync says so once, as on ext4 without the mount.
#[test]
fn error_of_the_disk_is_reported_once_by_fsync() {
    const PAGES: usize = 4;
    let Some(disk) = Disk::new("8M", 32 << 20) else { return };
    let (dir, reference) = (disk.dir("directory"), disk.dir("reference"));
    for dir in [&dir, &reference] {
        for name in ["bad", "good"] {
            let file = File::create(dir.join(name)).unwrap();
            if name == "bad" {
                // Blocks of the disk that the tmpfs has no memory for.
                rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, (PAGES * PAGE) as u64).unwrap();
            } else {
                file.write_all_at(&[3; PAGES * PAGE], 0).unwrap();
            }
            file.sync_all().unwrap();
        }
    }
    let filesystem = File::open(&disk.point).unwrap();
    rustix::fs::syncfs(&filesystem).unwrap();
    fill(&disk.below.join("filler"));

    let twice = |file: &File| (errno(file.sync_all()), errno(file.sync_all()));
    let wanted = {
        let (bad, good) = (open(&reference.join("bad")), open(&reference.join("good")));
        bad.write_all_at(&[7; PAGE], 0).unwrap();
        good.write_all_at(&[7; PAGE], 0).unwrap();
        (twice(&bad), twice(&good))
    };
    // What a loop device makes of ENOSPC of its image, depends on the Linux kernel.
    assert!(matches!(wanted, ((Some(Errno::NOSPC | Errno::IO), None), (None, None))), "{wanted:?}");
    let mut mount = TestMount::over(&dir);
    let (bad, good) = (open(&dir.join("bad")), open(&dir.join("good")));
    let (gpu, gpu_of_good) = (Gpu::new(&bad, PAGES), Gpu::new(&good, PAGES));
    for round in 10..12 {
        gpu.epoch(1, round);
        gpu_of_good.epoch(1, round);
        assert_eq!((twice(&bad), twice(&good)), wanted, "after a release");
        assert_eq!((byte(&bad, 0), byte(&good, 0)), (round, round));
        bad.write_all_at(&[round + 100; PAGE], PAGE as u64).unwrap();
        good.write_all_at(&[round + 100; PAGE], PAGE as u64).unwrap();
        assert_eq!((twice(&bad), twice(&good)), wanted, "after a write");
    }
    // WRITEs to single pages, so many that the server writes them back on its own account (small_writes.rs): what it finds out
    // meanwhile is not its own. More than the second after which it does.
    for round in 0..8 {
        bad.write_all_at(&[round + 50; PAGE], PAGE as u64).unwrap();
        spinio_sys::linux::write_back_range(bad.as_raw_fd(), 0, 0).unwrap();
    }
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(twice(&bad), wanted.0, "after the server has written back itself");
    // So does `sync` of a map: the server knows that it is no error of the Linux kernel's own (killed_programs.rs).
    bad.write_all_at(&[30; PAGE], PAGE as u64).unwrap();
    let synced = || gpu.1.sync(0, PAGE as u64).err().map(|error| error.errno);
    assert_eq!((synced(), synced()), wanted.0, "of a map");
    // Between the error and the fsync, the server is replaced.
    bad.write_all_at(&[20; PAGE], PAGE as u64).unwrap();
    spinio_sys::linux::write_back_range(bad.as_raw_fd(), 0, 0).unwrap();
    let _ = rustix::fs::syncfs(&filesystem);
    mount.kill_server();
    assert_eq!((twice(&bad), twice(&good)), (wanted.0, (None, None)), "from the next server");
    drop((gpu, gpu_of_good, bad, good));
    audit::nothing_is_left(&mount, 0);
    mount.unmount_directory();
    assert!(std::fs::read(dir.join("good")).unwrap()[..2 * PAGE] == [[11; PAGE], [111; PAGE]].concat());
}

#[test]
fn client_role() {
    gpu::client_role();
}

#[test]
fn client_that_is_stopped_delays_nobody() {
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [0; PAGE]).unwrap()) else { return };
    let path = mount.dir.join("file");
    let mut client = Client::start(Client::command(&path));
    let file = open(&path);
    let gpu = Gpu::new(&file, 1);
    let mut rounds = 0;
    let mut others = |count| {
        for _ in 0..count {
            rounds += 1;
            gpu.acquire();
            gpu.store(2, &[rounds]);
            file.write_all_at(&[rounds], 3).unwrap();
            gpu.release();
            file.sync_all().unwrap();
            assert_eq!((byte(&file, 2), byte(&file, 3)), (rounds, rounds));
        }
        rounds
    };
    // Inside an epoch.
    assert_eq!(client.says(), "open");
    stop_process(client.id());
    others(20);
    assert_eq!(byte(&file, 1), 0, "not released yet");
    continue_process(client.id());
    // Anywhere, also between the messages of an acquire and of a release.
    for round in 0..20 {
        client.go_on();
        std::thread::sleep(Duration::from_micros(round * 100));
        stop_process(client.id());
        others(3);
        continue_process(client.id());
        assert_eq!(client.says(), "open");
        assert_eq!(u64::from(byte(&file, 1)), round + 1);
    }
    client.finish();
    assert_eq!((others(1), mount.servers()), (81, 1));
    drop((gpu, file));
    audit::nothing_is_left(&mount, 0);
    audit::unmount_and_look(mount);
}

/// Programs and clients wait for a server that is stopped for two seconds, and nothing else happens to them.
#[test]
fn server_that_is_stopped_is_waited_for() {
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [0; PAGE]).unwrap()) else { return };
    let path = mount.dir.join("file");
    let (go_on, writes, epochs) = (AtomicBool::new(true), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = open(&path);
            while go_on.load(SeqCst) {
                let count = writes.load(SeqCst) + 1;
                file.write_all_at(&count.to_ne_bytes(), 0).unwrap();
                file.sync_all().unwrap();
                writes.store(count, SeqCst);
            }
        });
        scope.spawn(|| {
            let file = open(&path);
            let gpu = Gpu::new(&file, 1);
            while go_on.load(SeqCst) {
                let count = epochs.load(SeqCst) + 1;
                gpu.acquire();
                gpu.store(8, &count.to_ne_bytes());
                gpu.release();
                epochs.store(count, SeqCst);
            }
        });
        let counts = || (writes.load(SeqCst), epochs.load(SeqCst));
        let both_go_on = || {
            let (before, begun) = (counts(), Instant::now());
            while counts().0 < before.0 + 3 || counts().1 < before.1 + 3 {
                if begun.elapsed() > TIMEOUT {
                    go_on.store(false, SeqCst);
                    panic!("{before:?}, then {:?}", counts());
                }
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        both_go_on();
        mount.stop_server();
        // One more of each may end: that whose last request the server has answered already.
        let before = counts();
        std::thread::sleep(Duration::from_secs(2));
        let after = counts();
        assert!(after.0 <= before.0 + 1 && after.1 <= before.1 + 1, "{before:?}, then {after:?}");
        mount.continue_server();
        both_go_on();
        go_on.store(false, SeqCst);
    });
    assert_eq!(mount.servers(), 1);
    let mut bytes = [0; 16];
    open(&path).read_exact_at(&mut bytes, 0).unwrap();
    let seen = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word)).collect::<Vec<_>>();
    assert_eq!(seen, [writes.load(SeqCst), epochs.load(SeqCst)]);
    open(&path).sync_all().unwrap();
    audit::nothing_is_left(&mount, 0);
    audit::unmount_and_look(mount);
}
