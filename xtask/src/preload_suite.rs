//! `cargo x preload-suite`: real programs with and without the library.

use anyhow::{Result, bail};

#[derive(clap::Args)]
pub(crate) struct Args {}

pub(crate) fn run(_: &Args) -> Result<()> {
    bail!("the preload suite is not there yet")
}
