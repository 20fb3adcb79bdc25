//! The chores of this repository, as `cargo x <chore>`.
//!
//! ```text
//!   check ──> fmt, clippy, layers, file sizes    what every commit must pass
//!   layers                                       arrows between crates point only down
//!   docs                                         writes docs/settings.md, or checks it
//!   python                                       the module, its types and its tests
//!   stage ──> wheel                              the tree of installed files, and the wheel that contains it
//!   vm, preload-suite, interleavings             the suites that are no `cargo test`
//!   miri                                         pure code under an interpreter that detects undefined behaviour
//!   fuzz                                         malformed input for the parsers, the planner and the C API
//!   soak                                         the stress test, plain or under a sanitizer
//!   net-soak                                     the sockets of kernels for any time, plain or under a sanitizer
//!   mutate-net                                   takes the rules of the sockets' protocol away: some test must fail
//!   stats-cost                                   the cost of counters and traces for a device read
//!   host-cost                                    nanoseconds that the library adds to a host read
//!   gpu-pack, test-pack                          directories that run on another machine without cargo
//! ```
//!
//! One module per chore. A chore prints nothing on success, except the output of its suite.
#![forbid(unsafe_code)]

mod check;
mod circles;
mod doc_tests;
mod docs;
mod fuzz;
mod gpu_pack;
mod host_cost;
mod interleavings;
mod kernels;
mod layers;
mod miri;
mod mutate_net;
mod net_soak;
mod preload_suite;
mod python;
mod sizes;
mod soak;
mod stage;
mod stats_cost;
mod test_pack;
mod tools;
mod trace;
mod vm;
mod wheel;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo x", about = "Chores of the SPIN repository")]
struct Cli {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Formatting, lints, layers and file sizes: what every commit must pass
    Check,
    /// Fail on a dependency arrow that does not point down the layers
    Layers,
    /// Write docs/settings.md from the settings table
    Docs(docs::Args),
    /// Build the Python wheel and run its tests
    Python(python::Args),
    /// Create the tree of installed files
    Stage(stage::Args),
    /// Build the wheel with module, command, library and headers; install and check it
    Wheel(wheel::Args),
    /// Run the suite in the virtual machine with peer-to-peer DMA
    Vm(vm::Args),
    /// Run real programs with and without the library and compare
    PreloadSuite(preload_suite::Args),
    /// Run the models of thread protocols, in every interleaving
    Interleavings,
    /// Run the code that makes no system calls under Miri
    Miri,
    /// Give malformed input to the parsers, the planner and the C API
    Fuzz(fuzz::Args),
    /// Run the stress test, plain or under a sanitizer
    Soak(soak::Args),
    /// Run the sockets of kernels for any time, plain or under a sanitizer
    NetSoak(net_soak::Args),
    /// Take the rules of the sockets' protocol away, one by one: some test must fail
    MutateNet(mutate_net::Args),
    /// Measure what the library costs a host read
    HostCost(host_cost::Args),
    /// Measure what counting and tracing cost a device read
    StatsCost,
    /// Build the directory that runs the GPU suite on a machine without cargo
    GpuPack(gpu_pack::Args),
    /// Build the directory that repeats all tests on a machine without cargo
    TestPack(test_pack::Args),
}

fn main() -> ExitCode {
    let done = match Cli::parse().chore {
        Chore::Check => check::run(),
        Chore::Layers => layers::run(),
        Chore::Docs(args) => docs::run(&args),
        Chore::Python(args) => python::run(&args),
        Chore::Stage(args) => stage::run(&args),
        Chore::Wheel(args) => wheel::run(&args),
        Chore::Vm(args) => vm::run(&args),
        Chore::PreloadSuite(args) => preload_suite::run(&args),
        Chore::Interleavings => interleavings::run(),
        Chore::Miri => miri::run(),
        Chore::Fuzz(args) => fuzz::run(&args),
        Chore::Soak(args) => soak::run(&args),
        Chore::NetSoak(args) => net_soak::run(&args),
        Chore::MutateNet(args) => mutate_net::run(&args),
        Chore::HostCost(args) => host_cost::run(&args),
        Chore::StatsCost => stats_cost::run(),
        Chore::GpuPack(args) => gpu_pack::run(&args),
        Chore::TestPack(args) => test_pack::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // Not returned from main: a backtrace through xtask does not show the cause.
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
