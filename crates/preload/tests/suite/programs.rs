//! One test a program of `tests/c`: what it checks stands at its top.

use std::path::Path;
use std::process::Command;

use crate::build::{compile, folder, library, must_pass, preloaded, program, shim, source};

#[test]
fn device_reads_do_what_host_reads_do() {
    let program = program("differential");
    // A disk and tmpfs, which has no direct I/O and another page cache policy.
    for (seed, place) in [("1", folder()), ("2", folder()), ("3", Path::new("/dev/shm"))] {
        must_pass(preloaded(&program, &[seed, place.to_str().expect("UTF-8")]));
    }
}

#[test]
fn direct_descriptors_read_into_the_device_as_into_aligned_host_memory() {
    must_pass(preloaded(&program("direct"), &[folder().to_str().expect("UTF-8")]));
}

#[test]
fn read_beside_dup2_has_bytes_of_one_file() {
    let program = program("swaps");
    for (place, routes) in [(folder(), ""), (folder(), "copy,store"), (Path::new("/dev/shm"), "")] {
        let mut run = preloaded(&program, &[place.to_str().expect("UTF-8")]);
        if !routes.is_empty() {
            run.env("SPINIO_ROUTES", routes);
        }
        must_pass(run);
    }
}

#[test]
fn device_writes_do_what_host_writes_do() {
    let program = program("writes");
    for (seed, place) in [("1", folder()), ("2", folder()), ("3", Path::new("/dev/shm"))] {
        must_pass(preloaded(&program, &[seed, place.to_str().expect("UTF-8")]));
    }
}

#[test]
fn limits_end_a_write_as_they_end_the_hosts() {
    let program = program("limits");
    must_pass(preloaded(&program, &[]));
    // Larger than one call can be.
    let mut in_parts = preloaded(&program, &[]);
    in_parts.env("SPINIO_STAGING", "4M");
    must_pass(in_parts);
}

#[test]
fn a_cut_beside_a_write_leaves_bytes_of_one_or_the_other() {
    let program = program("cuts");
    for (seed, place, staging) in [("1", folder(), "128M"), ("2", folder(), "4M"), ("3", Path::new("/dev/shm"), "128M")]
    {
        // What the smaller ring cannot hold is written in portions.
        let mut run = preloaded(&program, &[seed, place.to_str().expect("UTF-8")]);
        run.env("SPINIO_STAGING", staging);
        must_pass(run);
    }
}

#[test]
fn other_processes_see_what_was_written() {
    let program = program("others");
    for (place, staging) in [(folder(), "128M"), (folder(), "2M"), (Path::new("/dev/shm"), "128M")] {
        let mut run = preloaded(&program, &[place.to_str().expect("UTF-8")]);
        run.env("SPINIO_STAGING", staging);
        must_pass(run);
    }
}

#[test]
fn copies_between_descriptors_are_the_kernels() {
    let program = program("copies");
    for place in [folder(), Path::new("/dev/shm")] {
        // Each in a folder of its own, on the same file system.
        let run = |how: &str| {
            let at = tempfile::Builder::new().prefix("copies-").tempdir_in(place).expect("a folder");
            let at_text = at.path().to_str().expect("UTF-8");
            let done = match how {
                "plain" => {
                    let mut plain = Command::new(&program);
                    plain.arg(at_text);
                    must_pass(plain)
                }
                "library" => must_pass(preloaded(&program, &[at_text])),
                _ => must_pass(preloaded(&program, &[at_text, how])),
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
fn edges_are_what_host_calls_meet() {
    let program = program("edges");
    must_pass(preloaded(&program, &[]));
    let mut chunked = preloaded(&program, &[]);
    chunked.env("SPINIO_STAGING", "4M");
    must_pass(chunked);
}

#[test]
fn hold_ends_without_signals_and_names_the_limit() {
    let program = linked("deaf");
    for how in ["before", "after", "space"] {
        let mut run = preloaded(&program, &[how]);
        run.env("SPINIO_HOLD", "1G");
        let done = must_pass(run);
        print!("{}", String::from_utf8_lossy(&done.stdout));
    }
}

/// A program that names the library's own functions.
fn linked(name: &str) -> std::path::PathBuf {
    let (out, text) = (folder().join(name), source("tests/c").join(format!("{name}.c")));
    let rpath = format!("-Wl,-rpath,{}", library().parent().expect("a folder").display());
    let library = library();
    compile("cc", &out, &[text.to_str().expect("UTF-8"), library.to_str().expect("UTF-8"), &rpath]);
    out
}

#[test]
fn errors_are_the_same_as_with_host_memory() {
    must_pass(preloaded(&program("errors"), &[]));
}

#[test]
fn pipes_and_sockets_reach_the_device() {
    must_pass(preloaded(&program("streams"), &[]));
}

#[test]
fn jumps_out_of_waiting_reads_lose_nothing() {
    let program = program("jumps");
    for staging in ["128M", "4M"] {
        let mut run = preloaded(&program, &[]);
        run.env("SPINIO_STAGING", staging);
        must_pass(run);
    }
}

#[test]
fn threads_can_be_cancelled_in_host_reads() {
    must_pass(preloaded(&program("cancel"), &[]));
}

#[test]
fn children_of_a_device_program_are_not_harmed() {
    must_pass(preloaded(&program("forks"), &[]));
}

#[test]
fn what_is_kept_beside_a_file_goes_with_it() {
    must_pass(preloaded(&program("closes"), &[]));
}

#[test]
fn advice_is_the_kernels_and_is_gone_by() {
    must_pass(preloaded(&program("advice"), &[]));
}

#[test]
fn fortified_names_are_served_too() {
    must_pass(preloaded(&program("fortified"), &[]));
}

#[test]
fn calls_of_the_driver_itself_are_left_alone() {
    let driver = folder().join("libnvidia-test.so");
    let code = source("tests/c/driver.c");
    let code = code.to_str().expect("UTF-8");
    compile("cc", &driver, &["-shared", "-fPIC", "-DDRIVER", code]);
    // Built as any other program, then once more against the driver.
    let memory = shim();
    let out = folder().join("driver");
    let rpath = format!("-Wl,-rpath,{}", folder().display());
    compile("cc", &out, &[code, driver.to_str().expect("UTF-8"), memory.to_str().expect("UTF-8"), &rpath]);
    must_pass(preloaded(&out, &[]));
}

#[test]
fn a_switch_turns_every_hook_off() {
    let mut run = preloaded(&program("disabled"), &[]);
    run.env("SPINIO_DISABLE", "1");
    must_pass(run);
}

#[test]
fn a_program_without_devices_sees_no_difference() {
    // The library itself is the input: large enough for several reads.
    let input = library();
    for args in [vec!["sha256sum"], vec!["wc", "-c"], vec!["od", "-A", "d"], vec!["sort", "-z"]] {
        let mut plain = Command::new(args[0]);
        plain.args(&args[1..]).arg(&input);
        let mut hooked = plain_copy(&plain);
        hooked.env("LD_PRELOAD", library());
        let (plain, hooked) = (plain.output().expect("it runs"), must_pass(hooked));
        assert!(plain.stdout == hooked.stdout, "{args:?} says something else under the library");
    }
}

fn plain_copy(command: &Command) -> Command {
    let mut copy = Command::new(command.get_program());
    copy.args(command.get_args());
    copy
}
