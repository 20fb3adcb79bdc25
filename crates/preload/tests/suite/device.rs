//! The headers of `device/`: kernels in CUDA C++, built by the host's compiler for the emulated GPU.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::build::{assert_passes, build_dir, library, source};
use crate::kernels;

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
    let headers = workspace_path("device/include");
    let rpath = format!("-Wl,-rpath,{}", library().parent().expect("a folder").display());
    let (headers, library) = (headers.display().to_string(), library().display().to_string());
    let mut args = vec!["-std=c++17", "-I", &headers];
    args.extend(more);
    let paths: Vec<String> = sources.iter().map(|s| s.display().to_string()).collect();
    args.extend(["-x", "c++"]);
    args.extend(paths.iter().map(String::as_str));
    args.extend(["-x", "none", &library, &rpath]);
    kernels::program(name, sources, &args)
}

/// A run with a deadline, so that a hang is a failure.
pub(crate) fn run_with_timeout(program: &Path) -> Command {
    let mut run = Command::new("timeout");
    // Without cargo's search path: an older library may be there.
    run.args(["--signal=KILL", "900"]).arg(program).current_dir(build_dir()).env_remove("LD_LIBRARY_PATH");
    run
}

/// A program of `device/tests`.
fn device_test(name: &str, more: &[&str]) -> PathBuf {
    let out = format!("{name}{}", more.concat().replace(['=', ','], "-"));
    build(&out, &[workspace_path("device/tests").join(format!("{name}.cpp"))], more)
}

/// Whether programs can be built with a sanitizer; says so if not.
fn has_sanitizer(name: &str) -> bool {
    let probe = build_dir().join(format!("{name}.cpp"));
    std::fs::write(&probe, "int main() { return 0; }\n").expect("a file");
    let flag = format!("-fsanitize={name}");
    let built = Command::new("c++").arg(flag).arg("-o").arg(build_dir().join(name)).arg(&probe).output();
    let there = built.is_ok_and(|done| done.status.success())
        && Command::new(build_dir().join(name)).output().is_ok_and(|done| done.status.success());
    if !there {
        eprintln!("skipped: no programs with {name} sanitizer here");
    }
    there
}

#[test]
fn blocks_threads_and_barriers_behave_as_on_gpu() {
    if has_cxx() {
        assert_passes(run_with_timeout(&device_test("emulation", &[])));
    }
}

#[test]
fn warps_behave_as_on_gpu_and_report_misuse() {
    if !has_cxx() {
        return;
    }
    let program = device_test("warps", &[]);
    assert_passes(run_with_timeout(&program));
    for (which, sentence) in [
        ("not-in-mask", "a lane is not in the mask"),
        ("two-masks", "different masks"),
        ("two-operations", "different operations"),
        ("two-barriers", "16 wait at a barrier of the block"),
    ] {
        let done = run_with_timeout(&program).arg(which).output().expect("timeout runs");
        let error = String::from_utf8_lossy(&done.stderr);
        assert!(!done.status.success() && error.contains(sentence), "{which}: {}\n{error}", done.status);
    }
}

#[test]
fn resident_blocks_wait_for_each_other() {
    if has_cxx() {
        assert_passes(run_with_timeout(&device_test("resident", &[])));
    }
}

#[test]
fn address_sanitizer_follows_stack_switches() {
    if !has_cxx() || !has_sanitizer("address") {
        return;
    }
    for name in ["emulation", "warps"] {
        let flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
        assert_passes(run_with_timeout(&device_test(name, &flags)));
    }
}

#[test]
fn thread_sanitizer_finds_races_of_kernels_and_no_others() {
    if !has_cxx() || !has_sanitizer("thread") {
        return;
    }
    let program = device_test("races", &["-fsanitize=thread"]);
    assert_passes(run_with_timeout(&program));
    for (which, kernel) in [("barrier", "block_sum"), ("warp", "warp_rotate"), ("release", "gather")] {
        // It finds a race of two accesses only while it remembers the first one: on a busy machine not in each run.
        let mut seen = String::new();
        let found = (0..10).any(|_| {
            let done = run_with_timeout(&program).arg(which).output().expect("timeout runs");
            let report = String::from_utf8_lossy(&done.stderr);
            seen += &format!("{}\n{report}\n", done.status);
            report.contains("data race") && report.contains(kernel)
        });
        assert!(found, "{which}: {seen}");
    }
}

