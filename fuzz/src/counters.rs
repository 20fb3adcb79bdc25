//! The file of another process's counters, whoever wrote it.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spinio_io::stats::Snapshot;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(snapshot) = Snapshot::from_bytes(bytes) {
        let nothing = snapshot.since(&snapshot);
        assert!(nothing.lines.is_empty(), "counts out of nothing");
    }
});
