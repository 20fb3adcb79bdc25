//! Pinned files and batches, while the mutator opens pinned files for writing.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use spinio_batch::{Arg, Batches, ReadArrays, ReadOp};
use spinio_device::emulated::Emulated;
use spinio_io::{PinError, Runtime};
use spinio_testkit::{Buffer, Rng};

use crate::files::{self, CHANGING, CHANGING_LEN, STEADY};
use crate::versioned::{self, EDITIONS, EditionLog};
use crate::worker::Worker;

/// One of the files, and its allowed contents.
#[derive(Clone, Copy, Debug)]
enum FileChoice {
    Steady(u64),
    Changing(u64),
    Edition(u64),
}

impl FileChoice {
    fn any(rng: &mut Rng) -> FileChoice {
        match rng.below(3) {
            // The largest has more pages than the emulated device registers.
            0 => FileChoice::Steady(rng.below(STEADY - 1)),
            1 => FileChoice::Changing(rng.below(CHANGING)),
            _ => FileChoice::Edition(rng.below(EDITIONS)),
        }
    }

    fn len(self) -> u64 {
        match self {
            FileChoice::Steady(n) => files::steady_len(n),
            FileChoice::Changing(_) => CHANGING_LEN,
            FileChoice::Edition(n) => versioned::len(n),
        }
    }
}

/// An op that completed.
struct ReadPiece {
    offset: u64,
    requested: u64,
    bytes: Vec<u8>,
}

