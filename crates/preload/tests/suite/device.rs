//! The headers of `device/`: kernels in CUDA C++, built by the host's compiler for the emulated GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::build::{assert_passes, build_dir, compile, library, source};

/// A path of the workspace.
pub(crate) fn workspace_path(path: &str) -> PathBuf {
    source("../..").join(path)
}

/// Whether there is a C++ compiler; says so if not.
pub(crate) fn has_cxx() -> bool {
    let there = Command::new("c++").arg("--version").output().is_ok();
    if !there {
        eprintln!("skipped: no c++ here");
    }
    there
}

/// Builds sources against the headers and the library.
pub(crate) fn build(name: &str, sources: &[PathBuf], more: &[&str]) -> PathBuf {
    let out = build_dir().join(name);
    let headers = workspace_path("device/include");
    let rpath = format!("-Wl,-rpath,{}", library().parent().expect("a folder").display());
    let (headers, library) = (headers.display().to_string(), library().display().to_string());
    let mut args = vec!["-std=c++17", "-I", &headers];
    args.extend(more);
    let sources: Vec<String> = sources.iter().map(|s| s.display().to_string()).collect();
    args.extend(["-x", "c++"]);
    args.extend(sources.iter().map(String::as_str));
    args.extend(["-x", "none", &library, &rpath]);
    compile("c++", &out, &args);
    out
}

/// A run with a deadline, so that a hang is a failure.
pub(crate) fn run_with_timeout(program: &Path) -> Command {
    let mut run = Command::new("timeout");
    // Without cargo's search path: an older library may be there.
    run.args(["--signal=KILL", "900"]).arg(program).current_dir(build_dir()).env_remove("LD_LIBRARY_PATH");
    run
}

#[test]
fn blocks_threads_and_barriers_behave_as_on_gpu() {
    if has_cxx() {
        assert_passes(run_with_timeout(&build("emulation", &[workspace_path("device/tests/emulation.cpp")], &[])));
    }
}

#[test]
fn address_sanitizer_follows_stack_switches() {
    let probe = build_dir().join("asan.cpp");
    std::fs::write(&probe, "int main() { return 0; }\n").expect("a file");
    let asan =
        Command::new("c++").arg("-fsanitize=address").arg("-o").arg(build_dir().join("asan")).arg(&probe).output();
    if !asan.is_ok_and(|done| done.status.success()) {
        return eprintln!("skipped: this compiler has no address sanitizer");
    }
    let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    assert_passes(run_with_timeout(&build("emulation-asan", &[workspace_path("device/tests/emulation.cpp")], &flags)));
}

#[test]
fn cuda_programs_run_on_emulated_device() {
    if has_cxx() {
        let mut run = run_with_timeout(&build("runtime", &[workspace_path("device/tests/runtime.cpp")], &[]));
        run.env("SPINIO_EMULATED", "devices=2");
        assert_passes(run);
    }
}
