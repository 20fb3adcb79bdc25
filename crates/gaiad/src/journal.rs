//! The journal: requests that must not be executed twice.
//!
//! ```text
//!   claim ──> BEGUN (request number, note) ──execute──> DONE (the reply) ──reply──> FREE
//!                │ crash                                   │ crash
//!                ▼ the request is sent again               ▼ the request is sent again
//!             executed again; an error that says           the stored reply
//!             "already done" is success
//! ```
//!
//! After a crash of the server the kernel sends each unanswered request again. Most can be repeated (reads, writes at
//! an offset, attributes). Those that change names cannot: `mkdir` would fail with EEXIST. While such a request is
//! pending the kernel keeps its directories locked, so nothing else changed these names in between; what the names look
//! like now is what the first execution left.
//!
//! A slot whose request was answered just before the crash is not sent again: [`Journal::drop_unclaimed`] frees it once
//! all requests that are sent again have arrived.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use crate::state::{SLOT_WORDS, StateMemory};

/// Words of a slot.
mod word {
    pub(super) const STATE: usize = 0;
    pub(super) const REQUEST: usize = 1;
    pub(super) const NOTE: usize = 2;
    /// Errno of the reply, and its length.
    pub(super) const RESULT: usize = 3;
    pub(super) const REPLY: usize = 4;
}

const FREE: u64 = 0;
const BEGUN: u64 = 1;
const DONE: u64 = 2;

/// Bytes of the longest reply of a request in the journal: an entry and an open file.
const REPLY_BYTES: usize = (SLOT_WORDS - word::REPLY) * 8;

/// The journal.
#[derive(Debug)]
pub struct Journal {
    state: Arc<StateMemory>,
    slots: Mutex<Slots>,
}

#[derive(Debug, Default)]
struct Slots {
    free: Vec<u32>,
    /// Of an earlier server, by request.
    past: HashMap<u64, u32>,
}

/// What an earlier server did about a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Past {
    /// Nothing.
    None,
    /// Began, with this note; whether it took effect is unknown.
    Begun(u64),
    /// Executed it; this was the reply.
    Done(Result<Vec<u8>, Errno>),
}

/// A slot in use; free when dropped, which is after the reply.
#[derive(Debug)]
pub struct Entry<'a> {
    journal: &'a Journal,
    slot: u32,
}

impl Journal {
    /// Uses the journal of the state memory, with what an earlier server left in it.
    pub fn attach(state: Arc<StateMemory>) -> Journal {
        let mut slots = Slots::default();
        let journal = Journal { state, slots: Mutex::default() };
        for slot in 0..(journal.state.journal().len() / SLOT_WORDS) as u32 {
            let words = journal.words(slot);
            match words[word::STATE].load(Acquire) {
                FREE => slots.free.push(slot),
                _ => drop(slots.past.insert(words[word::REQUEST].load(Relaxed), slot)),
            }
        }
        *journal.lock() = slots;
        journal
    }

    /// A slot for a request, and what an earlier server did about it.
    ///
    /// # Errors
    /// ENOMEM: none is free.
    pub fn claim(&self, request: u64) -> Result<(Entry<'_>, Past), Errno> {
        let mut slots = self.lock();
        if let Some(slot) = slots.past.remove(&request) {
            let words = self.words(slot);
            let past = match words[word::STATE].load(Acquire) {
                DONE => Past::Done(self.reply(slot)),
                _ => Past::Begun(words[word::NOTE].load(Relaxed)),
            };
            return Ok((Entry { journal: self, slot }, past));
        }
        let slot = slots.free.pop().ok_or(Errno::NOMEM)?;
        self.words(slot)[word::REQUEST].store(request, Relaxed);
        Ok((Entry { journal: self, slot }, Past::None))
    }

    /// Frees what an earlier server left and `still_needed` does not claim.
    pub fn drop_unclaimed(&self, still_needed: impl Fn(u64) -> bool) {
        let mut slots = self.lock();
        let (keep, drop) = std::mem::take(&mut slots.past).into_iter().partition(|(request, _)| still_needed(*request));
        slots.past = keep;
        for (_, slot) in drop {
            self.words(slot)[word::STATE].store(FREE, Release);
            slots.free.push(slot);
        }
    }

    fn reply(&self, slot: u32) -> Result<Vec<u8>, Errno> {
        let words = self.words(slot);
        let result = words[word::RESULT].load(Relaxed);
        let (errno, len) = ((result >> 32) as i32, (result as u32 as usize).min(REPLY_BYTES));
        if errno != 0 {
            return Err(Errno::from_raw_os_error(errno));
        }
        let stored = words[word::REPLY..].iter().take(len.div_ceil(8));
        let mut bytes: Vec<u8> = stored.flat_map(|w| w.load(Relaxed).to_ne_bytes()).collect();
        bytes.truncate(len);
        Ok(bytes)
    }

    fn words(&self, slot: u32) -> &[AtomicU64] {
        &self.state.journal()[slot as usize * SLOT_WORDS..][..SLOT_WORDS]
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry<'_> {
    /// Before the request is executed; `note` is what [`Past::Begun`] returns after a crash.
    pub fn begin(&self, note: u64) {
        let words = self.journal.words(self.slot);
        words[word::NOTE].store(note, Relaxed);
        words[word::STATE].store(BEGUN, Release);
    }

    /// After it was executed, before the reply.
    pub fn finish(&self, reply: Result<&[u8], Errno>) {
        let words = self.journal.words(self.slot);
        let result = match reply {
            Ok(bytes) if bytes.len() <= REPLY_BYTES => {
                for (word, part) in words[word::REPLY..].iter().zip(bytes.chunks(8)) {
                    let mut value = [0; 8];
                    value[..part.len()].copy_from_slice(part);
                    word.store(u64::from_ne_bytes(value), Relaxed);
                }
                bytes.len() as u64
            }
            // Not stored: it is executed again.
            Ok(_) => return,
            Err(error) => (error.raw_os_error() as u64) << 32,
        };
        words[word::RESULT].store(result, Relaxed);
        words[word::STATE].store(DONE, Release);
    }
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.journal.words(self.slot)[word::STATE].store(FREE, Release);
        self.journal.lock().free.push(self.slot);
    }
}