impl Worker<'_> {
    fn open(&self, which: FileChoice) -> Result<File> {
        let path = match which {
            FileChoice::Steady(n) => files::steady(self.folder, n),
            FileChoice::Changing(n) => files::changing(self.folder, n),
            FileChoice::Edition(n) => versioned::path(self.folder, n),
        };
        files::open(&path, false)
    }

    /// Runs a read, and checks every byte.
    fn check_reads(&self, which: FileChoice, read: impl FnOnce() -> Result<Vec<ReadPiece>>) -> Result<()> {
        match which {
            FileChoice::Edition(n) => {
                let (arrived, window) = EditionLog::open(self.folder, n)?.read(read)?;
                arrived.iter().try_for_each(|a| versioned::check(n, window, a.offset, a.requested, &a.bytes))
            }
            FileChoice::Changing(n) => read()?.iter().try_for_each(|a| {
                let wrong = files::first_bad_changing(a.offset, &a.bytes);
                ensure!(wrong.is_none(), "changing-{n}: a byte of no version at {wrong:?}");
                Ok(())
            }),
            FileChoice::Steady(n) => read()?.iter().try_for_each(|a| {
                let expect = a.requested.min(which.len().saturating_sub(a.offset));
                ensure!(a.bytes.len() as u64 == expect, "steady-{n}: {} bytes, not {expect}", a.bytes.len());
                let wrong = files::first_bad_steady(a.offset, &a.bytes);
                let (wanted, from) = (a.requested, a.offset);
                ensure!(wrong.is_none(), "steady-{n}: a wrong byte at {wrong:?}, in an op of {wanted} at {from}");
                Ok(())
            }),
        }
    }

    /// Pins a file, and reads it by every route for a moment. The mutator decides whether it can be pinned.
    pub(crate) fn pin_and_read(
        &self,
        runtime: &Runtime,
        device: &'static Emulated,
        buffer: &Buffer,
        rng: &mut Rng,
    ) -> Result<()> {
        let which = FileChoice::any(rng);
        let subject = self.open(which)?;
        let fd = subject.as_raw_fd();
        let held = match runtime.pin_file(fd, Some(device)) {
            Ok(_) => true,
            // Empty files are being rewritten; the emulated device registers 64 MiB at most.
            Err(PinError::OpenForWriting | PinError::NotPinned | PinError::NotRegularFile | PinError::PinRefused) => {
                false
            }
            Err(refused) => bail!("{which:?}: {refused}"),
        };
        for _ in 0..1 + rng.below(4) {
            match rng.below(3) {
                0 => self.check_reads(which, || {
                    let (offset, len) = self.range(which.len(), rng);
                    let bytes = self.read(runtime, buffer, &subject, offset, len)?;
                    Ok(vec![ReadPiece { offset, requested: len as u64, bytes }])
                })?,
                1 => self.batch_of_one(runtime, buffer, which, &subject, rng)?,
                _ if held && rng.chance(30) => match runtime.map(fd, 0, 1 + rng.below(which.len()), device) {
                    Ok(map) => {
                        let begun = Instant::now();
                        while !map.revoke_requested() && begun.elapsed() < Duration::from_millis(5) {
                            std::thread::yield_now();
                        }
                    }
                    Err(
                        PinError::OpenForWriting
                        | PinError::NotPinned
                        | PinError::NotRegularFile
                        | PinError::OutOfRange
                        | PinError::PinRefused,
                    ) => {}
                    Err(refused) => bail!("a mapping of {which:?}: {refused}"),
                },
                _ => self.batch_of_many(runtime, buffer, rng)?,
            }
        }
        if held {
            self.tally.add("hold", 1);
            // A file that is not unpinned here stays pinned until the mutator opens it.
            if rng.chance(70) {
                match runtime.unpin_file(fd) {
                    Ok(()) | Err(PinError::NotPinned) => {}
                    Err(refused) => bail!("releasing {which:?}: {refused}"),
                }
            }
        }
        Ok(())
    }

    /// A batch of one file, from arrays.
    fn batch_of_one(
        &self,
        runtime: &Runtime,
        buffer: &Buffer,
        which: FileChoice,
        subject: &File,
        rng: &mut Rng,
    ) -> Result<()> {
        let (n, len) = (1 + rng.below(600) as usize, 1 + rng.below(9_000));
        let offsets: Vec<u64> = (0..n).map(|_| rng.near_page_edge(which.len())).collect();
        let mut results = vec![0; n];
        self.check_reads(which, || {
            let many = ReadArrays {
                fd: subject.as_raw_fd(),
                offsets: Arg::Slice(&offsets),
                lens: Arg::Same(len),
                addresses: Arg::Stride(buffer.addr().0, len),
                results: &mut results,
            };
            let done = runtime.batch_file(many, &[buffer.allocation()]).context("a batch of one file")?;
            ensure!(done.failed == 0, "{} ops of {which:?} failed: {results:?}", done.failed);
            self.tally.add("bytes", done.bytes);
            let all = buffer.range_bytes(0..n * len as usize);
            let arrived = |(i, &offset): (usize, &u64)| {
                let from = i * len as usize;
                ReadPiece { offset, requested: len, bytes: all[from..from + results[i] as usize].to_vec() }
            };
            Ok(offsets.iter().enumerate().map(arrived).collect())
        })?;
        self.tally.add("batch", 1);
        Ok(())
    }

    /// A batch of ops of any length from several files.
    pub(crate) fn batch_of_many(&self, runtime: &Runtime, buffer: &Buffer, rng: &mut Rng) -> Result<()> {
        let subjects: Vec<(FileChoice, File)> = (0..1 + rng.below(4))
            .map(|_| {
                let which = FileChoice::any(rng);
                Ok((which, self.open(which)?))
            })
            .collect::<Result<_>>()?;
        let (mut pieces, mut of, mut to) = (Vec::new(), Vec::new(), 0);
        for _ in 0..rng.below(300) {
            let which = rng.below(subjects.len() as u64) as usize;
            let (offset, mut len) = self.range(subjects[which].0.len(), rng);
            if rng.chance(90) {
                len = len.min(8_000);
            }
            if to + len > buffer.len() {
                break;
            }
            let (fd, address) = (subjects[which].1.as_raw_fd(), buffer.addr().0 + to as u64);
            pieces.push(ReadOp { fd, offset, len: len as u64, address, ..ReadOp::default() });
            of.push(which);
            to += len;
        }
        // Every file has its own window, and all include the batch.
        let numbers = |which| match which {
            FileChoice::Edition(n) => Some(EditionLog::open(self.folder, n)),
            _ => None,
        };
        let before: Vec<u64> = subjects
            .iter()
            .map(|(which, _)| numbers(*which).map_or(Ok(0), |numbers| Ok(numbers?.read(|| Ok(()))?.1.oldest)))
            .collect::<Result<_>>()?;
        let done = runtime.batch(&mut pieces).context("a batch")?;
        ensure!(done.failed == 0, "{} ops failed: {pieces:?}", done.failed);
        self.tally.add("bytes", done.bytes);
        for (number, (which, _)) in subjects.iter().enumerate() {
            let arrived = || {
                let ours = pieces.iter().zip(&of).filter(|(_, of)| **of == number);
                let arrived = ours.map(|(p, _)| {
                    let from = (p.address - buffer.addr().0) as usize;
                    let bytes = buffer.range_bytes(from..from + p.result as usize);
                    ReadPiece { offset: p.offset, requested: p.len, bytes }
                });
                Ok(arrived.collect::<Vec<_>>())
            };
            match *which {
                FileChoice::Edition(n) => {
                    let (arrived, mut window) = EditionLog::open(self.folder, n)?.read(arrived)?;
                    window.oldest = before[number];
                    arrived.iter().try_for_each(|a| versioned::check(n, window, a.offset, a.requested, &a.bytes))?;
                }
                _ => self.check_reads(*which, arrived)?,
            }
        }
        self.tally.add("batch", 1);
        Ok(())
    }

    /// Frees device memory during a batch: ops may fail, without any other effect.
    pub(crate) fn free_during_batch(
        &self,
        runtime: &Runtime,
        device: &'static Emulated,
        held: bool,
        rng: &mut Rng,
    ) -> Result<()> {
        let victim = Buffer::new(device, 4 << 20);
        let subject = self.open(FileChoice::Steady(4))?;
        let fd = subject.as_raw_fd();
        let held = held && runtime.pin_file(fd, Some(device)).is_ok();
        let piece = |i: u64| ReadOp {
            fd,
            offset: i * 7919 * 13 % (15 << 20),
            len: 4096,
            address: victim.addr().0 + 4096 * i,
            ..ReadOp::default()
        };
        let mut pieces: Vec<ReadOp> = (0..1024).map(piece).collect();
        let pause = Duration::from_micros(rng.below(3_000));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(pause);
                drop(victim);
            });
            for _ in 0..3 {
                // Refused as a whole, or op by op, or completed in time.
                let _ = runtime.batch(&mut pieces);
            }
        });
        if held {
            let _ = runtime.unpin_file(fd);
        }
        self.tally.add("free", 1);
        Ok(())
    }
}
