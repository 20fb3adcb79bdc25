//! `cargo x interleavings`: protocols between threads, run by a model checker in every possible interleaving.
//!
//! Models are next to the code they check, in modules called `interleavings`, and are compiled only here: with `--cfg
//! loom` the code under test takes its locks and atomics from loom.

use anyhow::Result;

use crate::tools;

/// Crates with models.
const CRATES: [&str; 6] =
    ["spinio-ring", "spinio-host", "spinio-transfer", "spinio-pinned", "spinio-batch", "spinio-pagecache"];

pub(crate) fn run() -> Result<()> {
    // A separate target directory: the flag would make cargo build everything again, here and at the next plain build.
    let folder = tools::target()?.join("loom");
    let mut cargo = tools::cargo_without_lto();
    cargo.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", folder);
    cargo.args(["test", "--release", "--quiet", "--lib"]);
    tools::run(cargo.args(CRATES.iter().flat_map(|name| ["-p", *name])).arg("interleavings"))
}
