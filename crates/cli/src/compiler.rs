//! The compilers of this machine, for the programs of the demos and of the laboratory.
//!
//! A program with kernels is one source: nvcc compiles it for the GPU, if there are both, else the C++ compiler with the
//! headers of the emulated device.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use spinio_device::DeviceKind;

use crate::device_headers;
use crate::exit::{self, Exit};

/// Where GPU kernels run, and why there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// On the first CUDA GPU.
    Cuda,
    /// On the emulated device, and why not on a GPU.
    Emulated(&'static str),
}

/// Compiles a program with kernels in `dir`, from the source of this name there. `library`: libspinio.so.
pub fn gpu(dir: &Path, program: &str, source: &str, library: &Path) -> anyhow::Result<Gpu> {
    device_headers::write(dir)?;
    // Not RUNPATH, which LD_LIBRARY_PATH precedes: `cargo run` sets that, and an older build may be there.
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", library.parent().unwrap_or(Path::new("/")).display());
    let library = library.display().to_string();
    if crate::device::preferred().0.kind == DeviceKind::Cuda {
        let linked = ["-arch=native", "-Xcompiler", "-pthread", "-I.", "-o", program, source, &library, "-Xlinker"];
        let rpath = rpath.trim_start_matches("-Wl,");
        if let Some(compiled) = nvcc(dir, &[&linked[..], &[rpath]].concat()) {
            return compiled.map(|()| Gpu::Cuda);
        }
    }
    let gpu = match crate::device::preferred().0.kind {
        DeviceKind::Cuda => Gpu::Emulated("there is a CUDA GPU, but no nvcc: name it in NVCC"),
        _ => Gpu::Emulated("there is no CUDA GPU here"),
    };
    cxx(dir, &["-pthread", "-I.", "-o", program, "-x", "c++", source, "-x", "none", &library, &rpath])?;
    Ok(gpu)
}

/// Runs the C compiler in `dir`: that of CC, else `cc`.
pub fn c(dir: &Path, args: &[&str]) -> anyhow::Result<()> {
    compile("C compiler", "CC", "cc", "gcc libc6-dev", dir, &[&["-O2", "-std=gnu11"], args].concat())
}

/// Runs the C++ compiler in `dir`: that of CXX, else `c++`.
fn cxx(dir: &Path, args: &[&str]) -> anyhow::Result<()> {
    compile("C++ compiler", "CXX", "c++", "g++", dir, &[&["-O2", "-std=c++17"], args].concat())
}

/// Runs nvcc in `dir`: that of NVCC, else `nvcc`, else that of /usr/local/cuda. `None`: there is none.
fn nvcc(dir: &Path, args: &[&str]) -> Option<anyhow::Result<()>> {
    let named = std::env::var_os("NVCC").filter(|n| !n.is_empty()).map(PathBuf::from);
    let name = named.or_else(|| {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let usual = std::iter::once(PathBuf::from("/usr/local/cuda/bin"));
        std::env::split_paths(&path).chain(usual).map(|directory| directory.join("nvcc")).find(|nvcc| nvcc.is_file())
    })?;
    let args = [&["-O2", "-std=c++17"], args].concat();
    Some(run("CUDA compiler", "NVCC=/usr/local/cuda/bin/nvcc", "nvidia-cuda-toolkit", dir, name.as_os_str(), &args))
}

fn compile(what: &str, variable: &str, usual: &str, packages: &str, dir: &Path, args: &[&str]) -> anyhow::Result<()> {
    let compiler = std::env::var_os(variable).filter(|c| !c.is_empty()).unwrap_or_else(|| OsString::from(usual));
    run(what, &format!("{variable}=clang"), packages, dir, &compiler, args)
}

fn run(what: &str, example: &str, packages: &str, dir: &Path, compiler: &OsStr, args: &[&str]) -> anyhow::Result<()> {
    let name = compiler.to_string_lossy();
    let out = Command::new(compiler).current_dir(dir).args(args).output().map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => exit::error(
            Exit::Missing,
            format!(
                "Cannot compile a program: there is no {what} `{name}`. On Debian: apt install {packages}. Or \
                 name one: {example}"
            ),
        ),
        _ => exit::error(Exit::Missing, format!("Cannot start the {what} `{name}`: {e}")),
    })?;
    if !out.status.success() {
        let text = String::from_utf8_lossy(&out.stderr);
        return Err(exit::error(Exit::Missing, format!("The {what} `{name}` failed:\n{}", text.trim())));
    }
    Ok(())
}
