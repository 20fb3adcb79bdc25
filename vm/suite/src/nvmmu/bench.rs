//! The paper's four microbenchmarks: 14 request sizes from 4 KiB to 32 MiB, random and sequential, uploads and
//! downloads.
//!
//! ```text
//!   counters   begin      counters   move, move, move ... flush   counters   sync   counters
//!                │ early                    │ waited                           │ late
//!                └ a kernel computes        └ the program waits                └ until the bytes are on storage
//! ```
//!
//! The counted requests to the members are exact; the times are those of an emulator. A file system writes for itself,
//! too: its journal is on the same array, and its commits cover stripes partially. That is counted in `late`.
//!
//! Every fourth size is run, or all with `vm/run --bench`.

use std::fs::File;
use std::ops::Range as Span;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, fallocate};
use spinio_io::settings::NvmmuStripes;
use spinio_sys::linux;
use spinio_testkit::Rng;

use super::counters::{DiskCounters, Members};
use super::moves::{Moves, Range};
use crate::case::{Case, CaseError, Outcome, expect_bytes, fail};
use crate::md::Array;
use crate::memory::Memory;
use crate::place::{Guest, Place, drop_cache, pattern, remove};
use crate::spin::MIB;
use crate::stacks::kind;

/// The paper's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bench {
    Rdrd,
    Sqrd,
    Rdwr,
    Sqwr,
}

impl Bench {
    const ALL: [Bench; 4] = [Bench::Rdrd, Bench::Sqrd, Bench::Rdwr, Bench::Sqwr];

    const fn name(self) -> &'static str {
        match self {
            Bench::Rdrd => "bench-rdrd",
            Bench::Sqrd => "bench-sqrd",
            Bench::Rdwr => "bench-rdwr",
            Bench::Sqwr => "bench-sqwr",
        }
    }

    const fn is_download(self) -> bool {
        matches!(self, Bench::Rdwr | Bench::Sqwr)
    }

    const fn is_sequential(self) -> bool {
        matches!(self, Bench::Sqrd | Bench::Sqwr)
    }
}

/// 4 KiB, 8 KiB ... 32 MiB.
const SIZES: usize = 14;

fn size(number: usize) -> usize {
    4096 << number
}

/// Bytes of data in a stripe of the RAID-5 here.
const STRIPE: usize = 192 << 10;

/// Bytes of the file: room for three moves of the largest size, and for the bytes before the first full stripe.
fn file_size() -> usize {
    if all_sizes() { 108 * MIB } else { 60 * MIB }
}

fn all_sizes() -> bool {
    std::env::var("VM_BENCH").is_ok_and(|value| value == "1")
}

/// Limit of the bytes that a file system reads for itself, to commit the changes of one benchmark.
const OWN: u64 = 128 << 10;

/// Measurements of a benchmark in which members may have been read, before one must show none. The Linux kernel begins a
/// stripe as soon as something wakes it, and reads what it lacks then. Where the processors are taken by others, the
/// thread that writes the stripe may not have handed over all of it: seen with a few reads in 2 of 100 rows, beside
/// builds. A stripe that SPIN writes in parts is read each time.
const MEASUREMENTS: usize = 4;

/// Bytes of device memory between the sources of two moves, so that each moves different bytes.
const STEP: usize = 4096;

/// The configurations that are compared: a place, and a mode of moving.
#[derive(Clone, Copy)]
struct Setup {
    name: &'static str,
    place: Place,
    /// The array lacks a member.
    degraded: bool,
    wanted: NvmmuStripes,
    /// Whether members may be read while the program waits for a download.
    reads: fn(Bench, usize) -> Reads,
}

/// Requirements on the reads that members serve while the program waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reads {
    None,
    /// A control: the counters count the reads of partial stripes.
    Some,
    Any,
}

impl Reads {
    fn holds(self, row: &Row) -> bool {
        let (waited, late) = (row.waited, row.late);
        match self {
            Reads::None => waited.reads == 0 && late.read_bytes <= OWN,
            Reads::Some => waited.reads + late.reads > 0,
            Reads::Any => true,
        }
    }
}

