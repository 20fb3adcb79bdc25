//! Epochs of a GPU program while a CPU program does anything to the same files.
//!
//! ```text
//!   byte of a file:   0 1 2 ... 14 │15│ 16 ... 30 │31│ ...
//!                     CPU program  │  │           │  │       both write the last of each 16, kernels only these
//! ```
//!
//! So all other bytes are those of the ordinary directory at any time, whatever is released, and one of these is as in
//! the ordinary directory, or what kernels store. Now and then the CPU program waits for an epoch: then the kernels must
//! see what it has written, and programs what was released, byte by byte.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{LazyLock, Mutex, MutexGuard};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io::Errno;
use spinio_device::emulated::Emulated;
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Error, Map};

use crate::common::both::{NAMES, Op, Outcome, PAGE, Random};
use crate::common::gpu::device;

const LANE: u64 = 16;
/// What kernels store: one of these in each epoch, so that most epochs change something.
const STORED: [u8; 2] = [0xa5, 0x5a];
/// Longer than the files.
const PAGES: u64 = 56;
const LEN: usize = (PAGES * PAGE) as usize;

fn is_shared(at: u64) -> bool {
    at % LANE == LANE - 1
}

/// Whether bytes from `offset` of a file may be those of a file that no kernel writes.
pub(crate) fn agree(offset: u64, expected: &[u8], got: &[u8]) -> bool {
    let pairs = (offset..).zip(expected.iter().zip(got));
    expected.len() == got.len() && { pairs }
        .all(|(at, (wanted, now))| wanted == now || is_shared(at) && STORED.contains(now))
}

/// Whether an operation may return this.
pub(crate) fn may_return(op: &Op, expected: &Outcome, got: &Outcome) -> bool {
    match (op, expected, got) {
        (Op::Read { offset, .. } | Op::Map { offset, .. }, Outcome::Bytes(wanted), Outcome::Bytes(now)) => {
            agree(*offset, wanted, now)
        }
        (Op::Direct { page, .. }, Outcome::Bytes(wanted), Outcome::Bytes(now)) => agree(page * PAGE, wanted, now),
        _ => expected == got,
    }
}

/// The operation as it is done beside kernels.
pub(crate) fn beside_kernels(mut op: Op) -> Op {
    match &mut op {
        // Shared bytes stay where they are in each 16.
        Op::CopyRange { offset, at, .. } => *at = *at / LANE * LANE + *offset % LANE,
        // The server of a user's own mount maps no file that its owner may not read and write now.
        Op::Chmod { mode, .. } if !rustix::process::geteuid().is_root() => *mode |= 0o600,
        // A release sets the time too.
        Op::Times { name, .. } => return Op::Stat { name: name.clone() },
        _ => {}
    }
    op
}

/// What the threads of the two programs share.
#[derive(Default)]
pub(crate) struct Turn {
    held: Mutex<()>,
    wanted: AtomicBool,
    over: AtomicBool,
    released: AtomicU64,
    verified: AtomicU64,
    stale: AtomicU64,
    merged: AtomicU64,
}

impl Turn {
    /// For one operation of the CPU program.
    pub(crate) fn of_cpu(&self) -> MutexGuard<'_, ()> {
        while self.wanted.load(SeqCst) {
            std::thread::yield_now();
        }
        self.held.lock().unwrap()
    }

    /// The CPU program waits until this is dropped.
    fn of_gpu(&self) -> MutexGuard<'_, ()> {
        self.wanted.store(true, SeqCst);
        let held = self.held.lock().unwrap();
        self.wanted.store(false, SeqCst);
        held
    }

    /// The CPU program has ended, perhaps by a failure.
    pub(crate) fn end(&self) {
        self.over.store(true, SeqCst);
    }

    /// What the kernels' side has done.
    pub(crate) fn report(&self) -> String {
        let [released, verified, stale, merged] =
            [&self.released, &self.verified, &self.stale, &self.merged].map(|count| count.load(SeqCst));
        assert!(released > 0 && verified > 0);
        format!("{released} releases, {merged} pages merged, {verified} epochs compared, {stale} lost with a server")
    }
}

