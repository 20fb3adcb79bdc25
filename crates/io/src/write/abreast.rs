//! Portions of a long write abreast, through the program's own O_DIRECT descriptor: several under way, so that storage never
//! waits for the next one.
//!
//! ```text
//!   caller    copy 0 │ copy 1 │ ... │ copy 5 │ wait for 0 │ copy 6 │ wait for 1 │ copy 7 ...
//!   helpers          └ write 0 ........... ┘              └ write 6 ........... ┘
//!                             └ write 1 .............. ┘               └ write 7 ...
//! ```
//!
//! One call after the other leaves storage idle in between: while the last requests of a call come in, while its caller
//! wakes up, and until the first of the next are on their way. Seen: 0.25 ms of every 5. And small portions in the same
//! blocks again and again take a fraction of the staging memory: two portions of 32 MiB made a first write wait 10 ms for
//! memory to be made.
//!
//! The count is an unbroken front: portions are waited for in the order of the file, and nothing counts behind the first
//! that fails or is short. But what is behind it may have reached the file. So this is only for bytes that the file has
//! already, where a write adds nothing: no end is moved, and no room can be lacking. What remains is what O_DIRECT means
//! to a host as well, whose requests are under way side by side: where storage fails, bytes behind the failure may be new.
//! Writes that go around the page cache by SPIN's own choice stay in order, since their program has not asked for that.
//!
//! Keepers write, through the program's very descriptor (`pidfd_getfd`); where a sandbox refuses that, the mates do, who see
//! the program's table. All of them may be busy, and mates even with waiting for the blocks that lie here: so what nobody
//! has begun after a while the caller writes himself.
//!
//! Known flaws:
//! - On file systems that write no block in place (btrfs, xfs where blocks are shared) room can be lacking all the same; so it
//!   can where blocks that lie behind the end of the file make up for its holes.
//! - While a server (NFS, FUSE) does not answer, one write keeps up to six of the eight keepers waiting, and two keep all;
//!   reads of other files then wait too.

use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use spinio_plan::Route;
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind};

use super::gather::Gathered;
use super::later::shared;
use super::whole::{Hand, MOST_VECTORS};
use super::{Result, Write, bound, reason};
use spinio_host::{pool::{Crew}, shadow_fd::{PrivateFd}};
use spinio_host::is_interrupted;
use spinio_host::lock;
use spinio_files::is_own;

/// Bytes of a portion. Enough for storage to be busy with; little enough for several to be under way in a part of the ring.
const PORTION: usize = 4 << 20;

/// How many are under way at most.
const ABREAST: usize = 6;

/// How long the end of the shared descriptor is waited for.
const PARTING: Duration = Duration::from_millis(20);

/// How long somebody is waited for who begins a portion.
const PATIENCE: Duration = Duration::from_millis(10);

/// Who writes, and through which descriptor.
struct Helpers<'a> {
    crew: &'a Crew,
    fd: Fd,
    /// The number is of the program's table, and has to mean this file.
    file: Option<(u64, u64)>,
    /// The program's descriptor in the keepers' table.
    shared: Option<PrivateFd>,
}

/// How far a portion is.
#[derive(Default)]
enum State {
    #[default]
    Waits,
    /// A helper writes it.
    Begun,
    Over(core::result::Result<usize, Errno>),
    /// No helper will.
    Withdrawn,
}

/// What the caller and a helper tell each other about a portion.
#[derive(Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

impl Progress {
    /// Whether a helper may begin it.
    fn begin(&self) -> bool {
        let mut state = lock(&self.state);
        let waits = matches!(*state, State::Waits);
        if waits {
            *state = State::Begun;
        }
        waits
    }

    fn end(&self, wrote: core::result::Result<usize, Errno>) {
        *lock(&self.state) = State::Over(wrote);
        self.changed.notify_one();
    }

