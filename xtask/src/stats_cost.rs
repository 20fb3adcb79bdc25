//! `cargo x stats-cost`: the cost of counters and traces for a device read on the emulated device, measured by
//! crates/io/benches/stats_cost.rs; on a GPU, by benches/calls/device_call.c of the GPU pack.

use anyhow::Result;

use crate::tools;

pub(crate) fn run() -> Result<()> {
    tools::run(tools::cargo().args(["bench", "--quiet", "--package", "spinio-io", "--bench", "stats_cost"]))
}
