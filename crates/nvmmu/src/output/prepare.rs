//! What is done for an output before there is anything to write: on a keeper, while the program goes on.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use rangemap::RangeSet;
use spinio_io::{ParityArray, ShadowFile, StripeMap};
use spinio_plan::shape::Piece;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::survey::survey;
use super::{GATHER, lock};

/// Old bytes: the stripe, where in it, what stands there.
type Old = (u64, u64, Vec<u8>);

#[derive(Default)]
struct State {
    running: usize,
    /// All that is expected, and what of it nobody has looked at yet.
    expected: RangeSet<u64>,
    asked: RangeSet<u64>,
    /// What was read and not taken yet.
    have: RangeSet<u64>,
    announced: u64,
    ready: Vec<Old>,
    waiting: u64,
    hurried: bool,
    read: u64,
    surveyed: Option<StripeMap>,
    beyond: bool,
}

impl State {
    /// What is neither expected nor read of a range.
    fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let unexpected = self.expected.gaps(range);
        unexpected.flat_map(|gap| self.have.gaps(&gap).collect::<Vec<_>>()).collect()
    }
}

/// The preparation of an output.
#[derive(Default)]
pub(super) struct Preparation {
    state: Mutex<State>,
    changed: Condvar,
}

/// Counts a preparation until it is over, however that comes.
struct Running {
    of: Arc<Preparation>,
    counted: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.counted {
            lock(&self.of.state).running -= 1;
            self.of.changed.notify_all();
        }
    }
}

impl Running {
    /// The next range that was announced, once no further ones come; `None` ends the work.
    fn next(&mut self) -> Option<Range<u64>> {
        let mut state = lock(&self.of.state);
        let mut seen = 0;
        while !state.asked.is_empty() && !state.hurried && state.announced != seen {
            seen = state.announced;
            state = self.of.changed.wait_timeout(state, GATHERING).unwrap_or_else(PoisonError::into_inner).0;
        }
        let next = state.asked.first().cloned();
        match &next {
            Some(next) => state.asked.remove(next.clone()),
            None => {
                // With the lock in hand, so that who announces from now on starts anew.
                self.counted = false;
                state.running -= 1;
                self.of.changed.notify_all();
            }
        }
        next
    }
}

/// Ranges are announced one after another: what the next ones cover need not be read for the first.
const GATHERING: Duration = Duration::from_millis(1);

impl Preparation {
    /// Prepares a range on a keeper. The file's lease must be held, and nothing be written, until
    /// [`Preparation::finish`].
    pub(super) fn begin(self: &Arc<Self>, file: &Arc<ShadowFile>, array: ParityArray, range: Range<u64>) {
        let mut state = lock(&self.state);
        state.expected.insert(range.clone());
        state.asked.insert(range);
        state.announced += 1;
        if state.running > 0 {
            return;
        }
        state.running += 1;
        drop(state);
        let mut running = Running { of: Arc::clone(self), counted: true };
        // Where no keeper can be had, the closure goes, and with it the count.
        file.spawn(move |fd| {
            while let Some(range) = running.next() {
                // What cannot be prepared is written as it comes.
                let _ = running.of.prepare(fd, array, range);
            }
        });
    }

    /// What was expected until now is not: only a guess. Left among what is asked for, it would swallow what is expected
    /// in its stead, and of stripes that it covers nothing is read.
    pub(super) fn withdraw(&self) {
        let mut state = lock(&self.state);
        state.expected.clear();
        state.asked.clear();
    }

    /// A range was written: its bytes are old ones from now on.
    pub(super) fn written(&self, range: Range<u64>) {
        lock(&self.state).expected.remove(range);
    }

    fn prepare(&self, fd: Fd, array: ParityArray, range: Range<u64>) -> Result<(), Errno> {
        let (surveyed, beyond) = survey(fd, array, range.clone(), true)?;
        let shape = surveyed.layout.clone();
        {
            let mut state = lock(&self.state);
            state.beyond |= beyond;
            state.surveyed = Some(surveyed);
        }
        let _ = linux::fadvise(fd, 0, 0, linux::Advice::Random);
        for span in shape.cut(range) {
            let Piece::Part(stripe) = span.piece else { continue };
            let gaps: Vec<_> = lock(&self.state).gaps(&(stripe..stripe + array.width));
            for gap in gaps {
                if lock(&self.state).waiting + (gap.end - gap.start) > GATHER {
                    continue;
                }
                // Beyond the end of the file there are zeros.
                let mut old = vec![0; (gap.end - gap.start) as usize];
                let got = linux::read_at(fd, &mut old, gap.start)? as u64;
                let mut state = lock(&self.state);
                state.read += got;
                state.waiting += old.len() as u64;
                state.ready.push((stripe, gap.start - stripe, old));
                state.have.insert(gap);
            }
        }
        Ok(())
    }

    /// Waits until nothing is being prepared; what was read since it was last asked.
    pub(super) fn finish(&self) -> Vec<Old> {
        let mut state = lock(&self.state);
        while state.running > 0 {
            // The downloads have come: no further announcements are waited for.
            state.hurried = true;
            self.changed.notify_all();
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.hurried = false;
        state.waiting = 0;
        state.have.clear();
        std::mem::take(&mut state.ready)
    }

    /// Bytes read so far.
    pub(super) fn read(&self) -> u64 {
        lock(&self.state).read
    }

    /// The range that was looked at last.
    pub(super) fn surveyed(&self) -> Option<StripeMap> {
        lock(&self.state).surveyed.take()
    }

    /// Whether room was reserved beyond the end of the file, since it was last asked.
    pub(super) fn went_beyond(&self) -> bool {
        std::mem::take(&mut lock(&self.state).beyond)
    }
}

/// A file, and where a session wrote in it.
type Went = ((u64, u64), RangeSet<u64>);

/// Where the last sessions wrote: a program that runs its body again writes there again.
static REMEMBERED: Mutex<Vec<Went>> = Mutex::new(Vec::new());

/// Files, and ranges of each, that are remembered.
const FILES: usize = 32;
const RANGES: usize = 64;

/// Where downloads into a file will probably go.
pub(super) fn remembered(file: (u64, u64)) -> Vec<Range<u64>> {
    // Held for ever in a forked child, perhaps: it does without.
    let Ok(all) = REMEMBERED.try_lock() else { return Vec::new() };
    all.iter().find(|(f, _)| *f == file).map(|(_, ranges)| ranges.iter().cloned().collect()).unwrap_or_default()
}

/// Where downloads into a file went.
pub(super) fn remember(file: (u64, u64), ranges: &RangeSet<u64>) {
    let Ok(mut all) = REMEMBERED.try_lock() else { return };
    all.retain(|(f, _)| *f != file);
    if ranges.is_empty() || ranges.iter().nth(RANGES).is_some() {
        return;
    }
    if all.len() >= FILES {
        all.remove(0);
    }
    all.push((file, ranges.clone()));
}
