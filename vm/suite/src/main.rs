//! The cases that run in the virtual machine (see `vm/README.md` for a diagram).
//!
//! `spinio-vm-suite FOLDER [PART]...`: FOLDER is the directory that `vm/guest/disks` created; with PARTs,
//! only cases whose name contains one of them run. One line per case, a summary, and status 1
//! if any failed. A plain binary and not `#[test]`s: it is built on the host and run in the
//! guest, where there is no cargo.
//!
//! ```text
//!   machine   plain system calls: the basis
//!   spin      SPIN's reads into the p2pmem device
//!   stacks    both, on every block stack
//!   user      the cases that need no disk of their own, as an ordinary user
//!   nvmmu     moves on arrays with parity, and the requests to the members
//!   gaia      mounts of GAIA: CPU programs, maps of the emulated device, servers that die; tests of its daemon
//!   preload   an unmodified program that reads into it, under LD_PRELOAD
//!   after     the disks are consistent
//! ```
//!
//! With a Linux kernel that publishes no device memory only `stacks`, `nvmmu`, `gaia` and `after` have cases.

mod as_user;
mod case;
mod gaia;
mod gaia_tests;
mod loop_device;
mod machine;
mod md;
mod memory;
mod nvmmu;
mod place;
mod preload;
mod spin;
mod stacks;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let Some(folder) = args.next() else {
        eprintln!("usage: spinio-vm-suite FOLDER [PART]...");
        return ExitCode::from(2);
    };
    let only: Vec<String> = args.collect();
    let guest = place::Guest::new(&folder);
    if as_user::is_child() {
        let mut cases = spin::cases_for_users();
        cases.extend(stacks::cases_for_users());
        return closing(&case::run_all(&cases, &guest, &only));
    }
    let mut tally = case::CaseCounts::default();
    if memory::has_p2p() {
        let mut cases = machine::cases();
        cases.extend(spin::cases());
        cases.extend(preload::cases());
        tally += case::run_all(&cases, &guest, &only);
        if let Err(why) = as_user::rerun(&folder, &only, &mut tally) {
            tally.failed += 1;
            println!("FAILED   user: {why:?}");
        }
    } else {
        println!("This kernel publishes no device memory: only cases with the emulated device follow.");
    }
    let mut cases = stacks::cases();
    cases.extend(nvmmu::cases());
    cases.extend(gaia::cases());
    cases.extend(gaia_tests::cases());
    cases.extend(machine::last_cases());
    cases.extend(stacks::last_cases());
    tally += case::run_all(&cases, &guest, &only);
    closing(&tally)
}

fn closing(tally: &case::CaseCounts) -> ExitCode {
    println!("{} passed, {} failed, {} skipped", tally.passed, tally.failed, tally.skipped);
    ExitCode::from(u8::from(tally.failed > 0))
}
