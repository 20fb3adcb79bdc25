//! NVMMU sessions, while other threads open and write the same output files.
//!
//! ```text
//!   file      session's ......│ rival's │ unused ......│ session's │ rival's ....      new for each session
//!   stripes   │         │         │         │         │         │         │          some contain bytes of all three
//! ```
//!
//! No byte has two writers. So at the end each byte is known, however the lease of the session was broken, and
//! whichever of its stripes were written as full stripes. The rival writes as any program would, or is a session
//! itself.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use spinio_device::StreamId;
use spinio_device::emulated::Emulated;
use spinio_io::settings::NvmmuStripes;
use spinio_io::{Runtime, Settings};
use spinio_nvmmu::{Direction, OutputMode, Report, Session, Ticket};
use spinio_testkit::{Buffer, Rng, file};

use crate::files::{self, STEADY};
use crate::versioned;
use crate::worker::Worker;

/// The largest output.
const LEN: u64 = 2 << 20;

/// The largest upload, which follows the output in the buffer.
const UPLOAD: u64 = 300_000;

/// Stripes as if an array were under the file.
const WIDTH: u64 = 3 << 14;

/// A runtime for sessions, which need `&'static`, that is nevertheless dropped at the end of a worker.
pub(crate) struct SessionRuntime(NonNull<Runtime>);

// SAFETY: a runtime is shared by threads.
unsafe impl Send for SessionRuntime {}
// SAFETY: as above.
unsafe impl Sync for SessionRuntime {}

impl SessionRuntime {
    pub(crate) fn new(nvmmu: NvmmuStripes) -> SessionRuntime {
        let runtime = Runtime::new(Settings { nvmmu_stripes: nvmmu, bounce_limit: 16 << 20, ..Settings::default() });
        SessionRuntime(NonNull::from(Box::leak(Box::new(runtime))))
    }

