//! What the daemon says goes to standard error, which may be gone: a terminal that was closed, a pipe without a reader.
//! `eprintln!` panics then, and a supervisor that panics ends the mount.

use std::fmt::Arguments;
use std::io::Write;

/// As `eprintln!`, for one line of the daemon.
macro_rules! report {
    ($($words:tt)*) => { $crate::report::line(format_args!($($words)*)) };
}
pub(crate) use report;

pub(crate) fn line(words: Arguments<'_>) {
    let _ = writeln!(std::io::stderr(), "spinio gaia: {words}");
}
