//! `spinio-lab gaia`: every experiment runs, small, on emulated devices; results are checked, methods that cannot run are
//! named, and nothing is left.

#[path = "../../cli/tests/common/mod.rs"]
mod common;

use common::mount::unavailable;
use common::{folder, spinio as lab, stderr, stdout};
use serde_json::Value;

/// Experiments, and how many settings times methods of each run on emulated devices.
const CELLS: [(&str, usize); 15] = [
    ("fig1a", 4),
    ("fig1b", 4),
    ("fig1c", 3),
    ("overhead", 20),
    ("fig5", 0),
    ("fig6a", 14),
    ("fig6b", 3),
    ("table2", 10),
    ("fig7", 6),
    ("fig8", 4),
    ("model", 3),
    ("second", 4),
    ("changes", 6),
    ("checkpoint", 3),
    ("writers", 2),
];

fn figure(cell: &Value, name: &str) -> f64 {
    cell["runs"][0][name].as_f64().unwrap_or_else(|| panic!("no {name} in {cell}"))
}

#[test]
fn every_experiment_is_listed_and_runs_with_right_results() {
    let listed = stdout(&lab().args(["gaia", "list"]).assert().success());
    if let Some(why) = unavailable() {
        eprintln!("skipped: {why}");
        return;
    }
    let dir = folder();
    let out = dir.path().join("out");
    let mut command = lab();
    command.args(["gaia", "all", "--runs", "2", "--scale", "small", "--limit", "1200", "--path"]).arg(dir.path());
    // On a busy machine too.
    command.timeout(std::time::Duration::from_secs(1300));
    let assert = command.arg("--out").arg(&out).assert().success();
    let text = stdout(&assert);
    for (name, cells) in CELLS {
        assert!(listed.contains(name) && text.contains(name), "{name}: {text}");
        let record = std::fs::read_to_string(out.join(format!("{name}.json"))).unwrap();
        let record: Value = serde_json::from_str(&record).unwrap();
        let measured = record["cells"].as_array().unwrap();
        assert_eq!(measured.len(), cells, "{name}: {}\n{}", record["not_measured"], stderr(&assert));
        assert!(measured.iter().all(|cell| figure(cell, "seconds") > 0.0), "{record}");
        let chart = std::fs::read_to_string(out.join(format!("{name}.svg")));
        assert_eq!(chart.is_ok_and(|chart| chart.contains("milliseconds") && chart.contains("</svg>")), cells > 0);
        for setting in measured.iter().filter(|cell| cell["method"] == "map") {
            check(name, setting, measured);
        }
    }
    for why in ["managed: there is no CUDA GPU here", "peer-caching: benches/gaia/gaia.py"] {
        assert!(text.contains(&format!("not measured: {why}")), "{text}");
    }
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(left, ["out"], "files are left");
    assert!(!std::fs::read_to_string("/proc/self/mounts").unwrap().contains(dir.path().to_str().unwrap()));
}

/// What maps must do, whatever the machine's speed.
fn check(name: &str, map: &Value, all: &[Value]) {
    let others = |method: &str| all.iter().find(|cell| cell["method"] == method && cell["setting"] == map["setting"]);
    let value = |name: &str| map["values"][name].as_f64().unwrap();
    match name {
        // Both writers have changed every page: the later one, at least, merges.
        "fig1a" | "fig1b" | "writers" => assert!(figure(map, "merged") >= value("size") / 4096.0, "{map}"),
        // At least the pages that have changed; few, where few have.
        "changes" => {
            let pages = value("size") / 4096.0 * value("changed") / 10_000.0;
            let most = value("size") * if value("changed") < 10_000.0 { 0.5 } else { 2.0 };
            assert!((pages.ceil() * 4096.0..=most).contains(&figure(map, "fetched")), "{map}");
        }
        "fig7" => assert!(figure(map, "fetched") < figure(others("copy").unwrap(), "fetched"), "{map}"),
        "fig8" => assert!(figure(map, "merged") > 0.0, "{map}"),
        // A quarter of the images, and what lies between two of them, or in the same page of a reader.
        "table2" => {
            let reader = others("reader").unwrap();
            assert!(figure(map, "fetched") < 0.5 * value("size"), "{map}");
            assert!((0.2..0.5).contains(&(figure(reader, "fetched") / value("size"))), "{reader}");
        }
        // One copy, and what each process has for its sum.
        "model" => {
            let copy = others("copy").unwrap();
            assert!(figure(map, "gpu") < 2.0 * value("size") && figure(copy, "gpu") > 8.0 * value("size"), "{map}");
        }
        "fig6a" => assert_eq!(figure(map, "fetched"), value("size"), "{map}"),
        // All of it, and the file is not read again.
        "second" => {
            for map in [map, others("mounted").unwrap()] {
                assert_eq!((figure(map, "peer"), figure(map, "refused")), (value("size"), 0.0), "{map}");
            }
        }
        _ => {}
    }
}

#[test]
fn invalid_arguments_are_refused() {
    for (args, needle) in [
        (&["fig99"][..], "`fig99` is no experiment"),
        (&[], "EXPERIMENT"),
        (&["fig1a", "--runs", "1"], "--runs"),
        (&["fig1a", "--limit", "0"], "--limit"),
        (&["fig1a", "--limit", "1e30"], "--limit"),
    ] {
        let assert = lab().arg("gaia").args(args).assert().code(2);
        assert!(stderr(&assert).contains(needle), "{args:?}: {}", stderr(&assert));
    }
}
