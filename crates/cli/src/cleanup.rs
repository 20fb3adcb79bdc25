//! Removes the files of a demo or an experiment when the user interrupts it: they may be many GiB. It watches from the
//! moment that there is a directory: compilers take longer than many demos.
//!
//! A signal ends a process without running a destructor, so a thread waits for the usual signals, removes the
//! files, and then ends the process as the signal would have.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::{Handle, Signals};

/// Watches until dropped.
pub struct Cleanup {
    handle: Option<Handle>,
    made: Arc<Mutex<Vec<PathBuf>>>,
}

impl Cleanup {
    /// Removes this too.
    pub fn add(&self, path: PathBuf) {
        self.made.lock().unwrap_or_else(PoisonError::into_inner).push(path);
    }
}

/// Removes these files and directories if a signal ends this process.
pub fn on_signal(made: Vec<PathBuf>) -> Cleanup {
    on_signal_after(made, || {})
}

/// The same, after a call of `before`.
pub fn on_signal_after(made: Vec<PathBuf>, before: impl FnOnce() + Send + 'static) -> Cleanup {
    let made = Arc::new(Mutex::new(made));
    let Ok(mut signals) = Signals::new([SIGHUP, SIGINT, SIGTERM]) else { return Cleanup { handle: None, made } };
    let cleanup = Cleanup { handle: Some(signals.handle()), made: made.clone() };
    let watch = move || {
        if let Some(signal) = signals.forever().next() {
            before();
            for path in std::mem::take(&mut *made.lock().unwrap_or_else(PoisonError::into_inner)) {
                let _ = if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            }
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    let _ = std::thread::Builder::new().name("cleanup".to_owned()).spawn(watch);
    cleanup
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        if let Some(handle) = &self.handle {
            handle.close();
        }
    }
}
