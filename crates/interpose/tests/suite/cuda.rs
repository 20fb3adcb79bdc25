//! The programs of the GPU suite (`tests/gpu`) against the stand-in driver: the CUDA back end through the real hooks.
//!
//! What needs a device that works beside the program (the order of queued work) or gigabytes of its memory is left to
//! a real GPU.

use std::path::PathBuf;
use std::sync::OnceLock;

use crate::build::{compile, folder, must_pass, preloaded, source};

/// The suite's program; the stand-in lies beside it as `stand-in/libcuda.so.1`.
fn suite() -> &'static PathBuf {
    static SUITE: OnceLock<PathBuf> = OnceLock::new();
    SUITE.get_or_init(|| {
        let text = |path: &str| source(path).to_str().expect("a path in UTF-8").to_owned();
        let driver = folder().join("stand-in");
        std::fs::create_dir_all(&driver).expect("a folder");
        let stand_in = text("../sys/tests/fake/libcuda.c");
        compile("cc", &driver.join("libcuda.so.1"), &["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", &stand_in]);
        let out = folder().join("gpu-suite");
        compile("cc", &out, &[&text("../../tests/gpu/suite.c"), "-ldl"]);
        out
    })
}

fn run(tests: &[&str]) {
    let scratch = folder().join(tests.concat());
    std::fs::create_dir_all(&scratch).expect("a folder");
    let mut args = vec![scratch.to_str().expect("a path in UTF-8")];
    args.extend(tests);
    let mut command = preloaded(suite(), &args);
    command.env("LD_LIBRARY_PATH", folder().join("stand-in"));
    must_pass(command);
}

#[test]
fn every_kind_of_cuda_memory_is_read_into() {
    run(&["malloc", "pool", "managed", "mappings", "host_memory_of_cuda"]);
}

#[test]
fn allocations_end_and_come_again() {
    run(&["never_past_the_end", "reuse_of_an_address", "sees_every_write"]);
}

#[test]
fn captures_survive_reads() {
    run(&["captures_survive", "captures_of_another_thread_survive", "callback"]);
}

#[test]
fn threads_resets_and_forks_are_no_trouble() {
    run(&["threads_without_a_context", "reset", "fork", "overlapping_reads_keep_their_order"]);
}

#[test]
fn calls_keep_to_posix() {
    run(&["host_reads_are_untouched", "errors", "other_calls", "no_descriptor_of_ours"]);
}

#[test]
fn every_kind_of_cuda_memory_is_written() {
    run(&["writes", "captures_survive_writes", "writes_in_stream_order"]);
}
