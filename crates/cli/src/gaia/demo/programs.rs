//! The programs of the demo, examples/gaia, compiled from the sources that this command contains.
//!
//! `update` is the legacy program: it is compiled from one C file, without any code of SPIN. `update-gpu` is CUDA C++,
//! linked with libspinio.so: compiled by nvcc for the GPU, if there are both, else by the C++ compiler with the headers
//! of the emulated device.
//!
//! Known flaw: an installed command has no compiled programs of this demo, so it needs a compiler.

use std::path::Path;

use spinio_device::DeviceKind;

use crate::{compiler, device_headers};

/// File names below the working directory, and their text.
const SOURCES: &[(&str, &str)] = &[
    ("cells.h", include_str!("../../../../../examples/gaia/cells.h")),
    ("update.c", include_str!("../../../../../examples/gaia/update.c")),
    ("update.cu", include_str!("../../../../../examples/gaia/update.cu")),
];

/// The legacy program, below the working directory.
pub const LEGACY: &str = "update";
/// The program with GPU kernels.
pub const GPU: &str = "update-gpu";

/// Where the GPU kernels run, and why there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// On the first CUDA GPU.
    Cuda,
    /// On the emulated device, and why not on a GPU.
    Emulated(&'static str),
}

/// Writes the sources to `dir` and compiles them there. `library`: libspinio.so.
pub fn compile(dir: &Path, library: &Path) -> anyhow::Result<Gpu> {
    device_headers::write(dir)?;
    device_headers::write_files(dir, SOURCES)?;
    compiler::c(dir, &["-o", LEGACY, "update.c"])?;
    // Not RUNPATH, which LD_LIBRARY_PATH precedes: `cargo run` sets that, and an older build may be there.
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", library.parent().unwrap_or(Path::new("/")).display());
    let library = library.display().to_string();
    if crate::device::preferred().0.kind == DeviceKind::Cuda {
        let linked = ["-Xcompiler", "-pthread", "-I.", "-o", GPU, "update.cu", &library, "-Xlinker"];
        let rpath = rpath.trim_start_matches("-Wl,");
        if let Some(compiled) = compiler::nvcc(dir, &[&linked[..], &[rpath]].concat()) {
            return compiled.map(|()| Gpu::Cuda);
        }
    }
    let gpu = match crate::device::preferred().0.kind {
        DeviceKind::Cuda => Gpu::Emulated("there is a CUDA GPU, but no nvcc: name it in NVCC"),
        _ => Gpu::Emulated("there is no CUDA GPU here"),
    };
    compiler::cxx(dir, &["-pthread", "-I.", "-o", GPU, "-x", "c++", "update.cu", "-x", "none", &library, &rpath])?;
    Ok(gpu)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn legacy_program_references_no_code_of_spin() {
        let legacy = SOURCES.iter().find(|(name, _)| *name == "update.c").unwrap().1;
        let code: String = legacy.split("*/").skip(1).collect();
        assert!(code.contains("pwrite(") && code.contains("mmap("));
        assert!(!code.contains("spinio"), "the legacy program names our symbols");
    }
}
