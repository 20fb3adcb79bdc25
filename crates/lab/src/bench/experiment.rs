//! The paper's experiments, each as a list of settings to be measured.
//!
//! | experiment | what varies | what stays |
//! |---|---|---|
//! | fig1 | block size | sequential, one thread, 100 MB, nothing cached |
//! | fig4a | block size | random, 4 threads, 500 blocks each, nothing cached |
//! | fig4b | block size | sequential, 4 threads, 100 MB each, nothing cached |
//! | fig4c | block size | as fig4a, on an array |
//! | fig4d | load on CPU or disk, share cached | random 512 KiB, 4 threads |
//! | fig5 | share cached | random 512 B, one thread |
//! | table3 | - | sequential 8 MiB, 4 threads, everything cached |

use super::method::Method;
use crate::svg::Scale;

/// The concurrent load of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// None.
    None,
    /// Every processor is kept busy.
    Cpu,
    /// The disk is kept busy.
    Io,
}

impl Load {
    /// In tables.
    pub fn name(self) -> &'static str {
        match self {
            Load::None => "no load",
            Load::Cpu => "CPU load",
            Load::Io => "I/O load",
        }
    }
}

/// The offsets that a thread reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// After the last block, once through the file.
    Sequential,
    /// Anywhere, block-aligned.
    Random,
}

/// One setting, with which all methods are measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// In the first column of the table.
    pub label: String,
    /// Along the chart.
    pub x: f64,
    /// Bytes per read.
    pub block: u64,
    /// Share of the file that is cached before each run, from its start.
    pub cached: f64,
    /// The concurrent load.
    pub load: Load,
}

/// One figure or table.
pub struct Experiment {
    /// On the command line.
    pub name: &'static str,
    /// Its title, one line.
    pub title: &'static str,
    /// The paper's result.
    pub claim: &'static str,
    /// The methods that it compares.
    pub methods: &'static [Method],
    /// The offsets that threads read.
    pub pattern: Pattern,
    /// The number of threads.
    pub threads: usize,
    /// The most blocks that a thread reads, none of them twice; 0: the file.
    pub reads: u64,
    /// Bytes of the file of each thread.
    pub size: u64,
    /// The paper's own figures, if known.
    pub paper: &'static [(Method, &'static str)],
    kind: Kind,
}

/// The variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Blocks,
    Shares,
    Loads,
    Single,
}

const SEQUENTIAL: u64 = 100 << 20;
const ALL: &[Method] = &Method::ALL;

/// Random blocks of a file of 1 GiB, by four threads: the base of three of them.
const RANDOM: Experiment = Experiment {
    name: "",
    title: "",
    claim: "",
    methods: ALL,
    pattern: Pattern::Random,
    threads: 4,
    reads: 500,
    size: 1 << 30,
    paper: &[],
    kind: Kind::Blocks,
};

