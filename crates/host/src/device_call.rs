//! Whether the thread is inside a device call, whose locks it may hold: a signal handler that runs now has interrupted it.

use std::cell::Cell;

thread_local! {
    static IS_INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is inside a device call.
pub fn is_in_device_call() -> bool {
    IS_INSIDE.get()
}

/// Makes a device call, which must not unwind.
pub fn device_call<T>(body: impl FnOnce() -> T) -> T {
    let was_inside = IS_INSIDE.replace(true);
    let done = body();
    IS_INSIDE.set(was_inside);
    done
}