#[test]
fn texts_and_http_are_read_without_trust_and_written() {
    if has_cxx() {
        assert_passes(run_with_timeout(&device_test("http", &["-pthread", "-Wall", "-Wextra", "-Werror"])));
    }
}

fn passes_with_sockets(name: &str) {
    if has_cxx() {
        assert_passes(run_with_timeout(&device_test(name, &["-pthread", "-Wall", "-Wextra", "-Werror"])));
    }
}

#[test]
fn kernels_call_sockets() {
    passes_with_sockets("net");
}

#[test]
fn programs_poll_sockets_that_share_memory() {
    passes_with_sockets("net_program_poll");
}

#[test]
fn accept_ends_after_its_time_limit_and_loses_no_connection() {
    passes_with_sockets("net_accept");
}

#[test]
fn connect_ends_after_its_time_limit_and_has_room_beside_accepts() {
    passes_with_sockets("net_connect");
}

#[test]
fn kernels_call_sockets_by_the_names_of_the_paper() {
    passes_with_sockets("gpunet");
}

#[test]
fn kernels_keep_the_rules_of_order() {
    passes_with_sockets("net_rules");
}

#[test]
fn thread_sanitizer_finds_no_race_of_kernels_with_the_proxy() {
    if has_cxx() && has_sanitizer("thread") {
        assert_passes(run_with_timeout(&device_test("net_rules", &["-pthread", "-fsanitize=thread"])));
    }
}

#[test]
fn calls_of_kernels_cost_what_the_design_says_and_messages_of_all_sizes_come_back() {
    passes_with_sockets("net_costs");
}

#[test]
fn faults_around_sockets_of_kernels_end_in_right_bytes_or_true_errors() {
    passes_with_sockets("net_faults");
}

#[test]
fn faults_of_other_processes_end_in_right_bytes_or_true_errors() {
    passes_with_sockets("net_process_faults");
}

#[test]
fn bytes_that_were_sent_before_close_arrive_or_the_peer_learns_that_they_do_not() {
    passes_with_sockets("net_linger");
}

#[test]
fn descriptors_of_others_hold_up_no_net() {
    passes_with_sockets("net_foreign");
}

#[test]
fn time_limits_pass_behind_other_calls_and_without_a_mailbox() {
    passes_with_sockets("net_deadlines");
}

#[test]
fn limits_and_stops_end_every_call_with_a_true_error() {
    passes_with_sockets("net_limits");
}

#[test]
fn kernels_get_the_results_that_programs_get_from_sockets() {
    passes_with_sockets("net_scripts");
}

#[test]
fn sockets_move_between_programs_and_kernels() {
    passes_with_sockets("net_adopt");
}

#[test]
fn connections_inside_a_net_give_the_same_results_as_through_linux() {
    passes_with_sockets("net_peer");
}

#[test]
fn kernels_are_told_of_connections_inside_a_net() {
    passes_with_sockets("net_peer_events");
}

#[test]
fn programs_share_memory_with_kernels() {
    passes_with_sockets("net_shared");
}

#[test]
fn kernels_of_two_nets_share_memory() {
    passes_with_sockets("net_nets");
}

#[test]
fn connections_with_translated_addresses_stay_with_linux() {
    passes_with_sockets("net_translated");
}

#[test]
fn process_that_is_killed_or_stopped_in_a_step_of_the_upgrade_harms_no_other() {
    passes_with_sockets("net_handshake");
}

#[test]
fn kernels_do_not_trust_the_net_to_which_they_connect() {
    passes_with_sockets("net_doors");
}

#[test]
fn sockets_of_kernels_and_blocks_that_wait_are_published() {
    passes_with_sockets("net_status");
}

#[test]
fn kernels_wait_for_many_sockets() {
    passes_with_sockets("net_events");
}

