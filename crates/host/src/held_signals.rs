//! Signals that wait until a read of a local disk is over, as they do in the kernel's own read.
//!
//! ```text
//!   pread of the kernel     ─── read ───────────────────────┐ handler
//!   a read by several threads, no signal held   ── read ─┐ handler, which may jump away: the read is left half way,
//!                                                        │ its buffers stay in use for good
//!   signals held            ─── read ───┬───────────────────┐ handler
//!                                       └ every 20 ms: a signal without a handler ends the process at once
//! ```
//!
//! The kernel waits for a disk without looking at signals, but for those that end the process. Where a read can hang (a
//! server), or a program asked to be polled (cancel.rs), nothing is held. A wait for the device may be long too, since copies
//! run after what the program has queued: it polls while signals are held (device/src/wait.rs), and so does one for a bounce
//! buffer.
//!
//! A call of the program has more to undo than the read, such as the thread's state of cancellation. So inside
//! [`deliver_after`] handlers run at its end, where a jump leaves nothing behind. A part of the call that may wait without
//! bound delivers them first ([`deliver_now`]).
//!
//! A thread that waits or has more to do asks by itself whether a signal is to end the process
//! (`linux::deliver_default_signals`), which does nothing where none is held.

use std::cell::Cell;
use std::mem::ManuallyDrop;

use spinio_sys::linux::{SignalGuard, hold_signals_by, holds_signals, holds_signals_still};

thread_local! {
    /// Whether the thread is inside `deliver_after`; also after a handler has jumped out of it.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
    /// Signals that are held until its end. Without a destructor, which a signal handler could not register.
    static KEPT: Cell<Option<ManuallyDrop<SignalGuard>>> = const { Cell::new(None) };
}

/// Runs a call of the program; handlers of signals that it held run when all that `body` has changed is restored.
///
/// A call inside another is one of a handler, and ends with the signals that are held when it begins. So is, for all that
/// is known here, the next call after a handler has jumped out of one. Only signals that such a jump has let through are held no
/// more.
pub fn deliver_after<T>(body: impl FnOnce() -> T) -> T {
    let are_held = holds_signals_still();
    let outer = (IN_CALL.replace(true), KEPT.take().filter(|_| are_held));
    let done = body();
    deliver_now();
    IN_CALL.set(outer.0);
    KEPT.set(outer.1);
    done
}

/// Handlers of signals that were held until the end of the call run now: what comes next may wait without bound.
pub fn deliver_now() {
    if let Some(guard) = KEPT.take().map(ManuallyDrop::into_inner) {
        release(guard);
    }
}

/// Handlers run as soon as the guard is gone, and may jump away: nothing is left to do here then.
fn release(guard: SignalGuard) {
    hold_signals_by(None);
    drop(guard);
}

/// While it lives, handlers of the program do not run on this thread; inside [`deliver_after`] until its end.
pub struct HeldSignals {
    /// Always there until it is dropped.
    guard: Option<SignalGuard>,
    /// A part of the call holds them already, and goes on doing so.
    is_nested: bool,
}

impl HeldSignals {
    /// Holds them from here on.
    pub fn hold() -> HeldSignals {
        let kept = KEPT.take().map(ManuallyDrop::into_inner);
        let is_kept = kept.is_some();
        let guard = kept.unwrap_or_else(SignalGuard::block_asynchronous);
        let is_nested = !is_kept && holds_signals() && guard.changed_nothing();
        if !is_nested {
            hold_signals_by(Some(&guard));
        }
        HeldSignals { guard: Some(guard), is_nested }
    }
}

impl Drop for HeldSignals {
    fn drop(&mut self) {
        let guard = self.guard.take().filter(|_| !self.is_nested);
        if IN_CALL.get() {
            KEPT.set(guard.map(ManuallyDrop::new));
        } else {
            guard.into_iter().for_each(release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jump_out_of_a_call_that_held_signals_ends_the_hold() {
        let before = SignalGuard::block_asynchronous();
        hold_signals_by(Some(&before));
        KEPT.set(Some(ManuallyDrop::new(SignalGuard::block_asynchronous())));
        assert!(deliver_after(holds_signals), "the call of a handler of SIGSEGV");
        assert!(holds_signals() && KEPT.take().map(|kept| KEPT.set(Some(kept))).is_some());
        // As siglongjmp does.
        drop(before);
        assert!(!deliver_after(holds_signals), "the next call after a jump");
        assert!(KEPT.take().is_none());
    }
}
