//! Every part of `run-gpu-suite record`, tiny, on the stand-in for the CUDA driver that the tests use.
//!
//! It shows that scripts find what they start, and that figures are packed and understood. What has no stand-in fails and says so: nvcc,
//! PyTorch and CuPy where they are missing here, and memory of another process.

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
    // Its python3 is one with pytest and NumPy.
    let python = crate::python::environment()?;
    let mut path = vec![python.parent().context("a folder")?.to_path_buf()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    record.env("PATH", std::env::join_paths(path)?);
    // What fails is told in the table; some of it must, here.
    let status = record.env("LD_LIBRARY_PATH", &folder).status()?;
    println!("{status}; files in {}", folder.display());
    Ok(())
}
