//! One direction of a socket: which call has it, how far it is, and what a program has of it in place.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError, TryLockError};

use spinio_ring::Position;
use spinio_sys::Errno;

/// A call locks it; a span keeps others out until it is given back.
#[derive(Debug)]
pub(super) struct Direction {
    side: Mutex<Side>,
    given_back: Condvar,
}

#[derive(Debug)]
pub(super) struct Side {
    /// Of memory that is shared: what was received, or sent.
    pub(super) position: Position,
    /// Bytes that the program has in place; 0: none.
    pub(super) span: usize,
    /// Those of a socket that shares no memory.
    pub(super) buffer: Vec<u8>,
}

impl Direction {
    pub(super) fn new(position: Position) -> Direction {
        Direction { side: Mutex::new(Side { position, span: 0, buffer: Vec::new() }), given_back: Condvar::new() }
    }

    /// For a call, once no other one and no span has it; EAGAIN instead if it does not wait.
    pub(super) fn lock(&self, waits: bool) -> core::result::Result<MutexGuard<'_, Side>, Errno> {
        let mut side = if waits {
            self.lock_beside_span()
        } else {
            match self.side.try_lock() {
                Ok(guard) => guard,
                Err(TryLockError::Poisoned(error)) => error.into_inner(),
                Err(TryLockError::WouldBlock) => return Err(Errno::AGAIN),
            }
        };
        while side.span > 0 {
            if !waits {
                return Err(Errno::AGAIN);
            }
            side = self.given_back.wait(side).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(side)
    }

    /// Takes the span back, of which the first `bytes` are used. EINVAL: there is none, or it is shorter.
    pub(super) fn take_back(&self, bytes: usize) -> core::result::Result<MutexGuard<'_, Side>, Errno> {
        let mut side = self.lock_beside_span();
        if bytes > side.span || side.span == 0 {
            return Err(Errno::INVAL);
        }
        side.span = 0;
        self.given_back.notify_all();
        Ok(side)
    }

    /// Once no other call has it, also if a span does: for a close, which takes spans away.
    pub(super) fn lock_beside_span(&self) -> MutexGuard<'_, Side> {
        self.side.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
