//! Calls to whose thread signals come, with a handler that does nothing.

use std::os::unix::thread::JoinHandleExt;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use spinio_sys::linux;

/// So that a hang is a failure.
const DEADLINE: Duration = Duration::from_secs(300);

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

/// Whether a thread waits in ppoll, or this machine does not say: one that has not begun to wait gets a signal in vain.
fn waits_in_ppoll(tid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/self/task/{tid}/syscall"))
        .map_or(true, |call| call.starts_with(&format!("{} ", libc::SYS_ppoll)))
}

/// Makes a call in a thread to which a signal comes each time such a time has passed: its result, and how long it took. `most`: no more
/// signals than that, and only while the call waits in ppoll.
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
        let _ = start.send(linux::gettid());
        let begun = Instant::now();
        let _ = tell.send((call(), begun.elapsed()));
        // It can be sent signals as long as it lives.
        let _ = finished.recv();
    });
    let tid = started.recv().unwrap();
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
            Err(mpsc::RecvTimeoutError::Timeout) if most == usize::MAX || (sent < most && waits_in_ppoll(tid)) => {
                // SAFETY: the thread lives until `finish` is dropped.
                assert_eq!(unsafe { libc::pthread_kill(thread.as_pthread_t(), libc::SIGUSR1) }, 0);
                sent += 1;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {}
        }
    }
    panic!("the call does not return, or has panicked, after {sent} signals");
}
