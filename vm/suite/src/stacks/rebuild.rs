//! A member fails and is rebuilt while SPIN reads and a writer writes; then another one fails, so that the rebuilt
//! bytes are read.
//!
//! ```text
//!   members    all ────── one fails ────── a blank one is added, rebuilt ────── another one fails
//!   reader     reads a file that does not change, cold, repeatedly ───────────────── once more
//!   writer     rewrites a file, and reads what it wrote, repeatedly ──────────────── once more
//! ```

use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use spinio_io::{Runtime, Settings};
use spinio_plan::Route;

use super::{MemoryKind, kind};
use crate::case::{Case, CaseError, Outcome, expect, fail};
use crate::md::{Array, retry, run};
use crate::memory::{Memory, P2pMemory};
use crate::place::{Guest, drop_cache, open_direct, pattern};
use crate::spin::{MIB, by, read_and_check};

const FILE: usize = 3 * MIB;

/// Only turns a hang into a failure.
const PATIENCE: Duration = Duration::from_secs(120);

/// Device memory in flight, whose DMA the Linux kernel passes through md RAID-1 and -10.
const fn passes(level: u32) -> bool {
    level == 1 || level == 10
}

pub(super) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for level in [1, 10, 5, 6] {
        let kind = kind();
        let name =
            format!("spin: a member fails and is rebuilt while reading and writing, md RAID-{level}, {}", kind.name());
        all.push(Case::new(name, move |g| rebuild(g, level, kind)));
    }
    all
}

fn rebuild(guest: &Guest, level: u32, kind: MemoryKind) -> Outcome {
    let disks = ["m0", "m1", "m2", "m3"].iter().take(if level == 1 { 2 } else { 4 });
    let members = disks.map(|disk| guest.free_partition(disk)).collect::<Result<Vec<_>, CaseError>>()?;
    let array = Array::make(30, level, members.clone())?;
    let mounted = MountGuard::new(array.device())?;
    let (constant, changing) = (mounted.0.join("constant"), mounted.0.join("changing"));
    let bytes = pattern(FILE, 5);
    fs::write(&constant, &bytes)?;
    fs::write(&changing, pattern(FILE, 1000))?;

    let work =
        RebuildState { level, kind, stop: AtomicBool::new(false), reads: AtomicU64::new(0), writes: AtomicU64::new(0) };
    let last = thread::scope(|scope| {
        let reader = scope.spawn(|| work.until_stopped(|| work.read(&constant, &bytes)));
        let writer = scope.spawn(|| work.until_stopped(|| work.write(&changing)));
        let outcome = (|| {
            work.rounds(2)?;
            // RAID-6 survives two.
            let lost = if level == 6 { &members[1..3] } else { &members[1..2] };
            for member in lost {
                array.fail(member)?;
            }
            work.rounds(3)?;
            for member in lost {
                array.add(member)?;
            }
            array.whole()?;
            work.rounds(2)
        })();
        work.stop.store(true, Relaxed);
        let joined = |thread: thread::ScopedJoinHandle<'_, Outcome>| thread.join().unwrap_or_else(|_| fail("a panic"));
        (outcome, joined(reader), joined(writer))
    });
    // The thread that stopped first knows the reason.
    last.1?;
    last.2?;
    last.0?;
    expect("sectors that do not match", array.mismatches()?, 0)?;

    // Now the rebuilt bytes are read: the other half of its mirror is missing, or parity is needed for another.
    array.fail(&members[0])?;
    let runtime = Runtime::new(Settings::default());
    let mut memory = kind.memory(FILE)?;
    for path in [&constant, &changing] {
        let file = File::open(path)?;
        let expected = if path == &constant { bytes.clone() } else { pattern(FILE, 1000 + work.writes.load(Relaxed)) };
        for _ in 0..2 {
            drop_cache(&file)?;
            read_and_check(&runtime, &file, &mut *memory, (0, 0, FILE), &expected)?;
        }
    }
    if kind == MemoryKind::P2p {
        expect("p2p is used without a member", by(&runtime.stats(), Route::P2p) > 0, passes(level))?;
    }
    mounted.end()?;
    run(Command::new("e2fsck").args(["-f", "-n"]).arg(array.device()))
}

