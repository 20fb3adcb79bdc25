//! The four microbenchmarks of the NVMMU paper on one file: what its moves cost, and the requests that the disks under
//! it served.
//!
//!     microbench PATTERN FILE [mode=passthrough|aligned|preread] [request=BYTES] [total=BYTES] [span=BYTES]
//!                [device=emulated|p2pmem] [disks=NAME,NAME...]
//!
//! PATTERN: rdrd, sqrd (uploads, random and sequential), rdwr, sqwr (downloads). Before the measurement, FILE is
//! created, `span` bytes are written to it, and they are flushed to storage. Prints one line of JSON. `disks` are names
//! in /sys/block whose `stat` files are read: requests and bytes read and written, while the output is prepared (as it
//! would be while a GPU kernel runs), while the moves are made, and until storage has what the page cache took. Every
//! byte is checked at the end.
//!
//! passthrough writes each request as it arrives, with direct I/O if it is aligned for that, as a program does that
//! wants the bytes on storage and not in the page cache. The earlier mode names (plain, shaped, prepared) still work.

use std::collections::BTreeSet;
use std::ffi::c_void;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use spinio_device::{DeviceAddr, DeviceKind, registry};
use spinio_io::settings::NvmmuStripes;
use spinio_io::{Runtime, Settings, Target};
use spinio_nvmmu::{Direction, Session};
use spinio_sys::linux;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

struct Options {
    pattern: String,
    file: PathBuf,
    mode: String,
    request: u64,
    total: u64,
    span: u64,
    device: DeviceKind,
    disks: Vec<String>,
}

impl Options {
    fn parse() -> Result<Options> {
        let mut args = std::env::args().skip(1);
        let (Some(pattern), Some(file)) = (args.next(), args.next()) else {
            return Err("microbench rdrd|sqrd|rdwr|sqwr FILE [NAME=VALUE ...]".into());
        };
        let mut o = Options {
            pattern,
            file: file.into(),
            mode: "preread".to_owned(),
            request: 64 << 10,
            total: 8 << 20,
            span: 64 << 20,
            device: DeviceKind::Emulated,
            disks: Vec::new(),
        };
        for arg in args {
            let (name, value) = arg.split_once('=').ok_or_else(|| format!("{arg} is no NAME=VALUE"))?;
            match name {
                "mode" if ["passthrough", "aligned", "preread"].contains(&value) => value.clone_into(&mut o.mode),
                "mode" if value == "plain" => "passthrough".clone_into(&mut o.mode),
                "mode" if value == "shaped" => "aligned".clone_into(&mut o.mode),
                "mode" if value == "prepared" => "preread".clone_into(&mut o.mode),
                "request" => o.request = value.parse()?,
                "total" => o.total = value.parse()?,
                "span" => o.span = value.parse()?,
                "device" if value == "emulated" => o.device = DeviceKind::Emulated,
                "device" if value == "p2pmem" => o.device = DeviceKind::P2pmem,
                "disks" => o.disks = value.split(',').filter(|d| !d.is_empty()).map(str::to_owned).collect(),
                _ => return Err(format!("{arg} is not understood").into()),
            }
        }
        if o.request == 0 || o.request > o.span {
            return Err("a request is at least a byte, and at most the file".into());
        }
        Ok(o)
    }

    fn is_random(&self) -> bool {
        self.pattern.starts_with("rd")
    }

    fn direction(&self) -> Direction {
        if self.pattern.ends_with("wr") { Direction::Download } else { Direction::Upload }
    }

    /// Offsets of the requests: each different, multiples of their length.
    fn offsets(&self) -> Vec<u64> {
        let places = self.span / self.request;
        let request_count = (self.total / self.request).clamp(1, places);
        if !self.is_random() {
            return (0..request_count).map(|i| i * self.request).collect();
        }
        let (mut offsets, mut seen, mut state) = (Vec::new(), BTreeSet::new(), 88172645463325252u64);
        while (offsets.len() as u64) < request_count {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let place = state % places;
            if seen.insert(place) {
                offsets.push(place * self.request);
            }
        }
        offsets
    }
}

/// What the disks have served: requests read, bytes read, requests written, bytes written.
#[derive(Clone, Copy, Default)]
struct DiskCounters([u64; 4]);

impl DiskCounters {
    fn now(disks: &[String]) -> Result<DiskCounters> {
        let mut sum = DiskCounters::default();
        for disk in disks {
            let text = fs::read_to_string(Path::new("/sys/block").join(disk).join("stat"))?;
            let fields: Vec<u64> = text.split_whitespace().map(|f| f.parse().unwrap_or(0)).collect();
            for (to, from) in [(0, 0), (1, 2), (2, 4), (3, 6)] {
                sum.0[to] += fields.get(from).ok_or("a short stat file")? * if to % 2 == 1 { 512 } else { 1 };
            }
        }
        Ok(sum)
    }

    fn since(self, before: DiskCounters) -> String {
        let [a, b, c, d] = std::array::from_fn(|i| self.0[i] - before.0[i]);
        format!("{{\"reads\": {a}, \"read_bytes\": {b}, \"writes\": {c}, \"written_bytes\": {d}}}")
    }
}

