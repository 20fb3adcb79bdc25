//! Users of a held file under a model checker: pins are given back once, by one, while nobody uses them, and nobody waits
//! for ever.
//!
//! A pin is a cell: who uses it reads, who gives it back writes, and loom fails where one may meet the other.

use std::sync::Arc as Shared;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

use super::users::Users;

struct Pin(UnsafeCell<u32>);

// SAFETY: the cell is what is being checked; loom reports a touch that the protocol does not order.
unsafe impl Send for Pin {}
// SAFETY: as above.
unsafe impl Sync for Pin {}

/// What a read or a batch does; whether it came in time.
fn use_it(users: &Users<Pin>) -> bool {
    if !users.enter() {
        return false;
    }
    let pin = users.find(|_| true).unwrap_or_else(|| {
        let pin = Shared::new(Pin(UnsafeCell::new(0)));
        users.add(Shared::clone(&pin));
        pin
    });
    // SAFETY: loom checks that nobody writes it meanwhile.
    pin.0.with(|value| unsafe { assert_eq!(*value, 0, "a pin that was given back is used") });
    users.leave(false);
    // Dropped behind the leaving, as a `Using` drops it.
    drop(pin);
    true
}

/// What whoever wants it back does, and then the holder and the watcher.
fn close(users: &Users<Pin>) -> usize {
    if !users.begin_closing() {
        users.await_gone();
        return 0;
    }
    let pins = users.take();
    for pin in &pins {
        // SAFETY: loom checks that nobody reads it meanwhile.
        pin.0.with_mut(|value| unsafe { *value += 1 });
    }
    users.set_bare();
    assert!(users.is_bare() && users.is_closing());
    users.set_gone();
    1
}

fn check(work: impl Fn(Arc<Users<Pin>>) + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(move || work(Arc::new(Users::new())));
}

#[test]
fn pins_go_when_the_last_user_has_left() {
    check(|users| {
        let others: Vec<_> = (0..2)
            .map(|_| {
                let users = Arc::clone(&users);
                thread::spawn(move || use_it(&users))
            })
            .collect();
        assert_eq!(close(&users), 1);
        assert!(!use_it(&users), "somebody came in after the pins had gone");
        others.into_iter().for_each(|other| assert!(other.join().is_ok()));
    });
}

#[test]
fn of_two_who_want_it_back_one_gives_it_back_and_both_go_on() {
    check(|users| {
        let reader = {
            let users = Arc::clone(&users);
            thread::spawn(move || use_it(&users))
        };
        let writer = {
            let users = Arc::clone(&users);
            thread::spawn(move || close(&users))
        };
        let closed = close(&users);
        assert_eq!(closed + writer.join().unwrap(), 1);
        reader.join().unwrap();
    });
}

#[test]
fn who_waits_for_the_end_goes_on_when_it_has_come_or_a_map_stays() {
    check(|users| {
        assert!(users.enter());
        let mapper = {
            let users = Arc::clone(&users);
            thread::spawn(move || users.become_map())
        };
        let waiter = {
            let users = Arc::clone(&users);
            thread::spawn(move || users.await_gone_unless_mapped())
        };
        assert!(users.begin_closing());
        assert!(!waiter.join().unwrap(), "gone, though it is mapped");
        mapper.join().unwrap();
        users.leave(true);
        assert!(users.take().is_empty());
        users.set_gone();
        assert!(users.await_gone_unless_mapped());
    });
}
