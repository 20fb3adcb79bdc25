//! Uses of a pinned file under a model checker: the pins are unpinned once, by one thread, while no use is active, and
//! no thread waits forever.
//!
//! A pin is a cell: a use reads it, unpinning writes it, and loom fails if the two may overlap.

#![cfg_attr(loom, expect(unsafe_code, reason = "loom hands out raw pointers"))]

use std::sync::Arc as Shared;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::ref_gate::{RefGate, UnpinSignal};

struct Pin(UnsafeCell<u32>);

// SAFETY: the cell is what is being checked; loom reports an access that the protocol does not order.
unsafe impl Send for Pin {}
// SAFETY: as above.
unsafe impl Sync for Pin {}

/// As a read or a batch uses the pins; whether it could.
fn use_pin(gate: &RefGate<Pin>) -> bool {
    if !gate.acquire() {
        return false;
    }
    let pin = gate.find(|_| true).unwrap_or_else(|| {
        let pin = Shared::new(Pin(UnsafeCell::new(0)));
        gate.add(Shared::clone(&pin));
        pin
    });
    // SAFETY: loom checks that no thread writes it meanwhile.
    pin.0.with(|value| unsafe { assert_eq!(*value, 0, "a pin is used that was unpinned") });
    gate.release(false);
    // Dropped after the release, as a `PinGuard` drops it.
    drop(pin);
    true
}

/// Acts as the unpinner of one file, and then as the lease watcher.
fn unpin(gate: &RefGate<Pin>, signal: &UnpinSignal) {
    let pins = loop {
        signal.wait();
        assert!(gate.is_closing());
        if let Some(pins) = gate.take_unused() {
            break pins;
        }
    };
    for pin in &pins {
        // SAFETY: loom checks that no thread reads it meanwhile.
        pin.0.with_mut(|value| unsafe { *value += 1 });
    }
    gate.set_unpinned();
    assert!(gate.is_unpinned() && gate.is_closing());
    gate.set_released();
}

fn check(work: impl Fn(Arc<RefGate<Pin>>, &UnpinSignal) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || {
        let signal = Shared::new(UnpinSignal::default());
        work(Arc::new(RefGate::new(Shared::clone(&signal))), &signal);
    });
}

#[test]
fn pins_are_taken_after_last_release() {
    check(|gate, signal| {
        let others: Vec<_> = (0..2)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || use_pin(&gate))
            })
            .collect();
        gate.begin_closing();
        unpin(&gate, signal);
        assert!(!use_pin(&gate), "a use began after the pins were unpinned");
        others.into_iter().for_each(|other| assert!(other.join().is_ok()));
    });
}

#[test]
fn concurrent_closers_unpin_once() {
    check(|gate, signal| {
        let reader = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || use_pin(&gate))
        };
        let writer = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || {
                gate.begin_closing();
                gate.wait_released();
            })
        };
        gate.begin_closing();
        unpin(&gate, signal);
        writer.join().unwrap();
        reader.join().unwrap();
    });
}

#[test]
fn waiter_returns_when_released_or_mapped() {
    check(|gate, signal| {
        assert!(gate.acquire());
        let mapper = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.mark_mapping())
        };
        let waiter = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.wait_released_unless_mapped())
        };
        gate.begin_closing();
        assert!(gate.take_unused().is_none(), "taken while it is mapped");
        assert!(!waiter.join().unwrap(), "released, though it is mapped");
        mapper.join().unwrap();
        gate.release(true);
        unpin(&gate, signal);
        assert!(gate.wait_released_unless_mapped());
    });
}
