//! Writing to standard output: an error is an error, not a panic.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Context;

/// Writes and flushes. A reader that has closed the pipe gives EPIPE, which `main` takes as success.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("Cannot write to standard output")
}
/// Writes a note to standard error. Unlike `eprint!` it does not panic where that is closed.
pub fn note(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// How this command was started, short: for commands that a text proposes.
pub fn command_name() -> String {
    // It need not be UTF-8.
    let me = std::env::args_os().next().map_or_else(|| PathBuf::from("spinio"), PathBuf::from);
    match std::env::current_dir() {
        Ok(here) => me.strip_prefix(here).unwrap_or(&me).display().to_string(),
        Err(_) => me.display().to_string(),
    }
}
