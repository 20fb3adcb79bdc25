//! Turns a hang into a failure.

use std::sync::mpsc;
use std::time::{Duration, Instant};

/// Long enough for the slowest machine under load: only a hang takes longer.
pub const TIMEOUT: Duration = Duration::from_secs(600);

/// Waits until a condition holds; fails if it never does.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < TIMEOUT, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `body`; ends the whole test program if it has not returned after [`TIMEOUT`], since a hang would block
/// the other tests too. A panic in the body is passed on.
pub fn with_deadline<T>(what: &str, body: impl FnOnce() -> T) -> T {
    let (done, finished) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if finished.recv_timeout(TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{what} hangs");
                std::process::abort();
            }
        });
        // Dropped on return and on panic alike.
        let _done = done;
        body()
    })
}
