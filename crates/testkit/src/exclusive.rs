//! Waits until no other process has a file open.
//!
//! ```text
//!   one test:      writes a file ── closes it ────────────────── takes a lease: refused
//!   another test:            fork ──┐                                  │
//!                            child: └── has the file open ── exec      still open here
//! ```
//!
//! A child has every descriptor of its parent until it calls exec. So a file that a test has closed may still be open
//! for as long as another test of the process takes to start a program. A test that needs exclusive access to a file
//! waits for that first; a refusal afterwards is a defect.

#![cfg_attr(test, expect(unsafe_code, reason = "C calls of tests"))]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::{OnceLock, mpsc};
use std::time::{Duration, Instant};

use spinio_sys::Errno;
use spinio_sys::linux::{self, FdTableRoot};

use crate::deadline::{TIMEOUT, eventually};

/// Waits until no other process has the file open; the error says why that cannot be known: no leases on this file
/// system, or a file owned by another user.
pub fn wait_exclusive(path: &Path) -> Result<(), Errno> {
    static SHADOW_TABLE: OnceLock<FdTableRoot> = OnceLock::new();
    // In a table that no child inherits, so that the probe itself does not keep the file open.
    let shadow_table = SHADOW_TABLE.get_or_init(|| FdTableRoot::new().expect("a descriptor table"));
    let (done, answer) = mpsc::channel();
    let target = path.to_owned();
    let spawned = shadow_table.spawn("exclusive", move || {
        let _ = done.send(probe_lease(&target));
    });
    assert!(spawned, "no thread");
    let found = answer.recv().expect("an answer");
    assert_ne!(found, Err(Errno::AGAIN), "{} stays open", path.display());
    found
}

/// Waits until no process has the file open for writing. It may be open for reading, with leases.
pub fn wait_unwritten(path: &Path) {
    let file = File::open(path).expect("a file");
    eventually("a file without writers", || match linux::take_read_lease(file.as_raw_fd(), linux::gettid()) {
        Ok(()) => linux::release_lease(file.as_raw_fd()).is_ok(),
        Err(errno) => {
            assert_eq!(errno, Errno::AGAIN, "{}", path.display());
            false
        }
    });
}

fn probe_lease(path: &Path) -> Result<(), Errno> {
    let begun = Instant::now();
    let file = File::open(path).map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    loop {
        match linux::take_write_lease(file.as_raw_fd(), linux::gettid()) {
            Ok(()) => return linux::release_lease(file.as_raw_fd()),
            Err(Errno::AGAIN) if begun.elapsed() < TIMEOUT => std::thread::sleep(Duration::from_millis(1)),
            Err(errno) => return Err(errno),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering::SeqCst};

    use super::*;

    #[test]
    fn wait_exclusive_waits_for_child() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let file = File::create(&path).unwrap();
        // SAFETY: the child only waits to be ended.
        let child = unsafe { libc::fork() };
        if child == 0 {
            loop {
                // SAFETY: no memory is involved.
                unsafe { libc::pause() };
            }
        }
        drop(file);
        let child_stopped = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| match wait_exclusive(&path) {
                Ok(()) => assert!(child_stopped.load(SeqCst)),
                Err(e) => println!("skipped: no leases here: {e}"),
            });
            // Gives a wrong result time to appear.
            std::thread::sleep(Duration::from_millis(100));
            child_stopped.store(true, SeqCst);
            // SAFETY: our own child.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, core::ptr::null_mut(), 0);
            }
        });
    }
}
