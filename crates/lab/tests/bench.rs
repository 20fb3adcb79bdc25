//! `spinio-lab bench`: every experiment runs, small, on the emulated device, and methods that cannot run are listed.

#[path = "../../cli/tests/common/mod.rs"]
mod common;

use std::os::unix::fs::PermissionsExt;

use assert_cmd::Command;
use common::{file, folder, spinio as lab, stderr, stdout};

fn bench(args: &[&str]) -> Command {
    let mut command = lab();
    command.args(["bench", "--device", "emulated", "--runs", "3", "--limit", "0.05"]);
    if !args.contains(&"--size") {
        command.args(["--size", "8M"]);
    }
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
    let data = file(dir.path(), "data", 32 << 20);
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
fn finished_experiments_are_printed_if_a_later_one_fails() {
    let dir = folder();
    // table3 has blocks of 8 MiB.
    let mut command = bench(&["fig1", "table3", "--json", "--size", "4M", "--path"]);
    let assert = command.args([dir.path()]).assert().code(2);
    assert!(stderr(&assert).contains("largest block"), "{}", stderr(&assert));
    let value: serde_json::Value = serde_json::from_str(&stdout(&assert)).unwrap();
    assert_eq!((value.as_array().unwrap().len(), &value[0]["experiment"]), (1, &"fig1".into()), "{value}");
}

#[test]
fn file_with_less_than_a_block_for_each_thread_is_not_measured() {
    let dir = folder();
    let data = file(dir.path(), "data", 8 << 20);
    let arguments = ["fig4a", "--json", "--blocks", "2M,4M", "--threads", "4", "--path"];
    let mut command = lab();
    command.args(["bench", "--device", "emulated", "--runs", "2", "--limit", "0.05", "--size", "8M"]).args(arguments);
    let value: serde_json::Value = serde_json::from_str(&stdout(&command.arg(&data).assert().success())).unwrap();
    let cells = value[0]["cells"].as_array().unwrap();
    assert!(!cells.is_empty() && cells.iter().all(|cell| cell["block"] == 2 << 20), "{value}");
    let missing = value[0]["not_measured"].to_string();
    assert!(missing.contains("4 MiB: 8 MiB are less than a block for each of 4 threads"), "{value}");
}

/// A `stress-ng` that writes down its arguments and its end.
const STRESS: &str = "#!/bin/sh
cd $(dirname $0)
echo $* >>arguments
trap 'echo >ended; exit' TERM
echo $$ >pid
while :; do sleep 0.05; done
";

#[test]
fn io_load_is_on_the_disk_of_the_file_and_ends_with_the_command() {
    let (bin, dir) = (folder(), folder());
    let (data, load) = (file(dir.path(), "data", 8 << 20), bin.path().join("stress-ng"));
    std::fs::write(&load, STRESS).unwrap();
    std::fs::set_permissions(&load, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let fig4d = |runs: &str| {
        let mut command = std::process::Command::new(common::PROGRAM);
        command.args(["bench", "fig4d", "--device", "emulated", "--methods", "SPIN", "--limit", "0.01"]);
        command.env("PATH", &path).args(["--runs", runs, "--path"]).arg(&data);
        command
    };
    let done = fig4d("2").output().unwrap();
    assert!(done.status.success() && !String::from_utf8_lossy(&done.stdout).contains("not measured"), "{done:?}");
    let arguments = std::fs::read_to_string(bin.path().join("arguments")).unwrap();
    assert!(
        arguments.contains(&format!("--temp-path {} ", dir.path().canonicalize().unwrap().display())),
        "{arguments}"
    );
    assert!(arguments.lines().all(|line| line.contains("--timeout ")), "{arguments}");

    let (pid, ended) = (bin.path().join("pid"), bin.path().join("ended"));
    for made in [&pid, &ended] {
        std::fs::remove_file(made).unwrap();
    }
    let mut child = fig4d("30").stdout(std::process::Stdio::null()).spawn().unwrap();
    let begun = std::time::Instant::now();
    let wait = |what: &str, is: &dyn Fn() -> bool| {
        while !is() {
            assert!(begun.elapsed() < std::time::Duration::from_secs(250), "{what}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    };
    wait("no load", &|| pid.exists());
    let sent = std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap();
    assert!(sent.success() && !child.wait().unwrap().success());
    wait("the load has not ended", &|| ended.exists());
}

#[test]
fn signal_ends_the_command_after_its_loads_have_ended() {
    let (bin, dir) = (folder(), folder());
    let (data, load) = (file(dir.path(), "data", 8 << 20), bin.path().join("stress-ng"));
    std::fs::write(&load, STRESS).unwrap();
    std::fs::set_permissions(&load, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let mut command = std::process::Command::new(common::PROGRAM);
    command.args(["bench", "fig4d"]).args(["fig1"; 1000]).args(["--device", "emulated", "--methods", "SPIN"]);
    command.args(["--limit", "0.01", "--runs", "2", "--path"]).arg(&data);
    command.env("PATH", &path).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    let mut lines = lines.map(Result::unwrap).skip_while(|line| !line.starts_with("fig1 "));
    assert!(lines.next().is_some(), "only fig4d has loads, and it comes first");
    assert!(std::process::Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    // Its output is read: a command that goes on must not wait for that.
    lines.for_each(drop);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()), Some(15));
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