    fn runtime(&self) -> &'static Runtime {
        // SAFETY: alive until `end`, when no session is left.
        unsafe { self.0.as_ref() }
    }

    /// Every session has ended.
    pub(crate) fn end(self) {
        // SAFETY: leaked by `new`, and no longer in use.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// A thread's output, and its expected contents.
pub(crate) struct Output {
    path: PathBuf,
    model: Vec<u8>,
    queue: StreamId,
}

impl Output {
    pub(crate) fn new(folder: &Path, me: u64, device: &Emulated) -> Result<Output> {
        let path = folder.join(format!("output-{me}"));
        Ok(Output { path, model: Vec::new(), queue: device.new_stream().context("a queue")? })
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The writer of each range of a file.
struct FileShares {
    session: Vec<Range<u64>>,
    rival: Vec<Range<u64>>,
}

impl FileShares {
    fn assign(rng: &mut Rng) -> FileShares {
        let (mut shares, mut at) = (FileShares { session: Vec::new(), rival: Vec::new() }, 0);
        let most = *rng.choose(&[10_000, 70_000, 400_000]);
        while at < LEN {
            let end = (at + 1 + rng.below(most)).min(LEN);
            match rng.below(5) {
                0 | 1 => shares.session.push(at..end),
                2 | 3 => shares.rival.push(at..end),
                _ => {}
            }
            at = end;
            if shares.session.len() >= 12 {
                break;
            }
        }
        shares
    }
}

/// Records a write in the model.
fn fill(model: &mut Vec<u8>, shares: &[Range<u64>], bytes: &[u8]) {
    for range in shares {
        let (start, end) = (range.start as usize, range.end as usize);
        model.resize(model.len().max(end), 0);
        model[start..end].copy_from_slice(&bytes[start..end]);
    }
}

impl Worker<'_> {
    /// A session that writes a part of the file, concurrently with a rival that writes another part.
    pub(crate) fn session(&self, output: &mut Output, rng: &mut Rng) -> Result<()> {
        if output.model.is_empty() || rng.chance(10) {
            output.model = file::bytes(rng.next_u64() >> 8, rng.below(LEN) as usize, 0);
            std::fs::write(&output.path, &output.model)?;
        }
        let shares = FileShares::assign(rng);
        let session_bytes = file::bytes(rng.next_u64() >> 8, LEN as usize, 0);
        let rival_bytes = file::bytes(rng.next_u64() >> 8, LEN as usize, 0);
        let runtime = rng.choose(&self.session_runtimes).runtime();
        let path = &output.path;
        let (mut ours, mut others) = (Rng::new(rng.next_u64()), Rng::new(rng.next_u64()));
        let how = rng.below(4);
        let report = std::thread::scope(|scope| {
            let (shares, mine, theirs) = (&shares, &session_bytes, &rival_bytes);
            let rival = scope.spawn(move || {
                let late = *others.choose(&[2_000, 10_000, 50_000]);
                std::thread::sleep(Duration::from_micros(others.below(late)));
                match how {
                    0 => Ok(()),
                    1 => self.moves(runtime, path, (&shares.rival, theirs), None, &mut others).map(drop),
                    _ => write(path, &shares.rival, theirs, &mut others),
                }
            });
            let queue = Some(output.queue);
            let report = self.moves(runtime, path, (&shares.session, mine), queue, &mut ours);
            let rivaled = rival.join().unwrap_or_else(|_| bail!("a rival panicked"));
            rivaled.context("the rival").and(report)
        })?;
        fill(&mut output.model, &shares.session, &session_bytes);
        if how != 0 {
            fill(&mut output.model, &shares.rival, &rival_bytes);
        }
        let now = std::fs::read(path)?;
        ensure!(now.len() == output.model.len(), "an output of {} bytes, not {}", now.len(), output.model.len());
        let wrong = now.iter().zip(&output.model).position(|(seen, expected)| seen != expected);
        if let Some(at) = wrong {
            let of = |shares: &[Range<u64>]| shares.iter().any(|range| range.contains(&(at as u64)));
            let whose = match (of(&shares.session), of(&shares.rival)) {
                (true, _) => "the session's",
                (_, true) => "the rival's",
                _ => "unused",
            };
            bail!("a wrong byte at {at} of an output, {whose}; rival {how}; {report:?}");
        }
        self.tally.add("sessions", 1);
        self.tally.add("parted", u64::from(matches!(&report.mode, OutputMode::Aligned(why) if why.contains("opened"))));
        self.tally.add("neighbours", report.filler);
        Ok(())
    }

    /// Downloads into several ranges of a file, and uploads of others between them.
    fn moves(
        &self,
        runtime: &'static Runtime,
        path: &Path,
        (shares, bytes): (&[Range<u64>], &[u8]),
        queue: Option<StreamId>,
        rng: &mut Rng,
    ) -> Result<Report> {
        let buffer = Buffer::new(self.session_device, (LEN + UPLOAD) as usize);
        buffer.write_at(0, bytes);
        let at = |offset: u64| buffer.addr().offset(offset).0 as *mut std::ffi::c_void;
        let mut session = match rng.below(4) {
            0 => Session::begin(runtime, Some(path)),
            _ => Session::begin_with_stripes(runtime, path, WIDTH, 8192),
        }?;
        for share in shares {
            if rng.chance(60) {
                session.hint_range(share.start, share.end - share.start);
            }
        }
        // Simulates the time of a GPU kernel.
        std::thread::sleep(Duration::from_micros(rng.below(2000)));
        let mut under_way: Vec<Ticket> = Vec::new();
        for share in shares {
            let (mut offset, down) = (share.start, Direction::Download);
            while offset < share.end {
                let len = (1 + rng.below(200_000)).min(share.end - offset);
                let moved = match queue.filter(|_| rng.chance(50)) {
                    Some(queue) => {
                        under_way.push(session.move_async(path, at(offset), offset, len, down, queue)?);
                        len
                    }
                    None => session.move_range(path, at(offset), offset, len, down)?,
                };
                ensure!(moved == len, "a download of {len} moved {moved}");
                self.tally.add("bytes", len);
                offset += len;
            }
            match rng.below(40) {
                0..5 => session.flush()?,
                5..10 => self.upload(&mut session, &buffer, queue, rng)?,
                10 => {
                    // The session itself must see the written bytes, although it no longer has exclusive access.
                    let len = (share.end - share.start).min(UPLOAD);
                    session.move_range(path, at(LEN), share.start, len, Direction::Upload)?;
                    let seen = buffer.range_bytes(LEN as usize..(LEN + len) as usize);
                    let expected = &bytes[share.start as usize..][..len as usize];
                    ensure!(seen == expected, "{len} bytes at {} were not uploaded as downloaded", share.start);
                }
                _ => {}
            }
        }
        if rng.chance(30) {
            under_way.iter().try_for_each(|ticket| ticket.wait().map(drop))?;
        }
        Ok(session.end()?)
    }

    /// An upload of a file that does not change.
    fn upload(&self, session: &mut Session, buffer: &Buffer, queue: Option<StreamId>, rng: &mut Rng) -> Result<()> {
        let n = rng.below(STEADY);
        let (path, len) = (files::steady(self.folder, n), 1 + rng.below(UPLOAD));
        let offset = rng.near_page_edge(files::steady_len(n));
        let to = buffer.addr().offset(LEN).0 as *mut std::ffi::c_void;
        let got = match queue.filter(|_| rng.chance(50)) {
            Some(queue) => session.move_async(&path, to, offset, len, Direction::Upload, queue)?.wait()?,
            None => session.move_range(&path, to, offset, len, Direction::Upload)?,
        };
        let expect = (files::steady_len(n) - offset).min(len);
        ensure!(got == expect, "steady-{n}: an upload of {got} bytes at {offset}, not {expect}");
        let wrong = files::first_bad_steady(offset, &buffer.range_bytes(LEN as usize..(LEN + got) as usize));
        ensure!(wrong.is_none(), "steady-{n}: a wrong byte at {wrong:?}, in an upload of {len} at {offset}");
        self.tally.add("bytes", got);
        Ok(())
    }
}

/// Writes a share as any program would. The session must not block it.
fn write(path: &Path, shares: &[Range<u64>], bytes: &[u8], rng: &mut Rng) -> Result<()> {
    // Opened several times: each may break a lease.
    for shares in shares.chunks(1 + rng.below(8) as usize) {
        let subject = versioned::open_for_write(path, false, rng.chance(20))?;
        for range in shares {
            subject.write_all_at(&bytes[range.start as usize..range.end as usize], range.start)?;
        }
        if rng.chance(20) {
            subject.sync_all()?;
        }
    }
    Ok(())
}
