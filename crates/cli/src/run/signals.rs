//! Forwards signals sent to `spinio run --stats` to the program.
//!
//! Ctrl-C and Ctrl-\ are sent to every process of the terminal's foreground group, the program among them: those are
//! ignored here, because the program would get them twice. The Linux kernel is their sender, wherever standard input is;
//! the same signal from a process (`kill -INT`) came to this process alone and is forwarded.
//!
//! Handlers are installed before the program is started: otherwise a signal in between would end this process, and no
//! process would forward signals to the program. The program inherits no handler, and a signal that the parent of this
//! process ignored (`nohup`, a shell's `trap ''`) stays ignored, in both processes.

use rustix::process::{Pid, Signal, kill_process};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::exfiltrator::WithOrigin;
use signal_hook::iterator::{Handle, SignalsInfo};
use signal_hook::low_level::siginfo::Cause;

/// Forwards until dropped.
pub struct SignalForwarder {
    handle: Option<Handle>,
    thread: Option<std::thread::JoinHandle<()>>,
}

/// Signals that wait for a child.
pub struct PendingSignals(Option<SignalsInfo<WithOrigin>>);

/// Collects signals from now on, for a child that is about to be started.
pub fn catch() -> PendingSignals {
    let ignored = ignored_mask();
    let wanted = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2]
        .into_iter()
        .filter(|signal| ignored & (1 << (signal - 1)) == 0);
    PendingSignals(SignalsInfo::new(wanted).ok())
}

/// Starts forwarding to a child process, pending signals first.
pub fn forward_to(child: u32, caught: PendingSignals) -> SignalForwarder {
    let nothing = SignalForwarder { handle: None, thread: None };
    let (Some(mut signals), Some(pid)) = (caught.0, Pid::from_raw(child as i32)) else { return nothing };
    let handle = signals.handle();
    let thread = std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        for origin in signals.forever() {
            let from_terminal = origin.cause == Cause::Kernel;
            if matches!(origin.signal, SIGINT | SIGQUIT) && from_terminal {
                continue;
            }
            if let Some(signal) = Signal::from_named_raw(origin.signal) {
                // It may have ended meanwhile.
                let _ = kill_process(pid, signal);
            }
        }
    });
    SignalForwarder { handle: Some(handle), thread: thread.ok() }
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
