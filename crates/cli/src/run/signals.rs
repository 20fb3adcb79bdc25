//! Forwards signals sent to `spinio run --stats` to the program.
//!
//! Ctrl-C and Ctrl-\ are sent to every process of the terminal's foreground group, the program among them: `run` only
//! ignores those, because the program would get them twice.
//!
//! Handlers are installed before the program is started: otherwise a signal in between would end this process, and no
//! process would forward signals to the program. The program inherits no handler, and a signal that the parent of this
//! process ignored (`nohup`, a shell's `trap ''`) stays ignored, in both processes.

use rustix::process::{Pid, Signal, getpgrp, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::{Handle, Signals};

/// Forwards until dropped.
pub struct SignalForwarder {
    handle: Option<Handle>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Signals that wait for a child.
pub struct PendingSignals(Option<Signals>);

/// Collects signals from now on, for a child that is about to be started.
pub fn catch() -> PendingSignals {
    let ignored = ignored_mask();
    let wanted = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2]
        .into_iter()
        .filter(|signal| ignored & (1 << (signal - 1)) == 0);
    PendingSignals(Signals::new(wanted).ok())
}

/// Starts forwarding to a child process, pending signals first.
pub fn forward_to(child: u32, caught: PendingSignals) -> SignalForwarder {
    let nothing = SignalForwarder { handle: None, thread: None };
    let (Some(mut signals), Some(pid)) = (caught.0, Pid::from_raw(child as i32)) else { return nothing };
    let handle = signals.handle();
    let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for number in signals.forever() {
            if matches!(number, SIGINT | SIGQUIT) && is_foreground() {
                continue;
            }
            if let Some(signal) = Signal::from_named_raw(number) {
                // It may have ended meanwhile.
                let _ = kill_process(pid, signal);
            }
        }
    });
    SignalForwarder { handle: Some(handle), thread: thread.ok() }
}

/// Whether the terminal sends its signals to the program itself.
fn is_foreground() -> bool {
    rustix::termios::tcgetpgrp(std::io::stdin()).is_ok_and(|group| group == getpgrp())
}

fn ignored_mask() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|l| l.strip_prefix("SigIgn:"));
    mask.and_then(|m| u64::from_str_radix(m.trim(), 16).ok()).unwrap_or(0)
}

impl Drop for SignalForwarder {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            handle.close();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