impl Setup {
    const fn new(name: &'static str, place: Place, wanted: NvmmuStripes, reads: fn(Bench, usize) -> Reads) -> Setup {
        Setup { name, place, degraded: false, wanted, reads }
    }
}

const SETUPS: [Setup; 8] = [
    Setup::new("md RAID-5, plain", Place::Raid5, NvmmuStripes::Passthrough, part_is_read),
    Setup::new("md RAID-5, shaped", Place::Raid5, NvmmuStripes::Aligned, sequence_is_not_read),
    Setup::new("md RAID-5, shaped and prepared", Place::Raid5, NvmmuStripes::Preread, nothing_is_read),
    Setup {
        degraded: true,
        ..Setup::new(
            "md RAID-5 without a member, shaped and prepared",
            Place::Raid5,
            NvmmuStripes::Preread,
            nothing_is_read,
        )
    },
    Setup::new("md RAID-6, shaped and prepared", Place::Raid6, NvmmuStripes::Preread, nothing_is_read),
    Setup::new("md RAID-0 of the same disks", Place::Raid0, NvmmuStripes::Passthrough, nothing_is_read),
    Setup::new("one NVMe", Place::Part, NvmmuStripes::Passthrough, nothing_is_read),
    Setup::new("SATA", Place::Sata, NvmmuStripes::Passthrough, nothing_is_read),
];

fn nothing_is_read(_: Bench, _: usize) -> Reads {
    Reads::None
}

fn part_is_read(bench: Bench, len: usize) -> Reads {
    if !bench.is_sequential() && len < STRIPE { Reads::Some } else { Reads::Any }
}

fn sequence_is_not_read(bench: Bench, _: usize) -> Reads {
    if bench.is_sequential() { Reads::None } else { Reads::Any }
}

pub(super) fn cases() -> Vec<Case> {
    SETUPS
        .into_iter()
        .map(|setup| {
            let name = format!("nvmmu: the four microbenchmarks, {}", setup.name);
            Case::new(name, move |g| if setup.degraded { without_a_member(g, setup) } else { run(g, setup) })
        })
        .collect()
}

/// One measurement.
#[derive(Clone, Copy, Debug)]
struct Row {
    bytes: usize,
    time: Duration,
    /// While a kernel would compute.
    early: DiskCounters,
    /// While the program waits.
    waited: DiskCounters,
    /// While storage is waited for.
    late: DiskCounters,
}

impl Row {
    /// What members read during a download, for the log.
    fn reads(&self, bench: Bench, len: usize) -> String {
        let (waited, late) = (self.waited, self.late);
        format!(
            "{} of {} KiB: {} reads ({} KiB) waited for, then {} ({} KiB)",
            bench.name(),
            len >> 10,
            waited.reads,
            waited.read_bytes >> 10,
            late.reads,
            late.read_bytes >> 10
        )
    }
}

fn without_a_member(guest: &Guest, setup: Setup) -> Outcome {
    let array = Array::at(guest.disk(setup.place.folder().unwrap_or_default())?);
    let member = guest.partition("m1", 4)?;
    array.fail(&member)?;
    let outcome = run(guest, setup);
    array.add(&member)?;
    array.whole()?;
    outcome
}

