//! The names that machines see: JSON keys and Prometheus labels.

use spinio_io::stats::Gauge;
use spinio_plan::{Reason, Residency};

/// `cached_large`.
pub fn reason(reason: Reason) -> String {
    let mut out = String::new();
    for c in format!("{reason:?}").chars() {
        if c.is_ascii_uppercase() && !out.is_empty() {
            out.push('_');
        }
        out.push(c.to_ascii_lowercase());
    }
    out
}

/// `staging_bytes`.
pub fn gauge(gauge: Gauge) -> &'static str {
    match gauge {
        Gauge::Pinned => "pinned_bytes",
        Gauge::BounceBytes => "staging_bytes",
        Gauge::CachedFileStates => "kept_files",
        Gauge::PinnedFiles => "held_files",
        Gauge::PinnedFileBytes => "held_bytes",
        Gauge::ReadaheadPages => "read_ahead_pages",
    }
}

/// All of them, with their names.
pub const RESIDENCIES: [(Residency, &str); 4] = [
    (Residency::Absent, "absent"),
    (Residency::Clean, "clean"),
    (Residency::Dirty, "dirty"),
    (Residency::Unknown, "unknown"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_names_are_unique() {
        assert_eq!(reason(Reason::CachedLarge), "cached_large");
        let mut names: Vec<_> = Reason::ALL.iter().map(|r| reason(*r)).collect();
        names.sort();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
    }
}
