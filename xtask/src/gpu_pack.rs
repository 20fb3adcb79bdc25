//! `cargo x gpu-pack`: one folder that runs the GPU suite on a machine without cargo.

use anyhow::{Result, bail};

#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Result<()> {
    bail!("the GPU pack is not there yet")
}
