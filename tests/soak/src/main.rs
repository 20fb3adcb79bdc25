//! The stress test: all operations concurrently, for any duration.
//!
//! ```text
//!   supervisor ──starts, kills, restarts──> workers     threads that read and write device memory, and check
//!       │                                        │
//!       └──────────────────────────> mutator     │      rewrites, truncates, evicts, opens for writing
//!                                       └─ files ┘      some constant, some changing, one log, some of one thread
//! ```
//!
//! `cargo x soak` runs it for 30 minutes. It fails if a byte is wrong or outdated, a record of the log is torn or
//! missing, a byte that an NVMMU session and its rivals wrote is missing, a writer of a pinned file or of a session's
//! output is blocked, a worker dies that was not killed, no worker makes progress for two minutes, or a worker that
//! ends has leaked descriptors, pins, fences, streams or memory, or grew.
//!
//! Known limits: the Linux kernel ends a write of a killed process in the middle, as it would a host's; so the first
//! two workers are never killed, and only they write the log. The emulated device is the only device.

mod counts;
mod files;
mod moves;
mod mutator;
mod pinned;
mod supervisor;
mod versioned;
mod worker;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

/// Workers up to this number are never killed.
pub(crate) const LAST_PROTECTED: u64 = 2;

/// The parameters; workers and the mutator are the same program with a role.
#[derive(Clone, Debug, Parser)]
#[command(name = "soak", about = "SPIN's stress test")]
pub(crate) struct Args {
    /// How long
    #[arg(long, default_value_t = 1800)]
    seconds: u64,
    /// Workers at a time
    #[arg(long, default_value_t = 3)]
    processes: usize,
    /// Threads of each
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Seconds between one SIGKILL and the next; 0: none
    #[arg(long, default_value_t = 5)]
    kill_every: u64,
    /// Another seed, another run
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Directory of the files; a temporary one by default
    #[arg(long)]
    folder: Option<PathBuf>,
    #[arg(long, hide = true)]
    worker: Option<u64>,
    #[arg(long, hide = true)]
    mutator: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match (&args.folder, args.worker, args.mutator) {
        (Some(folder), Some(number), _) => worker::run(&args, folder, number),
        (Some(folder), None, true) => mutator::run(&args, folder),
        _ => supervisor::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("soak: {error:#}");
            ExitCode::FAILURE
        }
    }
}
