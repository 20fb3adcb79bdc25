//! Untrusted contents of another process's statistics file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spinio_stats::Snapshot;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(snapshot) = Snapshot::from_bytes(bytes) {
        let nothing = snapshot.since(&snapshot);
        assert!(nothing.rows.is_empty(), "a difference to itself has rows");
    }
});
