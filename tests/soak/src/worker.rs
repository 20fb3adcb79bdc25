//! One worker: threads that read and write device memory, and check the results.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use spinio_device::emulated::{Emulated, ResourceCounts};
use spinio_io::settings::NvmmuStripes;
use spinio_io::{Runtime, Settings, on_close_range};
use spinio_plan::Route;
use spinio_testkit::buffer::emulated;
use spinio_testkit::{Buffer, Rng, file, leak_check};

use crate::counts::EventCounts;
use crate::files::{self, CHANGING, CHANGING_LEN, STEADY};
use crate::moves::{Output, SessionRuntime};
use crate::{Args, LAST_PROTECTED};

/// Bytes of a thread's private file, and of its buffer.
const OWN_FILE_LEN: usize = 6 << 20;

/// Growth of a process between the first minute and the last that counts as a leak.
const MAX_GROWTH: u64 = 200 << 20;

pub(crate) struct Worker<'a> {
    pub(crate) folder: &'a Path,
    devices: [&'static Emulated; 2],
    runtimes: Vec<Runtime>,
    /// A device of the sessions, and their runtimes.
    pub(crate) session_device: &'static Emulated,
    pub(crate) session_runtimes: [SessionRuntime; 2],
    pub(crate) tally: EventCounts,
    log_records: AtomicU64,
    /// Passed when each thread has its buffers. Threads free memory that is being read into, as no program should: late
    /// copies must not write to a buffer that is allocated at the same address.
    ready: Barrier,
    end: Instant,
}

pub(crate) fn run(args: &Args, folder: &Path, number: u64) -> Result<()> {
    let devices = [emulated("size=256M,bar=32M"), emulated("size=256M,bar=32M")];
    // Workers of the pool are started by the first request; their descriptors are their own.
    let descriptors = leak_check::thread_descriptors();
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let worker = Worker {
        folder,
        devices,
        runtimes: runtimes(),
        session_device: emulated("size=64M"),
        session_runtimes: [NvmmuStripes::Preread, NvmmuStripes::Aligned].map(SessionRuntime::new),
        tally: EventCounts::default(),
        log_records: AtomicU64::new(0),
        ready: Barrier::new(args.threads),
        end,
    };
    let (half, mut early) = (Instant::now() + Duration::from_secs(args.seconds / 2), None);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..args.threads as u64)
            .map(|n| {
                let worker = &worker;
                let rng = Rng::new(args.seed ^ (number << 20) ^ n);
                scope.spawn(move || worker.run_thread(number * 1000 + n, rng))
            })
            .collect();
        while threads.iter().any(|t| !t.is_finished()) {
            std::thread::sleep(Duration::from_millis(100));
            if early.is_none() && Instant::now() > half {
                early = Some(resident());
            }
        }
        threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| bail!("a thread of worker {number} panicked")))
    })?;
    println!("{}", worker.tally.line());
    println!("logged {}", worker.log_records.load(Relaxed));
    let grown = resident().saturating_sub(early.unwrap_or(u64::MAX));
    ensure!(grown < MAX_GROWTH, "worker {number} grew by {} MiB in its second half", grown >> 20);
    worker.check_leaks(descriptors)
}

fn runtimes() -> Vec<Runtime> {
    let some = |routes: &[Route]| {
        Runtime::new(Settings {
            routes: routes.to_vec(),
            dma_min: 256 << 10,
            bounce_limit: 16 << 20,
            ..Settings::default()
        })
    };
    vec![
        some(&Route::ALL),
        some(&[Route::Copy, Route::Store, Route::Dma]),
        some(&[Route::Copy, Route::Store, Route::Direct]),
    ]
}

/// Bytes of memory of this process, without its file mappings: pinned ones change.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let of = |name: &str| {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|l| l.trim().strip_suffix(" kB")?.parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    of("RssAnon:") + of("RssShmem:")
}

