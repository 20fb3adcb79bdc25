//! JSON keys and Prometheus labels, and those of the last release, which are written next to them for one release.

use serde_json::Value;
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

/// The key of a reason in the last release, if it was another one.
pub const fn reason_old(reason: Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::NoShadowFd => "no_twin",
        Reason::NoWorkers => "no_helpers",
        Reason::Concurrent => "crowded",
        Reason::Fallback => "fell_back",
        Reason::AppODirect => "own_direct",
        Reason::CacheBypass => "around",
        Reason::TailCopy => "beside",
        Reason::NotAtomic => "one_call",
        Reason::AppFdOnly => "own_only",
        Reason::Chunked => "in_parts",
        Reason::FullStripes => "whole_stripes",
        Reason::BySetting => "forced",
        Reason::Pinned => "held",
        _ => return None,
    })
}

/// Puts the key of a reason into a JSON object, as `reason`, and its key of the last release, as `reason_old`.
pub fn add_reason(object: &mut Value, reason: Reason) {
    object["reason"] = self::reason(reason).into();
    if let Some(old) = reason_old(reason) {
        object["reason_old"] = old.into();
    }
}

/// The key of a gauge in the last release, if it was another one.
pub const fn gauge_old(gauge: Gauge) -> Option<&'static str> {
    match gauge {
        Gauge::Pinned => None,
        Gauge::BounceBytes => Some("staging_bytes"),
        Gauge::CachedFileStates => Some("kept_files"),
        Gauge::PinnedFiles => Some("held_files"),
        Gauge::PinnedFileBytes => Some("held_bytes"),
        Gauge::ReadaheadPages => Some("read_ahead_pages"),
    }
}

/// Adds to a JSON object the keys of the last release, with the values of the new ones.
pub fn add_old_keys(object: &mut Value, pairs: &[(&str, &str)]) {
    for (old, new) in pairs {
        object[*old] = object[*new].clone();
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

    #[test]
    fn renamed_reasons_keep_their_numbers() {
        let renamed: Vec<_> =
            Reason::ALL.iter().filter_map(|r| Some((*r as u8, reason_old(*r)?, reason(*r)))).collect();
        let expected = [
            (9, "no_twin", "no_shadow_fd"),
            (10, "no_helpers", "no_workers"),
            (19, "crowded", "concurrent"),
            (23, "fell_back", "fallback"),
            (24, "own_direct", "app_o_direct"),
            (27, "around", "cache_bypass"),
            (29, "one_call", "not_atomic"),
            (30, "own_only", "app_fd_only"),
            (31, "in_parts", "chunked"),
            (32, "whole_stripes", "full_stripes"),
            (33, "forced", "by_setting"),
            (35, "held", "pinned"),
            (36, "beside", "tail_copy"),
        ];
        assert_eq!(renamed, expected.map(|(number, old, new)| (number, old, new.to_owned())));
        let mut object = serde_json::json!({});
        add_reason(&mut object, Reason::Chunked);
        assert_eq!(object, serde_json::json!({"reason": "chunked", "reason_old": "in_parts"}));
        object = serde_json::json!({});
        add_reason(&mut object, Reason::Cached);
        assert_eq!(object, serde_json::json!({"reason": "cached"}));
    }
}
