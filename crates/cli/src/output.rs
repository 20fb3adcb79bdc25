//! Writing to standard output: an error is an error, not a panic.

use std::fmt;
use std::io::{self, Write};
use std::path::PathBuf;

use anyhow::Context;

/// The reader of the output has closed the pipe: the cause of an error of [`written`].
#[derive(Debug)]
pub struct ClosedPipe;

impl fmt::Display for ClosedPipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("its reader has closed the pipe")
    }
}

impl std::error::Error for ClosedPipe {}

/// The result of a write to standard output or error: EPIPE of it is [`ClosedPipe`], that of other files is not.
pub fn written<T>(done: io::Result<T>) -> io::Result<T> {
    done.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => io::Error::new(io::ErrorKind::BrokenPipe, ClosedPipe),
        _ => error,
    })
}

/// Standard output, with the errors of [`written`].
#[derive(Debug)]
pub struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        written(io::stdout().write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        written(io::stdout().flush())
    }
}

/// Writes and flushes. A reader that has closed the pipe is an error that `main` takes as success.
pub fn print(text: &str) -> anyhow::Result<()> {
    Stdout.write_all(text.as_bytes()).and_then(|()| Stdout.flush()).context("Cannot write to standard output")
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
