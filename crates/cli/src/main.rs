//! The `spinio` command: all of it is in the library of this package.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    spinio_cli::main()
}
