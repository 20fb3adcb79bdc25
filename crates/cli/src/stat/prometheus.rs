//! Counters in the text format of Prometheus, version 0.0.4: the one that its server, the text files of node_exporter
//! and `promtool check metrics` all read. The library writes the newer OpenMetrics, in which the suffix of a counter is
//! not part of its name and the page has a last line. So counters are named in full here, and written as plain numbers.
//!
//! Every series names its process and program. When a process ends its series end too, which rates of counters handle.
//! Two processes with one PID and program, each in its own container, are one series: a page with a duplicate series is
//! invalid. Latency buckets are four times as wide from one to the next, from 1 us to 1 s; the last finite bound is 3.8
//! s, above which latencies are not distinguished.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use spinio_io::stats::{Direction, Gauge, Histogram, Snapshot};

use crate::renamed_keys;

/// The page.
pub fn text(snapshots: Vec<Snapshot>) -> Result<String, fmt::Error> {
    let mut processes: Vec<Snapshot> = Vec::new();
    for s in snapshots {
        let alike = |p: &Snapshot| (p.process.pid, &p.process.name) == (s.process.pid, &s.process.name);
        match processes.iter().position(alike) {
            Some(at) => processes[at].add(&s),
            None => processes.push(s),
        }
    }
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Processes(processes)));
    let mut page = String::new();
    encode(&mut page, &registry)?;
    // The last line of OpenMetrics.
    let text = page.strip_suffix("# EOF\n").map(str::len).unwrap_or(page.len());
    page.truncate(text);
    Ok(page)
}

#[derive(Debug)]
struct Processes(Vec<Snapshot>);

