//! The cases that run in the virtual machine (see `vm/README.md` for its picture).
//!
//! `spinio-vm-suite FOLDER [PART]...`: FOLDER is what `vm/guest/disks` laid out; with PARTs,
//! only cases whose name holds one of them run. A line a case, a closing line, and status 1
//! if any failed. A plain binary and not `#[test]`s: it is built on the host and run in the
//! guest, where there is no cargo.
//!
//! ```text
//!   machine   plain system calls: the ground to stand on
//!   spin      SPIN's reads into the p2pmem device
//!   user      those that need no disk of their own, as an ordinary user
//!   preload   an unmodified program that reads into it, under LD_PRELOAD
//! ```

mod case;
mod loops;
mod machine;
mod memory;
mod place;
mod preload;
mod spin;
mod user;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(folder) = args.next() else {
        eprintln!("usage: spinio-vm-suite FOLDER [PART]...");
        return ExitCode::from(2);
    };
    let only: Vec<String> = args.collect();
    let guest = place::Guest::new(&folder);
    let mut cases = Vec::new();
    if user::is_child() {
        cases.extend(spin::cases_for_users());
    } else {
        cases.extend(machine::cases());
        cases.extend(spin::cases());
        cases.extend(preload::cases());
    }
    let mut tally = case::run_all(&cases, &guest, &only);
    if !user::is_child()
        && let Err(why) = user::rerun(&folder, &only, &mut tally)
    {
        tally.failed += 1;
        println!("FAILED   user: {why:?}");
    }
    if !user::is_child() {
        tally += case::run_all(&[machine::last_case()], &guest, &only);
    }
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    ExitCode::from(u8::from(tally.failed > 0))
}
