//! `cargo x miri`: what needs no kernel, run by an interpreter that notices undefined behaviour, and arithmetic that
//! overflows.
//!
//! It interprets no system calls of ours and no device; so it runs the planner, parsers, and those parts of the runtime
//! that are memory alone. Property tests run a few cases each: it is some hundred times slower than a processor.

use anyhow::Result;

use crate::tools;

/// Package, what of it, and what takes too long.
const PARTS: [(&str, &[&str], &[&str]); 4] = [
    ("spinio-plan", &["--lib"], &[]),
    ("spinio-python", &["--test", "header"], &["--skip", "a_deep_header", "--skip", "many_tensors"]),
    ("spinio-io", &["--lib"], &["batch::list"]),
    ("spinio-device", &["--lib"], &["first_fit::tests::a_region"]),
];

pub(crate) fn run() -> Result<()> {
    let nightly = || {
        let mut rustup = tools::command("rustup");
        // Of the toolchain that runs us, not of that one.
        for name in ["CARGO", "RUSTC", "RUSTDOC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"] {
            rustup.env_remove(name);
        }
        rustup.args(["run", "nightly", "cargo", "miri"]);
        rustup
    };
    if !nightly().arg("--version").output().is_ok_and(|o| o.status.success()) {
        println!("skipped: no nightly toolchain with miri here (rustup toolchain install nightly -c miri -c rust-src)");
        return Ok(());
    }
    for (package, what, filter) in PARTS {
        let mut miri = nightly();
        // Property tests look for files of earlier failures, and take their seeds from the machine.
        miri.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "2");
        tools::run(miri.args(["test", "--quiet", "-p", package]).args(what).arg("--").args(filter))?;
    }
    Ok(())
}
