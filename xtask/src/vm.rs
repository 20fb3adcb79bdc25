//! `cargo x vm`: the suite in the virtual machine, where peer-to-peer DMA is real without a GPU.

use anyhow::{Result, ensure};

use crate::tools;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Passed on to vm/run
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let script = tools::root().join("vm/run");
    ensure!(script.exists(), "the VM suite does not exist: {} is missing", script.display());
    tools::run(tools::command(script).args(&args.rest))
}
