//! `spinio-lab bench`: every experiment runs, small, on the emulated device, and methods that cannot run are listed.

#[path = "../../cli/tests/common/mod.rs"]
mod common;

use assert_cmd::Command;
use common::{file, folder, spinio as lab, stderr, stdout};

fn bench(args: &[&str]) -> Command {
    let mut command = lab();
    command.args(["bench", "--device", "emulated", "--runs", "3", "--size", "8M", "--limit", "0.05"]);
    command.args(["--blocks", "4K,256K"]).args(args);
    command
}

#[test]
fn every_experiment_is_listed_and_runs() {
    let listed = stdout(&lab().args(["bench", "--list"]).assert().success());
    let dir = folder();
    let out = dir.path().join("out");
    let mut command = bench(&["all", "--out"]);
    command.arg(&out).arg("--path").arg(dir.path()).env("SPINIO_EMULATED", "size=256M,bar=128M,p2p=1");
    // Without stress-ng the loads are named as missing, which is tested too.
    let text = stdout(&command.env("PATH", "/nonexistent").assert().success());
    for name in ["fig1", "fig4a", "fig4b", "fig4c", "fig4d", "fig5", "table3"] {
        assert!(listed.contains(name) && text.contains(name), "{name}: {text}");
        let value = std::fs::read_to_string(out.join(format!("{name}.json"))).unwrap();
        let value: serde_json::Value = serde_json::from_str(&value).unwrap();
        assert_eq!(value["experiment"], name);
        let cells = value["cells"].as_array().unwrap();
        if name == "fig4c" {
            assert!(cells.is_empty() && value["not_measured"][0].as_str().unwrap().contains("--raid"), "{value}");
            continue;
        }
        // The first of three runs does not count.
        let gbps = |c: &serde_json::Value| c["gbps"].as_array().unwrap().len();
        assert!(value["runs"] == 2 && cells.iter().all(|c| gbps(c) == 2 && c["deviation"].is_number()), "{value}");
        let chart = std::fs::read_to_string(out.join(format!("{name}.svg"))).unwrap();
        assert!(chart.contains("SPIN") && chart.contains("</svg>"), "{name}: {chart}");
        // An error bar is two ends and what joins them; nothing else is a full line.
        let varied = cells.iter().filter(|c| c["deviation"].as_f64().unwrap() > 0.0).count();
        assert!(varied > 0, "{value}");
        assert_eq!(chart.matches("<line opacity=\"1\"").count(), 3 * varied, "{name}: error bars");
        let mut methods: Vec<_> = cells.iter().map(|c| c["method"].as_str().unwrap().to_owned()).collect();
        methods.sort();
        methods.dedup();
        let expected = if name == "fig1" { 3 } else { 5 };
        assert_eq!(methods.len(), expected, "{name}: {methods:?}, {}", value["not_measured"]);
        assert!(cells.iter().all(|c| c["mean"].as_f64().unwrap() > 0.0), "{value}");
    }
    assert!(text.contains("not measured: 50 %, CPU load: stress-ng is not installed"), "{text}");
}

#[test]
fn unavailable_method_is_named() {
    let dir = folder();
    let data = file(dir.path(), "data", 8 << 20);
    let text = stdout(&bench(&["table3", "--path"]).arg(&data).assert().success());
    for line in ["not measured: P2P: ", "not measured: pread+GPU: the device's memory is not mapped for the CPU"] {
        assert!(text.contains(line), "{text}");
    }
    assert!(text.contains("the paper") && text.contains("10.13"), "{text}");
    let json = stdout(&bench(&["fig4b", "--json", "--methods", "SPIN,p2p", "--path"]).arg(&data).assert().success());
    let value: serde_json::Value = serde_json::from_str(&json).unwrap();
    let methods: Vec<_> = value[0]["cells"].as_array().unwrap().iter().map(|c| c["method"].as_str().unwrap()).collect();
    assert_eq!(methods, ["SPIN", "SPIN"], "{value}");
}

#[test]
fn invalid_arguments_are_refused() {
    for (args, needle) in [
        (&["fig9"][..], "`fig9` is no experiment"),
        (&[], "Name an experiment"),
        (&["fig1", "--methods", "warp"], "no transfer method"),
        (&["fig1", "--threads", "0"], "--threads"),
        (&["table3", "--size", "1M"], "largest block"),
        (&["fig1", "--limit", "1e30"], "--limit"),
    ] {
        let assert = lab().arg("bench").args(args).assert().code(2);
        assert!(stderr(&assert).contains(needle), "{args:?}: {}", stderr(&assert));
    }
}
