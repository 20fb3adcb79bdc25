//! `cargo x check`: what every commit must pass, cheapest first.

use anyhow::Result;

use crate::tools::{self, cargo};
use crate::{doc_tests, docs, layers, sizes};

pub(crate) fn run() -> Result<()> {
    tools::run(cargo().args(["fmt", "--all", "--check"]))?;
    layers::run()?;
    sizes::run()?;
    docs::check()?;
    doc_tests::run()?;
    tools::run(cargo().args(["clippy", "-q", "--workspace", "--all-targets", "--", "-D", "warnings"]))
}
