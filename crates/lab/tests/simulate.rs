//! `spinio-lab simulate`: the same seed gives the same table, for any number of threads, and a chart.

#[path = "../../cli/tests/common/mod.rs"]
mod common;

use common::{folder, spinio as lab, stderr, stdout};

#[test]
fn table_depends_on_seed_only() {
    let table = |args: &[&str]| stdout(&lab().args(["simulate", "--vectors", "1200"]).args(args).assert().success());
    let one = table(&["--threads", "1"]);
    assert_eq!(one, table(&["--threads", "3"]));
    // More than the work needs, and more than any machine starts.
    assert_eq!(one, table(&["--threads", "1000000000"]));
    assert_ne!(one, table(&["--seed", "2"]));
    for row in ["all-storage", "all-cache", "greedy", "optimal, serial", "optimal, concurrent"] {
        assert!(one.contains(row), "{one}");
    }
    let greedy = one.lines().find(|l| l.contains("greedy")).unwrap();
    assert!(greedy.contains("98.9 %"), "the paper's figure is next to ours: {greedy}");
}

#[test]
fn json_and_chart_are_written() {
    let dir = folder();
    let svg = dir.path().join("chart.svg");
    let assert = lab().args(["simulate", "--vectors", "600", "--json", "--svg"]).arg(&svg).assert().success();
    let value: serde_json::Value = serde_json::from_str(&stdout(&assert)).unwrap();
    assert_eq!(value["vectors"], 600);
    let serial = &value["strategies"][3]["serial"];
    assert!((serial["near"].as_f64().unwrap() - 1.0).abs() < 1e-9, "the optimum is the optimum: {serial}");
    let chart = std::fs::read_to_string(&svg).unwrap();
    assert!(chart.contains("<svg") && chart.contains("greedy"), "{chart}");
}

#[test]
fn model_of_a_path_can_be_studied() {
    let dir = folder();
    let mut command = lab();
    command.args(["simulate", "--vectors", "50", "--device", "emulated", "--on"]).arg(dir.path());
    let text = stdout(&command.assert().success());
    assert!(text.contains("not calibrated") && !text.contains("98.9 %"), "{text}");
}

#[test]
fn invalid_arguments_are_refused() {
    let assert = lab().args(["simulate", "--vectors", "0"]).assert().code(2);
    assert!(stderr(&assert).contains("--vectors above 0"));
    let dir = folder();
    let assert = lab().args(["simulate", "--requests", "0", "--validate"]).arg(dir.path()).assert().code(2);
    assert!(stderr(&assert).contains("--requests above 0"));
    let assert = lab().args(["simulate", "--vectors", "1", "--svg", "/nowhere/at/all.svg"]).assert().code(1);
    assert!(stderr(&assert).contains("/nowhere/at/all.svg"));
}

#[test]
fn simulation_is_compared_with_real_transfers() {
    let (dir, state) = (folder(), folder());
    let assert = lab()
        .env("XDG_STATE_HOME", state.path())
        .env("SPINIO_EMULATED", "size=64M,gbps=1,latency_us=100")
        .args(["simulate", "--device", "emulated", "--size", "256K", "--requests", "9", "--json", "--validate"])
        .arg(dir.path())
        .assert()
        .success();
    let value: serde_json::Value = serde_json::from_str(&stdout(&assert)).unwrap();
    let all = &value["rows"][3];
    assert_eq!((value["storage"].as_str(), all["count"].as_u64()), (Some("direct"), Some(9)), "{value}");
    assert!(all["error"].as_f64().unwrap().is_finite() && all["error_of_fit"].as_f64().unwrap() > 0.0, "{value}");
}
