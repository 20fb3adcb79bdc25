//! `spinio trace -- CMD`: what happens to the program and to an earlier trace when tracing ends early or cannot begin.

mod common;

use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{compile, file, folder, spinio, stderr};
use spinio_io::stats::trace::file::{TICKETS_AT, TRACING_AT};

/// Reads 4 KiB into a device; then again for each byte of its input, until that ends.
const PROGRAM: &str = r#"
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <fcntl.h>
    #include <stdio.h>
    #include <unistd.h>
    int main(int argc, char **argv) {
        void *(*alloc)(const char *, size_t, unsigned) = dlsym(RTLD_DEFAULT, "spinio_mem_alloc");
        void *memory = alloc ? alloc("emulated", 1 << 20, 0) : 0;
        char byte;
        int file = open(argv[1], O_RDONLY);
        do {
            if (!memory || pread(file, memory, 4096, 0) != 4096)
                return 2;
            puts("ready"), fflush(stdout);
        } while (read(0, &byte, 1) > 0);
        return 0;
    }"#;

fn programs() -> Option<(tempfile::TempDir, PathBuf, PathBuf)> {
    let dir = folder();
    let program = compile(dir.path(), "reader", PROGRAM, &["-ldl"])?;
    let data = file(dir.path(), "data", 1 << 20);
    Some((dir, program, data))
}

fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(begun.elapsed() < Duration::from_secs(300), "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn process_that_begins_after_seconds_is_not_traced() {
    let Some((dir, program, data)) = programs() else { return };
    let text = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap_or_default();
    // The second program begins when the trace has been written to its end.
    let script =
        r#"echo $SPINIO_STATS >place; until [ -e go ] || ! [ -e place ]; do sleep 0.02; done; exec "$0" "$1" >second"#;
    let mut tracer = Command::new(common::PROGRAM)
        .args(["trace", "--seconds", "0.05", "-o", "trace.json", "--", "sh", "-c", script])
        .args([&program, &data])
        .current_dir(dir.path())
        .env_remove("SPINIO_STATS")
        .stdin(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("no trace", || serde_json::from_str::<serde_json::Value>(&text("trace.json")).ok());
    std::fs::write(dir.path().join("go"), "").unwrap();
    wait_for("the program does not read", || text("second").starts_with("ready").then_some(()));
    let counters = std::fs::read_dir(text("place").trim()).unwrap().next().unwrap().unwrap().path();
    let counters = std::fs::File::open(counters).unwrap();
    let word_at = |at: u64| {
        let mut word = [0; 8];
        counters.read_exact_at(&mut word, at).unwrap();
        u64::from_le_bytes(word)
    };
    wait_for("tracing stays on", || (word_at(TRACING_AT) == 0).then_some(()));
    let (reads, records) = (text("second").lines().count(), word_at(TICKETS_AT));
    let mut input = tracer.stdin.take().unwrap();
    input.write_all(b"read again").unwrap();
    wait_for("the program reads no more", || (text("second").lines().count() >= reads + 10).then_some(()));
    assert_eq!(word_at(TICKETS_AT), records, "these reads are traced");
    drop(input);
    assert!(tracer.wait().unwrap().success());
}

#[test]
fn program_runs_to_its_end_if_the_trace_cannot_be_written() {
    let Some((dir, program, data)) = programs() else { return };
    let script = r#""$0" "$1" </dev/null; sleep 0.3; echo >ended; exit 7"#;
    let mut command = spinio();
    command.args(["trace", "-o", "/dev/full", "--", "sh", "-c", script]).args([&program, &data]);
    let assert = command.current_dir(dir.path()).assert().code(7);
    assert!(dir.path().join("ended").exists());
    assert!(stderr(&assert).contains("Cannot write the trace to /dev/full"), "{}", stderr(&assert));
}

#[test]
fn trace_that_cannot_begin_leaves_an_earlier_one() {
    let dir = folder();
    let earlier = file(dir.path(), "trace.jsonl", 100);
    let before = std::fs::read(&earlier).unwrap();
    let traced = |arguments: &[&str], status: i32| {
        spinio().args(["trace", "-o"]).arg(Path::new(&earlier)).args(arguments).assert().code(status);
        assert_eq!(std::fs::read(&earlier).unwrap(), before, "{arguments:?}");
    };
    traced(&["--", "/nowhere/at/all"], 127);
    traced(&["4000000000"], 1);
}
