//! `cargo x gpu-pack`: a directory that runs the GPU suite on a machine without cargo.
//!
//! ```text
//!   pack/ ── libspinio.so, spinio, spinio-lab, spinio.h   release build, stripped
//!         ── suite, many, two, frameworks.py       the GPU suite (tests/gpu); two: with two GPUs
//!         ── hooks/                                the programs of crates/preload/tests, on CUDA memory
//!         ── reads, writes, batch, parts, registering, host_call, device_call, benches/: the benchmarks
//!         ── nvmmu, maps                           moves, and maps in stream order, on a GPU
//!         ── benches/nvmmu, examples, device       the twelve programs and the example: nvcc builds them there
//!         ── benches/gaia                          what maps of files cost
//!         ── benches/gpunet                        what sockets of kernels cost: nvcc builds it there
//!         ── stories_load, examples/net            clients of a language model server, a model; benches/gpunet/stories has the peer
//!         ── net.cu, device/tests                  sockets and on-demand reads of kernels: nvcc builds them there
//!         ── stress-ng/                            this machine's, for `spinio-lab bench` (vendored.rs)
//!         ── grpc/                                 with --peers: gRPC for C++, if this machine has it (vendored.rs)
//!         ── python/                               with --python: the wheel, its tests
//!         ── wheels/                               with --peers: KvikIO, fastsafetensors, ZeroMQ, grpcio (vendored.rs)
//!         ── commit                                the commit it was built from
//!         ── run-gpu-suite                         runs all of it
//! ```
//!
//! The C programs open the driver at run time, so they are built here, on a machine without CUDA.

mod rehearse;
mod vendored;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::tools;
pub(crate) use vendored::stress_ng;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Target directory
    #[arg(long, default_value = "pack")]
    out: PathBuf,
    /// Also the wheel of the Python module, with its tests
    #[arg(long)]
    python: bool,
    /// Wheels of the libraries that are compared with SPIN, from PyPI
    #[arg(long)]
    peers: bool,
    /// Then run all of it here, with small sizes, on a fake CUDA driver
    #[arg(long)]
    rehearse: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = tools::root();
    let pack = root.join(&args.out);
    if pack.exists() {
        // Only a directory that this command has created.
        ensure!(pack.join("run-gpu-suite").exists(), "{} exists, and is not a pack", pack.display());
        fs::remove_dir_all(&pack)?;
    }
    fs::create_dir_all(&pack)?;
    // First, so that an incomplete directory counts as a pack.
    copy(&root.join("tests/gpu/run-gpu-suite"), &pack.join("run-gpu-suite"))?;

    tools::run(tools::cargo().args([
        "build",
        "--release",
        "--quiet",
        "-p",
        "spinio-preload",
        "-p",
        "spinio-cli",
        "-p",
        "spinio-lab",
    ]))?;
    let built = tools::target()?.join("release");
    for name in ["libspinio.so", "spinio", "spinio-lab"] {
        copy(&built.join(name), &pack.join(name))?;
        tools::run(tools::command("strip").arg("--strip-unneeded").arg(pack.join(name)))?;
    }
    // Programs that were linked with it load it by that name.
    std::os::unix::fs::symlink("libspinio.so", pack.join("libspinio.so.0"))?;
    for (from, to) in [
        ("crates/capi/include/spinio.h", "spinio.h"),
        ("crates/capi/include/nvmmu.h", "nvmmu.h"),
        ("crates/capi/include/spinio_gaia.h", "spinio_gaia.h"),
        ("crates/capi/include/spinio_net.h", "spinio_net.h"),
        ("tests/gpu/frameworks.py", "frameworks.py"),
        ("tests/gpu/net.cu", "net.cu"),
        ("crates/device/src/cuda/gather.ptx", "gather.ptx"),
    ] {
        copy(&root.join(from), &pack.join(to))?;
    }
    for (source, program) in [
        ("tests/gpu/suite.c", "suite"),
        ("tests/gpu/two.c", "two"),
        ("tests/gpu/many.c", "many"),
        ("tests/gpu/nvmmu.c", "nvmmu"),
        ("tests/gpu/maps.c", "maps"),
        ("benches/gpu/reads.c", "reads"),
        ("benches/gpu/writes.c", "writes"),
        ("benches/gpu/batch.c", "batch"),
        ("benches/gpu/parts.c", "parts"),
        ("benches/gpu/registering.c", "registering"),
        ("benches/gpu/growing.c", "growing"),
        ("benches/calls/host_call.c", "host_call"),
        ("benches/calls/device_call.c", "device_call"),
    ] {
        let flags = ["-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"];
        let headers = root.join("crates/capi/include");
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
    let mut load = tools::command("c++");
    load.args(["-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]).arg(pack.join("stories_load"));
    tools::run(load.arg(root.join("benches/gpunet/stories/load.cpp")))?;
    for folder in [
        "benches/gaia",
        "benches/gpu",
        "benches/gpunet",
        "benches/nvmmu",
        "benches/record",
        "benches/safetensors",
        "device/include",
        "device/tests",
        "examples/net",
        "examples/nvmmu",
    ] {
        for file in files(&root.join(folder))?.into_iter().filter(|f| !f.iter().any(|part| part == "__pycache__")) {
            let to = pack.join(file.strip_prefix(&root)?);
            fs::create_dir_all(to.parent().context("a file in a directory")?)?;
            copy(&file, &to)?;
        }
    }
    hooks(&root, &pack.join("hooks"))?;
    vendored::stress_ng(&pack.join("stress-ng"))?;
    if args.python {
        crate::python::copy_wheel_and_tests(&pack.join("python"))?;
    }
    if args.peers {
        vendored::peers(&pack.join("wheels"))?;
        vendored::grpc(&root, &pack.join("grpc"))?;
    }
    fs::write(pack.join("commit"), tools::output(tools::command("git").args(["describe", "--always", "--dirty"]))?)?;

    let bytes: u64 = files(&pack)?.iter().filter_map(|f| fs::metadata(f).ok()).map(|m| m.len()).sum();
    println!("{}: {:.1} MiB; there: ./run-gpu-suite", pack.display(), bytes as f64 / f64::from(1 << 20));
    if args.rehearse { rehearse::run(&root, &pack) } else { Ok(()) }
}

/// Programs of `crates/preload/tests/c` that run on any device, and the shim that gives them its memory.
const HOOKS: [&str; 10] =
    ["differential", "writes", "limits", "errno", "errors", "streams", "cancel", "forks", "closes", "fortified"];

fn hooks(root: &Path, folder: &Path) -> Result<()> {
    fs::create_dir(folder)?;
    let sources = root.join("crates/preload/tests/c");
    let compile = |out: &str, source: &str, more: &[&str]| {
        let mut cc = tools::command("cc");
        cc.args(["-O1", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"]).arg(root.join("crates/capi/include"));
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
