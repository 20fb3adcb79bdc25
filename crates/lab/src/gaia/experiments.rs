//! The experiments: the rows of the paper's evaluation in its order, and uses of today.
//!
//! Full sizes are below the paper's, so that all of them together take minutes on a GPU that is there for minutes. Large
//! ones are the paper's or today's, for few experiments in a call. Small ones are for emulated devices, whose speed says nothing.

use super::cells;
use super::experiment::{Along, Column, Experiment, Method, Needs, Setting, Unit};

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

const fn at(label: &'static str, x: f64, values: &'static [(&'static str, u64)]) -> Setting {
    Setting { label, x, values }
}

const fn column(key: &'static str, label: &'static str, unit: Unit) -> Column {
    Column { key, label, unit }
}

const MAP: Method = Method::new("map", "a map of a file in a GAIA mount");
const COPY: Method = Method::new("copy", "pread into host memory and cudaMemcpy, in pieces of 8 MiB");
const PREAD: Method = Method::new("pread", "spinio_pread into device memory");
const MANAGED: Method = Method::new("managed", "CUDA's managed memory (UVM)").needs(Needs::Cuda);
const READER: Method = Method::new("reader", "gaia::reader: the kernel itself reads on demand, through a cache");
const IN_PLACE: Method = Method::new("in place", "kernels load from the host's page cache: a map in place");
const LIMIT: Method = Method::new("limit", "the limit: a copy of as many bytes from registered host memory");

const MERGED: Column = column("merged", "pages merged", Unit::Number);
const KERNEL: Column = column("kernel", "kernels", Unit::Seconds);
const BRING: Column = column("bring", "to the device", Unit::Seconds);
const FETCHED: Column = column("fetched", "fetched", Unit::Bytes);
const RELEASE: Column = column("release", "release", Unit::Seconds);
const EVICTED: Column = column("evicted", "chunks evicted", Unit::Number);

const PRIVATE: Method =
    Method::new("private", "each writer has a copy, whose words are stored into the file at the end");

const SHARED_SMALL: &[Setting] = &[
    at("100", 100.0, &[("size", 65536), ("iterations", 100)]),
    at("1000", 1000.0, &[("size", 65536), ("iterations", 1000)]),
];
const SHARED_FULL: &[Setting] = &[
    at("2000", 2000.0, &[("size", 65536), ("iterations", 2000)]),
    at("20000", 20000.0, &[("size", 65536), ("iterations", 20000)]),
];

/// All of them.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "fig1a",
        title: "false sharing of 64 KiB between two GPU processes",
        claim: "with UVM, false sharing makes kernels up to 28x slower than private buffers; with GAIA it does not (6.2: for \
                a CPU and a GPU)",
        methods: &[
            PRIVATE,
            MAP,
            MANAGED.needs(Needs::Absent("a buffer in managed memory is of one process, and here each GPU has its own")),
        ],
        small: SHARED_SMALL,
        full: SHARED_FULL,
        large: &[],
        columns: &[KERNEL, RELEASE, MERGED],
        axis: ("additions to each word", Along::Log),
        open: cells::two_devices,
    },
    Experiment {
        name: "fig1b",
        title: "false sharing of 64 KiB between a thread of the CPU and a GPU",
        claim: "as fig1a; GAIA is as fast as private buffers, and merges a page in 1.4 us",
        methods: &[PRIVATE, MAP, MANAGED],
        small: SHARED_SMALL,
        full: SHARED_FULL,
        large: &[],
        columns: &[KERNEL, column("other", "CPU thread", Unit::Seconds), RELEASE, MERGED],
        axis: ("additions to each word", Along::Log),
        open: cells::both_processors,
    },
    Experiment {
        name: "fig1c",
        title: "k-means on 4 threads of the CPU, beside false sharing",
        claim: "false sharing with UVM makes k-means up to 47 % slower",
        methods: &[
            Method::new("alone", "k-means alone"),
            PRIVATE,
            MAP,
            Method::new("managed", "a CPU thread and the GPU share managed memory").needs(Needs::Cuda),
        ],
        small: &[at(
            "2 GPU processes",
            0.0,
            &[("size", 65536), ("iterations", 100), ("points", 20_000), ("rounds", 5)],
        )],
        full: &[at(
            "2 GPU processes",
            0.0,
            &[("size", 65536), ("iterations", 2000), ("points", 1_000_000), ("rounds", 10)],
        )],
        large: &[],
        columns: &[column("beside", "rounds beside", Unit::Number)],
        axis: ("", Along::Labels),
        open: cells::kmeans,
    },
    Experiment {
        name: "overhead",
        title: "CPU reads and writes of 256 KiB and 4 KiB, while maps have copies of the file",
        claim: "6.1: random reads cost less than 1 % more with 32 GPUs and up to 5 % with 160, sequential ones nothing; 512 \
                bytes of memory for each entry",
        methods: &[
            Method::new("no mount", "the file system without GAIA"),
            Method::new("0 owners", "in the mount"),
            Method::new("32 owners", "and 32 maps of all of the file").number(32),
            Method::new("160 owners", "and 160 maps of all of the file").number(160),
        ],
        small: &[
            at("sequential reads", 0.0, &[("size", MIB), ("kib", 256), ("passes", 4), ("writes", 0), ("random", 0)]),
            at("random reads", 1.0, &[("size", MIB), ("kib", 256), ("passes", 4), ("writes", 0), ("random", 1)]),
            at("sequential writes", 2.0, &[("size", MIB), ("kib", 256), ("passes", 4), ("writes", 1), ("random", 0)]),
            at("random writes", 3.0, &[("size", MIB), ("kib", 256), ("passes", 4), ("writes", 1), ("random", 1)]),
            at("reads of 4 KiB", 4.0, &[("size", MIB), ("kib", 4), ("passes", 4), ("writes", 0), ("random", 1)]),
        ],
        full: &[
            at(
                "sequential reads",
                0.0,
                &[("size", 64 * MIB), ("kib", 256), ("passes", 8), ("writes", 0), ("random", 0)],
            ),
            at("random reads", 1.0, &[("size", 64 * MIB), ("kib", 256), ("passes", 8), ("writes", 0), ("random", 1)]),
            at(
                "sequential writes",
                2.0,
                &[("size", 64 * MIB), ("kib", 256), ("passes", 2), ("writes", 1), ("random", 0)],
            ),
            at("random writes", 3.0, &[("size", 64 * MIB), ("kib", 256), ("passes", 2), ("writes", 1), ("random", 1)]),
            at("reads of 4 KiB", 4.0, &[("size", 64 * MIB), ("kib", 4), ("passes", 8), ("writes", 0), ("random", 1)]),
        ],
        large: &[],
        columns: &[
            column("rate", "bytes a second", Unit::Bytes),
            column("metadata", "daemon's bytes a page and owner", Unit::Number),
        ],
        axis: ("", Along::Labels),
        open: cells::cpu_io,
    },
    Experiment {
        name: "fig5",
        title: "CPU reads of pages that GPU memory has",
        claim: "peer-caching makes random reads up to 3x faster than the disk, and reads from a busy disk up to 2x",
        methods: &[Method::new("peer-caching", "READ is answered from GPU memory")
            .needs(Needs::Absent("benches/gaia/gaia.py --rows lent measures it"))],
        small: &[],
        full: &[],
        large: &[],
        columns: &[],
        axis: ("", Along::Labels),
        open: cells::none,
    },
    Experiment {
        name: "fig6a",
        title: "a kernel reads a whole file once",
        claim: "GAIA keeps up with UVM and GPUfs; a plain copy of a small cached file is faster than GAIA; only GAIA and GPUfs \
                read files above the size of GPU memory",
        methods: &[
            COPY,
            LIMIT,
            PREAD,
            MAP,
            Method::new("windows", "a map with half of the file's size as its limit, an eighth acquired at a time"),
            IN_PLACE,
            READER,
            MANAGED,
        ],
        small: &[
            at("cached", 0.0, &[("size", 8 * MIB), ("cold", 0)]),
            at("on disk", 1.0, &[("size", 8 * MIB), ("cold", 1)]),
        ],
        full: &[at("cached", 0.0, &[("size", GIB), ("cold", 0)]), at("on disk", 1.0, &[("size", GIB), ("cold", 1)])],
        large: &[
            at("cached", 0.0, &[("size", 8 * GIB), ("cold", 0)]),
            // The disk's rate does not depend on the size, and all of it is read twice by each method.
            at("on disk", 1.0, &[("size", 2 * GIB), ("cold", 1)]),
        ],
        columns: &[BRING, FETCHED, EVICTED],
        axis: ("", Along::Labels),
        open: cells::streaming,
    },
    Experiment {
        name: "fig6b",
        title: "unmodified kernels with much work: LU decomposition of a matrix in a file",
        claim: "LUD: GAIA is faster than UVM and a little slower than a copy; cuBLAS with a large file thrashes",
        methods: &[
            COPY,
            PREAD,
            MAP,
            Method::new("SGEMM on a map", "a closed library's kernel").needs(Needs::Absent(
                "cuBLAS is not called by this program; tests/gpu/frameworks.py uses maps in PyTorch and CuPy",
            )),
        ],
        small: &[at("64 x 64", 64.0, &[("n", 64)])],
        full: &[at("1024 x 1024", 1024.0, &[("n", 1024)]), at("4096 x 4096", 4096.0, &[("n", 4096)])],
        large: &[],
        columns: &[BRING, KERNEL],
        axis: ("", Along::Labels),
        open: cells::lud,
    },
    Experiment {
        name: "table2",
        title: "image collage: a quarter of a large file is needed, and only kernels know which",
        claim: "GAIA, on demand, is 9x faster than UVM with all of the file read before, from the disk 6x",
        methods: &[
            Method::new("whole", "all of the file is read and copied, in windows of a quarter of the limit"),
            Method::new("batch", "a kernel chooses, spinio_batch reads what it chose, a kernel pastes"),
            Method::new("map", "the same, with acquires of what it chose, within the limit"),
            IN_PLACE,
            READER,
        ],
        small: &[
            at("prefetched", 0.0, &[("size", 8 * MIB), ("limit", 4 * MIB), ("blocks", 600), ("cold", 0)]),
            at("on disk", 1.0, &[("size", 8 * MIB), ("limit", 4 * MIB), ("blocks", 600), ("cold", 1)]),
        ],
        full: &[
            at("prefetched", 0.0, &[("size", 2 * GIB), ("limit", GIB), ("blocks", 150_000), ("cold", 0)]),
            at("on disk", 1.0, &[("size", 2 * GIB), ("limit", GIB), ("blocks", 150_000), ("cold", 1)]),
        ],
        large: &[
            at("prefetched", 0.0, &[("size", 16 * GIB), ("limit", 8 * GIB), ("blocks", 1_000_000), ("cold", 0)]),
            // In the same proportions.
            at("on disk", 1.0, &[("size", 4 * GIB), ("limit", 2 * GIB), ("blocks", 250_000), ("cold", 1)]),
        ],
        columns: &[FETCHED, EVICTED],
        axis: ("", Along::Labels),
        open: cells::collage,
    },
    Experiment {
        name: "fig7",
        title: "shortest paths in a graph whose weights a CPU program changes with write",
        claim: "GAIA is faster than copies of the whole file, by CUDA or UVM, until about 75 % of it changes",
        methods: &[COPY, PREAD, MAP],
        small: &[
            at("1 %", 1.0, &[("scale", 11), ("changed", 100)]),
            at("100 %", 100.0, &[("scale", 11), ("changed", 10_000)]),
        ],
        full: &[
            at("0.01 %", 0.01, &[("scale", 20), ("changed", 1)]),
            at("1 %", 1.0, &[("scale", 20), ("changed", 100)]),
            at("10 %", 10.0, &[("scale", 20), ("changed", 1000)]),
            at("100 %", 100.0, &[("scale", 20), ("changed", 10_000)]),
        ],
        large: &[
            at("0.01 %", 0.01, &[("scale", 23), ("changed", 1)]),
            at("1 %", 1.0, &[("scale", 23), ("changed", 100)]),
            at("100 %", 100.0, &[("scale", 23), ("changed", 10_000)]),
        ],
        columns: &[BRING, KERNEL, FETCHED],
        axis: ("pages of weights that have changed, %", Along::Log),
        open: cells::graph,
    },
    Experiment {
        name: "fig8",
        title: "image stitching: a CPU program and GPUs paste tiles into one file",
        claim: "GAIA makes the GPU 2.3x faster than UVM, the CPU 1.45x, and all of it 21 to 31 %",
        methods: &[
            Method::new("private", "GPUs have pictures of their own, whose tiles the CPU stores into the file"),
            MAP,
            MANAGED.needs(Needs::Absent("managed memory is of one process, and the CPU program here is another one")),
        ],
        small: &[
            at("CPU + 1 GPU process", 0.0, &[("gpus", 1), ("columns", 6), ("rows", 4)]),
            at("CPU + 2 GPU processes", 1.0, &[("gpus", 2), ("columns", 6), ("rows", 4)]),
        ],
        full: &[
            at("CPU + 1 GPU process", 0.0, &[("gpus", 1), ("columns", 40), ("rows", 30)]),
            at("CPU + 2 GPU processes", 1.0, &[("gpus", 2), ("columns", 40), ("rows", 30)]),
        ],
        large: &[],
        columns: &[KERNEL, column("other", "CPU program", Unit::Seconds), MERGED],
        axis: ("", Along::Labels),
        open: cells::stitching,
    },
    Experiment {
        name: "model",
        title: "eight processes use one model on one GPU",
        claim: "a use of today: one copy instead of eight, and further processes wait for no copy",
        methods: &[
            Method::new("copy", "each process reads and copies it"),
            Method::new("pread", "each process reads it with spinio_pread"),
            Method::new("map", "a leased file: the first process reads it, the others map its memory"),
        ],
        small: &[at("8 processes", 0.0, &[("size", 4 * MIB), ("processes", 8)])],
        full: &[at("8 processes", 0.0, &[("size", 2 * GIB), ("processes", 8)])],
        large: &[at("8 processes", 0.0, &[("size", 16 * GIB), ("processes", 8)])],
        columns: &[
            column("first", "first", Unit::Seconds),
            column("further", "seven others", Unit::Seconds),
            column("bring", "of it to the device", Unit::Seconds),
        ],
        axis: ("", Along::Labels),
        open: cells::model,
    },
    Experiment {
        name: "second",
        title: "a second GPU gets a file that the first one has",
        claim: "a use of today: from the first GPU's memory, at 0.7 of the rate of cudaMemcpyPeer, instead of from the file",
        methods: &[
            Method::new("limit", "the limit: cudaMemcpyPeer of as many bytes"),
            Method::new("pread", "spinio_pread of the file, which the host has cached"),
            Method::new("map", "an acquire of a map of the leased file"),
            Method::new("mounted", "an acquire of a map of the mounted file"),
        ],
        small: &[at("4 MiB", 0.0, &[("size", 4 * MIB)])],
        full: &[at("2 GiB", 0.0, &[("size", 2 * GIB)])],
        large: &[at("8 GiB", 0.0, &[("size", 8 * GIB)])],
        columns: &[
            column("peer", "from the first GPU", Unit::Bytes),
            column("refused", "reason of a refusal", Unit::Number),
        ],
        axis: ("", Along::Labels),
        open: cells::second,
    },
    Experiment {
        name: "changes",
        title: "kernels add up a file of which a CPU program has changed single words",
        claim: "a use of today: only the pages that have changed are brought to the device",
        methods: &[COPY, PREAD, MAP],
        small: &[
            at("1 %", 1.0, &[("size", 4 * MIB), ("changed", 100)]),
            at("100 %", 100.0, &[("size", 4 * MIB), ("changed", 10_000)]),
        ],
        full: &[
            at("0.01 %", 0.01, &[("size", 512 * MIB), ("changed", 1)]),
            at("1 %", 1.0, &[("size", 512 * MIB), ("changed", 100)]),
            at("10 %", 10.0, &[("size", 512 * MIB), ("changed", 1000)]),
            at("100 %", 100.0, &[("size", 512 * MIB), ("changed", 10_000)]),
        ],
        large: &[],
        columns: &[BRING, FETCHED],
        axis: ("pages that have changed, %", Along::Log),
        open: cells::changes,
    },
    Experiment {
        name: "checkpoint",
        title: "a checkpoint from the GPU: readable, and later durable",
        claim: "a use of today: other programs read it when release returns; writing it out is not waited for",
        methods: &[
            Method::new("copy", "cudaMemcpy and write; fsync"),
            Method::new("pwrite", "spinio_pwrite; fsync"),
            Method::new("map", "kernels store into an overwritten map; release; sync"),
        ],
        small: &[at("1 MiB", 0.0, &[("size", MIB)])],
        full: &[at("256 MiB", 0.0, &[("size", 256 * MIB)])],
        large: &[at("2 GiB", 0.0, &[("size", 2 * GIB)])],
        columns: &[column("sum", "sha256sum", Unit::Seconds), column("sync", "then durable", Unit::Seconds)],
        axis: ("", Along::Labels),
        open: cells::checkpoint,
    },
    Experiment {
        name: "writers",
        title: "two GPU processes write every page of one file",
        claim: "a use of today, which the paper could not run: no byte is lost, and no program merges by hand",
        methods: &[PRIVATE, MAP],
        small: &[at("1 MiB", 0.0, &[("size", MIB), ("iterations", 1)])],
        full: &[at("64 MiB", 0.0, &[("size", 64 * MIB), ("iterations", 1)])],
        large: &[],
        columns: &[KERNEL, RELEASE, MERGED],
        axis: ("", Along::Labels),
        open: cells::two_devices,
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_each_experiment_says_why_if_nothing_of_it_runs() {
        for (i, e) in EXPERIMENTS.iter().enumerate() {
            assert!(EXPERIMENTS[..i].iter().all(|other| other.name != e.name), "{}", e.name);
            // These words start the daemon's processes.
            assert!(!["all", "list", "mount", "umount", "serve", "server", "drop", "status"].contains(&e.name));
            let runs = e.methods.iter().any(|m| m.needs == Needs::Nothing);
            assert_eq!(runs, !e.small.is_empty() && !e.full.is_empty(), "{}", e.name);
            for scale in [e.small, e.full, e.large] {
                assert!(scale.iter().all(|s| !s.values.is_empty() && s.x.is_finite()), "{}", e.name);
            }
        }
    }
}