/// Ends the epochs when the CPU program ends.
pub(crate) struct Ending<'a>(pub(crate) &'a Turn);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Maps files of the mount and writes them, until the CPU program has ended. `reference`: the ordinary directory.
pub(crate) fn run(dir: &Path, reference: &Path, turn: &Turn, mut random: Random) {
    // One for all mounts: a process has a few only.
    static DEVICE: LazyLock<&'static Emulated> = LazyLock::new(device);
    let device = *DEVICE;
    while !turn.over.load(SeqCst) {
        let name = random.pick(NAMES);
        let open = |root: &Path| {
            let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK;
            let options =
                File::options().read(true).write(true).custom_flags(flags.bits() as i32).open(root.join(name));
            options.ok().filter(|file| file.metadata().is_ok_and(|stat| stat.is_file()))
        };
        let both = {
            let _held = turn.of_gpu();
            open(dir).zip(open(reference))
        };
        let Some((file, reference)) = both else {
            std::thread::sleep(Duration::from_micros(200));
            continue;
        };
        let map = Map::new(file.as_raw_fd(), 0, LEN as u64, Access::Write, device).unwrap();
        let mut gpu = Gpu { device, map, file, reference, turn, random: random.clone() };
        for _ in 0..random.range(1, 20) {
            gpu.epoch();
        }
        turn.merged.fetch_add(gpu.map.info().pages_merged, SeqCst);
    }
}

struct Gpu<'a> {
    device: &'static Emulated,
    map: Map,
    file: File,
    reference: File,
    turn: &'a Turn,
    random: Random,
}

impl Gpu<'_> {
    /// Until it succeeds.
    fn acquire(&self, at: u64, len: u64) {
        while let Err(error) = self.map.acquire(at, len, Access::Write) {
            self.lost(&error);
        }
    }

    fn lost(&self, error: &Error) {
        assert_eq!(error.errno, Errno::STALE, "{error}");
        self.turn.stale.fetch_add(1, SeqCst);
    }

    fn epoch(&mut self) {
        let first = self.random.range(0, PAGES);
        let (at, len) = (first * PAGE, self.random.range(1, (PAGES - first).min(12) + 1) * PAGE);
        let value = self.random.pick(&STORED);
        if self.random.range(0, 4) == 0 {
            self.compared_epoch(at, len, value);
            return;
        }
        self.acquire(at, len);
        self.store(at, len, value);
        // Meanwhile the CPU program goes on, and the kernels see some of it.
        std::thread::sleep(Duration::from_micros(self.random.range(0, 500)));
        if self.random.range(0, 3) == 0 {
            self.acquire(at, len);
        }
        let ended = match self.random.range(0, 5) {
            0 => self.map.discard(at, len).map(|()| 0),
            _ => self.map.release(at, len),
        };
        match ended {
            Ok(_) => drop(self.turn.released.fetch_add(1, SeqCst)),
            Err(error) => self.lost(&error),
        }
    }

    /// One during which the CPU program waits.
    fn compared_epoch(&mut self, at: u64, len: u64, value: u8) {
        let _held = self.turn.of_gpu();
        let mut wanted = vec![0; len as usize];
        let inside = read(&self.reference, at, &mut wanted);
        self.acquire(at, len);
        let mut bytes = self.load(at, len);
        assert!(agree(at, &wanted[..inside], &bytes[..inside]), "the kernel sees {}", difference(at, &wanted, &bytes));
        assert!(bytes[inside..].iter().all(|byte| *byte == 0), "past the end, at {at}");
        self.store(at, len, value);
        match self.map.release(at, len) {
            Ok(_) => {}
            Err(error) => return self.lost(&error),
        }
        (at..at + len).zip(&mut bytes).filter(|(at, _)| is_shared(*at)).for_each(|(_, byte)| *byte = value);
        let mut seen = vec![0; len as usize];
        assert_eq!(read(&self.file, at, &mut seen), inside, "the size, at {at}");
        assert!(seen[..inside] == bytes[..inside], "a program sees {}", difference(at, &bytes, &seen));
        self.turn.verified.fetch_add(1, SeqCst);
    }

    fn load(&self, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let from = DeviceAddr(self.map.address() + at);
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.device.copy_out(StreamId(0), bytes.as_mut_ptr(), from, bytes.len()) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
        bytes
    }

    /// Stores all shared bytes of the range.
    fn store(&self, at: u64, len: u64, value: u8) {
        let mut bytes = self.load(at, len);
        (at..at + len).zip(&mut bytes).filter(|(at, _)| is_shared(*at)).for_each(|(_, byte)| *byte = value);
        let to = DeviceAddr(self.map.address() + at);
        // SAFETY: as above.
        unsafe { self.device.copy_in(StreamId(0), to, bytes.as_ptr(), bytes.len()) }.unwrap();
        self.device.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }
}

/// Reads until the end of the file; how much.
fn read(file: &File, at: u64, bytes: &mut [u8]) -> usize {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], at + done as u64).unwrap() {
            0 => break,
            got => done += got,
        }
    }
    done
}

fn difference(offset: u64, wanted: &[u8], got: &[u8]) -> String {
    let mut pairs = (offset..).zip(wanted.iter().zip(got));
    let first = pairs.find(|(at, (wanted, now))| wanted != now && !(is_shared(*at) && STORED.contains(now)));
    format!("{first:?}: byte, (wanted, now)")
}