fn run(guest: &Guest, setup: Setup) -> Outcome {
    let (path, file) = guest.create(setup.place, "bench")?;
    // Contiguous as far as possible.
    fallocate(&file, FallocateFlags::empty(), 0, file_size() as u64)?;
    let bytes = pattern(file_size(), 3);
    file.write_all_at(&bytes, 0)?;
    file.sync_all()?;
    let within = match setup.place {
        Place::Raid5 => whole_stripes(&file, STRIPE as u64, file_size() as u64)?,
        Place::Raid6 => whole_stripes(&file, 128 << 10, file_size() as u64)?,
        _ => 0..file_size(),
    };
    drop(file);
    let mut bed = TestSetup::new(guest, setup, path, bytes, within)?;
    // The first transfers establish P2P trust, by reading some bytes twice.
    bed.measure(Bench::Sqrd, MIB)?;
    bed.measure(Bench::Sqwr, MIB)?;
    let mut table = Vec::new();
    let mut wrong = Vec::new();
    let step = if all_sizes() { 1 } else { 4 };
    for number in (0..SIZES).step_by(step) {
        let len = size(number);
        let mut rows = Vec::new();
        for bench in Bench::ALL {
            let mut row = bed.measure(bench, len)?;
            let mut wanted = if bench.is_download() { (setup.reads)(bench, len) } else { Reads::Any };
            if setup.wanted == NvmmuStripes::Aligned && row.bytes % STRIPE != 0 {
                // The file has more extents than it should: there was no room for full stripes.
                wanted = Reads::Any;
            }
            for _ in 1..MEASUREMENTS {
                if wanted != Reads::None || wanted.holds(&row) {
                    break;
                }
                println!("      once more: {}", row.reads(bench, len));
                row = bed.measure(bench, len)?;
            }
            if !wanted.holds(&row) {
                wrong.push(format!("{}, expected: {wanted:?}", row.reads(bench, len)));
            }
            rows.push(row);
        }
        table.push((len, rows));
    }
    bed.check(&[(0, file_size())])?;
    remove(&bed.path);
    print(&table);
    if wrong.is_empty() { Ok(()) } else { fail(wrong.join("; ")) }
}

/// The longest contiguous range of the file, from its first full stripe on. The rest of a stripe that the
/// file begins in belongs to another file, and no write can cover it as a full stripe.
pub(super) fn whole_stripes(file: &File, stripe: u64, len: u64) -> Result<Span<usize>, CaseError> {
    let extents = linux::fiemap_extents(file.as_raw_fd(), 0, len, 64)?;
    // Adjacent extents, although separate (written and unwritten ones), are contiguous.
    let mut pieces: Vec<(u64, u64, u64)> = Vec::new();
    for extent in &extents {
        match pieces.last_mut() {
            Some((logical, physical, len))
                if *logical + *len == extent.logical && *physical + *len == extent.physical =>
            {
                *len += extent.len;
            }
            _ => pieces.push((extent.logical, extent.physical, extent.len)),
        }
    }
    let Some(&(logical, physical, len)) = pieces.iter().max_by_key(|piece| piece.2) else { return fail("no extents") };
    let skip = physical.next_multiple_of(stripe) - physical;
    Ok((logical + skip) as usize..(logical + len) as usize)
}

/// The file, its contents, and memory to move from and to.
struct TestSetup {
    path: PathBuf,
    model: Vec<u8>,
    /// The range of moves.
    within: Span<usize>,
    source: Vec<u8>,
    memory: Box<dyn Memory>,
    members: Members,
    array: Option<Array>,
    moves: Moves,
    random: Rng,
}

impl TestSetup {
    fn new(
        guest: &Guest,
        setup: Setup,
        path: PathBuf,
        model: Vec<u8>,
        within: Span<usize>,
    ) -> Result<TestSetup, CaseError> {
        let device = guest.disk(setup.place.folder().unwrap_or_default())?;
        let array = matches!(setup.place, Place::Raid5 | Place::Raid6).then(|| Array::at(device.clone()));
        let source = pattern(size(SIZES - 1) + 256 * STEP, 77);
        let mut memory = kind().memory(source.len())?;
        memory.put(0, &source);
        Ok(TestSetup {
            path,
            model,
            within,
            source,
            memory,
            members: Members::of(&device)?,
            array,
            moves: Moves::new(setup.wanted),
            random: Rng::new(15),
        })
    }

