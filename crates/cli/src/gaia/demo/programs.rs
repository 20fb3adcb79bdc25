//! The programs of the demo, examples/gaia, compiled from the sources that this command contains.
//!
//! `update` is the legacy program: it is compiled from one C file, without any code of SPIN. `update-gpu` is CUDA C++,
//! linked with libspinio.so: compiled by nvcc for the GPU, if there are both, else by the C++ compiler with the headers
//! of the emulated device.
//!
//! Known flaw: an installed command has no compiled programs of this demo, so it needs a compiler.

use std::path::Path;

use crate::compiler::{self, Gpu};
use crate::device_headers;

/// File names below the working directory, and their text.
const SOURCES: [(&str, &str); 3] = [
    ("cells.h", include_str!("../../../../../examples/gaia/cells.h")),
    ("update.c", include_str!("../../../../../examples/gaia/update.c")),
    ("update.cu", include_str!("../../../../../examples/gaia/update.cu")),
];

/// The legacy program, below the working directory.
pub const LEGACY: &str = "update";
/// The program with GPU kernels.
pub const GPU: &str = "update-gpu";

/// Writes the sources to `dir` and compiles them there. `library`: libspinio.so.
pub fn compile(dir: &Path, library: &Path) -> anyhow::Result<Gpu> {
    device_headers::write_files(dir, &SOURCES)?;
    compiler::c(dir, &["-o", LEGACY, "update.c"])?;
    compiler::gpu(dir, GPU, "update.cu", library)
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
