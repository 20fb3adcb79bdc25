//! A progress bar that appears only when a command has run for a second, and only on a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const PATIENCE: Duration = Duration::from_secs(1);

/// Bytes done of bytes to do.
pub struct Progress {
    bar: ProgressBar,
    begun: Instant,
    shown: bool,
}

impl Progress {
    /// Starts the clock; nothing is drawn yet.
    pub fn bytes(total: u64, what: &str) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        let style =
            ProgressStyle::with_template("{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        bar.set_message(what.to_owned());
        Progress { bar, begun: Instant::now(), shown: false }
    }

    /// What is going on now.
    pub fn say(&self, what: &str) {
        if self.bar.message() != what {
            self.bar.set_message(what.to_owned());
        }
    }

    /// So many bytes are done.
    pub fn set(&mut self, done: u64) {
        if !self.shown && self.begun.elapsed() >= PATIENCE {
            // indicatif itself draws nothing where stderr is no terminal.
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
            self.shown = true;
        }
        self.bar.set_position(done);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
