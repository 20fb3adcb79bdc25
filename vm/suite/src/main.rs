//! The cases that run in the virtual machine (see `vm/README.md` for its picture).
//!
//! `spinio-vm-suite FOLDER [PART]...`: FOLDER is what `vm/guest/disks` laid out; with PARTs,
//! only cases whose name holds one of them run. A line a case, a closing line, and status 1
//! if any failed. A plain binary and not `#[test]`s: it is built on the host and run in the
//! guest, where there is no cargo.
//!
//! ```text
//!   machine   plain system calls: the ground to stand on
//! ```

mod case;
mod machine;
mod memory;
mod place;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(folder) = args.next() else {
        eprintln!("usage: spinio-vm-suite FOLDER [PART]...");
        return ExitCode::from(2);
    };
    let only: Vec<String> = args.collect();
    let guest = place::Guest::new(folder);
    let tally = case::run_all(&machine::cases(), &guest, &only);
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    ExitCode::from(u8::from(tally.failed > 0))
}
