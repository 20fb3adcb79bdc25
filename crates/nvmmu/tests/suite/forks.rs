//! Processes that fork while they have a session.

use std::fs;
use std::time::{Duration, Instant};

use crate::common::{Buffer, bytes, runtime};
use spinio_nvmmu::Direction::Download;
use spinio_nvmmu::{ErrorKind, Session};

/// What a forked child ends with; none if it hangs.
fn in_child(body: impl FnOnce() -> i32) -> Option<i32> {
    // SAFETY: the child runs `body` and ends without unwinding into the test harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(99);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork");
    let patience = Instant::now() + Duration::from_secs(60);
    let mut status = 0;
    // SAFETY: asks about our own child.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > patience {
            // SAFETY: ends our own child.
            unsafe { libc::kill(child, libc::SIGKILL) };
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Some(libc::WEXITSTATUS(status))
}

#[test]
fn a_session_stays_with_the_process_that_began_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let device = Buffer::holding(&bytes(5000, 2));
    let mut session = Session::begin_as_if_striped(runtime(), &path, 65536, 0).unwrap();
    session.move_range(&path, device.at(0), 0, 2000, Download).unwrap();
    let mut theirs = Some(session);
    let code = in_child(|| {
        let Some(mut session) = theirs.take() else { return 1 };
        let told =
            session.move_range(&path, device.at(0), 0, 5000, Download).is_err_and(|e| e.kind == ErrorKind::NoSession);
        session.expect(0, 100);
        let flushed = session.flush().is_ok();
        session.report();
        drop(session);
        i32::from(!told || flushed)
    });
    assert_eq!(code, Some(0));
    let mut session = theirs.take().unwrap();
    session.move_range(&path, device.at(2000), 2000, 3000, Download).unwrap();
    session.end().unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes(5000, 2));
}
