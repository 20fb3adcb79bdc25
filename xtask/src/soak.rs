//! `cargo x soak`: the stress test (tests/soak), plain or under a sanitizer.
//!
//! A fifth of the time is for the same on a GAIA mount (crates/gaiad/tests/stress), where the sanitizers are not used: it
//! consists of processes that are killed. Then a mount is compared with an ordinary directory while a GPU program writes
//! the same files (crates/gaiad/tests/differential): a million operations in the long form of half an hour. And a mount
//! gets as many files, which must need few descriptors.
//!
//! The thread sanitizer needs the source of the standard library (`rustup component add rust-src`).

use std::process::Command;

use anyhow::Result;

use crate::kernels::{self, Sanitizer};
use crate::tools;

/// The part of the time that is for the test of GAIA, and the least that is of use.
const GAIA_SHARE: u64 = 5;
const GAIA_LEAST: u64 = 4;
/// Operations on a mount that are compared, for each second of the whole: a million in half an hour.
const OPERATIONS_EACH_SECOND: u64 = 556;
/// Files at most: from twice as many on the kernel is asked to forget some.
const MOST_FILES: u64 = 1_000_000;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Duration
    #[arg(long, default_value_t = 1800)]
    seconds: u64,
    /// Detect memory errors or races at the same time
    #[arg(long)]
    sanitizer: Option<Sanitizer>,
    /// Arguments of the stress test itself, after --: --processes, --threads, --kill-every, --seed
    #[arg(last = true)]
    more: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let program = match args.sanitizer {
        None => {
            tools::run(tools::cargo().args(["build", "--release", "--quiet", "-p", "spinio-soak"]))?;
            tools::target()?.join("release/spinio-soak")
        }
        Some(sanitizer) => {
            let target = kernels::target_of(sanitizer)?;
            kernels::sanitized(&tools::root(), &target, sanitizer, "spinio-soak")?.join("spinio-soak")
        }
    };
    let mut soak = match args.sanitizer {
        // Its shadow memory has fixed addresses, which a randomised layout may take.
        Some(Sanitizer::Thread) => {
            let mut setarch = Command::new("setarch");
            setarch.arg("-R").arg(program);
            setarch
        }
        _ => Command::new(program),
    };
    let suppressions = tools::root().join("tests/soak/races.txt");
    // Into files: workers with an unshared descriptor table have no standard error.
    let reports = kernels::reports()?;
    let log = format!("log_path={}", reports.join("report").display());
    soak.env("TSAN_OPTIONS", format!("halt_on_error=1 {log} suppressions={}", suppressions.display()));
    // The test itself detects leaks: memory that lives as long as the process is no leak.
    soak.env("ASAN_OPTIONS", format!("detect_leaks=0:abort_on_error=1:{log}"));
    let gaia = if args.sanitizer.is_none() { (args.seconds / GAIA_SHARE).max(GAIA_LEAST).min(args.seconds) } else { 0 };
    let seconds = (args.seconds - gaia).max(1);
    let done = tools::run(soak.args(["--seconds", &seconds.to_string()]).args(&args.more));
    eprint!("{}", kernels::read_reports(&reports)?);
    done?;
    if gaia == 0 {
        return Ok(());
    }
    on_a_mount(gaia)?;
    let operations = args.seconds * OPERATIONS_EACH_SECOND;
    compared_with_a_directory(operations)?;
    many_files(operations.min(MOST_FILES))
}

/// Files that the Linux kernel knows of a mount at the same time.
fn many_files(files: u64) -> Result<()> {
    let mut test = apart();
    test.args(["test", "--release", "--quiet", "-p", "spinio-gaiad", "--test", "survival"]);
    test.args(["hundred_thousand_nodes_need_few_descriptors", "--", "--nocapture"]);
    tools::run(test.env("SPINIO_GAIA_FILES", files.to_string()))
}

/// The stress test of GAIA: programs that die while they write the same pages, on a mount whose servers die.
fn on_a_mount(seconds: u64) -> Result<()> {
    let mut test = apart();
    test.args(["test", "--release", "--quiet", "-p", "spinio-gaiad", "--test", "stress", "--", "--nocapture"]);
    tools::run(test.env("SPINIO_SOAK_SECONDS", seconds.to_string()))
}

/// Operations of a CPU program on a mount and on an ordinary directory, while a GPU program writes the same files.
fn compared_with_a_directory(operations: u64) -> Result<()> {
    let mut test = apart();
    test.args(["test", "--release", "--quiet", "-p", "spinio-gaiad", "--test", "differential"]);
    test.args(["kernels_beside_a_cpu_program", "--", "--nocapture"]);
    tools::run(test.env("SPINIO_GAIA_OPERATIONS", operations.to_string()))
}

/// Cargo, for root in a mount namespace of its own: another namespace that is made meanwhile, as by each section of
/// `.ci/run`, would have copies of the mounts, whose daemons then do not end when the test unmounts them.
fn apart() -> Command {
    let cargo = tools::cargo();
    let is_possible = Command::new("unshare").args(["--mount", "true"]).stderr(std::process::Stdio::null()).status();
    if !is_possible.is_ok_and(|status| status.success()) {
        return cargo;
    }
    let mut apart = tools::command("unshare");
    apart.args(["--mount", "--propagation", "private"]).arg(cargo.get_program());
    apart
}