type Labels = Vec<(&'static str, String)>;

/// A value of a series, under the unchanged name of its metric.
fn encode_value(encoder: &mut MetricEncoder<'_>, value: u64) -> fmt::Result {
    encoder.encode_gauge(&value)
}

impl Processes {
    /// One metric: for each process, series of labels and value.
    fn metric(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        kind: MetricType,
        series: impl Fn(&Snapshot) -> Vec<(Labels, u64)>,
    ) -> fmt::Result {
        let mut metric = encoder.encode_descriptor(name, help, None, kind)?;
        for s in &self.0 {
            for (more, value) in series(s) {
                let labels = labels(s, more);
                encode_value(&mut metric.encode_family(&labels.as_slice())?, value)?;
            }
        }
        Ok(())
    }

    /// A metric under its name, and for one release under its old name.
    fn renamed(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        old: &str,
        kind: MetricType,
        series: impl Fn(&Snapshot) -> Vec<(Labels, u64)>,
    ) -> fmt::Result {
        self.metric(encoder, (name, help), kind, &series)?;
        self.metric(encoder, (old, &format!("Deprecated: use {name}")), kind, &series)
    }

    fn seconds(
        &self,
        encoder: &mut DescriptorEncoder<'_>,
        (name, help): (&str, &str),
        series: impl Fn(&Snapshot) -> Vec<(Labels, u64, Histogram)>,
    ) -> fmt::Result {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
        for s in &self.0 {
            for (more, nanos, latency) in series(s) {
                let labels = labels(s, more);
                let (count, buckets) = buckets(&latency);
                let labels = labels.as_slice();
                let mut family = metric.encode_family(&labels)?;
                family.encode_histogram::<NoLabelSet>(nanos as f64 / 1e9, count, &buckets, None)?;
            }
        }
        Ok(())
    }
}

fn labels(s: &Snapshot, more: Labels) -> Labels {
    let mut labels = vec![("pid", s.process.pid.to_string()), ("program", s.process.name.clone())];
    labels.extend(more);
    labels
}

/// The total count, and the count of each bucket. Counts that no process can have reached are clipped, so that their
/// sums do not overflow.
fn buckets(latency: &Histogram) -> (u64, Vec<(f64, u64)>) {
    let bounds = (0..11).map(|i| 1u64 << (10 + 2 * i)).chain([Histogram::MAX_NANOS]);
    let mut out: Vec<(f64, u64)> = bounds.map(|nanos| (nanos as f64 / 1e9, 0)).collect();
    out.push((f64::INFINITY, 0));
    let mut count = 0;
    for (below, n) in latency.nonempty() {
        let (n, below) = (n.min(1 << 48), below.map_or(f64::INFINITY, |nanos| nanos as f64 / 1e9));
        count += n;
        if let Some(bucket) = out.iter_mut().find(|(bound, _)| below <= *bound) {
            bucket.1 += n;
        }
    }
    (count, out)
}

fn directions(s: &Snapshot) -> impl Iterator<Item = Direction> {
    Direction::ALL.into_iter().filter(|d| s.calls(*d).calls > 0)
}

impl Collector for Processes {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let e = &mut encoder;
        self.metric(e, ("spinio_requests_total", "Device requests that returned"), MetricType::Counter, |s| {
            directions(s)
                .flat_map(|d| {
                    let c = s.calls(d);
                    [("ok", c.calls.saturating_sub(c.failed)), ("error", c.failed)].map(|(outcome, n)| {
                        (vec![("direction", d.name().to_owned()), ("outcome", outcome.to_owned())], n)
                    })
                })
                .collect()
        })?;
        self.metric(e, ("spinio_request_bytes_total", "Bytes that device requests moved"), MetricType::Counter, |s| {
            directions(s).map(|d| (vec![("direction", d.name().to_owned())], s.calls(d).bytes)).collect()
        })?;
        self.seconds(e, ("spinio_request_seconds", "Time of device requests"), |s| {
            let series = |d| {
                let c = s.calls(d);
                (vec![("direction", d.name().to_owned())], c.nanos, c.latency.clone())
            };
            directions(s).map(series).collect()
        })?;
        let labels_of = |l: &spinio_io::stats::RouteRow| {
            vec![
                ("direction", l.direction.name().to_owned()),
                ("route", l.route.name().to_owned()),
                ("reason", renamed_keys::reason(l.reason)),
            ]
        };
        self.metric(
            e,
            ("spinio_route_bytes_total", "Bytes by route, and why they took it"),
            MetricType::Counter,
            |s| s.rows.iter().map(|l| (labels_of(l), l.bytes)).collect(),
        )?;
        self.metric(
            e,
            ("spinio_route_pieces_total", "Pieces by route, and why they took it"),
            MetricType::Counter,
            |s| s.rows.iter().map(|l| (labels_of(l), l.pieces)).collect(),
        )?;
        self.seconds(e, ("spinio_route_seconds", "Time of pieces by route"), |s| {
            s.rows.iter().map(|l| (labels_of(l), l.nanos, l.latency.clone())).collect()
        })?;
        let refused = |s: &Snapshot| {
            s.refusals.iter().map(|r| (vec![("reason", renamed_keys::reason(r.reason))], r.count)).collect::<Vec<_>>()
        };
        let (name, help) = ("spinio_fast_route_refused_total", "Segments for which a faster route was refused");
        self.renamed(e, (name, help), "spinio_refused_total", MetricType::Counter, refused)?;
        let refused = |s: &Snapshot| {
            s.refusals.iter().map(|r| (vec![("reason", renamed_keys::reason(r.reason))], r.bytes)).collect::<Vec<_>>()
        };
        let (name, help) = ("spinio_fast_route_refused_bytes_total", "Bytes for which a faster route was refused");
        self.renamed(e, (name, help), "spinio_refused_bytes_total", MetricType::Counter, refused)?;
        let surveyed = |s: &Snapshot| {
            renamed_keys::RESIDENCIES.map(|(r, name)| (vec![("residency", name.to_owned())], s.pages(r))).into()
        };
        let (name, help) = ("spinio_pages_surveyed_total", "Pages of 4 KiB whose residency was queried");
        self.renamed(e, (name, help), "spinio_pages_seen_total", MetricType::Counter, surveyed)?;
        for g in Gauge::ALL {
            let (name, help) = (format!("spinio_{}", g.key()), format!("{}, now", g.name()));
            let now = |s: &Snapshot| vec![(Vec::new(), s.gauge(g).0)];
            match renamed_keys::gauge_old(g) {
                Some(old) => {
                    self.renamed(e, (&name, &help), &format!("spinio_{old}"), MetricType::Gauge, now)?;
                }
                None => self.metric(e, (&name, &help), MetricType::Gauge, now)?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use spinio_plan::Reason;

    use super::*;

    #[test]
    fn invalid_counts_do_not_overflow() {
        let mut h = Histogram::default();
        (0..64).for_each(|i| h.add(1 << i, u64::MAX / 2));
        let (count, buckets) = buckets(&h);
        assert_eq!(count, buckets.iter().map(|b| b.1).sum::<u64>());
    }

    #[test]
    fn slowest_calls_are_only_in_inf_bucket() {
        let mut h = Histogram::default();
        h.add(1_000_000_000, 2);
        h.add(60_000_000_000, 3);
        let (count, buckets) = buckets(&h);
        let finite: u64 = buckets.iter().filter(|(bound, _)| bound.is_finite()).map(|b| b.1).sum();
        assert_eq!((count, finite, buckets.last()), (5, 2, Some(&(f64::INFINITY, 3))));
    }

    #[test]
    fn series_are_unique() {
        let mut one = Snapshot::default();
        (one.process.pid, one.process.name) = (1, "loader".to_owned());
        one.read.calls = 3;
        let page = text(vec![one.clone(), one]).unwrap();
        let ok: Vec<&str> = page.lines().filter(|l| l.contains("outcome=\"ok\"")).collect();
        assert_eq!(
            ok,
            [r#"spinio_requests_total{pid="1",program="loader",direction="read",outcome="ok"} 6"#],
            "{page}"
        );
    }

    #[test]
    fn deprecated_metrics_equal_new_metrics() {
        let mut s = Snapshot { gauges: std::array::from_fn(|i| [10 + i as u64, 20]), ..Snapshot::default() };
        s.pages = std::array::from_fn(|i| 30 + i as u64);
        s.refusals.push(spinio_io::stats::Refusal { reason: Reason::Dirty, count: 5, bytes: 6 });
        let page = text(vec![s]).unwrap();
        let of = |name: &str| -> Vec<String> {
            let series = page.lines().filter_map(|l| l.strip_prefix(name).filter(|rest| rest.starts_with('{')));
            series.map(str::to_owned).collect()
        };
        let pairs = [
            ("spinio_refused_total", "spinio_fast_route_refused_total"),
            ("spinio_refused_bytes_total", "spinio_fast_route_refused_bytes_total"),
            ("spinio_pages_seen_total", "spinio_pages_surveyed_total"),
            ("spinio_staging_bytes", "spinio_bounce_bytes"),
            ("spinio_kept_files", "spinio_file_cache_entries"),
            ("spinio_held_files", "spinio_pinned_files"),
            ("spinio_held_bytes", "spinio_pinned_file_bytes"),
            ("spinio_read_ahead_pages", "spinio_readahead_pages"),
        ];
        for (old, new) in pairs {
            assert!(!of(new).is_empty() && of(old) == of(new), "{old}: {page}");
            assert!(page.contains(&format!("# HELP {old} Deprecated: use {new}")), "{page}");
        }
    }

    #[test]
    fn page_without_processes_is_valid() {
        let page = text(Vec::new()).unwrap();
        assert!(page.contains("# TYPE spinio_requests_total counter\n") && !page.contains("EOF"), "{page}");
    }
}
