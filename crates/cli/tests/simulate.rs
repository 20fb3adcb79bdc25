//! `spinio simulate`: the same seed gives the same table, whatever the threads, and a chart.

mod common;

use common::{folder, spinio, stderr, stdout};

#[test]
fn the_table_depends_on_the_seed_alone() {
    let table = |args: &[&str]| stdout(&spinio().args(["simulate", "--vectors", "1200"]).args(args).assert().success());
    let one = table(&["--threads", "1"]);
    assert_eq!(one, table(&["--threads", "3"]));
    // More than there is work for, and more than any machine starts.
    assert_eq!(one, table(&["--threads", "1000000000"]));
    assert_ne!(one, table(&["--seed", "2"]));
    for row in ["all-storage", "all-cache", "greedy", "optimal, serial", "optimal, concurrent"] {
        assert!(one.contains(row), "{one}");
    }
    let greedy = one.lines().find(|l| l.contains("greedy")).unwrap();
    assert!(greedy.contains("98.9 %"), "the paper's figure stands beside ours: {greedy}");
}

#[test]
fn json_and_a_chart() {
    let dir = folder();
    let svg = dir.path().join("chart.svg");
    let assert = spinio().args(["simulate", "--vectors", "600", "--json", "--svg"]).arg(&svg).assert().success();
    let told: serde_json::Value = serde_json::from_str(&stdout(&assert)).unwrap();
    assert_eq!(told["vectors"], 600);
    let serial = &told["strategies"][3]["serial"];
    assert!((serial["near"].as_f64().unwrap() - 1.0).abs() < 1e-9, "the optimum is the optimum: {serial}");
    let chart = std::fs::read_to_string(&svg).unwrap();
    assert!(chart.contains("<svg") && chart.contains("greedy"), "{chart}");
}

#[test]
fn the_model_of_a_place_can_be_studied() {
    let dir = folder();
    let mut command = spinio();
    command.args(["simulate", "--vectors", "50", "--device", "emulated", "--on"]).arg(dir.path());
    let text = stdout(&command.assert().success());
    assert!(text.contains("not calibrated") && !text.contains("98.9 %"), "{text}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let assert = spinio().args(["simulate", "--vectors", "0"]).assert().code(2);
    assert!(stderr(&assert).contains("--vectors above 0"));
    let dir = folder();
    let assert = spinio().args(["simulate", "--requests", "0", "--validate"]).arg(dir.path()).assert().code(2);
    assert!(stderr(&assert).contains("--requests above 0"));
    let assert = spinio().args(["simulate", "--vectors", "1", "--svg", "/nowhere/at/all.svg"]).assert().code(1);
    assert!(stderr(&assert).contains("/nowhere/at/all.svg"));
}