    /// What was written, if a helper begins it in such a time; `None`: none does any more.
    fn wait(&self, patience: Duration) -> Option<core::result::Result<usize, Errno>> {
        let waits = |state: &mut State| matches!(state, State::Waits);
        let state = lock(&self.state);
        let (mut state, _) =
            self.changed.wait_timeout_while(state, patience, waits).unwrap_or_else(PoisonError::into_inner);
        loop {
            match *state {
                State::Waits => *state = State::Withdrawn,
                State::Withdrawn => return None,
                State::Over(wrote) => return Some(wrote),
                State::Begun => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// A portion that a helper writes, and its memory, which stays until he is done with it.
struct UnderWay {
    progress: Arc<Progress>,
    from: usize,
    begun: Instant,
    portion: Gathered,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let _ = self.progress.wait(Duration::ZERO);
    }
}

impl Write<'_> {
    /// Whether portions of a range may be under way side by side.
    pub(super) fn may_go_abreast(&self, range: &Range<usize>, hand: Hand) -> bool {
        let own = hand.route == Route::Direct && hand.twin.is_none() && !is_own(self.fd);
        let Some(at) = self.at.filter(|_| own && self.flags == 0 && !self.appends()) else { return false };
        let there = match self.stat.kind {
            FileKind::Block => true,
            FileKind::Regular => {
                let filled = self.stat.blocks.saturating_mul(512) >= self.stat.size;
                let end = at + range.end as u64;
                // The signal of a limit is for the thread that makes the call.
                filled && end <= self.stat.size.min(linux::file_size_limit())
            }
            FileKind::Stream => false,
        };
        // One more is being copied; and half of the memory is for others, as in any long write.
        let room = bound(self.ctx) / 2 >= ((ABREAST + 1) * PORTION) as u64;
        there && room && range.len() > 2 * PORTION
    }

    /// Those who can write; `None` if nobody can.
    fn helpers(&self) -> Option<Helpers<'_>> {
        let keepers = self.ctx.files.shadow_workers()?;
        let file = (self.stat.dev, self.stat.ino);
        if let Some(shared) = shared(self.ctx, self.fd, file) {
            return Some(Helpers { crew: keepers, fd: shared.get(), file: None, shared: Some(shared) });
        }
        let mates = self.ctx.files.workers().copy().filter(|mates| mates.shares_my_table() != Some(false))?;
        Some(Helpers { crew: mates, fd: self.fd, file: Some(file), shared: None })
    }

    /// The range, gathered portion by portion; the unbroken front that was written. `None`: nobody can help.
    pub(super) fn abreast(
        &self,
        range: &Range<usize>,
        hand: Hand,
        mut gather: impl FnMut(usize, usize) -> Result<Gathered>,
    ) -> Option<Result<usize>> {
        let mut helpers = self.helpers()?;
        let wrote = self.abreast_by(&helpers, range, hand, &mut gather);
        if helpers.shared.take().is_some()
            && let Some(keepers) = self.ctx.files.shadow_workers()
        {
            // What ends with the last descriptor (locks, say) shall end with the program's.
            keepers.await_burials(PARTING);
        }
        Some(wrote)
    }

    fn abreast_by(
        &self,
        helpers: &Helpers<'_>,
        range: &Range<usize>,
        hand: Hand,
        gather: &mut impl FnMut(usize, usize) -> Result<Gathered>,
    ) -> Result<usize> {
        let mut under_way: VecDeque<UnderWay> = VecDeque::with_capacity(ABREAST);
        // To the end of what is copied, and to the end of what is written.
        let (mut copied, mut done) = (range.start, range.start);
        let mut ended = loop {
            let next = (copied < range.end).then(|| gather(copied, PORTION));
            // While it is copied.
            if (next.is_none() || under_way.len() == ABREAST)
                && let Some(oldest) = under_way.pop_front()
            {
                match self.settle(&oldest, hand, &mut done) {
                    Ok(true) => {}
                    Ok(false) => break Ok(()),
                    Err(error) => break Err(error),
                }
            } else if next.is_none() {
                break Ok(());
            }
            let Some(next) = next else { continue };
            let begun = Instant::now();
            match next.and_then(|mut portion| portion.wait().map(|()| portion)) {
                Ok(portion) => {
                    let from = copied;
                    copied += portion.len;
                    let portion = UnderWay { progress: Arc::default(), from, begun, portion };
                    self.begin(helpers, hand, &portion);
                    under_way.push_back(portion);
                }
                Err(error) => break Err(error),
            }
            if copied < range.end && is_interrupted() {
                break Ok(());
            }
        };
        for portion in under_way {
            if let (Err(error), true) = (self.settle(&portion, hand, &mut done), ended.is_ok()) {
                ended = Err(error);
            }
        }
        match ended {
            Err(error) if done == range.start => Err(error),
            _ => Ok(done - range.start),
        }
    }

    /// Waits for a portion, and adds what was written of it to the front if it goes on from there. Whether that was all of it.
    fn settle(&self, portion: &UnderWay, hand: Hand, done: &mut usize) -> Result<bool> {
        if portion.from != *done {
            return Ok(false);
        }
        let at = self.at.map(|at| at + portion.from as u64);
        let by_helper = portion.progress.wait(PATIENCE);
        let wrote = by_helper
            .unwrap_or_else(|| self.call(hand, &portion.portion.vectors, at))
            .map_err(|e| self.kernel_error(e, *done))?;
        let why = reason(portion.portion.is_pinned(), hand.reason);
        self.ctx.files.stats().piece(&self.watch, hand.route, why, *done as u64, wrote as u64, portion.begun);
        *done += wrote;
        Ok(wrote == portion.portion.len)
    }

    /// Lets a helper write a portion.
    fn begin(&self, helpers: &Helpers<'_>, hand: Hand, portion: &UnderWay) {
        let (kernel, fd, route) = (self.ctx.files.sys(), helpers.fd, hand.route);
        let at = self.at.map(|at| at + portion.from as u64);
        let mut vectors = portion.portion.vectors.clone();
        vectors.truncate(MOST_VECTORS);
        let file = helpers.file;
        let write = move || match file {
            Some(key) if !kernel.names(fd, key) => Err(Errno::BADF),
            // SAFETY: the memory stays until what was begun is over; host parts are the program's, for the kernel to judge.
            _ => unsafe { kernel.pwritev(route, fd, &vectors, at, 0) },
        };
        let progress = Arc::clone(&portion.progress);
        helpers.crew.start(move || {
            if progress.begin() {
                // Whatever happens, somebody waits for an answer.
                progress.end(catch_unwind(AssertUnwindSafe(write)).unwrap_or(Err(Errno::IO)));
            }
        });
    }
}
