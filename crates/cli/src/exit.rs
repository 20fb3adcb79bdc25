//! Exit codes, and the error that carries one.
//!
//! They are an interface: docs/command.md and `--help` list them, scripts depend on them.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;

use anyhow::Context;

use crate::output;

/// How the command ends. `spinio run` ends as its program does, see the module `run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Exit {
    /// All done.
    Ok = 0,
    /// A file, device or program failed; the message says which.
    Failed = 1,
    /// The command line is invalid.
    Usage = 2,
    /// Bytes on the device differ from the file's.
    Different = 3,
    /// Something that is needed is missing: a compiler, the library, a device.
    Missing = 4,
    /// `run` refused (`--strict`) or could not do its own part.
    Refused = 125,
    /// `run` found the program but could not start it.
    CannotStart = 126,
    /// `run` did not find the program.
    NotFound = 127,
}

/// The meaning of the codes, at the end of `spinio --help` and of that of each command that does not run a program.
macro_rules! codes {
    () => {
        "\
Exit status:
  0    done
  1    a file, device or program failed (the message on stderr names it)
  2    the command line is not understood
  3    bytes on the device differ from the file's
  4    something needed is not here: a C compiler, libspinio.so, a device"
    };
}

/// The same for a command that ends as its program does.
macro_rules! programs_codes {
    () => {
        "  125  refused by --strict, or spinio itself failed
  126  the program could not be started
  127  the program was not found"
    };
}

/// At the end of `spinio --help`.
pub const HELP: &str = concat!(
    codes!(),
    "\n`spinio run` ends with the status of its program, 128+n if signal n ended it, or\n",
    programs_codes!(),
    "\n\nEnvironment: SPINIO_* (docs/settings.md), SPINIO_LIBRARY (path of libspinio.so), NO_COLOR."
);

/// For most commands.
pub const CODES: &str = codes!();

/// For `calibrate`.
pub const CALIBRATE: &str =
    concat!(codes!(), "\nWith --check 1 also means that the model does not fit, and 4 that there is none.");

/// For `run`.
pub const RUN: &str = concat!(
    "Exit status: the program's, 128+n if signal n ended it, or\n",
    "  2    the command line is not understood\n",
    programs_codes!()
);

/// For `trace`.
pub const TRACE: &str = concat!(codes!(), "\nWith a program: its status, as of `spinio run`.");

/// An error with its exit code.
#[derive(Debug)]
pub struct ExitError {
    /// The code.
    pub exit: Exit,
    text: String,
}

impl fmt::Display for ExitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for ExitError {}

/// An error with a code and a text.
pub fn error(exit: Exit, text: impl fmt::Display) -> anyhow::Error {
    anyhow::Error::new(ExitError { exit, text: text.to_string() })
}

/// The code of an error: its own, or 1.
pub fn code(error: &anyhow::Error) -> Exit {
    error.chain().find_map(|e| e.downcast_ref::<ExitError>()).map_or(Exit::Failed, |c| c.exit)
}

/// Prints help, a version, or an error of the command line. A failed write is an error.
pub fn of_clap(error: &clap::Error) -> anyhow::Result<u8> {
    let printed = error.print().and_then(|()| std::io::stdout().flush());
    output::written(printed).context("Cannot write to standard output")?;
    Ok(error.exit_code() as u8)
}

/// The status of the command `command` with this result, after its error was printed.
pub fn report(command: &str, done: anyhow::Result<u8>) -> ExitCode {
    match done {
        Ok(code) => ExitCode::from(code),
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("{command}: {error:#}\n"));
            ExitCode::from(code(&error) as u8)
        }
    }
}

/// Whether the reader of the output has closed the pipe (`spinio doctor | head`): not an error. EPIPE of a socket or of another
/// file is one.
pub fn is_closed_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|e| e.downcast_ref::<std::io::Error>()?.get_ref());
    causes.any(|cause| cause.is::<output::ClosedPipe>())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn only_the_closed_pipe_of_the_output_is_no_error() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let mut write = || ours.write_all(b"text");
        let error = |done: std::io::Result<()>| done.context("Cannot write").unwrap_err();
        assert_eq!(write().unwrap_err().kind(), std::io::ErrorKind::BrokenPipe);
        assert!(!is_closed_pipe(&error(write())));
        assert!(is_closed_pipe(&error(output::written(write())).context("Cannot print")));
        assert!(!is_closed_pipe(&error(output::written(Err(std::io::ErrorKind::StorageFull.into())))));
    }
}
