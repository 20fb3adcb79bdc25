//! Sockets that are ends of a granule, on either side of a connection to a program or to another net: events, and the end of the
//! other process.
//!
//! ```text
//!   armed ── the other end rings (a program) ─────────────── watch in the granule ──> RING ──> due? ──> event
//!         └─ it does not (a kernel: no GPU could wake the proxy that rings) ── each pass: due? ──> event
//!   end of the TCP or UNIX connection ──> the words that the process did not write, into its end; EOF into the line
//! ```

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use spinio_ring::Word;
use spinio_ring::granule::{self, Look, watch_for};
use spinio_ring::peer::{CONSUMED, Place, TAIL};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;
use spinio_sys::linux::channel;
use spinio_sys::linux::socket::AF_UNIX;

use super::Proxy;
use super::sockets::State;
use crate::mapped_granule::MappedGranule;
use crate::memory::Memory;

impl Proxy {
    /// It is one no more.
    pub(super) fn leave_granule(&mut self, place: Place) {
        if let Some(number) = self.shared.leave(place) {
            self.end_channel(number);
        }
    }

    /// What the socket's set is to be told now.
    pub(super) fn events_of_granule(&mut self, index: u32, place: Place) -> Option<u16> {
        let (memory, import) = (Arc::clone(&self.memory), self.import_of(place));
        let (first, words) = (self.first, words_of(&memory, import.as_deref(), place)?);
        let socket = self.sockets.at(index)?;
        let (watch, is_unix) = (socket.watch, socket.domain == AF_UNIX);
        let level = || Look::at(words, place.second, place.generation, first).level(1 << place.size_log2, is_unix);
        let due = watch.due(level());
        if due.is_some() || !watch.is_armed() {
            return due;
        }
        if !self.shared.rings(place) {
            self.looked_at.push(index);
            return None;
        }
        watch_for(words, watch.events | spinio_ring::event::ERR | spinio_ring::event::HUP);
        watch.due(level())
    }

    /// They were told: the program need not ring.
    pub(super) fn told_of_granule(&mut self, place: Place) {
        if self.shared.rings(place)
            && let Some(words) = self.memory.granule(place.pair)
        {
            watch_for(words, 0);
        }
    }

    /// Looks at the granules of armed sockets whose other end is a kernel of another net, which sends no packet: whether one was
    /// due.
    pub(super) fn look_at_granules(&mut self) -> bool {
        let count = self.looked_at.len();
        for _ in 0..count {
            if let Some(index) = self.looked_at.pop() {
                self.notify(index);
            }
        }
        self.looked_at.len() < count
    }

    /// Where kernels see a granule.
    pub(super) fn granule_address(&self, place: Place) -> u64 {
        if place.second { self.memory.granule_address(place.pair) } else { self.imports.address(place.pair) }
    }

    /// A granule of another net, to which this one has connected.
    fn import_of(&self, place: Place) -> Option<Arc<MappedGranule>> {
        if place.second { None } else { self.imports.granule(place.pair) }
    }

    /// Looks whether the socket of the other process is closed.
    pub(super) fn look_at_other_process(&mut self, index: u32, fd: Fd, place: Place) {
        match channel::look(fd) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            // It may not send here.
            Ok(1..) => self.violation(index),
            Ok(0) => {
                self.write_last_words(place);
                self.end_line(index);
            }
            Err(errno) => {
                let this = self.sockets.descriptor(index);
                self.fail_end(this, errno);
            }
        }
    }

    /// What a process has not written that has ended: its words are the proxy's now.
    fn write_last_words(&self, place: Place) {
        let import = self.import_of(place);
        let Some(words) = words_of(&self.memory, import.as_deref(), place) else { return };
        let look = Look::at(words, place.second, place.generation, self.first);
        if let Some([sent, taken]) = look.last_words(place.generation) {
            let theirs = granule::end(!place.second);
            words[theirs + TAIL].store_release(sent);
            words[theirs + CONSUMED].store_release(taken);
        }
    }

    /// Whether a socket is an end of a granule.
    pub(super) fn granule_of(&mut self, index: u32) -> Option<Place> {
        let socket = self.sockets.at(index).filter(|socket| socket.state == State::Upgraded)?;
        socket.meeting.end.as_ref().map(|end| end.place).filter(|place| place.shared)
    }
}

/// The words of the ends of a granule.
fn words_of<'a>(memory: &'a Memory, import: Option<&'a MappedGranule>, place: Place) -> Option<&'a [AtomicU64]> {
    if place.second { memory.granule(place.pair) } else { import.map(MappedGranule::words) }
}
