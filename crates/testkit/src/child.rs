//! A forked child of a test.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::time::{Duration, Instant};

use crate::deadline::TIMEOUT;

/// Forks; the child ends with what `body` returns, which must not panic and should not print. Fails if that is not 0,
/// or if it hangs.
pub fn in_child(what: &str, body: impl FnOnce() -> i32) {
    // SAFETY: the child runs `body` and ends without unwinding into the test harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(99);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(code) };
    }
    assert!(child > 0, "fork");
    let deadline = Instant::now() + TIMEOUT;
    let mut status = 0;
    // SAFETY: asks about our own child.
    while unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } == 0 {
        if Instant::now() > deadline {
            // SAFETY: ends our own child.
            unsafe { libc::kill(child, libc::SIGKILL) };
            panic!("{what}: the child hangs");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(libc::WIFEXITED(status), "{what}: the child was killed: {status:#x}");
    assert_eq!(libc::WEXITSTATUS(status), 0, "{what}: the exit status of the child");
}
