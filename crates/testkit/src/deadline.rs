//! A hang becomes a failure.

use std::sync::mpsc;
use std::time::Duration;

/// Long enough for the slowest machine.
const PATIENCE: Duration = Duration::from_secs(120);

/// Runs `body`; ends the whole test program if it has not returned after two minutes, since whatever hangs would hang
/// the other tests too. A panic in the body is passed on.
pub fn within<T>(what: &str, body: impl FnOnce() -> T) -> T {
    let (done, finished) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if finished.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
                eprintln!("{what} hangs");
                std::process::abort();
            }
        });
        // Dropped on return and on panic alike.
        let _done = done;
        body()
    })
}
