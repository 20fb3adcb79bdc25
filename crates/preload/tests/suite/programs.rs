//! One test for each program of `tests/c`; the comment at its top states what it checks.

use std::path::Path;
use std::process::Command;

use crate::build::{assert_passes, build_dir, compile, library, program, run_preloaded, shim, source};

#[test]
fn device_reads_match_host_reads() {
    let program = program("differential");
    // A disk and tmpfs, which has no direct I/O and another page cache policy.
    for (seed, place) in [("1", build_dir()), ("2", build_dir()), ("3", Path::new("/dev/shm"))] {
        assert_passes(run_preloaded(&program, &[seed, place.to_str().expect("UTF-8")]));
    }
}

#[test]
fn reads_in_parts_return_when_bytes_arrived() {
    let mut run = run_preloaded(&program("arrival"), &[]);
    run.env("SPINIO_EMULATED", "size=64M,bar=32M,latency_us=300000");
    assert_passes(run);
}

#[test]
fn direct_fd_reads_into_device_match_aligned_host_memory() {
    assert_passes(run_preloaded(&program("direct"), &[build_dir().to_str().expect("UTF-8")]));
}

/// Variables that select what reads storage: the shared ring, workers, or the calling thread's own ring, which reads into
/// peer-to-peer memory.
const ENGINES: [&[(&str, &str)]; 3] = [
    &[("SPINIO_STORAGE_ENGINE", "ring")],
    &[("SPINIO_STORAGE_ENGINE", "workers")],
    &[("SPINIO_EMULATED", "size=64M,bar=40M,p2p=1"), ("SPINIO_TEST_HOST_MAPPED", "1")],
];

/// Runs a program with each engine; these arguments have it read absent pages.
fn passes_with_each_engine(program: &Path, arguments: &[&str]) {
    for engine in ENGINES {
        let mut run = run_preloaded(program, arguments);
        run.envs(engine.iter().copied());
        assert_passes(run);
    }
}

#[test]
fn read_concurrent_with_dup2_has_bytes_of_one_file() {
    let program = program("swaps");
    for (place, routes) in [(build_dir(), ""), (build_dir(), "copy,store"), (Path::new("/dev/shm"), "")] {
        let mut run = run_preloaded(&program, &[place.to_str().expect("UTF-8")]);
        if !routes.is_empty() {
            run.env("SPINIO_ROUTES", routes);
        }
        assert_passes(run);
    }
    passes_with_each_engine(&program, &[build_dir().to_str().expect("UTF-8"), "absent"]);
}

#[test]
fn device_writes_match_host_writes() {
    let program = program("writes");
    for (seed, place) in [("1", build_dir()), ("2", build_dir()), ("3", Path::new("/dev/shm"))] {
        assert_passes(run_preloaded(&program, &[seed, place.to_str().expect("UTF-8")]));
    }
}

#[test]
fn write_limits_match_host_writes() {
    let program = program("limits");
    assert_passes(run_preloaded(&program, &[]));
    // Larger than one call can be.
    let mut chunked = run_preloaded(&program, &[]);
    chunked.env("SPINIO_BOUNCE_LIMIT", "4M");
    assert_passes(chunked);
}

#[test]
fn concurrent_truncate_and_write_leave_bytes_of_either() {
    let program = program("cuts");
    for (seed, place, staging) in
        [("1", build_dir(), "128M"), ("2", build_dir(), "4M"), ("3", Path::new("/dev/shm"), "128M")]
    {
        // What does not fit in the smaller bounce buffer pool is written in chunks.
        let mut run = run_preloaded(&program, &[seed, place.to_str().expect("UTF-8")]);
        run.env("SPINIO_BOUNCE_LIMIT", staging);
        assert_passes(run);
    }
}

#[test]
fn other_processes_see_writes() {
    let program = program("others");
    for (place, staging) in [(build_dir(), "128M"), (build_dir(), "2M"), (Path::new("/dev/shm"), "128M")] {
        let mut run = run_preloaded(&program, &[place.to_str().expect("UTF-8")]);
        run.env("SPINIO_BOUNCE_LIMIT", staging);
        assert_passes(run);
    }
}

#[test]
fn fd_to_fd_copies_are_left_to_kernel() {
    let program = program("copies");
    for place in [build_dir(), Path::new("/dev/shm")] {
        // Each in its own directory, on the same file system.
        let run = |how: &str| {
            let at = tempfile::Builder::new().prefix("copies-").tempdir_in(place).expect("a folder");
            let at_text = at.path().to_str().expect("UTF-8");
            let done = match how {
                "plain" => {
                    let mut plain = Command::new(&program);
                    plain.arg(at_text);
                    assert_passes(plain)
                }
                "library" => assert_passes(run_preloaded(&program, &[at_text])),
                _ => assert_passes(run_preloaded(&program, &[at_text, how])),
            };
            String::from_utf8(done.stdout).expect("UTF-8")
        };
        let plain = run("plain");
        assert!(plain.lines().count() > 20, "{plain}");
        for how in ["library", "device"] {
            assert_eq!(run(how), plain, "{how}, in {}", place.display());
        }
    }
}