fn pattern(offset: u64, round: u8) -> u8 {
    (offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8 ^ round
}

fn pattern_at(offset: u64, len: u64, round: u8) -> Vec<u8> {
    (offset..offset + len).map(|at| pattern(at, round)).collect()
}

fn make_file(o: &Options) -> Result<()> {
    let bytes = pattern_at(0, o.span, 0);
    fs::write(&o.file, &bytes)?;
    let file = fs::File::open(&o.file)?;
    file.sync_all()?;
    linux::fadvise(file.as_raw_fd(), 0, 0, linux::Advice::DontNeed)?;
    Ok(())
}

/// As a program without NVMMU: one request after the other, around the page cache if possible.
fn passthrough(o: &Options, runtime: &Runtime, target: Target, offsets: &[u64]) -> Result<()> {
    let aligned = o.request.is_multiple_of(4096);
    let flags = if aligned { linux::O_DIRECT as i32 } else { 0 };
    let file = fs::OpenOptions::new().read(true).write(true).custom_flags(flags).open(&o.file)?;
    for (i, &offset) in offsets.iter().enumerate() {
        let target = Target { addr: DeviceAddr(target.addr.0 + i as u64 * o.request), ..target };
        let done = match o.direction() {
            Direction::Download => runtime.write(file.as_raw_fd(), Some(offset), target, o.request as usize)?,
            Direction::Upload => runtime.read(file.as_raw_fd(), Some(offset), target, o.request as usize)?,
        };
        if done as u64 != o.request {
            return Err(format!("{done} bytes of {} moved", o.request).into());
        }
    }
    Ok(file.sync_data()?)
}

fn main() -> Result<()> {
    let o = Options::parse()?;
    let settings = Settings {
        nvmmu_stripes: if o.mode == "preread" { NvmmuStripes::Preread } else { NvmmuStripes::Aligned },
        ..Settings::default()
    };
    spinio_device::emulated::configure("size=512M")?;
    let runtime: &'static Runtime = Box::leak(Box::new(Runtime::new(settings)));
    let offsets = o.offsets();
    let bytes = offsets.len() as u64 * o.request;
    let addr = registry::alloc(o.device, 0, bytes as usize, o.device == DeviceKind::P2pmem)?;
    let target =
        Target { allocation: registry::find(addr.0 as *const u8, bytes as usize).ok_or("no device memory")?, addr };
    make_file(&o)?;
    if o.direction() == Direction::Download {
        for (i, &offset) in offsets.iter().enumerate() {
            let to = Target { addr: DeviceAddr(addr.0 + i as u64 * o.request), ..target };
            runtime.put(to, &pattern_at(offset, o.request, 7))?;
        }
    }
    let address = |i: usize| (addr.0 + i as u64 * o.request) as *mut c_void;

    let start = DiskCounters::now(&o.disks)?;
    let began = Instant::now();
    let mut session = None;
    if o.mode != "passthrough" {
        let output = (o.direction() == Direction::Download).then_some(o.file.as_path());
        let mut started = Session::begin(runtime, output)?;
        for &offset in &offsets {
            started.hint_range(offset, o.request);
        }
        // The GPU kernel would run here.
        started.report();
        session = Some(started);
    }
    let prepare = began.elapsed();
    let prepared = DiskCounters::now(&o.disks)?;
    let began = Instant::now();
    let mut mode = "no session".to_owned();
    let (elapsed, moved);
    match session {
        None => {
            passthrough(&o, runtime, target, &offsets)?;
            elapsed = began.elapsed();
            moved = DiskCounters::now(&o.disks)?;
        }
        Some(mut session) => {
            for (i, &offset) in offsets.iter().enumerate() {
                session.move_range(&o.file, address(i), offset, o.request, o.direction())?;
            }
            session.flush()?;
            elapsed = began.elapsed();
            moved = DiskCounters::now(&o.disks)?;
            session.sync()?;
            let report = session.end()?;
            mode = format!(
                "{}; whole {}, neighbours {}, loose {}, read ahead {}",
                report.mode, report.full_stripe, report.filler, report.unaligned, report.read_ahead
            );
        }
    }
    let synced = began.elapsed();
    let end = DiskCounters::now(&o.disks)?;

    // The file, or the device's memory, has the expected bytes, and nothing else changed.
    let mut expected = pattern_at(0, o.span, 0);
    if o.direction() == Direction::Download {
        for &offset in &offsets {
            expected[offset as usize..(offset + o.request) as usize].copy_from_slice(&pattern_at(offset, o.request, 7));
        }
    } else {
        for (i, &offset) in offsets.iter().enumerate() {
            let mut got = vec![0; o.request as usize];
            let from = Target { addr: DeviceAddr(addr.0 + i as u64 * o.request), ..target };
            runtime.fetch(from, &mut got)?;
            if got != pattern_at(offset, o.request, 0) {
                return Err(format!("wrong bytes on the device at request {i}").into());
            }
        }
    }
    if fs::read(&o.file)? != expected {
        return Err("wrong bytes in the file".into());
    }
    println!(
        "{{\"pattern\": \"{}\", \"mode\": \"{}\", \"request\": {}, \"requests\": {}, \"bytes\": {bytes}, \
         \"prepare_seconds\": {:.6}, \"seconds\": {:.6}, \"sync_seconds\": {:.6}, \"prepare\": {}, \"move\": {}, \"sync\": {}, \"promise\": \"{}\"}}",
        o.pattern,
        o.mode,
        o.request,
        offsets.len(),
        prepare.as_secs_f64(),
        elapsed.as_secs_f64(),
        (synced - elapsed).as_secs_f64(),
        prepared.since(start),
        moved.since(prepared),
        end.since(moved),
        mode.replace('"', "'"),
    );
    Ok(())
}
