//! The scripts of `examples/gaia` run, find what they shall find, and leave nothing.

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::folder;
use rustix::process::{Pid, Signal};

/// A script with its scratch files in `dir`. `None`, with a message, without what mounts GAIA, and compilers.
fn example(script: &str, dir: &Path) -> Option<Command> {
    if !rustix::process::geteuid().is_root() || !Path::new("/dev/fuse").exists() {
        eprintln!("skipped: not root, or no /dev/fuse");
        return None;
    }
    example_without_mount(script, dir)
}

/// The same of a script that mounts nothing.
fn example_without_mount(script: &str, dir: &Path) -> Option<Command> {
    if ["cc", "c++"].iter().any(|compiler| Command::new(compiler).arg("--version").output().is_err()) {
        eprintln!("skipped: no cc, or no c++");
        return None;
    }
    Some(command(script, dir))
}

fn command(script: &str, dir: &Path) -> Command {
    let mut command = Command::new("timeout");
    command.arg("300").arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/gaia").join(script));
    for name in ["CC", "CXX", "LD_PRELOAD", "SPINIO_LIBRARY"] {
        command.env_remove(name);
    }
    // On the emulated device also where a GPU and nvcc are, but perhaps no driver: the GPU suite runs the examples on GPUs.
    command.env("NVCC", "no-nvcc").env("SPINIO_COMMAND", common::PROGRAM).env("TMPDIR", dir).current_dir(dir);
    command
}