/// All of them, in the paper's order.
pub const EXPERIMENTS: &[Experiment] = &[
    Experiment {
        name: "fig1",
        title: "sequential reads, one thread, nothing cached",
        claim: "CPU-mediated reads are more than 10x faster than P2P for very short blocks, about 3x at 32 KB; P2P is \
                faster from 512 KB on",
        methods: &[Method::PreadCopy, Method::P2p, Method::Spin],
        pattern: Pattern::Sequential,
        threads: 1,
        reads: 0,
        size: SEQUENTIAL,
        paper: &[],
        kind: Kind::Blocks,
    },
    Experiment {
        name: "fig4a",
        title: "random reads, 4 threads, nothing cached",
        claim: "SPIN matches P2P, with 1 % overhead; above 1 MB all but pread+copy come near",
        ..RANDOM
    },
    Experiment {
        name: "fig4b",
        title: "sequential reads, 4 threads, nothing cached",
        claim: "SPIN tracks the best method of each block size, switching from the page cache to P2P at 512 KB; up to 10 % \
                overhead below 4 KB",
        methods: ALL,
        pattern: Pattern::Sequential,
        threads: 4,
        reads: 0,
        size: SEQUENTIAL,
        paper: &[],
        kind: Kind::Blocks,
    },
    Experiment {
        name: "fig4c",
        title: "random reads, 4 threads, on an array of disks",
        claim: "SPIN uses P2P for all of them; two disks are faster than one above 512 KB only",
        ..RANDOM
    },
    Experiment {
        name: "fig4d",
        title: "random reads of 512 KiB, 4 threads, with concurrent CPU and I/O load",
        claim: "SPIN keeps its advantage whatever the load",
        size: 256 << 20,
        kind: Kind::Loads,
        ..RANDOM
    },
    Experiment {
        name: "fig5",
        title: "random reads of 512 B, one thread, more and more of the file cached",
        claim: "SPIN tracks the best method and is up to 20 % faster than any where the file is partly cached; 5 % \
                overhead at both ends",
        methods: ALL,
        pattern: Pattern::Random,
        threads: 1,
        reads: 20_000,
        size: 256 << 20,
        paper: &[],
        kind: Kind::Shares,
    },
    Experiment {
        name: "table3",
        title: "sequential reads of 8 MiB, 4 threads, everything cached",
        claim: "SPIN is faster than every method that does not use the page cache, within 1.5 % of pread+GPU",
        methods: ALL,
        pattern: Pattern::Sequential,
        threads: 4,
        reads: 0,
        size: 1 << 30,
        paper: &[
            (Method::PreadCopy, "5.72"),
            (Method::PreadCopyDirect, "4.69 (RAID)"),
            (Method::P2p, "2.65"),
            (Method::PreadGpu, "10.28"),
            (Method::Spin, "10.13"),
        ],
        kind: Kind::Single,
    },
];

/// 512 B to 8 MiB by factors of 4.
pub fn blocks() -> Vec<u64> {
    (0..8).map(|i| 512u64 << (2 * i)).collect()
}

impl Experiment {
    /// The settings of an experiment, with these block sizes if they vary.
    pub fn settings(&self, blocks: &[u64]) -> Vec<Setting> {
        let setting = |label: String, x: f64, block, cached, load| Setting { label, x, block, cached, load };
        match self.kind {
            Kind::Blocks => blocks
                .iter()
                .map(|&block| setting(crate::format::bytes(block), block as f64, block, 0.0, Load::None))
                .collect(),
            Kind::Shares => (0..=10)
                .map(|i| setting(format!("{} %", i * 10), f64::from(i) * 10.0, 512, f64::from(i) / 10.0, Load::None))
                .collect(),
            Kind::Loads => {
                let mut out = Vec::new();
                for load in [Load::None, Load::Cpu, Load::Io] {
                    for share in [0, 50, 100] {
                        let label = format!("{share} %, {}", load.name());
                        out.push(setting(label, out.len() as f64, 512 << 10, f64::from(share) / 100.0, load));
                    }
                }
                out
            }
            Kind::Single => vec![setting("8 MiB".to_owned(), 0.0, 8 << 20, 1.0, Load::None)],
        }
    }

    /// The chart's horizontal axis: its quantity and its scale.
    pub fn axis(&self, settings: &[Setting]) -> (&'static str, Scale) {
        let names = || Scale::Names(settings.iter().map(|s| s.label.clone()).collect());
        match self.kind {
            Kind::Blocks => ("bytes a read", Scale::Bytes),
            Kind::Shares => ("share of the file that is cached, %", Scale::Linear),
            Kind::Loads => ("share cached, and load", names()),
            Kind::Single => ("", names()),
        }
    }

    /// Whether it needs an array of disks.
    pub fn needs_array(&self) -> bool {
        self.name == "fig4c"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_is_listed_once_with_settings() {
        let names: Vec<_> = EXPERIMENTS.iter().map(|e| e.name).collect();
        assert_eq!(names, ["fig1", "fig4a", "fig4b", "fig4c", "fig4d", "fig5", "table3"]);
        for e in EXPERIMENTS {
            let settings = e.settings(&blocks());
            assert!(!settings.is_empty() && settings.iter().all(|s| s.block <= e.size), "{}", e.name);
        }
        assert_eq!(blocks().last(), Some(&(8 << 20)));
    }
}
