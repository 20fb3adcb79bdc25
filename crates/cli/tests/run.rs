//! `spinio run`: statuses, signals, and programs that LD_PRELOAD does not affect.

mod common;

use std::os::unix::fs::PermissionsExt;

use common::{compile, folder, is_root, spinio, stderr, stdout};

#[test]
fn exit_status_is_the_programs() {
    for stats in [&[][..], &["--stats"]] {
        let run = |script: &str| {
            let mut command = spinio();
            command.arg("run").args(stats).args(["--", "sh", "-c", script]);
            command.assert()
        };
        run("exit 0").code(0);
        run("exit 7").code(7);
        assert_eq!(stdout(&run("echo $0 $LD_PRELOAD")).matches("libspinio.so").count(), 1);
    }
    // With exec no process of SPIN remains to translate the signal: the waiting shell does it.
    spinio().args(["run", "--stats", "--", "sh", "-c", "kill -TERM $$"]).assert().code(128 + 15);
}

#[test]
fn program_without_device_reads_gets_a_message() {
    let assert = spinio().args(["run", "--stats", "--", "cat", "/etc/passwd"]).assert().success();
    assert!(stderr(&assert).contains("no device requests"), "{}", stderr(&assert));
    assert_eq!(stdout(&assert), std::fs::read_to_string("/etc/passwd").unwrap());
}

#[test]
fn counters_elsewhere_are_not_reported_as_none() {
    let dir = folder();
    let message = |place: &str| {
        let assert = spinio().env("SPINIO_STATS", place).args(["run", "--stats", "--", "true"]).assert().success();
        stderr(&assert)
    };
    assert!(message("off").contains("nothing was counted: SPINIO_STATS is off"), "{}", message("off"));
    assert!(message(dir.path().to_str().unwrap()).contains("`spinio stat --file`"));
    assert!(message("/nowhere/at/all").contains("/nowhere/at/all, which SPINIO_STATS names, has no counters"));
}

#[test]
fn signals_are_forwarded_to_the_program() {
    let dir = folder();
    let ready = dir.path().join("ready");
    let script = format!("trap 'exit 42' TERM; echo > {}; while :; do sleep 0.05; done", ready.display());
    let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_spinio"))
        .args(["run", "--stats", "--", "sh", "-c", &script])
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    while !ready.exists() {
        assert_eq!(child.try_wait().unwrap(), None, "ended before it was ready");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let sent = std::process::Command::new("kill").arg("-TERM").arg(child.id().to_string()).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(42));
}

/// Writes who sent each SIGINT: `k` the Linux kernel, `p` a process. SIGTERM ends it.
const INTERRUPTED: &str = r#"
    #include <signal.h>
    #include <fcntl.h>
    #include <unistd.h>
    static int out;
    static void interrupted(int n, siginfo_t *info, void *p) { write(out, info->si_code == SI_KERNEL ? "k" : "p", 1); }
    static void ended(int n) { _exit(0); }
    int main(int argc, char **argv) {
        struct sigaction action = { .sa_sigaction = interrupted, .sa_flags = SA_SIGINFO };
        out = open(argv[1], O_WRONLY | O_CREAT | O_TRUNC, 0600);
        sigaction(SIGINT, &action, 0);
        signal(SIGTERM, ended);
        write(out, "r", 1);
        for (;;) pause();
    }"#;

