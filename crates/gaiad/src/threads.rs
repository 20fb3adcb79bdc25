//! Threads of the server other than its workers.
//!
//! They are io-flushers, since they hold locks that a handler of a WRITE needs while they allocate memory: getting that
//! memory must not wait for a WRITE.

use rustix::io::Errno;

/// Starts one.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
    let body = move || {
        let _ = rustix::process::configure_io_flusher_behavior(true);
        body();
    };
    let spawned = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    spawned.map(drop).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::AGAIN))
}
