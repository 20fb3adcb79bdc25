//! Every part of `run-gpu-suite record`, with small sizes, on the fake CUDA driver of the tests.
//!
//! It shows that scripts find the programs they start, and that figures are packed and parsed. Parts without a fake
//! fail and report it: nvcc, PyTorch and CuPy where they are missing here, and memory of another process.

use std::path::Path;

use anyhow::{Context, Result};

use crate::tools;

const RECORD_PARTS: [&str; 8] = ["two", "speed", "cold", "calls", "python", "nvmmu", "paper", "programs"];

pub(super) fn run(root: &Path, pack: &Path) -> Result<()> {
    let folder = tools::target()?.join("rehearsal");
    std::fs::create_dir_all(&folder)?;
    let flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o"];
    let source = root.join("crates/sys/tests/fake/libcuda.c");
    tools::run(tools::command("cc").args(flags).arg(folder.join("libcuda.so.1")).arg(source))?;
    let mut record = tools::command(pack.join("run-gpu-suite"));
    record.arg("record").args(RECORD_PARTS).args(["--tiny", "--reps", "1", "--seconds", "900", "--out"]).arg(&folder);
    // Its python3 has pytest and NumPy.
    let python = crate::python::environment()?;
    let mut path = vec![python.parent().context("a folder")?.to_path_buf()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    record.env("PATH", std::env::join_paths(path)?);
    // The table shows the failures; some parts must fail here.
    let status = record.env("LD_LIBRARY_PATH", &folder).status()?;
    println!("{status}; files in {}", folder.display());
    Ok(())
}