/// State shared by the threads.
struct RebuildState {
    level: u32,
    kind: MemoryKind,
    stop: AtomicBool,
    reads: AtomicU64,
    writes: AtomicU64,
}

impl RebuildState {
    fn until_stopped(&self, mut round: impl FnMut() -> Outcome) -> Outcome {
        let mut outcome = Ok(());
        while outcome.is_ok() && !self.stop.load(Relaxed) {
            outcome = round();
        }
        self.stop.store(true, Relaxed);
        outcome
    }

    /// Waits until both threads have completed `rounds` more.
    fn rounds(&self, more: u64) -> Outcome {
        let (reads, writes) = (self.reads.load(Relaxed), self.writes.load(Relaxed));
        let begun = Instant::now();
        while self.reads.load(Relaxed) < reads + more || self.writes.load(Relaxed) < writes + more {
            if self.stop.load(Relaxed) {
                return fail("a thread stopped early");
            }
            if begun.elapsed() > PATIENCE {
                return fail("reader or writer is stuck");
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn read(&self, path: &Path, bytes: &[u8]) -> Outcome {
        let file = File::open(path)?;
        // A new runtime: the array may have changed since the last P2P probe.
        let runtime = Runtime::new(Settings::default());
        let mut memory = self.kind.memory(FILE)?;
        for (offset, len) in [(0, FILE), (100_000, MIB)] {
            drop_cache(&file)?;
            let expected = &bytes[offset..offset + len];
            read_and_check(&runtime, &file, &mut *memory, (offset as u64, offset % 4096, len), expected)?;
        }
        if self.kind == MemoryKind::P2p && by(&runtime.stats(), Route::P2p) > 0 && !passes(self.level) {
            return fail("bytes went peer to peer where none can");
        }
        self.reads.fetch_add(1, Relaxed);
        Ok(())
    }

    fn write(&self, path: &Path) -> Outcome {
        let version = self.writes.load(Relaxed) + 1;
        let new = pattern(FILE, 1000 + version);
        let file = File::options().read(true).write(true).open(path)?;
        let runtime = Runtime::new(Settings::default());
        let mut memory = self.kind.memory(FILE)?;
        if self.kind == MemoryKind::P2p && passes(self.level) && version.is_multiple_of(2) {
            // By the Linux kernel alone, directly from device memory.
            let mut memory = P2pMemory::allocate(FILE)?;
            memory.put(0, &new);
            expect("a direct write", memory.pwrite(open_direct(path)?.as_raw_fd(), 0, FILE, 0)?, FILE)?;
        } else {
            memory.put(0, &new);
            let wrote = runtime.write(file.as_raw_fd(), Some(0), memory.target(0)?, FILE);
            expect("a write", wrote.map_err(|e| CaseError::Failed(e.to_string()))?, FILE)?;
        }
        drop_cache(&file)?;
        self.writes.store(version, Relaxed);
        read_and_check(&runtime, &file, &mut *memory, (0, 0, FILE), &new)?;
        drop_cache(&file)
    }
}

/// ext4 on a device; unmounted when dropped.
struct MountGuard(PathBuf);

impl MountGuard {
    fn new(device: &Path) -> Result<MountGuard, CaseError> {
        run(Command::new("mkfs.ext4").args(["-q", "-F", "-E", "lazy_itable_init=1,nodiscard"]).arg(device))?;
        let at = PathBuf::from("/run/spinio-vm-rebuild");
        fs::create_dir_all(&at)?;
        run(Command::new("mount").arg(device).arg(&at))?;
        Ok(MountGuard(at))
    }

    fn end(self) -> Outcome {
        // A runtime closes a file some seconds after its last read.
        retry(|| run(Command::new("umount").arg(&self.0)))
    }
}

impl Drop for MountGuard {
    fn drop(&mut self) {
        let _ = retry(|| match Command::new("mountpoint").arg("-q").arg(&self.0).status()?.success() {
            true => run(Command::new("umount").arg(&self.0)),
            false => Ok(()),
        });
    }
}
