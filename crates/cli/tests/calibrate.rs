//! `spinio calibrate`: measures, stores a model that the next process uses, and checks it.

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use assert_cmd::Command;
use common::{file, folder, spinio, stderr, stdout};

/// The command with its own state directory, and a short measurement.
fn calibrate(state: &Path, args: &[&str]) -> Command {
    let mut command = spinio();
    command.env("XDG_STATE_HOME", state);
    command.args(["calibrate", "--device", "emulated", "--runs", "1", "--size", "4M"]).args(args);
    command
}

fn explained(state: &Path, path: &Path) -> String {
    let mut command = spinio();
    command.env("XDG_STATE_HOME", state).args(["explain", "--device", "emulated"]).arg(path);
    stdout(&command.assert().success())
}

#[test]
fn measured_model_is_used_by_next_process() {
    let (dir, state) = (folder(), folder());
    let data = file(dir.path(), "data", 1 << 20);
    assert!(explained(state.path(), &data).contains("not calibrated"));

    let assert = calibrate(state.path(), &["--check"]).arg(dir.path()).assert().code(4);
    assert!(stderr(&assert).contains("There is no model of"), "{}", stderr(&assert));

    let assert = calibrate(state.path(), &[]).arg(dir.path()).assert().success();
    let text = stdout(&assert);
    assert!(text.contains("R2") && text.contains("copy") && text.contains("stored in"), "{text}");
    assert!(text.contains("p2p was not measured"), "{text}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the scratch file is deleted");

    let value = explained(state.path(), &data);
    assert!(value.contains("Cost model: calibrated 20"), "{value}");
    let model = std::fs::read_dir(state.path().join("spinio/models")).unwrap().next().unwrap().unwrap();
    // As the umask allows: `data` was made with 0666.
    let mode = |metadata: std::fs::Metadata| metadata.permissions().mode();
    assert_eq!(mode(model.metadata().unwrap()) & 0o777, mode(data.metadata().unwrap()) & 0o644);
    // Whether a machine that is busy with tests still fits is not asserted.
    let assert = calibrate(state.path(), &["--check"]).arg(dir.path()).assert();
    let text = stdout(&assert);
    assert!(text.contains("still fits") != text.contains("does not fit"), "{text}");
    assert_eq!(assert.get_output().status.code(), Some(i32::from(text.contains("does not fit"))));

    let off = stdout(
        &spinio()
            .env("XDG_STATE_HOME", state.path())
            .env("SPINIO_COST_MODEL_DIR", "default")
            .args(["explain", "--device", "emulated"])
            .arg(&data)
            .assert()
            .success(),
    );
    assert!(off.contains("not calibrated"), "{off}");
}

#[test]
fn check_rejects_model_far_from_measurement() {
    let (dir, state) = (folder(), folder());
    calibrate(state.path(), &[]).arg(dir.path()).assert().success();
    let models = state.path().join("spinio/models");
    let model = std::fs::read_dir(models).unwrap().next().expect("a model").unwrap().path();
    // For every route: the cost of one transfer, its cutoff, the cost per byte; the cost of those in flight.
    let scaled = |line: &str, by: f64| {
        let mut words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let costs = if words[0] == "cost" { [1, 3].as_slice() } else { &[1, 2, 3] };
        for &at in costs {
            words[at] = (words[at].parse::<f64>().unwrap() * by).to_string();
        }
        words.join(" ")
    };
    let is_cost = |line: &&str| line.starts_with("cost ") || line.starts_with("flight ");
    let text = std::fs::read_to_string(&model).unwrap();
    let off: Vec<String> =
        text.lines().map(|line| if is_cost(&line) { scaled(line, 1000.0) } else { line.to_owned() }).collect();
    std::fs::write(&model, off.join("\n") + "\n").unwrap();
    let assert = calibrate(state.path(), &["--check"]).arg(dir.path()).assert().code(1);
    assert!(stdout(&assert).contains("does not fit"), "{}", stdout(&assert));
}

#[test]
fn file_is_only_read_and_dry_run_stores_nothing() {
    let (dir, state) = (folder(), folder());
    let data = file(dir.path(), "data", 3 << 20);
    let before = std::fs::read(&data).unwrap();
    let assert = calibrate(state.path(), &["--dry-run", "--json"]).arg(&data).assert().success();
    let value: serde_json::Value = serde_json::from_str(&stdout(&assert)).unwrap();
    assert_eq!((&value["stored_at"], &value["kept"]), (&serde_json::Value::Null, &serde_json::Value::Null));
    for route in value["routes"].as_array().unwrap() {
        assert!(route["queue"]["latency_ns"].is_number() && route["flight"] == route["queue"], "{route:#}");
    }
    assert_eq!(value["writeback_ns_per_byte"], serde_json::Value::Null, "a file of the user's is not written");
    let copy = value["routes"].as_array().unwrap().iter().find(|r| r["route"] == "copy").unwrap();
    assert!(copy["cost"]["fixed_ns"].as_f64().unwrap() > 0.0 && copy["points"].as_array().unwrap().len() > 10);
    assert!(std::fs::read(&data).unwrap() == before);
    assert_eq!(std::fs::read_dir(state.path()).unwrap().count(), 0);
}

#[test]
fn unmeasurable_path_is_named() {
    let state = folder();
    let assert = calibrate(state.path(), &[]).arg("/nowhere/at/all").assert().code(1);
    assert!(stderr(&assert).contains("/nowhere/at/all"));
    let assert = calibrate(state.path(), &[]).arg("/dev/null").assert().code(1);
    assert!(stderr(&assert).contains("/dev/null"), "{}", stderr(&assert));
    let assert = calibrate(state.path(), &["--runs", "0"]).arg("/").assert().code(2);
    assert!(stderr(&assert).contains("--runs"), "{}", stderr(&assert));
    if common::is_root() {
        let assert = calibrate(state.path(), &[]).arg("/dev/shm").assert().code(1);
        assert!(stderr(&assert).contains("in memory"), "{}", stderr(&assert));
    }
}

#[test]
fn result_is_printed_if_it_cannot_be_stored() {
    let dir = folder();
    let taken = common::file(dir.path(), "taken", 10);
    let assert = calibrate(&taken, &[]).arg(dir.path()).assert().code(1);
    assert!(stderr(&assert).contains("Cannot store the model in"), "{}", stderr(&assert));
    assert!(stdout(&assert).contains("not stored") && stdout(&assert).contains("copy"), "{}", stdout(&assert));
}
