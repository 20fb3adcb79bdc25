//! The programs of the experiments, benches/gaia/programs and parts of examples/gaia, compiled from the sources that this
//! command contains.
//!
//! `worker` is CUDA C++, linked with libspinio.so. The others are ordinary C programs, without any code of SPIN.

use std::path::Path;

use spinio_cli::compiler::{self, Gpu};
use spinio_cli::device_headers;

/// Names below the directory, and text, of files in a directory of the repository.
macro_rules! sources {
    ($($name:literal: $directory:literal / $file:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../../", $directory, "/", $file)))),*]
    };
}

const SOURCES: [(&str, &str); 20] = sources![
    "main.cu": "benches/gaia/programs" / "main.cu",
    "worker.h": "benches/gaia/programs" / "worker.h",
    "checkpoint.h": "benches/gaia/programs" / "checkpoint.h",
    "collage.h": "benches/gaia/programs" / "collage.h",
    "lud.h": "benches/gaia/programs" / "lud.h",
    "owners.h": "benches/gaia/programs" / "owners.h",
    "pasting.h": "benches/gaia/programs" / "pasting.h",
    "second.h": "benches/gaia/programs" / "second.h",
    "sharing.h": "benches/gaia/programs" / "sharing.h",
    "shortest.h": "benches/gaia/programs" / "shortest.h",
    "streaming.h": "benches/gaia/programs" / "streaming.h",
    "kmeans.c": "benches/gaia/programs" / "kmeans.c",
    "graph/graph.h": "examples/gaia/graph" / "graph.h",
    "graph/paths.h": "examples/gaia/graph" / "paths.h",
    "graph/generate.c": "examples/gaia/graph" / "generate.c",
    "graph/change.c": "examples/gaia/graph" / "change.c",
    "stitching/tiles.h": "examples/gaia/stitching" / "tiles.h",
    "stitching/stitch.h": "examples/gaia/stitching" / "stitch.h",
    "stitching/stitch.c": "examples/gaia/stitching" / "stitch.c",
    "stitching/camera.c": "examples/gaia/stitching" / "camera.c",
];

/// The program with kernels.
pub const WORKER: &str = "worker";

/// The others: program, source, library.
const PLAIN: [(&str, &str); 5] = [
    ("kmeans", "kmeans.c"),
    ("generate", "graph/generate.c"),
    ("change", "graph/change.c"),
    ("stitch", "stitching/stitch.c"),
    ("camera", "stitching/camera.c"),
];

/// Writes the sources below `work` and compiles the programs into it.
pub fn compile(work: &Path, library: &Path) -> anyhow::Result<Gpu> {
    let sources = work.join("sources");
    device_headers::write_files(&sources, &SOURCES)?;
    for (program, source) in PLAIN {
        compiler::c(&sources, &["-pthread", "-o", &work.join(program).display().to_string(), source])?;
    }
    compiler::gpu(&sources, &work.join(WORKER).display().to_string(), "main.cu", library)
}