    /// The offsets of the moves of a benchmark.
    fn ranges(&mut self, bench: Bench, len: usize) -> Vec<Range> {
        // Full stripes in all, and several moves even of the largest.
        let count = if bench.is_sequential() { (4 * STRIPE / len).max(3) } else { (8 * MIB / len).clamp(2, 8) };
        let mut slots: Vec<usize> = (0..self.within.len() / len).collect();
        if !bench.is_sequential() {
            for at in (1..slots.len()).rev() {
                slots.swap(at, self.random.below(at as u64 + 1) as usize);
            }
        }
        slots.into_iter().take(count).map(|slot| ((self.within.start + slot * len) as u64, len)).collect()
    }

    fn measure(&mut self, bench: Bench, len: usize) -> Result<Row, CaseError> {
        let moves = self.ranges(bench, len);
        // Neither the page cache nor the array's stripe cache has any of it.
        drop_cache(&File::open(&self.path)?)?;
        if let Some(array) = &self.array {
            array.forget_stripes()?;
        }
        let zero = self.members.count()?;
        self.moves.begin(&self.path, if bench.is_download() { &moves } else { &[] })?;
        let begun = self.members.count()?;
        let clock = Instant::now();
        for (number, &range) in moves.iter().enumerate() {
            let target = self.memory.target(number * STEP)?;
            if bench.is_download() {
                self.moves.download(target, range)?;
            } else {
                // To the same offset: the next move overwrites it.
                self.moves.upload(target, range)?;
            }
        }
        self.moves.finish()?;
        let finished = self.members.count()?;
        self.moves.sync()?;
        let time = clock.elapsed();
        let synced = self.members.count()?;
        for (number, &(offset, len)) in moves.iter().enumerate() {
            let (from, to) = (number * STEP, offset as usize);
            if bench.is_download() {
                self.model[to..to + len].copy_from_slice(&self.source[from..from + len]);
            }
        }
        if bench.is_download() {
            self.check(&moves)?;
        } else if let Some(&(offset, len)) = moves.last() {
            let from = (moves.len() - 1) * STEP;
            let seen = self.memory.bytes(from, len);
            expect_bytes("the last upload", &seen, &self.model[offset as usize..offset as usize + len])?;
            self.memory.put(0, &self.source);
        }
        Ok(Row {
            bytes: moves.len() * len,
            time,
            early: begun - zero,
            waited: finished - begun,
            late: synced - finished,
        })
    }

    /// Passes if storage has these ranges, and a page before and after each.
    fn check(&self, ranges: &[Range]) -> Outcome {
        // The file must not be open elsewhere when a session needs exclusive access.
        let file = File::open(&self.path)?;
        drop_cache(&file)?;
        // What the kernel reads ahead here would still be in flight, and count as a read of the next bench.
        linux::fadvise(file.as_raw_fd(), 0, 0, linux::Advice::Random)?;
        for &(offset, len) in ranges {
            let from = (offset as usize).saturating_sub(4096);
            let to = (offset as usize + len + 4096).min(self.model.len());
            let mut seen = vec![0; to - from];
            file.read_exact_at(&mut seen, from as u64)?;
            expect_bytes(&format!("{len} bytes at {offset}"), &seen, &self.model[from..to])?;
        }
        Ok(())
    }
}

/// A line a size: milliseconds, MB/s, and KiB that members read: early, waited for, late.
fn print(table: &[(usize, Vec<Row>)]) {
    let mut head = String::from("      size");
    for bench in Bench::ALL {
        head += &format!(" | {:>36}", format!("{}: ms  MB/s early waited   late", bench.name()));
    }
    println!("{head}");
    for (len, rows) in table {
        let mut line = format!("{:>6} KiB", len >> 10);
        for row in rows {
            let (ms, rate) = (row.time.as_secs_f64() * 1e3, row.bytes as f64 / 1e6 / row.time.as_secs_f64());
            let kib = |counted: DiskCounters| counted.read_bytes >> 10;
            line +=
                &format!(" | {ms:>9.1} {rate:>5.0} {:>5} {:>6} {:>6}", kib(row.early), kib(row.waited), kib(row.late));
        }
        println!("{line}");
    }
}
