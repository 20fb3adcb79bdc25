//! The counters of this process.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client;

/// What SPIN has done in this process since it began.
///
/// A dictionary. read, write, batch: calls, failed ones, bytes, nanoseconds in all, and the latency that half (p50) and 99 of
/// 100 (p99) did not exceed. routes: a list of how bytes travelled, with direction, route, reason, pieces and the same
/// figures. refused: faster routes that were not taken, with reason, times and bytes. gauges: the current
/// and the largest value of each, by name; kept has the same under the names of the last release.
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let said = py.import("json")?.call_method1("loads", (client::counters(),))?.cast_into::<PyDict>()?;
    // Now and at most: JSON has no pairs.
    for key in ["gauges", "kept"] {
        let Some(gauges) = said.get_item(key)? else { continue };
        let gauges = gauges.cast_into::<PyDict>()?;
        for (name, pair) in gauges.iter() {
            let [now, max] = pair.extract::<[u64; 2]>()?;
            gauges.set_item(name, (now, max))?;
        }
    }
    Ok(said)
}
