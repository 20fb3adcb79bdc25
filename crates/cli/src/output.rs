//! Writing to standard output: an error is an error, not a panic.

use std::io::Write;

use anyhow::Context;

/// Writes and flushes. A reader that has closed the pipe gives EPIPE, which `main` takes as success.
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("Cannot write to standard output")
}
