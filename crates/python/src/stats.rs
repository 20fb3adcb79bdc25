//! The counters of this process.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use spinio_io::runtime;
use spinio_io::stats::{Direction, Gauge, Histogram};

/// What SPIN has done in this process since it began.
///
/// A dictionary. read, write, batch: calls, failed ones, bytes, nanoseconds in all, and the latency that half (p50) and 99 of
/// 100 (p99) did not exceed. routes: a list of how bytes travelled, with direction, route, reason, pieces and the same
/// figures. refused: faster routes that were not taken, with reason, times and bytes. kept: what is held now and was held at
/// most, by name.
#[pyfunction]
pub(crate) fn stats(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let snapshot = runtime().stats();
    let said = PyDict::new(py);
    for direction in Direction::ALL {
        let calls = snapshot.calls(direction);
        let one = PyDict::new(py);
        one.set_item("calls", calls.calls)?;
        one.set_item("failed", calls.failed)?;
        one.set_item("bytes", calls.bytes)?;
        one.set_item("nanoseconds", calls.nanos)?;
        quantiles(&one, &calls.latency)?;
        said.set_item(direction.name(), one)?;
    }
    let routes = PyList::empty(py);
    for line in &snapshot.lines {
        let one = PyDict::new(py);
        one.set_item("direction", line.direction.name())?;
        one.set_item("route", line.route.name())?;
        one.set_item("reason", line.reason.text())?;
        one.set_item("pieces", line.pieces)?;
        one.set_item("bytes", line.bytes)?;
        one.set_item("nanoseconds", line.nanos)?;
        quantiles(&one, &line.latency)?;
        routes.append(one)?;
    }
    said.set_item("routes", routes)?;
    let refused = PyList::empty(py);
    for line in &snapshot.refused {
        let one = PyDict::new(py);
        one.set_item("reason", line.reason.text())?;
        one.set_item("times", line.times)?;
        one.set_item("bytes", line.bytes)?;
        refused.append(one)?;
    }
    said.set_item("refused", refused)?;
    let kept = PyDict::new(py);
    for gauge in Gauge::ALL {
        kept.set_item(gauge.name(), snapshot.gauge(gauge))?;
    }
    said.set_item("kept", kept)?;
    Ok(said)
}

/// Latencies that half, and 99 of 100, did not exceed; None where there are none.
fn quantiles(into: &Bound<'_, PyDict>, latency: &Histogram) -> PyResult<()> {
    into.set_item("p50_nanoseconds", latency.quantile(0.5))?;
    into.set_item("p99_nanoseconds", latency.quantile(0.99))
}
