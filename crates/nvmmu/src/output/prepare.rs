//! Preparation of an output before its first write: on a shadow worker, while the program runs.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rangemap::RangeSet;
use spinio_host::lock;
use spinio_io::{ParityArray, ShadowFile, StripeMap};
use spinio_plan::stripe_layout::StripePart;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKey};

use super::stripes::MAX_GATHERED;
use super::survey::survey;

/// Old bytes: the stripe, the position in it, the bytes.
type OldBytes = (u64, u64, Vec<u8>);

#[derive(Default)]
struct PreparationState {
    running: usize,
    /// All ranges that were hinted, and those of them not processed yet.
    hinted: RangeSet<u64>,
    pending: RangeSet<u64>,
    /// Ranges that were read and not taken yet.
    preread: RangeSet<u64>,
    hint_count: u64,
    ready: Vec<OldBytes>,
    ready_bytes: u64,
    finishing: bool,
    bytes_read: u64,
    stripe_map: Option<StripeMap>,
    past_end: bool,
}

impl PreparationState {
    /// The parts of a range that are neither hinted nor read.
    fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let not_hinted = self.hinted.gaps(range);
        not_hinted.flat_map(|gap| self.preread.gaps(&gap).collect::<Vec<_>>()).collect()
    }
}

/// The preparation of an output.
#[derive(Default)]
pub(super) struct Preparation {
    state: Mutex<PreparationState>,
    changed: Condvar,
}

/// Counts a preparation until it has ended, also by a panic.
struct RunGuard {
    preparation: Arc<Preparation>,
    counted: bool,
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        if self.counted {
            lock(&self.preparation.state).running -= 1;
            self.preparation.changed.notify_all();
        }
    }
}

impl RunGuard {
    /// The next range that was hinted, once no further ones arrive; `None` ends the work.
    fn next(&mut self) -> Option<Range<u64>> {
        let mut state = lock(&self.preparation.state);
        let mut last_count = 0;
        while !state.pending.is_empty() && !state.finishing && state.hint_count != last_count {
            last_count = state.hint_count;
            state = self.preparation.changed.wait_timeout(state, HINT_DELAY).unwrap_or_else(PoisonError::into_inner).0;
        }
        let next = state.pending.first().cloned();
        match &next {
            Some(next) => state.pending.remove(next.clone()),
            None => {
                // While the lock is held, so that a later hint starts a new run.
                self.counted = false;
                state.running -= 1;
                self.preparation.changed.notify_all();
            }
        }
        next
    }
}

/// Hints come one after another: what the next ones cover need not be read for the first.
const HINT_DELAY: Duration = Duration::from_millis(1);

impl Preparation {
    /// Prepares a range on a shadow worker. The file's lease must be in place, and nothing be written, until
    /// [`Preparation::finish`].
    pub(super) fn begin(self: &Arc<Self>, file: &Arc<ShadowFile>, array: ParityArray, range: Range<u64>) {
        let mut state = lock(&self.state);
        state.hinted.insert(range.clone());
        state.pending.insert(range);
        state.hint_count += 1;
        if state.running > 0 {
            return;
        }
        state.running += 1;
        drop(state);
        let mut running = RunGuard { preparation: Arc::clone(self), counted: true };
        // Without a shadow worker the closure is dropped, and the count with it.
        file.spawn(move |fd| {
            while let Some(range) = running.next() {
                // What cannot be prepared is written without preparation.
                let _ = running.preparation.prepare(fd, array, range);
            }
        });
    }

    /// The hints so far were only a guess and are dropped. If they were kept, they would absorb the hints that replace
    /// them, and nothing would be read for the stripes that those cover.
    pub(super) fn discard_guess(&self) {
        let mut state = lock(&self.state);
        state.hinted.clear();
        state.pending.clear();
    }

    /// A range was written: from now on its bytes are old ones, which a partial stripe may need.
    pub(super) fn note_written(&self, range: Range<u64>) {
        lock(&self.state).hinted.remove(range);
    }

    fn prepare(&self, fd: Fd, array: ParityArray, range: Range<u64>) -> Result<(), Errno> {
        let (surveyed, beyond) = survey(fd, array, range.clone(), true)?;
        let shape = surveyed.layout.clone();
        {
            let mut state = lock(&self.state);
            state.past_end |= beyond;
            state.stripe_map = Some(surveyed);
        }
        let _ = linux::fadvise(fd, 0, 0, linux::Advice::Random);
        for span in shape.split(range) {
            let StripePart::Partial(stripe) = span.part else { continue };
            let gaps: Vec<_> = lock(&self.state).gaps(&(stripe..stripe + array.width));
            for gap in gaps {
                if lock(&self.state).ready_bytes + (gap.end - gap.start) > MAX_GATHERED {
                    continue;
                }
                // Past the end of the file there are zeros.
                let mut old = vec![0; (gap.end - gap.start) as usize];
                let read_len = linux::read_fully_at(fd, &mut old, gap.start)? as u64;
                let mut state = lock(&self.state);
                state.bytes_read += read_len;
                state.ready_bytes += old.len() as u64;
                state.ready.push((stripe, gap.start - stripe, old));
                state.preread.insert(gap);
            }
        }
        Ok(())
    }

    /// Waits until nothing is being prepared; returns what was read since the last call.
    pub(super) fn finish(&self) -> Vec<OldBytes> {
        let mut state = lock(&self.state);
        while state.running > 0 {
            // The downloads have started: no further hints are waited for.
            state.finishing = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.finishing = false;
        state.ready_bytes = 0;
        state.preread.clear();
        std::mem::take(&mut state.ready)
    }

    /// Bytes read so far.
    pub(super) fn read(&self) -> u64 {
        lock(&self.state).bytes_read
    }

    /// The stripe map that was found last.
    pub(super) fn take_stripe_map(&self) -> Option<StripeMap> {
        lock(&self.state).stripe_map.take()
    }

    /// Whether space was reserved past the end of the file since the last call.
    pub(super) fn take_past_end(&self) -> bool {
        std::mem::take(&mut lock(&self.state).past_end)
    }
}

/// A file, and the ranges that a session wrote in it.
type WrittenRanges = (FileKey, RangeSet<u64>);

/// Where the last sessions wrote: a program that repeats its loop writes there again.
static LAST_WRITES: Mutex<Vec<WrittenRanges>> = Mutex::new(Vec::new());

/// The number of files, and of ranges of each, that are remembered.
const MAX_FILES: usize = 32;
const MAX_RANGES: usize = 64;

/// Where downloads into a file will probably be written.
pub(super) fn last_writes(file: FileKey) -> Vec<Range<u64>> {
    // In a forked child it may stay locked forever: the child does without hints.
    let Ok(all) = LAST_WRITES.try_lock() else { return Vec::new() };
    all.iter().find(|(f, _)| *f == file).map(|(_, ranges)| ranges.iter().cloned().collect()).unwrap_or_default()
}

/// Records where downloads into a file were written.
pub(super) fn record_writes(file: FileKey, ranges: &RangeSet<u64>) {
    let Ok(mut all) = LAST_WRITES.try_lock() else { return };
    all.retain(|(f, _)| *f != file);
    if ranges.is_empty() || ranges.iter().nth(MAX_RANGES).is_some() {
        return;
    }
    if all.len() >= MAX_FILES {
        all.remove(0);
    }
    all.push((file, ranges.clone()));
}