/// Its exit status, and what it printed.
fn run(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

/// Whether a mount or a file is left below the directory.
fn is_clean(dir: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    !mounts.contains(dir.to_str().unwrap()) && std::fs::read_dir(dir).unwrap().next().is_none()
}

/// The columns of the table of `graph`: pages changed, and KiB fetched.
fn pages_and_kib(text: &str) -> Vec<(String, f64)> {
    let rows = text.lines().filter(|line| line.contains(" ms "));
    rows.map(|row| {
        let words: Vec<&str> = row.trim_start().trim_start_matches("first").split_whitespace().collect();
        // Of a step: percentage, %, pages, bytes, unit.
        let at = words.iter().position(|word| word.ends_with("iB")).unwrap();
        let kib = words[at - 1].parse::<f64>().unwrap() * if words[at] == "MiB" { 1024.0 } else { 1.0 };
        (words[at - 2].to_owned(), kib)
    })
    .collect()
}

#[test]
fn graph_is_right_in_every_step_and_acquire_fetches_the_changed_pages() {
    for way in [None, Some("--mmap")] {
        let dir = folder();
        let Some(mut graph) = example("graph/run", dir.path()) else { return };
        let (status, text) = run(graph.args(["--scale", "12", "--steps", "0.01 10 100"]).args(way));
        assert!(status == Some(0) && text.contains("✓ in every step"), "{status:?}: {text}");
        let steps = pages_and_kib(&text);
        // 2^16 edges are 64 pages of weights. The first acquire fetches the file, the others the pages that changed.
        let expected: Vec<_> =
            [("-", 536.0), ("1", 4.0), ("6", 24.0), ("64", 256.0)].map(|(p, k)| (p.into(), k)).into();
        assert_eq!(steps, expected, "{text}");
        assert!(is_clean(dir.path()), "the example leaves something");
    }
}

#[test]
fn graph_without_acquires_is_reported_as_wrong() {
    let dir = folder();
    let Some(mut graph) = example("graph/run", dir.path()) else { return };
    let (status, text) = run(graph.args(["--scale", "12", "--steps", "100", "--no-acquire"]));
    assert!(status == Some(1) && text.contains("distances are wrong") && !text.contains('✓'), "{status:?}: {text}");
    assert!(!text.contains("✗ 0 of 4096 distances"), "only bytes were compared: {text}");
    assert!(is_clean(dir.path()), "the example leaves something");
}

#[test]
fn invalid_options_and_absent_compilers_are_named() {
    let dir = folder();
    for (script, options, word) in [
        ("graph/run", ["--scale", "30"], "--scale takes a number from 1 to 24"),
        ("graph/run", ["--steps", "0"], "--steps takes percentages"),
        ("graph/run", ["--steps", "1 x"], "not 'x'"),
        ("graph/run", ["--picture", "x"], "unknown option '--picture'"),
        ("reader/run", ["--page", "5000"], "--page takes 4096, 8192, ... 65536, not '5000'"),
        ("reader/run", ["--cache", "7"], "--cache takes a number from 32"),
        ("stitching/run", ["--gpus", "0"], "--gpus takes a number from 1 to 8"),
    ] {
        let (status, text) = run(command(script, dir.path()).args(options));
        assert!(status == Some(2) && text.contains(word), "{status:?}: {text}");
    }
    for (variable, word) in [("CC", "no C compiler 'no-such'"), ("CXX", "no C++ compiler 'no-such'")] {
        if let Some(mut graph) = example("graph/run", dir.path()) {
            let (status, text) = run(graph.env(variable, "no-such"));
            assert!(status == Some(4) && text.contains(word), "{status:?}: {text}");
        }
    }
    let (status, text) = run(command("graph/run", dir.path()).arg("--help"));
    assert!(status == Some(0) && text.contains("--no-acquire") && !text.contains("set -e"), "{text}");
    assert!(is_clean(dir.path()), "the example leaves something");
}

#[test]
fn picture_of_three_writers_is_that_of_one() {
    let (dir, elsewhere) = (folder(), folder());
    let output = elsewhere.path().join("picture.ppm");
    let Some(mut stitching) = example("stitching/run", dir.path()) else { return };
    stitching.args(["--gpus", "2", "--columns", "6", "--rows", "4", "--mmap", "--output"]).arg(&output);
    let (status, text) = run(&mut stitching);
    assert!(status == Some(0) && text.matches("✓ every byte is right").count() == 3, "{status:?}: {text}");
    // Both have acquired before one of them releases, so the second one merges at least the pages of both.
    let merges = |line: &str| line.split_whitespace().last().unwrap().parse::<u64>().unwrap();
    let most = text.lines().filter(|line| line.starts_with("GPU process")).map(merges).max();
    let head = b"P6\n576 384\n255\n";
    let picture = std::fs::read(&output).unwrap();
    assert!(picture.starts_with(head) && picture.len() == head.len() + 576 * 384 * 3);
    let pages = picture.len() as u64 / 4096;
    assert!(most >= Some(pages - 1), "{text}");
    assert!(text.ends_with(&format!("The picture is {}\n", output.display())), "{text}");
    assert!(is_clean(dir.path()), "the example leaves something");
}

/// The file has 3.4 MiB, the cache 128 KiB, so that pages are replaced; the landscape has few colors.
#[test]
fn collage_reads_on_demand_what_the_cpu_finds_with_all_of_the_file() {
    let (dir, elsewhere) = (folder(), folder());
    let output = elsewhere.path().join("collage.ppm");
    let Some(mut collage) = example_without_mount("reader/run", dir.path()) else { return };
    let (status, text) = run(collage.args(["--tiles", "4", "--cache", "128", "--output"]).arg(&output));
    assert!(status == Some(0) && text.matches("✓ every block").count() == 2, "{status:?}: {text}");
    let kib = |line: &str| {
        let words: Vec<_> = text.lines().find(|l| l.starts_with(line)).unwrap().split_whitespace().collect();
        let at = words.iter().position(|word| word.ends_with("iB")).unwrap();
        words[at - 1].parse::<f64>().unwrap() * if words[at] == "MiB" { 1024.0 } else { 1.0 }
    };
    let (demand, whole) = (kib("on demand"), kib("the whole file"));
    assert!(whole > 3000.0 && (64.0..whole / 2.0).contains(&demand), "{text}");
    let head = b"P6\n960 576\n255\n";
    let picture = std::fs::read(&output).unwrap();
    assert!(picture.starts_with(head) && picture.len() == head.len() + 960 * 576 * 3);
    assert!(is_clean(dir.path()), "the example leaves something");
}

#[test]
fn interrupted_example_leaves_no_mount_and_no_file() {
    let dir = folder();
    let Some(mut graph) = example("graph/run", dir.path()) else { return };
    // So many steps that it cannot end before the signal.
    let steps = "100 ".repeat(10_000);
    let mut running = graph.args(["--scale", "10", "--steps", &steps]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(running.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("100 %")), "no step");
    rustix::process::kill_process(Pid::from_child(&running), Signal::TERM).unwrap();
    // The output ends when all programs of the example have ended.
    lines.for_each(drop);
    running.wait().unwrap();
    assert!(is_clean(dir.path()), "the example leaves something");
}
