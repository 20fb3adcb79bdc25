//! Uses of a pinned file under a model checker: the pins are unpinned once, by one thread, while no use is active, and
//! no thread waits forever.
//!
//! A pin is a cell: a use reads it, unpinning writes it, and loom fails if the two may overlap.

#![cfg_attr(loom, expect(unsafe_code, reason = "loom hands out raw pointers"))]

use std::sync::Arc as Shared;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use crate::ref_gate::RefGate;

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

/// Begins to close and, if it is the first to do so, acts as the unpinner and then as the lease watcher.
fn close_gate(gate: &RefGate<Pin>) -> usize {
    if !gate.begin_closing() {
        gate.wait_released();
        return 0;
    }
    let pins = gate.wait_and_take();
    for pin in &pins {
        // SAFETY: loom checks that no thread reads it meanwhile.
        pin.0.with_mut(|value| unsafe { *value += 1 });
    }
    gate.set_unpinned();
    assert!(gate.is_unpinned() && gate.is_closing());
    gate.set_released();
    1
}

fn check(work: impl Fn(Arc<RefGate<Pin>>) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || work(Arc::new(RefGate::new())));
}

#[test]
fn pins_are_taken_after_last_release() {
    check(|gate| {
        let others: Vec<_> = (0..2)
            .map(|_| {
                let gate = Arc::clone(&gate);
                thread::spawn(move || use_pin(&gate))
            })
            .collect();
        assert_eq!(close_gate(&gate), 1);
        assert!(!use_pin(&gate), "a use began after the pins were unpinned");
        others.into_iter().for_each(|other| assert!(other.join().is_ok()));
    });
}

#[test]
fn concurrent_closers_unpin_once() {
    check(|gate| {
        let reader = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || use_pin(&gate))
        };
        let writer = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || close_gate(&gate))
        };
        let closed = close_gate(&gate);
        assert_eq!(closed + writer.join().unwrap(), 1);
        reader.join().unwrap();
    });
}

#[test]
fn waiter_returns_when_released_or_mapped() {
    check(|gate| {
        assert!(gate.acquire());
        let mapper = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.mark_mapping())
        };
        let waiter = {
            let gate = Arc::clone(&gate);
            thread::spawn(move || gate.wait_released_unless_mapped())
        };
        assert!(gate.begin_closing());
        assert!(!waiter.join().unwrap(), "released, though it is mapped");
        mapper.join().unwrap();
        gate.release(true);
        assert!(gate.wait_and_take().is_empty());
        gate.set_released();
        assert!(gate.wait_released_unless_mapped());
    });
}
