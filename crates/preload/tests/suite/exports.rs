//! What the library exports, and what it must not import.

use std::collections::BTreeSet;
use std::process::Command;

use crate::build::{library, source};

fn nm(option: &str) -> Vec<String> {
    let done = Command::new("nm").args(["-D", option]).arg(library()).output().expect("nm runs");
    assert!(done.status.success());
    let text = String::from_utf8(done.stdout).expect("symbols in ASCII");
    text.lines().filter_map(|l| l.split_whitespace().last()).map(str::to_owned).collect()
}

#[test]
fn exports_match_committed_list_without_versions() {
    let exported: BTreeSet<String> = nm("--defined-only").into_iter().collect();
    let list = std::fs::read_to_string(source("exports.txt")).expect("exports.txt");
    let listed: BTreeSet<String> = list.lines().map(str::to_owned).collect();
    assert!(exported.iter().all(|name| !name.contains('@')), "a versioned symbol would never be bound: {exported:?}");
    let extra: Vec<_> = exported.difference(&listed).collect();
    let missing: Vec<_> = listed.difference(&exported).collect();
    assert!(extra.is_empty() && missing.is_empty(), "not in exports.txt: {extra:?}; only there: {missing:?}");
}

#[test]
fn library_is_nodelete_and_needs_no_accelerator_library() {
    let done = Command::new("readelf").args(["-d", "-W"]).arg(library()).output().expect("readelf runs");
    let text = String::from_utf8_lossy(&done.stdout);
    assert!(text.contains("NODELETE"), "{text}");
    assert!(text.contains("Library soname: [libspinio.so.0]"), "{text}");
    for needed in text.lines().filter(|l| l.contains("(NEEDED)")) {
        let allowed = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"];
        assert!(allowed.iter().any(|a| needed.contains(a)), "{needed}");
    }
}
