//! `cargo x net-soak`: the sockets of kernels for any time, on the emulated GPU, plain or under a sanitizer.
//!
//! ```text
//!   random words      a hostile kernel, for a sixth of the time (crates/net/tests/hostile.rs; not with ThreadSanitizer)
//!   random scripts    the results of kernels and of CPU programs are the same: 10^5 in half an hour (net_scripts.cpp)
//!   soak              connections that are made, broken and killed, checked by CRC32C; nothing is left (net_soak.cpp)
//! ```
//!
//! With ThreadSanitizer, which sees kernel and proxy together, the other programs of device/tests run first: it looks at what
//! they do, not at how often. Two nets map what they share at different addresses, so of such memory it sees the threads of each
//! net and not what one orders with the other.

use anyhow::{Result, ensure};

use crate::kernels::{self, Program, Sanitizer};
use crate::tools;

/// Scripts for each second of the whole: 10^5 in half an hour.
const SCRIPTS_EACH_SECOND: u64 = 56;
/// The part of the time that is for random words.
const WORDS_SHARE: u64 = 6;
/// Programs of which ThreadSanitizer sees kernel and proxy.
const PROGRAMS: [&str; 7] =
    ["net", "net_costs", "net_events", "net_datagrams", "net_faults", "net_nets", "net_threads"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Duration
    #[arg(long, default_value_t = 1800)]
    seconds: u64,
    /// Random scripts; by default 56 for each second
    #[arg(long)]
    scripts: Option<u64>,
    /// The first script, and the seed of the soak: a failed run prints where it can begin
    #[arg(long, default_value_t = 0)]
    first: u64,
    /// Detect memory errors or races at the same time
    #[arg(long)]
    sanitizer: Option<Sanitizer>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = tools::root();
    let folder = match args.sanitizer {
        None => {
            tools::run(tools::cargo().args(["build", "--quiet", "-p", "spinio-preload"]))?;
            tools::target()?.join("debug")
        }
        Some(sanitizer) => kernels::sanitized(&root, &kernels::target_of(sanitizer)?, sanitizer, "spinio-preload")?,
    };
    let words = args.seconds / WORDS_SHARE;
    if args.sanitizer != Some(Sanitizer::Thread) {
        random_words(args.sanitizer, words)?;
    }
    let out = folder.join("kernels");
    std::fs::create_dir_all(&out)?;
    let run = |name: &'static str, more: &[String]| {
        let program = Program { root: &root, name, sanitizer: args.sanitizer, library: Some(&folder) };
        let (file, reports) = (out.join(name), kernels::reports()?);
        program.build(&file)?;
        let done = tools::run(program.command(&file, &reports, 2 * args.seconds + 1800).args(more));
        let found = kernels::read_reports(&reports)?;
        eprint!("{found}");
        ensure!(found.is_empty(), "{name}: the sanitizer has found something");
        done
    };
    if args.sanitizer == Some(Sanitizer::Thread) {
        PROGRAMS.iter().try_for_each(|name| run(name, &[]))?;
    }
    let scripts = args.scripts.unwrap_or(args.seconds * SCRIPTS_EACH_SECOND);
    if scripts > 0 {
        run("net_scripts", &[args.first.to_string(), scripts.to_string()])?;
    }
    run("net_soak", &[(args.seconds - words).to_string(), (args.first + 1).to_string()])
}

/// A hostile kernel, which writes random words everywhere.
fn random_words(sanitizer: Option<Sanitizer>, seconds: u64) -> Result<()> {
    let mut test = tools::cargo_without_lto();
    test.args(["test", "--quiet", "-p", "spinio-net", "--test", "hostile"]);
    if let Some(sanitizer) = sanitizer {
        kernels::sanitize(&mut test, &kernels::target_of(sanitizer)?, sanitizer)?;
        test.arg("--release");
    }
    // An abandoned socket or thread is no leak of this test.
    test.env("ASAN_OPTIONS", "detect_leaks=0").env("SPINIO_SOAK_SECONDS", seconds.to_string());
    tools::run(test.args(["random_words", "--", "--nocapture"]))
}
