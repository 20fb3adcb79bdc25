//! `cargo x gpu-pack`: one folder that runs the GPU suite on a machine without cargo.
//!
//! ```text
//!   pack/ ── libspinio.so, spinio, spinio.h        release build, stripped
//!         ── suite, many, two, frameworks.py       the GPU suite (tests/gpu); two: with two GPUs
//!         ── hooks/                                the programs of crates/interpose/tests, on CUDA memory
//!         ── reads, writes, batch, parts, host_call, device_call, benches/*.py: the benchmarks
//!         ── nvmmu                                 moves on a GPU
//!         ── benches/nvmmu, examples, device       the twelve programs and the example: nvcc builds them there
//!         ── python/                               with --python: the wheel, its tests and its benchmark
//!         ── run-gpu-suite                         runs all of it
//! ```
//!
//! The C programs open the driver at run time, so they are built here, on a machine without CUDA.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::tools;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Where the folder goes
    #[arg(long, default_value = "pack")]
    out: PathBuf,
    /// The wheel of the Python module too, with its tests and its benchmark
    #[arg(long)]
    python: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = tools::root();
    let pack = root.join(&args.out);
    if pack.exists() {
        // Only ever a folder that we have made ourselves.
        ensure!(pack.join("run-gpu-suite").exists(), "{} is there already, and no pack", pack.display());
        fs::remove_dir_all(&pack)?;
    }
    fs::create_dir_all(pack.join("benches"))?;

    tools::run(tools::cargo().args(["build", "--release", "--quiet", "-p", "spinio-interpose", "-p", "spinio-cli"]))?;
    let built = target(&root)?.join("release");
    for name in ["libspinio.so", "spinio"] {
        copy(&built.join(name), &pack.join(name))?;
        tools::run(tools::command("strip").arg("--strip-unneeded").arg(pack.join(name)))?;
    }
    for (from, to) in [
        ("crates/interpose/include/spinio.h", "spinio.h"),
        ("crates/interpose/include/nvmmu.h", "nvmmu.h"),
        ("tests/gpu/run-gpu-suite", "run-gpu-suite"),
        ("tests/gpu/frameworks.py", "frameworks.py"),
        ("benches/h200.py", "benches/h200.py"),
        ("crates/device/src/cuda/gather.ptx", "gather.ptx"),
        ("benches/peers.py", "benches/peers.py"),
    ] {
        copy(&root.join(from), &pack.join(to))?;
    }
    for (source, program) in [
        ("tests/gpu/suite.c", "suite"),
        ("tests/gpu/two.c", "two"),
        ("tests/gpu/many.c", "many"),
        ("tests/gpu/nvmmu.c", "nvmmu"),
        ("benches/reads.c", "reads"),
        ("benches/writes.c", "writes"),
        ("benches/batch.c", "batch"),
        ("benches/parts.c", "parts"),
        ("benches/host_call.c", "host_call"),
        ("benches/device_call.c", "device_call"),
    ] {
        let flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"];
        let headers = root.join("crates/interpose/include");
        tools::run(
            tools::command("cc")
                .args(flags)
                .arg(headers)
                .arg("-o")
                .arg(pack.join(program))
                .arg(root.join(source))
                .arg("-ldl"),
        )?;
    }
    for folder in ["benches/nvmmu", "device/include", "examples/nvmmu"] {
        for file in files(&root.join(folder))? {
            let to = pack.join(file.strip_prefix(&root)?);
            fs::create_dir_all(to.parent().context("a file in a folder")?)?;
            copy(&file, &to)?;
        }
    }
    hooks(&root, &pack.join("hooks"))?;
    if args.python {
        crate::python::carry(&pack.join("python"))?;
    }

    let bytes: u64 = files(&pack)?.iter().filter_map(|f| fs::metadata(f).ok()).map(|m| m.len()).sum();
    println!("{}: {:.1} MiB; there: ./run-gpu-suite", pack.display(), bytes as f64 / f64::from(1 << 20));
    Ok(())
}

/// Programs of `crates/interpose/tests/c` that run on any device, and the shim that gives them its memory.
const HOOKS: [&str; 9] =
    ["differential", "writes", "limits", "errors", "streams", "cancel", "forks", "closes", "fortified"];

fn hooks(root: &Path, folder: &Path) -> Result<()> {
    fs::create_dir(folder)?;
    let sources = root.join("crates/interpose/tests/c");
    let compile = |out: &str, source: &str, more: &[&str]| {
        let mut cc = tools::command("cc");
        cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"]).arg(root.join("crates/interpose/include"));
        cc.arg("-o").arg(folder.join(out)).arg(sources.join(source));
        tools::run(cc.args(more).arg("-ldl"))
    };
    compile("libmemory.so", "memory.c", &["-shared", "-fPIC", "-Wl,-soname,libmemory.so"])?;
    let shim = folder.join("libmemory.so").display().to_string();
    for program in HOOKS {
        compile(program, &format!("{program}.c"), &[&shim, "-Wl,-rpath,$ORIGIN"])?;
    }
    Ok(())
}

/// Cargo's folder of built things, wherever it is.
fn target(root: &Path) -> Result<PathBuf> {
    let text = tools::output(tools::cargo().args(["metadata", "--format-version=1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&text)?;
    Ok(metadata["target_directory"].as_str().map_or_else(|| root.join("target"), PathBuf::from))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to).map(drop).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { all.extend(files(&path)?) } else { all.push(path) }
    }
    Ok(all)
}
