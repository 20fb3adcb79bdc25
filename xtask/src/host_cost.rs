//! `cargo x host-cost`: the cost of the library for a program's host reads, measured by benches/calls/host_call.c.

use anyhow::Result;

use crate::tools;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// States of the measured program: plain, emulated (a device in use), cuda (a CUDA context)
    #[arg(default_values = ["plain", "emulated"])]
    states: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    tools::run(tools::cargo().args(["build", "--quiet", "--release", "--package", "spinio-preload"]))?;
    let release = tools::target()?.join("release");
    let program = release.join("host_call");
    let compiler = ["-O2", "-Wall", "-pthread", "benches/calls/host_call.c", "-ldl", "-o"];
    tools::run(tools::command("cc").args(compiler).arg(&program))?;
    tools::run(tools::command(&program).arg(release.join("libspinio.so")).args(&args.states))
}
