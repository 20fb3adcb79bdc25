//! Calls to whose thread signals come, with a handler that does nothing.

use std::os::unix::thread::JoinHandleExt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// So that a hang is a failure.
const DEADLINE: Duration = Duration::from_secs(60);

extern "C" fn handle(_: libc::c_int) {}

/// A handler without SA_RESTART: calls of Linux that wait end with EINTR.
fn set_handler() {
    // SAFETY: zeros are a valid action without flags, and the handler does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handle as *const () as usize;
        assert_eq!(libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut()), 0);
    }
}

/// Makes a call in a thread to which a signal comes each time such a time has passed, `most` at most: its result, and how long it
/// took.
pub(crate) fn call_with_signals<T: Send + 'static>(
    each: Duration,
    most: usize,
    call: impl FnOnce() -> T + Send + 'static,
) -> (T, Duration) {
    set_handler();
    let (tell, told) = mpsc::channel();
    let (finish, finished) = mpsc::channel::<()>();
    let (start, started) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let _ = start.send(());
        let begun = Instant::now();
        let _ = tell.send((call(), begun.elapsed()));
        // It can be sent signals as long as it lives.
        let _ = finished.recv();
    });
    let _ = started.recv();
    let begun = Instant::now();
    let mut sent = 0;
    while begun.elapsed() < DEADLINE {
        match told.recv_timeout(each) {
            Ok(result) => {
                drop(finish);
                thread.join().unwrap();
                return result;
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) if sent < most => {
                // SAFETY: the thread lives until `finish` is dropped.
                assert_eq!(unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) }, 0);
                sent += 1;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
    }
    panic!("the call does not return, or has panicked, after {sent} signals");
}
