//! What is done for an output before there is anything to write: on a keeper, while the program goes on.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex};

use rangemap::RangeSet;
use spinio_io::OwnFile;
use spinio_plan::shape::Piece;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::survey::{Array, Surveyed, survey};
use super::{GATHER, lock};

/// Old bytes: the stripe, where in it, what stands there.
type Old = (u64, u64, Vec<u8>);

#[derive(Default)]
struct State {
    running: usize,
    ready: Vec<Old>,
    waiting: u64,
    read: u64,
    surveyed: Option<Surveyed>,
    beyond: bool,
}

/// The preparation of an output.
#[derive(Default)]
pub(super) struct Preparation {
    state: Mutex<State>,
    changed: Condvar,
}

/// Counts a preparation until it is over, however that comes.
struct Running(Arc<Preparation>);

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.0.state).running -= 1;
        self.0.changed.notify_all();
    }
}

impl Preparation {
    /// Prepares a range on a keeper. The file's lease must be held, and nothing be written, until
    /// [`Preparation::finish`].
    pub(super) fn begin(self: &Arc<Self>, file: &Arc<OwnFile>, array: Array, range: Range<u64>) {
        lock(&self.state).running += 1;
        let running = Running(Arc::clone(self));
        // Where no keeper can be had, the closure goes, and with it the count.
        file.start(move |fd| {
            // What cannot be prepared is written as it comes.
            let _ = running.0.prepare(fd, array, range);
        });
    }

    fn prepare(&self, fd: Fd, array: Array, range: Range<u64>) -> Result<(), Errno> {
        let surveyed = survey(fd, array, range.clone(), true)?;
        let shape = surveyed.shape.clone();
        {
            let mut state = lock(&self.state);
            state.beyond |= surveyed.beyond;
            state.surveyed = Some(surveyed);
        }
        let _ = linux::fadvise(fd, 0, 0, linux::Advice::Random);
        for span in shape.cut(range) {
            let Piece::Part(stripe) = span.piece else { continue };
            for gap in [stripe..span.range.start, span.range.end..stripe + array.width] {
                if gap.is_empty() || lock(&self.state).waiting + (gap.end - gap.start) > GATHER {
                    continue;
                }
                // Beyond the end of the file there are zeros.
                let mut old = vec![0; (gap.end - gap.start) as usize];
                let got = linux::read_at(fd, &mut old, gap.start)? as u64;
                let mut state = lock(&self.state);
                state.read += got;
                state.waiting += old.len() as u64;
                state.ready.push((stripe, gap.start - stripe, old));
            }
        }
        Ok(())
    }

    /// Waits until nothing is being prepared; what was read since it was last asked.
    pub(super) fn finish(&self) -> Vec<Old> {
        let mut state = lock(&self.state);
        while state.running > 0 {
            state = self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        state.waiting = 0;
        std::mem::take(&mut state.ready)
    }

    /// Bytes read so far.
    pub(super) fn read(&self) -> u64 {
        lock(&self.state).read
    }

    /// The range that was looked at last.
    pub(super) fn surveyed(&self) -> Option<Surveyed> {
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