#[test]
fn interrupt_reaches_the_program_once_from_terminal_or_process() {
    let dir = folder();
    let Some(program) = compile(dir.path(), "interrupted", INTERRUPTED, &[]) else { return };
    if !std::path::Path::new("/usr/bin/script").exists() {
        eprintln!("skipped: no script(1) to make a terminal");
        return;
    }
    for stdin in ["/dev/tty", "/dev/null"] {
        let (log, pid) = (dir.path().join("log"), dir.path().join("pid"));
        let _ = std::fs::remove_file(&log);
        let inner = format!(
            // A shell starts background jobs with SIGINT ignored, which `spinio run` keeps so.
            "echo $$ >{}; exec env --default-signal=INT {} run --stats -- {} {} <{stdin}",
            pid.display(),
            common::PROGRAM,
            program.display(),
            log.display()
        );
        let mut terminal = std::process::Command::new("script")
            .args(["-qec", &inner, "/dev/null"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut keys = terminal.stdin.take().unwrap();
        let mut expect = |wanted: &str| {
            let mut seen = String::new();
            for _ in 0..30_000 {
                seen = std::fs::read_to_string(&log).unwrap_or_default();
                if seen == wanted {
                    return;
                }
                assert_eq!(terminal.try_wait().unwrap(), None, "ended with {seen}");
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            panic!("{seen} instead of {wanted}, standard input {stdin}");
        };
        let kill = |signal: &str| {
            let pid = std::fs::read_to_string(&pid).unwrap();
            assert!(std::process::Command::new("kill").args([signal, pid.trim()]).status().unwrap().success());
        };
        expect("r");
        kill("-INT");
        expect("rp");
        // Ctrl-C, from `script`.
        std::io::Write::write_all(&mut keys, b"\x03").unwrap();
        expect("rpk");
        // A second copy of it would be forwarded before this.
        kill("-TERM");
        assert!(terminal.wait().unwrap().success());
        assert_eq!(std::fs::read_to_string(&log).unwrap(), "rpk", "standard input {stdin}");
    }
}

#[test]
fn closed_standard_error_changes_no_status() {
    let status = |arguments: &str| {
        let script = format!("exec {} {arguments} 2>/dev/full", common::PROGRAM);
        std::process::Command::new("sh").args(["-c", &script]).env("SPINIO_STATS", "").status().unwrap().code()
    };
    assert_eq!(status("run --stats -- sh -c 'exit 3'"), Some(3));
    assert_eq!(status("stat --file /nowhere/at/all"), Some(1));
    assert_eq!(status("trace -o /dev/null -- sh -c 'exit 4'"), Some(4));
}

#[test]
fn settings_reach_the_program() {
    let assert =
        spinio().args(["run", "--set", "threads=3", "--", "sh", "-c", "echo $SPINIO_THREADS"]).assert().success();
    assert_eq!(stdout(&assert), "3\n");
    let assert = spinio().args(["run", "--set", "warp=9", "--", "true"]).assert().code(2);
    assert!(stderr(&assert).contains("SPINIO_WARP"));
}

#[test]
fn old_and_new_names_of_a_setting_reach_the_program_alike() {
    let seen = |sets: &[&str]| {
        let mut command = spinio();
        // The value of the caller's environment: `--set` replaces it, under either name.
        command.env("SPINIO_HOLD", "3M").arg("run");
        for set in sets {
            command.args(["--set", set]);
        }
        let assert = command.args(["--", "sh", "-c", "echo $SPINIO_PIN_LIMIT,$SPINIO_HOLD"]).assert().success();
        (stdout(&assert), stderr(&assert))
    };
    for sets in [&["hold=1M"][..], &["pin_limit=1M"], &["SPINIO_HOLD=1M"], &["hold=1M", "pin_limit=1M"]] {
        assert_eq!(seen(sets), ("1M,\n".to_owned(), String::new()), "{sets:?}");
    }
    for sets in [["hold=2M", "pin_limit=1M"], ["pin_limit=1M", "hold=2M"]] {
        let (out, complaint) = seen(&sets);
        assert_eq!((out.as_str(), complaint.lines().count()), ("1M,\n", 1), "{complaint}");
        assert!(complaint.contains("SPINIO_HOLD=2M is ignored"), "{complaint}");
    }
}

#[test]
fn errors_of_starting_have_their_exit_codes() {
    let dir = folder();
    let plain = common::file(dir.path(), "plain", 10);
    for stats in [&[][..], &["--stats"]] {
        let run = |what: &str| {
            let mut command = spinio();
            // Not the caller's own PATH, which may name directories that the user may not enter.
            command.env("PATH", "/usr/bin:/bin").arg("run").args(stats).args(["--", what]);
            command.assert()
        };
        assert!(
            stderr(&run("no-such-program-here").code(127))
                .contains("Cannot run no-such-program-here: no such program on PATH")
        );
        assert!(stderr(&run("/nowhere/x").code(127)).contains("/nowhere/x"));
        run(plain.to_str().unwrap()).code(126);
        run(dir.path().to_str().unwrap()).code(126);
    }
    spinio().args(["run"]).assert().code(2);
    spinio().env("SPINIO_LIBRARY", "/nowhere/l.so").args(["run", "--", "true"]).assert().code(125);
}

#[test]
fn static_program_warns_and_strict_refuses() {
    let dir = folder();
    let Some(program) = compile(dir.path(), "fixed", "int main(void) { return 9; }\n", &["-static"]) else { return };
    let assert = spinio().args(["run", "--"]).arg(&program).assert().code(9);
    let text = stderr(&assert);
    assert!(text.contains("statically linked") && text.contains("fixed"), "{text}");
    let assert = spinio().args(["run", "--strict", "--"]).arg(&program).assert().code(125);
    assert!(stderr(&assert).contains("--strict"));
    // A script for it is as static as the program.
    let script = dir.path().join("script");
    std::fs::write(&script, format!("#!{}\n", program.display())).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    spinio().args(["run", "--strict", "--"]).arg(&script).assert().code(125);
}

#[test]
fn setuid_program_warns() {
    if !is_root() {
        eprintln!("skipped: only root can make a program that is setuid to another user");
        return;
    }
    let dir = folder();
    let Some(program) = compile(dir.path(), "rights", "int main(void) { return 0; }\n", &[]) else { return };
    std::os::unix::fs::chown(&program, Some(65534), Some(65534)).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let assert = spinio().args(["run", "--strict", "--"]).arg(&program).assert().code(125);
    assert!(stderr(&assert).contains("setuid"), "{}", stderr(&assert));
}

#[test]
fn unknown_option_is_usage_error() {
    for command in [&["run", "--nonsense"][..], &["run", "--nonsense", "--", "true"], &["run", "--stats", "--nonsense"]]
    {
        let assert = spinio().args(command).assert().code(2);
        assert!(stderr(&assert).contains("--nonsense"), "{}", stderr(&assert));
    }
    // The program's own options are passed to it, and after `--` everything is.
    let assert = spinio().args(["run", "echo", "--nonsense", "-n"]).assert().success();
    assert_eq!(stdout(&assert), "--nonsense -n\n");
    // A directory in PATH that may not be searched would make it 126, as with env(1).
    spinio().args(["run", "--", "--nonsense"]).env("PATH", "/usr/bin:/bin").assert().code(127);
}

#[test]
fn named_pipe_cannot_be_started() {
    let dir = folder();
    let fifo = dir.path().join("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    for mode in [0o644, 0o755] {
        std::fs::set_permissions(&fifo, std::fs::Permissions::from_mode(mode)).unwrap();
        for stats in [&[][..], &["--stats"]] {
            let mut command = spinio();
            // The deadline only turns a hang into a failure.
            command.timeout(std::time::Duration::from_secs(300));
            command.arg("run").args(stats).arg("--").arg(&fifo).assert().code(126);
        }
    }
    let script = dir.path().join("script");
    std::fs::write(&script, format!("#!{}\n", fifo.display())).unwrap();
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
    spinio().timeout(std::time::Duration::from_secs(300)).args(["run", "--"]).arg(&script).assert().code(126);
}

#[test]
fn help_that_cannot_be_written_is_failure() {
    for args in [&["--help"][..], &["run", "--help"], &["--version"], &["help", "read"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_spinio")).args(args).stdout(full).output().unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}");
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(text.contains("Cannot write to standard output"), "{args:?}: {text}");
    }
    spinio().arg("--help").assert().code(0);
    spinio().arg("--version").assert().code(0);
}

#[test]
fn asan_program_is_warned_about_and_starts() {
    let dir = folder();
    let flags = ["-fsanitize=address", "-shared-libasan"];
    let source = "int main(void) { return 9; }\n";
    // GCC links the shared runtime by default, and does not know the second flag.
    let program =
        compile(dir.path(), "asan", source, &flags[..1]).or_else(|| compile(dir.path(), "asan", source, &flags));
    let Some(program) = program else { return };
    let assert = spinio().args(["run", "--"]).arg(&program).assert().code(9);
    let text = stderr(&assert);
    if text.is_empty() {
        eprintln!("skipped: this compiler links the sanitizer's runtime statically, which starts under a preload");
        return;
    }
    assert!(
        text.contains("AddressSanitizer") && text.contains("LD_PRELOAD=lib") && text.contains("without SPIN"),
        "{text}"
    );
    let assert = spinio().args(["run", "--strict", "--"]).arg(&program).assert().code(125);
    assert!(stderr(&assert).contains("AddressSanitizer"));
    // The advice of the message works.
    let runtime = text.split("LD_PRELOAD=").nth(1).and_then(|t| t.split(' ').next()).unwrap();
    let mut command = spinio();
    command.env("LD_PRELOAD", runtime).env("ASAN_OPTIONS", "detect_leaks=0").args(["run", "--strict", "--"]);
    command.arg(&program).assert().code(9);
}

#[test]
fn bad_emulated_device_is_refused_like_other_settings() {
    let assert = spinio().args(["run", "--set", "emulated=nonsense", "--", "true"]).assert().code(2);
    assert!(stderr(&assert).contains("SPINIO_EMULATED takes"), "{}", stderr(&assert));
    // In the environment an invalid value is ignored, and doctor reports it.
    let dir = folder();
    let path = common::file(dir.path(), "f", 100_000);
    for command in ["read", "explain"] {
        let mut command_line = spinio();
        command_line.env("SPINIO_EMULATED", "nonsense").args([command, "--device", "emulated"]).arg(&path);
        command_line.assert().success();
    }
    let assert = spinio().env("SPINIO_EMULATED", "nonsense").arg("doctor").assert().success();
    assert!(stdout(&assert).contains("SPINIO_EMULATED=nonsense is not understood"), "{}", stdout(&assert));
}
