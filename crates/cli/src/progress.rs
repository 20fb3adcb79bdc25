//! Progress of a command: nothing in its first second, then a bar; and only on a terminal.
//!
//! The second is that of the whole command, not of one of its parts: a demo of many short parts is a long wait too.

use std::sync::LazyLock;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const SHOW_AFTER: Duration = Duration::from_secs(1);
const TICK: Duration = Duration::from_millis(100);

static STARTED: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Starts the clock of this command.
pub fn start_clock() {
    LazyLock::force(&STARTED);
}

fn hidden_bar(total: Option<u64>, style: &str, what: &str) -> ProgressBar {
    let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::hidden());
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}

/// How much is done, of a known total: bytes, or items.
pub struct Progress {
    bar: ProgressBar,
    shown: bool,
}

impl Progress {
    /// Nothing is drawn before the first [`Progress::set`].
    pub fn bytes(total: u64, what: &str) -> Progress {
        let style = "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        Progress { bar: hidden_bar(Some(total), style, what), shown: false }
    }

    /// The same, of items.
    pub fn count(total: u64, what: &str) -> Progress {
        let style = "{msg} {wide_bar} {pos} of {len}, {eta} left";
        Progress { bar: hidden_bar(Some(total), style, what), shown: false }
    }

    /// The current activity.
    pub fn set_message(&self, what: &str) {
        if self.bar.message() != what {
            self.bar.set_message(what.to_owned());
        }
    }

    /// This much is done.
    pub fn set(&mut self, done: u64) {
        if !self.shown && STARTED.elapsed() >= SHOW_AFTER {
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

/// Work without a measure of progress: a thread draws for it, until this is dropped.
pub struct Spinner {
    bar: ProgressBar,
    painter: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Spinner {
    /// Nothing is drawn before the command has run for a second.
    pub fn new(what: &str) -> Spinner {
        let bar = hidden_bar(None, "{spinner} {msg}, for {elapsed}", what);
        let (done, ended) = mpsc::channel::<()>();
        let drawn = bar.clone();
        let paint = move || {
            let patience = SHOW_AFTER.saturating_sub(STARTED.elapsed());
            if ended.recv_timeout(patience) == Err(RecvTimeoutError::Timeout) {
                drawn.set_draw_target(ProgressDrawTarget::stderr());
                while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                    drawn.tick();
                }
            }
        };
        let painter = std::thread::Builder::new().name("progress".to_owned()).spawn(paint);
        Spinner { bar, painter: painter.ok().map(|thread| (done, thread)) }
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        if let Some((done, painter)) = self.painter.take() {
            drop(done);
            let _ = painter.join();
        }
        self.bar.finish_and_clear();
    }
}
