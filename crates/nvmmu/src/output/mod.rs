//! The file that a session writes its results to.
//!
//! ```text
//!   begin(output) ─> geometry, lease         shadow worker: reservation, stripes, filler        (prepare.rs)
//!        GPU kernel runs                       │
//!   download ──> full stripes ────────────────── device -> bounce ──┐
//!            ──> partial stripes ─ gathered ───── in memory ────────┼── O_DIRECT, each request full stripes
//!            ──> unaligned bytes ───────────────> page cache        │   (no old byte is read)
//!   end ───────> gathered stripes, with their filler ───────────────┘                         (requests.rs)
//! ```
//!
//! Why: RAID-5 and -6 compute the parity of a full-stripe write from the written bytes. For a partial stripe they first
//! read the rest, or the old bytes and the old parity, and the writer waits. A degraded array reads even more. Those
//! reads can be made while the GPU kernel runs: the *other bytes of the stripe* (the filler) are read beforehand, and
//! the full stripe is written.
//!
//! That writes bytes which are not the session's. So there are two guarantees:
//!
//! - **Always**: the output is correct, whatever other processes do to the file. Full stripes of the session's own
//!   bytes are written directly, everything else as any program would write it.
//! - **Preread** stripes, with filler, are written only while no other process has the file open (a write lease, taken
//!   before the old bytes are read, and checked before each request that writes them back), and only where a stripe is
//!   one extent of this file on the device (FIEMAP). A process that opens the file meanwhile waits until a write in
//!   flight has completed; from then on no filler is written. The session's report gives the cause.
//!
//! Known flaws: a full stripe is written for a single byte in it, which is more to write than a read-modify-write;
//! gathered bytes are not in the file before the session ends or is flushed; the preparation reads through the page
//! cache.

mod prepare;
mod requests;
mod stripes;
mod survey;

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spinio_device::DeviceAddr;
use spinio_io::settings::NvmmuStripes;
use spinio_io::{ParityArray, Part, Runtime, ShadowFile, StripeMap, Target, WriteLease};
use spinio_plan::stripe_layout::StripePart;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKey};

use self::prepare::Preparation;
use self::stripes::{MAX_GATHERED, Stripe};
use self::survey::survey;
use crate::files::{c_path, open_output};
use crate::moves::write_all;
use crate::{Error, OutputMode, Report};

/// Bytes per request: the most that md handles as one.
const REQUEST_BYTES: u64 = 1 << 20;

/// How the output is written.
enum WriteMode {
    /// As any program would; with the cause.
    Passthrough(String),
    /// In stripes; `lease` while no other process has the file open, else the cause why there is none.
    Striped { array: ParityArray, lease: Option<Arc<WriteLease>>, lease_missing: String },
}

/// The output of a session.
pub(crate) struct Output {
    runtime: &'static Runtime,
    path: PathBuf,
    file: Arc<ShadowFile>,
    identity: FileKey,
    mode: WriteMode,
    preparation: Arc<Preparation>,
    stripe_map: Option<StripeMap>,
    /// The hints are only what the last session wrote.
    hints_are_guesses: bool,
    stripes: stripes::Stripes,
    /// Where downloads were written: the hints of the next session on this file.
    written: rangemap::RangeSet<u64>,
    past_end: bool,
    full_stripe_bytes: u64,
    filler_bytes: u64,
    unaligned_bytes: u64,
}

