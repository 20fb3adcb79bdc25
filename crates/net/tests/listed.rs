//! TESTS.md names tests that exist.

use std::path::{Path, PathBuf};

/// The file of a test, of which the document gives the shortest name.
fn find(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folders = [root.join("tests"), root.join("src"), root.join("../../device/tests"), root.join("../cli/tests")];
    let found = folders.iter().map(|folder| folder.join(name)).find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("there is no {name}"))
}

#[test]
fn each_row_names_tests_that_exist_or_says_why_there_is_none() {
    let document = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/TESTS.md")).unwrap();
    let mut count = 0;
    for row in document.lines().filter(|line| line.starts_with("| ")) {
        let cell = row.trim_end_matches(" |").rsplit(" | ").next().unwrap();
        if cell == "tests" {
            continue;
        }
        let named: Vec<_> = cell.split('`').skip(1).step_by(2).filter_map(|text| text.split_once(": ")).collect();
        assert!(!named.is_empty() || cell.starts_with("none: "), "neither a test nor a reason: {row}");
        for (file, test) in named {
            let source = std::fs::read_to_string(find(file)).unwrap();
            // Defined, and in C++ called too.
            let times = source.matches(&format!("{test}(")).count();
            let wanted = if file.ends_with(".cpp") { 2 } else { 1 };
            assert!(times >= wanted, "{test} is {times} times in {file}");
            count += 1;
        }
    }
    assert!(count > 40, "{count} tests are named");
}
