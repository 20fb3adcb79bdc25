//! The programs of the GPU suite (`tests/gpu`) against the stand-in driver: the CUDA back end through the real hooks.
//!
//! Tests that need a device which works concurrently with the program (the order of queued work), or gigabytes of its
//! memory, need a real GPU.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crate::build::{self, assert_passes, build_dir, compile, run_preloaded, source};

/// The directory of the stand-in, as `libcuda.so.1`.
fn driver() -> &'static PathBuf {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| {
        let driver = build_dir().join("stand-in");
        std::fs::create_dir_all(&driver).expect("a folder");
        let flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", &text("../sys/tests/fake/libcuda.c")];
        compile("cc", &driver.join("libcuda.so.1"), &flags);
        driver
    })
}

/// The suite's program.
fn suite_program() -> &'static PathBuf {
    static SUITE: OnceLock<PathBuf> = OnceLock::new();
    SUITE.get_or_init(|| program("suite"))
}

/// The program for two GPUs: the stand-in has two.
fn two_gpu_program() -> &'static PathBuf {
    static TWO: OnceLock<PathBuf> = OnceLock::new();
    TWO.get_or_init(|| program("two"))
}

fn program(name: &str) -> PathBuf {
    let out = build_dir().join(format!("gpu-{name}"));
    compile("cc", &out, &[&text(&format!("../../tests/gpu/{name}.c")), "-pthread", "-ldl"]);
    out
}

fn text(path: &str) -> String {
    source(path).to_str().expect("a path in UTF-8").to_owned()
}

fn run(tests: &[&str]) {
    run_program(suite_program(), tests);
}

fn run_program(program: &Path, tests: &[&str]) {
    let scratch = build_dir().join(tests.concat());
    std::fs::create_dir_all(&scratch).expect("a folder");
    let mut args = vec![scratch.to_str().expect("a path in UTF-8")];
    args.extend(tests);
    let mut command = run_preloaded(program, &args);
    command.env("LD_LIBRARY_PATH", driver());
    assert_passes(command);
}

#[test]
fn reads_into_every_kind_of_cuda_memory() {
    run(&["malloc", "pool", "managed", "mappings", "host_memory_of_cuda"]);
}

#[test]
fn freed_allocations_can_be_reallocated() {
    run(&["never_past_the_end", "reuse_of_an_address", "sees_every_write"]);
}

#[test]
fn reads_do_not_invalidate_captures() {
    run(&["captures_survive", "captures_of_another_thread_survive", "callback"]);
}

#[test]
fn reads_work_across_threads_resets_and_forks() {
    run(&["threads_without_a_context", "reset", "fork", "overlapping_reads_keep_their_order"]);
}

#[test]
fn calls_follow_posix() {
    run(&["host_reads_are_untouched", "errors", "other_calls", "no_descriptor_of_ours"]);
}

#[test]
fn writes_from_every_kind_of_cuda_memory() {
    run(&["writes", "captures_survive_writes", "writes_in_stream_order"]);
}

#[test]
fn reads_into_two_gpus() {
    run_program(
        two_gpu_program(),
        &["reads_in_turn", "reads_at_once", "one_after_the_other", "a_reset_of_one", "a_mapping_over_both"],
    );
}

#[test]
fn writes_from_two_gpus() {
    run_program(two_gpu_program(), &["writes_in_turn", "writes_at_once", "memory_of_the_peer", "two_processes"]);
}

/// A program of `tests/c` with its device memory from the stand-in, which refuses system calls as a GPU's memory does:
/// so the hooks find the device only after the host's call has failed.
fn run_on_driver(name: &str, args: &[&str]) {
    let mut command = run_preloaded(&build::program(name), args);
    command.env("LD_LIBRARY_PATH", driver()).env("SPINIO_TEST_DEVICE", "cuda");
    assert_passes(command);
}

#[test]
fn cuda_calls_match_host_calls() {
    let scratch = build_dir().to_str().expect("a path in UTF-8");
    run_on_driver("writes", &["1", scratch]);
    run_on_driver("differential", &["1", scratch]);
}

#[test]
fn served_cuda_call_leaves_errno() {
    run_on_driver("errno", &[]);
}
