//! `spinio read`: a file into device memory, in this process, without preloading.
//!
//! One device buffer of a block is read into repeatedly, so the time is that of the reads alone. `--verify` compares
//! each block at once with a plain `pread`. That reads the block into the page cache, but only after the device has
//! read it, and under POSIX_FADV_RANDOM, so no later block is affected.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use spinio_io::runtime;
use spinio_sys::linux::{self, Advice};

use crate::color::{OutputStyle, TextRole};
use crate::device::{self, Buffer, DeviceName};
use crate::exit::{self, Exit};
use crate::input::{Input, OpenRange};
use crate::progress::{Progress, Spinner};
use crate::{format, output, table};

/// What `spinio read` takes.
#[derive(Debug, Args)]
pub struct Read {
    #[command(flatten)]
    input: Input,
    /// The device to read into: cuda:0, p2pmem:0, emulated [default: a CUDA GPU if there is one]
    #[arg(long)]
    device: Option<DeviceName>,
    /// Bytes a read
    #[arg(long, value_name = "BYTES", default_value = "8M", value_parser = format::parse)]
    block: u64,
    /// Compare every byte on the device with a plain pread of the file
    #[arg(long)]
    verify: bool,
}

/// The result.
#[derive(Default)]
struct ReadTotals {
    bytes: u64,
    reads: u64,
    spent: Duration,
    /// File offset of the first byte that differs.
    first_difference: Option<u64>,
}

/// Runs it.
pub fn run(read: &Read) -> anyhow::Result<Exit> {
    if read.block == 0 {
        return Err(exit::error(Exit::Usage, "A read of 0 bytes gets nowhere: give --block a number above 0"));
    }
    let opened = read.input.open()?;
    let block = read.block.min(opened.len.max(1));
    let wait = Spinner::new("Opening the device");
    let buffer = Buffer::new(read.device.unwrap_or_else(device::preferred), block)?;
    drop(wait);
    let before = runtime().stats();
    let done = read_all(read, &opened, &buffer, block)?;
    report(read, &buffer, &done, &runtime().stats().since(&before))?;
    Ok(if done.first_difference.is_some() { Exit::Different } else { Exit::Ok })
}

fn read_all(read: &Read, opened: &OpenRange, buffer: &Buffer, block: u64) -> anyhow::Result<ReadTotals> {
    let name = read.input.path().display().to_string();
    // Its own open file description: advice must not change the one that the device reads.
    let plain = match read.verify {
        true => Some(std::fs::File::open(read.input.path()).with_context(|| format!("Cannot open {name}"))?),
        false => None,
    };
    if let Some(plain) = &plain {
        let _ = linux::fadvise(plain.as_raw_fd(), 0, 0, Advice::Random);
    }
    let mut progress = Progress::bytes(opened.len, "Reading");
    let mut done = ReadTotals::default();
    while done.bytes < opened.len && done.first_difference.is_none() {
        let (at, want) = (opened.offset + done.bytes, block.min(opened.len - done.bytes) as usize);
        let begun = Instant::now();
        let got = runtime().read(opened.file.as_raw_fd(), Some(at), buffer.target, want);
        done.spent += begun.elapsed();
        let got = got.map_err(|e| e.with_path(&name))?;
        if got == 0 {
            break;
        }
        if let Some(plain) = &plain {
            done.first_difference =
                compare(plain, at, buffer, got).with_context(|| format!("Cannot compare {name}"))?;
        }
        done.bytes += got as u64;
        done.reads += 1;
        progress.set(done.bytes);
    }
    Ok(done)
}

fn compare(plain: &std::fs::File, at: u64, buffer: &Buffer, len: usize) -> anyhow::Result<Option<u64>> {
    let (mut there, mut here) = (vec![0u8; len], vec![0u8; len]);
    runtime().fetch(buffer.target, &mut there)?;
    plain.read_exact_at(&mut here, at)?;
    Ok(there.iter().zip(&here).position(|(a, b)| a != b).map(|i| at + i as u64))
}

fn report(read: &Read, buffer: &Buffer, done: &ReadTotals, stats: &spinio_io::stats::Snapshot) -> anyhow::Result<()> {
    let paint = OutputStyle::stdout();
    let mut text = String::new();
    let mut line = |label: &str, what: String| {
        text += &format!("{} {what}\n", paint.text(TextRole::Head, &format!("{label:<8}")));
    };
    line("file", format!("{} of {}", format::bytes(done.bytes), read.input.path().display()));
    let device = buffer.target.allocation.device;
    line("device", format!("{}: {}", device.id(), device.describe()));
    line(
        "time",
        format!(
            "{} in {} {}: {} GB/s",
            format::time(done.spent.as_nanos() as f64),
            done.reads,
            if done.reads == 1 { "read" } else { "reads" },
            format::gbps(done.bytes, done.spent.as_secs_f64())
        ),
    );
    if !stats.rows.is_empty() {
        text += &format!("\n{}\n\n", table::text(&table::of_snapshot(&paint, stats)));
    }
    match (read.verify, done.first_difference) {
        (false, _) => {}
        (true, None) => {
            let tick = paint.text(TextRole::Good, "✓");
            text += &format!("{tick} every byte equals a plain pread: {} bytes\n", done.bytes);
        }
        (true, Some(at)) => {
            let cross = paint.text(TextRole::Bad, "✗");
            text += &format!(
                "{cross} byte {at} differs from a plain pread. If no process wrote to the file meanwhile, this is a bug: \
                 please report it\n"
            );
        }
    }
    output::print(&text)
}