#[test]
fn kernels_get_the_results_that_programs_get_from_datagrams() {
    passes_with_sockets("net_datagrams");
}

#[test]
fn kernels_get_the_results_that_programs_get_from_files() {
    passes_with_sockets("net_files");
}

#[test]
fn kernels_tell_of_room_where_it_is_waited_for() {
    passes_with_sockets("net_credit");
}

#[test]
fn io_threads_share_the_system_calls_of_many_streams_and_end_with_their_net() {
    passes_with_sockets("net_threads");
}

#[test]
fn kernels_send_and_receive_in_place() {
    passes_with_sockets("net_spans");
}

#[test]
fn bytes_sent_with_more_come_with_those_of_the_next_send() {
    passes_with_sockets("net_more");
}

#[test]
fn options_are_those_of_linux_and_connect_need_not_wait() {
    passes_with_sockets("net_options");
}

#[test]
fn groups_of_cooperative_groups_make_every_call() {
    passes_with_sockets("net_groups");
}

#[test]
fn checked_builds_refuse_unequal_arguments_and_no_others() {
    passes_with_sockets("net_check");
    if has_cxx() {
        assert_passes(run_with_timeout(&device_test("net_groups", &["-pthread", "-DSPINIO_NET_CHECK"])));
    }
}

#[test]
fn process_that_is_killed_with_a_span_leaves_nothing() {
    passes_with_sockets("net_spans_killed");
}

#[test]
fn short_messages_between_kernels_arrive_whole() {
    passes_with_sockets("net_message");
}

#[test]
fn what_kernels_have_sent_arrives_however_they_end() {
    passes_with_sockets("net_ends");
}

#[test]
fn each_call_of_a_kernel_has_the_result_of_the_system_call() {
    passes_with_sockets("net_calls");
}

#[test]
fn one_call_of_a_kernel_moves_any_number_of_bytes() {
    passes_with_sockets("net_large");
}

#[test]
fn kernels_send_files_whole_and_in_order() {
    passes_with_sockets("net_sendfile");
}

#[test]
fn benchmark_of_sockets_runs_every_row() {
    if !has_cxx() {
        return;
    }
    let program = build("gpunet", &[workspace_path("benches/gpunet/gpunet.cu")], &["-pthread", "-Wall", "-Wextra"]);
    let table = build_dir().join("gpunet.json");
    let mut run = run_with_timeout(&program);
    run.args(["--tiny", "--limit", "600", "--out"]).arg(&table);
    assert_passes(run);
    let table = std::fs::read_to_string(table).expect("the results");
    for row in [
        "parts",
        "echo",
        "relay",
        "grpc",
        "blocks",
        "stream",
        "send",
        "sockets",
        "contention",
        "attributes",
        "idle",
        "many",
        "shared",
        "peer",
        "events",
        "poll",
        "datagrams",
        "files",
        "spans",
        "copies",
        "busy",
        "two-cores",
        "crowded",
    ] {
        assert!(table.contains(&format!("{{\"row\": \"{row}\"")), "no result of {row}:\n{table}");
    }
}

#[test]
fn address_sanitizer_finds_nothing_in_kernels_that_call_sockets() {
    if has_cxx() && has_sanitizer("address") {
        let flags = ["-pthread", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
        assert_passes(run_with_timeout(&device_test("net", &flags)));
    }
}

#[test]
fn cuda_programs_run_on_emulated_device() {
    if has_cxx() {
        let mut run = run_with_timeout(&build("runtime", &[workspace_path("device/tests/runtime.cpp")], &[]));
        run.env("SPINIO_EMULATED", "devices=2");
        assert_passes(run);
    }
}

#[test]
fn kernels_read_files_on_demand() {
    if has_cxx() {
        assert_passes(run_with_timeout(&device_test("reader", &[])));
    }
}

#[test]
fn signals_end_a_process_whose_read_waits_for_a_kernel() {
    if has_cxx() {
        assert_passes(run_with_timeout(&device_test("signals", &["-pthread", "-Wall", "-Wextra", "-Werror"])));
    }
}
