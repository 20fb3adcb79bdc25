//! A process that is stopped by a signal, and certainly no longer runs.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::time::Duration;

/// Stops a process, and waits until all its threads are stopped: one on another processor goes on until then.
pub fn stop_process(pid: u32) {
    send(pid, libc::SIGSTOP);
    let stopped = |task: std::fs::DirEntry| {
        // A thread that has ended is not there any more.
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_else(|_| ") T".to_owned());
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    while !std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(|task| stopped(task.unwrap())) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Lets a stopped process go on.
pub fn continue_process(pid: u32) {
    send(pid, libc::SIGCONT);
}

fn send(pid: u32, signal: i32) {
    // SAFETY: sends a signal to a process of the test.
    let sent = unsafe { libc::kill(pid.try_into().unwrap(), signal) };
    assert_eq!(sent, 0, "signal {signal} to process {pid}: {}", std::io::Error::last_os_error());
}
