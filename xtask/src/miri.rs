//! `cargo x miri`: code that makes no system calls, run by an interpreter that detects undefined behaviour, and
//! arithmetic overflow.
//!
//! It interprets neither our system calls nor a device; so it runs the planner, parsers, and those parts of the runtime
//! that only use memory. Property tests run a few cases each: it is some hundred times slower than a processor.

use anyhow::Result;

use crate::tools;

/// Package, selected tests, and arguments that exclude slow ones.
const PARTS: [(&str, &[&str], &[&str]); 8] = [
    ("spinio-plan", &["--lib"], &[]),
    ("spinio-python", &["--test", "header"], &["--skip", "deeply_nested_header", "--skip", "tensors_are_ordered"]),
    ("spinio-batch", &["--lib"], &["both_layouts_give_same_ops"]),
    ("spinio-device", &["--lib"], &["first_fit::tests::allocation_stays"]),
    ("spinio-host", &["--lib"], &["settings::tests"]),
    ("spinio-transfer", &["--lib"], &["aligned_buf::tests"]),
    (
        "spinio-files",
        &["--lib"],
        &["sequential", "readahead", "colliding_fds", "advice_applies", "push_merges", "covers_tracks", "slow_needs"],
    ),
    ("spinio-stats", &["--lib"], &["histogram::tests", "layout::tests"]),
];

pub(crate) fn run() -> Result<()> {
    let nightly = || {
        let mut rustup = tools::command("rustup");
        // The environment of the toolchain that runs xtask, not of that one.
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
        // Property tests look for files of earlier failures, and take their seeds from the system.
        miri.env("MIRIFLAGS", "-Zmiri-disable-isolation").env("PROPTEST_CASES", "2");
        tools::run(miri.args(["test", "--quiet", "-p", package]).args(what).arg("--").args(filter))?;
    }
    Ok(())
}