impl Output {
    /// Opens the output and begins to prepare it.
    pub(crate) fn begin(
        runtime: &'static Runtime,
        path: &Path,
        assumed_array: Option<ParityArray>,
    ) -> Result<Output, Error> {
        let open_error = |errno| Error::from_errno(errno, "open the output", path);
        let file = Arc::new(open_output(runtime, path).map_err(open_error)?);
        let identity = file.run_blocking(|fd| linux::fstat(fd).map(|s| s.key())).map_err(open_error)?;
        let mode = choose_mode(runtime, &file, assumed_array);
        let preparation = Arc::new(Preparation::default());
        let mut output = Output {
            runtime,
            path: path.to_owned(),
            file,
            identity,
            mode,
            preparation,
            stripe_map: None,
            hints_are_guesses: false,
            stripes: stripes::Stripes::default(),
            written: rangemap::RangeSet::new(),
            past_end: false,
            full_stripe_bytes: 0,
            filler_bytes: 0,
            unaligned_bytes: 0,
        };
        for range in prepare::last_writes(identity) {
            output.hint_range(range.start, range.end - range.start);
        }
        output.hints_are_guesses = true;
        Ok(output)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a path refers to this file now.
    pub(crate) fn is_same_file(&self, path: &Path) -> bool {
        c_path(path).and_then(|name| linux::key_of_path(&name)) == Ok(self.identity)
    }

    /// Prepares a range on a shadow worker.
    pub(crate) fn hint_range(&mut self, offset: u64, len: u64) {
        let WriteMode::Striped { array, lease: Some(_), .. } = &self.mode else { return };
        if std::mem::take(&mut self.hints_are_guesses) {
            self.preparation.discard_guess();
        }
        if let Some(end) = offset.checked_add(len).filter(|&end| len > 0 && i64::try_from(end).is_ok()) {
            self.preparation.begin(&self.file, *array, offset..end);
        }
    }

    /// The file for a stream-ordered download, if it can be written as any other file.
    pub(crate) fn passthrough_file(&mut self, offset: u64, len: u64) -> Option<Arc<ShadowFile>> {
        matches!(self.mode, WriteMode::Passthrough(_)).then(|| {
            self.unaligned_bytes += len;
            self.written.insert(offset..offset + len);
            Arc::clone(&self.file)
        })
    }

    /// Writes a range of device memory, or gathers it.
    pub(crate) fn write(&mut self, from: Target, offset: u64, len: u64) -> Result<(), Error> {
        let range = offset..offset + len;
        self.written.insert(range.clone());
        let WriteMode::Striped { array, .. } = self.mode else {
            self.unaligned_bytes += len;
            return write_all(self.runtime, self.file.fd(), from, offset, len).map_err(|e| self.download_error(&e));
        };
        self.take_preread();
        // Before anything is gathered: where nothing can be written, each download fails, and leaves nothing in memory.
        if self.stripes.memory() > MAX_GATHERED && self.stripes.new_bytes() > 0 {
            self.write_partial_stripes()?;
        }
        self.preparation.note_written(range.clone());
        let shape = self.survey(array, range.clone())?;
        let device = |at: u64| Target { addr: DeviceAddr(from.addr.0 + (at - offset)), ..from };
        let (mut requests, mut full_ranges, mut unaligned_ranges) = (Vec::new(), Vec::new(), Vec::new());
        for span in shape.split(range) {
            let bytes = span.range.end - span.range.start;
            match span.part {
                StripePart::Full => {
                    self.flush_crossing(&span.range)?;
                    full_ranges.push(span.range.clone());
                    let parts = shape.split_requests(span.range, REQUEST_BYTES);
                    requests
                        .extend(parts.map(|r| (r.start, Part::Device(device(r.start), (r.end - r.start) as usize))));
                }
                StripePart::Partial(stripe) => {
                    self.flush_crossing(&(stripe..stripe + array.width))?;
                    let stripe_range = span.range.start - stripe..span.range.end - stripe;
                    let buffer = self.stripes.at(stripe, array.width);
                    let copied = self.runtime.fetch(device(span.range.start), buffer.slice_mut(stripe_range.clone()));
                    copied.map_err(|e| Error::from_io(&e, "download", &self.path))?;
                    self.stripes.at(stripe, array.width).mark_new(stripe_range);
                }
                StripePart::Unaligned => {
                    if self.stripes.overlaps(&span.range) {
                        // These bytes were part of a stripe before: the older bytes are written first.
                        self.write_partial_stripes()?;
                        self.stripes.drop_overlapping(&span.range);
                    }
                    self.unaligned_bytes += bytes;
                    unaligned_ranges.push(span.range);
                }
            }
        }
        // Their bytes are older than those of the full stripes, which replace them once they are written.
        let replaced = self.stripes.take_overlapping(&full_ranges);
        let complete = self.stripes.take(Stripe::is_all_new);
        let no_new_requests = requests.is_empty();
        match self.write_stripes(requests, &complete) {
            Ok(()) => self.full_stripe_bytes += full_ranges.iter().map(|range| range.end - range.start).sum::<u64>(),
            Err(error) => {
                // The bytes of earlier downloads are not lost with this one.
                self.stripes.put_back(replaced);
                self.write_back(complete)?;
                if !no_new_requests {
                    return Err(error);
                }
            }
        }
        // After the stripes: where blocks are smaller than pages, a stripe may end within a page, and the kernel would
        // first have to write back that page.
        for range in unaligned_ranges {
            let (from, len) = (device(range.start), range.end - range.start);
            write_all(self.runtime, self.file.fd(), from, range.start, len).map_err(|e| self.download_error(&e))?;
        }
        Ok(())
    }

    /// Ensures that no stripe in memory crosses a border of a range. If one does, the file's extents have changed since
    /// that stripe was begun. Its bytes are older than the next ones, so they are written first.
    fn flush_crossing(&mut self, range: &Range<u64>) -> Result<(), Error> {
        if self.stripes.straddles(range) {
            self.write_partial_stripes()?;
            self.stripes.drop_overlapping(range);
        }
        Ok(())
    }

    /// Writes all gathered bytes.
    pub(crate) fn flush(&mut self) -> Result<(), Error> {
        self.take_preread();
        if self.stripes.new_bytes() > 0 {
            self.write_partial_stripes()?;
        }
        if std::mem::take(&mut self.past_end)
            && let WriteMode::Striped { lease: Some(lease), .. } = &self.mode
        {
            // Space past the end is released to the file system.
            let file = Arc::clone(&self.file);
            let _ = lease.with_lease(|| file.run_blocking(|fd| linux::ftruncate(fd, linux::fstat(fd)?.size)));
            self.stripe_map = None;
        }
        prepare::record_writes(self.identity, &self.written);
        Ok(())
    }

    /// As [`Output::flush`], and waits until the storage has it.
    pub(crate) fn sync(&mut self) -> Result<(), Error> {
        self.flush()?;
        self.file.run_blocking(linux::fdatasync).map_err(|e| Error::from_errno(e, "sync", &self.path))
    }

    /// Lets other processes, and this one, open the file.
    pub(crate) fn release_lease(&mut self) {
        self.stop_filling("the session itself read the file");
    }

    pub(crate) fn report(&mut self) -> Report {
        self.take_preread();
        let mode = match &self.mode {
            WriteMode::Passthrough(why) => OutputMode::Passthrough(why.clone()),
            WriteMode::Striped { lease: Some(_), .. } => OutputMode::Preread,
            WriteMode::Striped { lease_missing: why_not, .. } => OutputMode::Aligned(why_not.clone()),
        };
        Report {
            uploaded: 0,
            downloaded: 0,
            mode,
            full_stripe: self.full_stripe_bytes,
            filler: self.filler_bytes,
            unaligned: self.unaligned_bytes,
            read_ahead: self.preparation.read(),
        }
    }

    /// The stripes of a range, surveyed if they are not known.
    fn survey(
        &mut self,
        array: ParityArray,
        range: Range<u64>,
    ) -> Result<spinio_plan::stripe_layout::StripeLayout, Error> {
        if let Some(surveyed) = &self.stripe_map
            && surveyed.range.start <= range.start
            && range.end <= surveyed.range.end
        {
            return Ok(surveyed.layout.clone());
        }
        let exclusive = matches!(&self.mode, WriteMode::Striped { lease: Some(_), .. });
        let (start, end) = (range.start, range.end);
        let surveyed = self.file.run_blocking(move |fd| survey(fd, array, start..end, exclusive));
        // If the file system does not report extents, all bytes are unaligned.
        let (surveyed, beyond) = surveyed.unwrap_or_else(|_| {
            let shape = spinio_plan::stripe_layout::StripeLayout::new(array.width, array.phase, []);
            (StripeMap { range: start..end, layout: shape }, false)
        });
        self.past_end |= beyond;
        let shape = surveyed.layout.clone();
        self.stripe_map = Some(surveyed);
        Ok(shape)
    }

    /// Waits for the preparation, and takes the old bytes that it read.
    fn take_preread(&mut self) {
        let WriteMode::Striped { array, lease: Some(_), .. } = &self.mode else { return };
        let width = array.width;
        for (stripe, at, old) in self.preparation.finish() {
            // A stripe in memory that straddles this one has bytes that the file did not have when it was read.
            if !self.stripes.straddles(&(stripe..stripe + width)) {
                self.stripes.at(stripe, width).fill_preread(at, &old);
            }
        }
        self.past_end |= self.preparation.take_past_end();
        if let Some(surveyed) = self.preparation.take_stripe_map() {
            self.stripe_map.get_or_insert(surveyed);
        }
    }

    /// From now on no filler is written.
    fn stop_filling(&mut self, reason: &str) {
        if let WriteMode::Striped { lease, lease_missing: why_not, .. } = &mut self.mode
            && lease.is_some()
        {
            self.preparation.finish();
            *lease = None;
            reason.clone_into(why_not);
            self.stripes.drop_preread();
        }
    }

    fn download_error(&self, error: &spinio_io::Error) -> Error {
        Error::from_io(error, "download", &self.path)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        // Nothing may read the file, or hold the lease, once the session is gone.
        self.preparation.finish();
    }
}

fn set_direct(fd: Fd, on: bool) -> Result<(), Errno> {
    let flags = linux::status_flags(fd)?;
    let direct = linux::O_DIRECT as i32;
    linux::set_status_flags(fd, if on { flags | direct } else { flags & !direct })
}

/// Chooses how a file is written.
fn choose_mode(runtime: &Runtime, file: &Arc<ShadowFile>, assumed_array: Option<ParityArray>) -> WriteMode {
    let setting = runtime.settings().nvmmu_stripes;
    if setting == NvmmuStripes::Passthrough {
        return WriteMode::Passthrough("SPINIO_NVMMU_STRIPES=passthrough".to_owned());
    }
    let detect_array = || {
        let stack = file.block_stack().map_err(|e| e.to_string())?;
        ParityArray::from_stack(&stack).map_err(|why| why.to_string())
    };
    let array = match assumed_array.map_or_else(detect_array, Ok) {
        Ok(array) => array,
        Err(why) => return WriteMode::Passthrough(why),
    };
    let direct = file.run_blocking(|fd| {
        set_direct(fd, true)?;
        set_direct(fd, false)
    });
    if let Err(errno) = direct {
        return WriteMode::Passthrough(format!("no direct I/O there: {errno}"));
    }
    let lease = match setting {
        NvmmuStripes::Aligned => Err("SPINIO_NVMMU_STRIPES=aligned".to_owned()),
        _ => file.take_write_lease().map_err(|errno| match errno {
            Errno::AGAIN => "another process has the file open".to_owned(),
            Errno::ACCESS => "only the owner of a file gets a lease on it".to_owned(),
            errno => format!("no lease: {errno}"),
        }),
    };
    match lease {
        Ok(lease) => WriteMode::Striped { array, lease: Some(Arc::new(lease)), lease_missing: String::new() },
        Err(why_not) => WriteMode::Striped { array, lease: None, lease_missing: why_not },
    }
}