impl Worker<'_> {
    /// The loop of one thread.
    fn run_thread(&self, me: u64, mut rng: Rng) -> Result<()> {
        let device = self.devices[me as usize % 2];
        let buffer =
            if rng.chance(30) { Buffer::host_mapped(device, OWN_FILE_LEN) } else { Buffer::new(device, OWN_FILE_LEN) };
        let path = self.folder.join(format!("own-{me}"));
        let own = file::create(&path);
        let output = Output::new(self.folder, me, self.session_device);
        self.ready.wait();
        let mut output = output?;
        let mut model = Vec::new();
        let mut sequence = 0;
        while Instant::now() < self.end {
            let runtime = rng.choose(&self.runtimes);
            match rng.below(29) {
                0..6 => self.read_steady(runtime, &buffer, &mut rng)?,
                6..10 => self.read_changing(runtime, &buffer, &mut rng)?,
                10..14 => self.write_own(runtime, &buffer, &own, &mut model, &mut rng)?,
                14..16 if me / 1000 <= LAST_PROTECTED => {
                    self.append(runtime, &buffer, me, sequence, &mut rng)?;
                    sequence += 1;
                }
                14..17 => self.free_while_reading(runtime, device, &mut rng)?,
                17 => self.free_during_batch(runtime, device, rng.chance(50), &mut rng)?,
                18..22 => self.pin_and_read(runtime, device, &buffer, &mut rng)?,
                22..25 => self.batch_of_many(runtime, &buffer, &mut rng)?,
                25..28 => self.session(&mut output, &mut rng)?,
                _ => {
                    file::advise(&own, 0, 0, *rng.choose(&[0, 1, 2, 3, 4]));
                    self.tally.add("advise", 1);
                }
            }
        }
        drop(own);
        let _ = std::fs::remove_file(path);
        Ok(())
    }

    fn read_steady(&self, runtime: &Runtime, buffer: &Buffer, rng: &mut Rng) -> Result<()> {
        let n = rng.below(STEADY);
        let subject = files::open(&files::steady(self.folder, n), false)?;
        let (offset, len) = self.range(files::steady_len(n), rng);
        let seen = self.read(runtime, buffer, &subject, offset, len)?;
        let expect = (files::steady_len(n) - offset).min(len as u64);
        ensure!(seen.len() as u64 == expect, "steady-{n}: {} bytes at {offset}, not {expect}", seen.len());
        if let Some(at) = files::first_bad_steady(offset, &seen) {
            bail!("steady-{n}: a wrong byte at {at}, in a read of {len} at {offset}");
        }
        self.tally.add("steady", 1);
        Ok(())
    }

    fn read_changing(&self, runtime: &Runtime, buffer: &Buffer, rng: &mut Rng) -> Result<()> {
        let n = rng.below(CHANGING);
        let subject = files::open(&files::changing(self.folder, n), false)?;
        let (offset, len) = self.range(CHANGING_LEN, rng);
        let seen = self.read(runtime, buffer, &subject, offset, len)?;
        if let Some(at) = files::first_bad_changing(offset, &seen) {
            bail!("changing-{n}: a byte of no version at {at}, in a read of {len} at {offset}");
        }
        self.tally.add("changing", 1);
        Ok(())
    }

    pub(crate) fn range(&self, size: u64, rng: &mut Rng) -> (u64, usize) {
        let most = if rng.chance(70) { 100_000 } else { OWN_FILE_LEN as u64 };
        (rng.near_page_edge(size), 1 + rng.below(most) as usize)
    }

    pub(crate) fn read(
        &self,
        runtime: &Runtime,
        buffer: &Buffer,
        from: &File,
        offset: u64,
        len: usize,
    ) -> Result<Vec<u8>> {
        let got = runtime.read(from.as_raw_fd(), Some(offset), buffer.target(0), len);
        let got = got.with_context(|| format!("a read of {len} at {offset}"))?;
        self.tally.add("bytes", got as u64);
        Ok(buffer.range_bytes(0..got))
    }

    /// Writes from the device, and checks the file by host reads.
    fn write_own(
        &self,
        runtime: &Runtime,
        buffer: &Buffer,
        own: &File,
        model: &mut Vec<u8>,
        rng: &mut Rng,
    ) -> Result<()> {
        let offset = rng.near_page_edge(OWN_FILE_LEN as u64 / 2) as usize;
        let most = if rng.chance(60) { 70_000 } else { OWN_FILE_LEN as u64 / 2 };
        let len = 1 + rng.below(most) as usize;
        let bytes = file::bytes(rng.next_u64() >> 8, len, 0);
        buffer.write_at(0, &bytes);
        let wrote = runtime.write(own.as_raw_fd(), Some(offset as u64), buffer.target(0), len);
        let wrote = wrote.with_context(|| format!("a write of {len} at {offset}"))?;
        ensure!(wrote == len, "a write of {len} wrote {wrote}");
        if model.len() < offset + len {
            model.resize(offset + len, 0);
        }
        model[offset..offset + len].copy_from_slice(&bytes);
        let mut now = vec![0; model.len() + 1];
        let there = own.read_at(&mut now, 0)?;
        ensure!(
            there == model.len() && now[..there] == model[..],
            "after a write of {len} at {offset} the file differs"
        );
        self.tally.add("own", 1);
        self.tally.add("bytes", wrote as u64);
        Ok(())
    }

    fn append(&self, runtime: &Runtime, buffer: &Buffer, me: u64, sequence: u64, rng: &mut Rng) -> Result<()> {
        let log = OpenOptions::new().append(true).open(files::log(self.folder))?;
        let most = if rng.chance(90) { 3_000 } else { 200_000 };
        let record = files::record(me, sequence, rng.below(most) as usize);
        buffer.write_at(0, &record);
        let wrote = runtime.write(log.as_raw_fd(), None, buffer.target(0), record.len()).context("an append")?;
        ensure!(wrote == record.len(), "an append of {} wrote {wrote}", record.len());
        self.log_records.fetch_add(1, Relaxed);
        self.tally.add("log", 1);
        Ok(())
    }

    /// Frees device memory during a read: it may fail, without any other effect.
    fn free_while_reading(&self, runtime: &Runtime, device: &'static Emulated, rng: &mut Rng) -> Result<()> {
        let victim = Buffer::new(device, 4 << 20);
        let target = victim.target(0);
        let subject = files::open(&files::steady(self.folder, 4), false)?;
        let pause = Duration::from_micros(rng.below(800));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(pause);
                drop(victim);
            });
            for _ in 0..3 {
                let _ = runtime.read(subject.as_raw_fd(), Some(0), target, 4 << 20);
            }
        });
        self.tally.add("free", 1);
        Ok(())
    }

    /// The end: nothing may be leaked.
    fn check_leaks(self, descriptors: usize) -> Result<()> {
        on_close_range(0, u32::MAX);
        let Worker { devices: [one, two], session_device: mover, session_runtimes: movers, runtimes, .. } = self;
        drop(runtimes);
        movers.into_iter().for_each(SessionRuntime::end);
        let devices = [one, two, mover];
        let begun = Instant::now();
        loop {
            let left: Vec<ResourceCounts> = devices.iter().map(|d| d.resources_in_use()).collect();
            let own = leak_check::thread_descriptors();
            if left.iter().all(|o| *o == ResourceCounts::default()) && own <= descriptors {
                return Ok(());
            }
            // Pins and shadow descriptors are released by workers, a little later.
            if begun.elapsed() > Duration::from_secs(60) {
                bail!("leaked: {left:?}; {own} descriptors, {descriptors} at the start");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