#[test]
fn edge_cases_match_host_calls() {
    let program = program("edges");
    assert_passes(run_preloaded(&program, &[]));
    let mut chunked = run_preloaded(&program, &[]);
    chunked.env("SPINIO_BOUNCE_LIMIT", "4M");
    assert_passes(chunked);
}

#[test]
fn unpinning_needs_no_signals_and_pin_error_names_limit() {
    let program = linked("no_signals");
    for how in ["before", "after", "space"] {
        let mut run = run_preloaded(&program, &[how]);
        run.env("SPINIO_PIN_LIMIT", "1G");
        let done = assert_passes(run);
        print!("{}", String::from_utf8_lossy(&done.stdout));
    }
}

/// A program that uses the library's own functions.
fn linked(name: &str) -> std::path::PathBuf {
    let (out, text) = (build_dir().join(name), source("tests/c").join(format!("{name}.c")));
    let rpath = format!("-Wl,-rpath,{}", library().parent().expect("a folder").display());
    let library = library();
    compile("cc", &out, &[text.to_str().expect("UTF-8"), library.to_str().expect("UTF-8"), &rpath]);
    out
}

#[test]
fn errors_match_host_memory() {
    assert_passes(run_preloaded(&program("errors"), &[]));
}

#[test]
fn pipes_and_sockets_reach_the_device() {
    assert_passes(run_preloaded(&program("streams"), &[]));
}

#[test]
fn longjmp_out_of_waiting_read_leaks_nothing() {
    let program = program("jumps");
    for staging in ["128M", "4M"] {
        let mut run = run_preloaded(&program, &[]);
        run.env("SPINIO_BOUNCE_LIMIT", staging);
        assert_passes(run);
    }
}

#[test]
fn longjmp_out_of_close_leaves_offsets_right() {
    assert_passes(run_preloaded(&program("left_closes"), &[]));
}

#[test]
fn handlers_run_after_reads_of_local_disks() {
    let program = program("handlers");
    let [ring, workers, own_ring] = ENGINES;
    for (engine, arguments) in [
        (ring, &["1024"][..]),
        (workers, &["1024"]),
        (workers, &["256"]),
        (workers, &["1024", "direct"]),
        (own_ring, &["1024"]),
    ] {
        let mut run = run_preloaded(&program, arguments);
        // Two bounce buffers: a read that a handler leaves must not keep one.
        run.envs(engine.iter().copied()).env("SPINIO_BOUNCE_LIMIT", "4M");
        let done = assert_passes(run);
        print!("{engine:?} {arguments:?}: {}", String::from_utf8_lossy(&done.stdout));
    }
}

#[test]
fn handler_that_jumps_leaves_no_lock_of_a_large_read() {
    assert_passes(run_preloaded(&program("jumps_any_time"), &[]));
}

#[test]
fn threads_can_be_cancelled_in_host_reads() {
    let program = program("cancel");
    assert_passes(run_preloaded(&program, &[]));
    passes_with_each_engine(&program, &["absent"]);
}

#[test]
fn children_of_device_program_work() {
    let program = program("forks");
    assert_passes(run_preloaded(&program, &[]));
    passes_with_each_engine(&program, &["absent"]);
}

#[test]
fn per_file_state_is_dropped_on_close() {
    assert_passes(run_preloaded(&program("closes"), &[]));
}

#[test]
fn handler_may_close_while_thread_allocates() {
    assert_passes(run_preloaded(&program("handler_closes"), &[]));
}

#[test]
fn fadvise_reaches_kernel_and_is_followed() {
    assert_passes(run_preloaded(&program("advice"), &[]));
}

#[test]
fn fortified_names_are_hooked() {
    assert_passes(run_preloaded(&program("fortified"), &[]));
}

#[test]
fn driver_calls_are_passed_through() {
    let driver = build_dir().join("libnvidia-test.so");
    let code = source("tests/c/driver.c");
    let code = code.to_str().expect("UTF-8");
    compile("cc", &driver, &["-shared", "-fPIC", "-DDRIVER", code]);
    // Built as any other program, then once more against the driver.
    let memory = shim();
    let out = build_dir().join("driver");
    let rpath = format!("-Wl,-rpath,{}", build_dir().display());
    compile("cc", &out, &[code, driver.to_str().expect("UTF-8"), memory.to_str().expect("UTF-8"), &rpath]);
    assert_passes(run_preloaded(&out, &[]));
}

#[test]
fn disable_setting_turns_off_every_hook() {
    let mut run = run_preloaded(&program("disabled"), &[]);
    run.env("SPINIO_DISABLE", "1");
    assert_passes(run);
}

#[test]
fn program_without_devices_is_unaffected() {
    // The library itself is the input: large enough for several reads.
    let input = library();
    for args in [vec!["sha256sum"], vec!["wc", "-c"], vec!["od", "-A", "d"], vec!["sort", "-z"]] {
        let mut plain = Command::new(args[0]);
        plain.args(&args[1..]).arg(&input);
        let mut hooked = unhooked_copy(&plain);
        hooked.env("LD_PRELOAD", library());
        let (plain, hooked) = (plain.output().expect("it runs"), assert_passes(hooked));
        assert!(plain.stdout == hooked.stdout, "{args:?} says something else under the library");
    }
}

fn unhooked_copy(command: &Command) -> Command {
    let mut copy = Command::new(command.get_program());
    copy.args(command.get_args());
    copy
}
