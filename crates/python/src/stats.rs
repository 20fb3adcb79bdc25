//! The counters of this process.

use pyo3::prelude::*;
use pyo3::types::PyDict;
use spinio_runtime::client;

/// What SPIN has done in this process since it began.
///
/// A dictionary. read, write, batch: calls, failed ones, bytes, nanoseconds in all, and the latency that half (p50) and 99 of
/// 100 (p99) did not exceed. routes: a list of how bytes travelled, with direction, route, reason, pieces and the same
/// figures. refused: faster routes that were not taken, with reason, times and bytes. kept: what is held now and was held at
/// most, by name.
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let said = py.import("json")?.call_method1("loads", (client::counters(),))?.cast_into::<PyDict>()?;
    // Now and at most: JSON has no pairs.
    if let Some(kept) = said.get_item("kept")? {
        let kept = kept.cast_into::<PyDict>()?;
        for (name, pair) in kept.iter() {
            let [now, most] = pair.extract::<[u64; 2]>()?;
            kept.set_item(name, (now, most))?;
        }
    }
    Ok(said)
}
