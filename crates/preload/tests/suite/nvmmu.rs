//! NVMMU as seen by programs: its C API, the paper's example, and the twelve programs of benches/nvmmu.

use std::path::PathBuf;
use std::process::Command;

use crate::build::{assert_passes, build_dir, compile, library, source};
use crate::device::{build, has_cxx, run_with_timeout, workspace_path};

#[test]
fn c_api_moves_files_and_reports_errors() {
    let out = build_dir().join("nvmmu");
    let (code, library) = (source("tests/c/nvmmu.c"), library());
    let rpath = format!("-Wl,-rpath,{}", library.parent().expect("a folder").display());
    compile("cc", &out, &[code.to_str().expect("UTF-8"), library.to_str().expect("UTF-8"), &rpath]);
    assert_passes(run_with_timeout(&out));
}

#[test]
fn figure_9_output_equals_figure_4_output() {
    if !has_cxx() {
        return;
    }
    let (width, height, channels) = (301usize, 97usize, 3usize);
    let image: Vec<u8> = (0..width * height * channels).flat_map(|i| ((i * 37 % 101) as f32).to_le_bytes()).collect();
    let input = build_dir().join("image.in");
    std::fs::write(&input, &image).expect("a file");
    let mut results = Vec::new();
    for name in ["conventional", "moved"] {
        let program = build(name, &[workspace_path("examples/nvmmu").join(format!("{name}.cu"))], &[]);
        let output = build_dir().join(format!("image.{name}"));
        let mut run = run_with_timeout(&program);
        run.arg(&input).arg(&output).args([width, height, channels].map(|n| n.to_string()));
        assert_passes(run);
        results.push(std::fs::read(output).expect("the output"));
    }
    assert_eq!(results[0].len(), image.len());
    assert!(results[0] == results[1], "the two programs differ");
    assert!(results[0] != image, "nothing was filtered");
}

#[test]
fn twelve_programs_give_same_results_with_both_apis() {
    if !has_cxx() {
        return;
    }
    let benches = workspace_path("benches/nvmmu");
    let mut sources: Vec<PathBuf> = std::fs::read_dir(&benches)
        .expect("benches/nvmmu")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
        .collect();
    assert_eq!(sources.len(), 12);
    sources.push(benches.join("harness/main.cu"));
    let include = benches.display().to_string();
    let programs = build("programs", &sources, &["-I", &include]);
    // Through the driver, as on a GPU: it checks every output.
    let Ok(version) = Command::new("python3").arg("--version").output() else {
        return eprintln!("skipped: no python3 here");
    };
    assert!(version.status.success());
    let results = build_dir().join("results");
    let mut run = Command::new("timeout");
    run.args(["--signal=KILL", "900", "python3"]).arg(benches.join("nvmmu.py")).arg("--programs").arg(programs);
    run.arg("--library").arg(library()).arg("--out").arg(&results).arg("--scratch").arg(build_dir());
    run.args(["--scale", "0.0008", "--rounds", "2", "--env", "SPINIO_EMULATED=size=256M"]);
    run.env_remove("LD_LIBRARY_PATH").env("PYTHONDONTWRITEBYTECODE", "1");
    let done = assert_passes(run);
    let report = std::fs::read_to_string(results.join("README.md")).expect("a report");
    assert!(report.contains("| every output right | - | met |"), "{report}{}", String::from_utf8_lossy(&done.stdout));
    assert_eq!(report.matches("| yes |").count(), 24, "{report}");
}
