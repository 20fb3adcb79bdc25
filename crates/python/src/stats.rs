//! The counters of this process.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client;

/// What SPIN has done in this process since it started.
///
/// A dictionary. read, write, batch: calls, failed ones, bytes, nanoseconds in total, and the latency that half (p50)
/// and 99 of 100 (p99) did not exceed. routes: a list of the routes of the bytes, with direction, route, reason, pieces
/// and the same figures. refused: faster routes that were not taken, with reason, times and bytes. gauges: current
/// amounts and their maximum, by name. kept: the same under the names of earlier releases.
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let counters = py.import("json")?.call_method1("loads", (client::counters(),))?.cast_into::<PyDict>()?;
    // Current value and maximum: JSON has no pairs.
    for group in ["gauges", "kept"] {
        let Some(gauges) = counters.get_item(group)? else { continue };
        let gauges = gauges.cast_into::<PyDict>()?;
        for (name, pair) in gauges.iter() {
            let [now, max] = pair.extract::<[u64; 2]>()?;
            gauges.set_item(name, (now, max))?;
        }
    }
    Ok(counters)
}
