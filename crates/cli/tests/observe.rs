//! `spinio stat`, `top` and `trace` on running programs.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use common::{compile, file, folder, spinio, stderr, stdout};
use serde_json::Value;

/// Reads 1 MiB and ten times 4 KiB into a device, then again for each line of its input. With `fork` a child does the
/// same. The program's descriptors must stay unchanged.
const PROGRAM: &str = r#"
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static char *memory;
static int fd;

static int descriptors(void) {
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

static void reads(void) {
    if (pread(fd, memory, 1 << 20, 0) != 1 << 20)
        exit(3);
    for (int i = 0; i < 10; i++)
        if (pread(fd, memory, 4096, i * 4096) != 4096)
            exit(4);
}

int main(int argc, char **argv) {
    void *(*alloc)(const char *, size_t, unsigned) = dlsym(RTLD_DEFAULT, "spinio_mem_alloc");
    char line[16];
    pid_t child = argc > 2 && !strcmp(argv[2], "fork") ? fork() : -1;
    if (!alloc || !(memory = alloc("emulated", 1 << 20, 0)))
        exit(2);
    fd = open(argv[1], O_RDONLY);
    int before = descriptors(), status;
    reads();
    int after = descriptors();
    // A copy worker of the library, which has this table, may be in malloc: glibc opens /sys/devices/system/cpu/online there,
    // once, when there are many threads.
    for (int i = 0; i < 1000000 && after != before; i++, after = descriptors())
        usleep(100);
    if (after != before) {
        fprintf(stderr, "descriptors %d before, %d after:", before, after);
        char path[64], link[256];
        for (int i = 0; i < 64; i++) {
            snprintf(path, sizeof path, "/proc/self/fd/%d", i);
            ssize_t n = readlink(path, link, sizeof link - 1);
            if (n > 0)
                link[n] = 0, fprintf(stderr, " %d %s", i, link);
        }
        exit(5);
    }
    if (child == 0)
        _exit(0);
    if (child > 0 && (waitpid(child, &status, 0) != child || status)) {
        fprintf(stderr, "the child ended with status %#x\n", status);
        exit(6);
    }
    while (puts("ready"), fflush(stdout), fgets(line, sizeof line, stdin))
        reads();
    return 0;
}
"#;

/// The program under the library, with its own directory for counters.
struct ObservedProgram {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

struct Bench {
    dir: tempfile::TempDir,
    program: PathBuf,
    data: PathBuf,
}

impl Bench {
    fn new() -> Option<Bench> {
        let dir = folder();
        let program = compile(dir.path(), "watched", PROGRAM, &["-ldl"])?;
        let data = file(dir.path(), "data", 1 << 20);
        std::fs::create_dir(dir.path().join("run")).unwrap();
        std::fs::set_permissions(dir.path().join("run"), std::fs::Permissions::from_mode(0o700)).unwrap();
        Some(Bench { dir, program, data })
    }

    fn spinio(&self) -> assert_cmd::Command {
        let mut command = spinio();
        command.env("XDG_RUNTIME_DIR", self.dir.path().join("run"));
        command
    }

    fn files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.dir.path().join("run/spinio")).into_iter().flatten();
        entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn start(&self, env: &[(&str, &str)]) -> ObservedProgram {
        let mut command = Command::new(env!("CARGO_BIN_EXE_spinio"));
        command.args(["run", "--"]).arg(&self.program).arg(&self.data);
        command.env_remove("SPINIO_STATS").env_remove("SPINIO_TRACE");
        command.env("XDG_RUNTIME_DIR", self.dir.path().join("run")).envs(env.iter().copied());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take(), BufReader::new(child.stdout.take().unwrap()));
        let mut watched = ObservedProgram { child, input, output };
        watched.await_ready();
        watched
    }
}

impl ObservedProgram {
    fn await_ready(&mut self) {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n", "{:?}", self.child.wait());
    }

    fn read(&mut self) {
        self.input.as_mut().unwrap().write_all(b"again\n").unwrap();
        self.await_ready();
    }

    /// `run` has executed the program in its own process.
    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn end(mut self) {
        drop(self.input.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for ObservedProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn json(assert: &assert_cmd::assert::Assert) -> Value {
    serde_json::from_str(&stdout(assert)).unwrap()
}

#[test]
fn live_processes_are_listed_and_reported_in_full() {
    let Some(bench) = Bench::new() else { return };
    let (mut one, two) = (bench.start(&[]), bench.start(&[]));
    one.read();
    let list = json(&bench.spinio().args(["stat", "--json"]).assert().success());
    let reads = |pid: u32| {
        let mine = list.as_array().unwrap().iter().find(|p| p["process"] == pid)?;
        mine["calls"]["read"]["calls"].as_u64()
    };
    assert_eq!((reads(one.pid()), reads(two.pid())), (Some(22), Some(11)), "{list:#}");

    let counters = json(&bench.spinio().args(["stat", "--json", &one.pid().to_string()]).assert().success());
    assert_eq!(counters["program"], "watched");
    assert_eq!(counters["calls"]["read"]["bytes"], 2 * ((1 << 20) + 10 * 4096));
    let bytes: u64 = counters["routes"].as_array().unwrap().iter().map(|r| r["bytes"].as_u64().unwrap()).sum();
    assert_eq!(bytes, 2 * ((1 << 20) + 10 * 4096), "{counters:#}");
    assert!(counters["gauges"]["bounce_bytes"]["now"].as_u64().unwrap() > 0);
    assert!(counters["calls"]["read"]["latency_ns"]["p99"].as_u64().unwrap() > 0);

    let text = stdout(&bench.spinio().args(["stat", &one.pid().to_string()]).assert().success());
    assert!(text.contains(&format!("watched (process {})", one.pid())) && text.contains("small request"), "{text}");
    let text = stdout(&bench.spinio().arg("stat").assert().success());
    assert!(text.lines().any(|l| l.contains(&one.pid().to_string()) && l.contains("watched")), "{text}");

    let gone = one.pid().to_string();
    one.end();
    let assert = bench.spinio().args(["stat", &gone]).assert().code(1);
    assert!(stderr(&assert).contains("there is no such process"), "{}", stderr(&assert));
    two.end();
}

#[test]
fn deprecated_json_keys_equal_new_keys() {
    let Some(bench) = Bench::new() else { return };
    // The setting refuses `dma` for the large read: a reason that was renamed.
    let program = bench.start(&[("SPINIO_ROUTES", "copy"), ("SPINIO_DMA_MIN", "64K")]);
    let value = json(&bench.spinio().args(["stat", "--json", &program.pid().to_string()]).assert().success());
    let pairs = [
        ("staging_bytes", "bounce_bytes"),
        ("kept_files", "file_cache_entries"),
        ("held_files", "pinned_files"),
        ("held_bytes", "pinned_file_bytes"),
        ("read_ahead_pages", "readahead_pages"),
    ];
    for (old, new) in pairs {
        let gauge = &value["gauges"][new];
        assert!(gauge["now"].is_u64() && gauge["most"] == gauge["max"] && gauge["max"].is_u64(), "{new}: {value:#}");
        assert_eq!(&value["gauges"][old], gauge, "{old}: {value:#}");
    }
    assert!(value["overflow"].is_u64() && value["unplaced"] == value["overflow"], "{value:#}");
    let rows = value["routes"].as_array().unwrap().iter().chain(value["refused"].as_array().unwrap());
    for row in rows {
        let expected = if row["reason"] == "by_setting" { "forced".into() } else { Value::Null };
        assert_eq!(row["reason_old"], expected, "{row:#}");
    }
    assert!(value.to_string().contains(r#""reason_old":"forced""#), "{value:#}");
    program.end();
}

#[test]
fn counters_of_killed_process_are_removed_by_the_next() {
    let Some(bench) = Bench::new() else { return };
    let killed = bench.start(&[]);
    let (pid, name) = (killed.pid(), killed.pid().to_string());
    assert_eq!(bench.files(), [name.as_str()]);
    drop(killed);
    assert_eq!(bench.files(), [name.as_str()], "no process has removed it since");
    let list = json(&bench.spinio().args(["stat", "--json"]).assert().success());
    assert!(list.as_array().unwrap().iter().all(|p| p["process"] != pid), "{list:#}");
    let next = bench.start(&[]);
    assert_eq!(bench.files(), [next.pid().to_string()]);
    next.end();
}

#[test]
fn host_programs_and_stats_off_create_no_file() {
    let Some(bench) = Bench::new() else { return };
    bench.spinio().args(["run", "--", "cat"]).arg(&bench.data).assert().success();
    let off = bench.start(&[("SPINIO_STATS", "off")]);
    assert!(bench.files().is_empty(), "{:?}", bench.files());
    off.end();
}

#[test]
fn forked_child_has_own_counters_and_run_adds_them() {
    let Some(bench) = Bench::new() else { return };
    let assert =
        bench.spinio().args(["run", "--stats", "--"]).arg(&bench.program).arg(&bench.data).arg("fork").assert();
    let text = stderr(&assert.success());
    assert!(text.contains("22 device reads"), "{text}");
    // Each has its own file: in a directory that the user named they stay.
    let kept = bench.dir.path().join("kept");
    std::fs::create_dir(&kept).unwrap();
    let mut command = bench.spinio();
    command.env("SPINIO_STATS", format!("{}/", kept.display()));
    command.args(["run", "--"]).arg(&bench.program).arg(&bench.data).arg("fork").assert().success();
    let mut reads = Vec::new();
    for entry in std::fs::read_dir(&kept).unwrap() {
        let counters =
            json(&bench.spinio().args(["stat", "--json", "--file"]).arg(entry.unwrap().path()).assert().success());
        reads.push(counters["calls"]["read"]["calls"].as_u64().unwrap());
    }
    assert_eq!(reads, [11, 11]);
}

#[test]
fn file_without_counters_is_error() {
    let dir = folder();
    let path = file(dir.path(), "data", 1 << 20);
    let assert = spinio().args(["stat", "--file"]).arg(&path).assert().code(1);
    assert!(stderr(&assert).contains("holds no counters"), "{}", stderr(&assert));
    spinio().args(["stat", "--file"]).arg(dir.path()).assert().code(1);
}

/// Every line; checks that its segments add up to its bytes.
fn requests(text: &str) -> Vec<Value> {
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    for line in &lines {
        let segments = line["segments"].as_array().unwrap();
        let bytes: u64 = segments.iter().map(|s| s["bytes"].as_u64().unwrap()).sum();
        assert_eq!(Some(bytes), line["bytes"].as_u64(), "{line:#}");
        let begun = line["start_ns"].as_u64().unwrap();
        let ended = begun + line["duration_ns"].as_u64().unwrap();
        for s in segments {
            let start = s["start_ns"].as_u64().unwrap();
            // The clock is read again for each, so the ends may differ by the time of a call.
            assert!((begun..=ended).contains(&start), "a segment outside its request: {line:#}");
        }
    }
    lines
}

#[test]
fn program_and_child_are_traced() {
    let Some(bench) = Bench::new() else { return };
    let traced = |output: &[&str]| {
        let mut command = bench.spinio();
        command.arg("trace").args(output).arg("--").arg(&bench.program).arg(&bench.data).arg("fork");
        command.assert().success()
    };
    let lines = bench.dir.path().join("trace.jsonl");
    traced(&["-o", lines.to_str().unwrap()]);
    let lines = requests(&std::fs::read_to_string(lines).unwrap());
    assert_eq!(lines.len(), 22);
    let path = bench.data.canonicalize().unwrap();
    assert!(lines.iter().all(|l| l["path"] == path.to_str().unwrap() && l["device"] == "emulated:0"), "{:#}", lines[0]);
    let mut by_process: HashMap<u64, Vec<u64>> = HashMap::new();
    for l in &lines {
        by_process.entry(l["pid"].as_u64().unwrap()).or_default().push(l["length"].as_u64().unwrap());
    }
    let expected: Vec<u64> = [1 << 20].into_iter().chain([4096; 10]).collect();
    assert_eq!(by_process.len(), 2);
    assert!(by_process.values().all(|lengths| *lengths == expected), "{by_process:?}");
    // Those of each process are in order; the tracer may poll while both read.
    for pid in by_process.keys() {
        let small = lines.iter().filter(|l| l["pid"] == *pid && l["length"] == 4096);
        let offsets: Vec<_> = small.map(|l| l["offset"].as_u64().unwrap()).collect();
        assert_eq!(offsets, (0..10).map(|i| i * 4096).collect::<Vec<_>>());
    }

    let chrome = bench.dir.path().join("trace.json");
    traced(&["-o", chrome.to_str().unwrap()]);
    let value: Value = serde_json::from_str(&std::fs::read_to_string(chrome).unwrap()).unwrap();
    let events = value["traceEvents"].as_array().unwrap();
    assert_eq!(events.iter().filter(|e| e["cat"] == "request").count(), 22);
    assert!(events.iter().any(|e| e["ph"] == "M" && e["args"]["name"] == "watched"), "{events:#?}");
    assert!(events.iter().any(|e| e["cat"] == "segment" && e["args"]["request"].is_u64()));
}

#[test]
fn running_process_is_traced_until_tracer_ends() {
    let Some(bench) = Bench::new() else { return };
    let mut program = bench.start(&[]);
    let output = bench.dir.path().join("trace.jsonl");
    let mut tracer = Command::new(env!("CARGO_BIN_EXE_spinio"))
        .env("XDG_RUNTIME_DIR", bench.dir.path().join("run"))
        .args(["trace", &program.pid().to_string(), "-o"])
        .arg(&output)
        .spawn()
        .unwrap();
    let traced = |output: &Path| std::fs::read_to_string(output).unwrap_or_default();
    let begun = Instant::now();
    while traced(&output).lines().count() < 11 {
        assert_eq!(tracer.try_wait().unwrap(), None, "the tracer ended");
        assert!(begun.elapsed() < Duration::from_secs(120), "nothing was traced");
        program.read();
    }
    let stop = Command::new("kill").arg("-INT").arg(tracer.id().to_string()).status().unwrap();
    assert!(stop.success() && tracer.wait().unwrap().success());
    let lines = requests(&traced(&output));
    assert!(lines.iter().all(|l| l["pid"] == program.pid() && l["direction"] == "read"));
    assert!(lines.iter().any(|l| l["length"] == 1 << 20) && lines.iter().any(|l| l["length"] == 4096));
    // Nothing is recorded any more.
    let file = bench.dir.path().join("run/spinio").join(program.pid().to_string());
    let head = || std::fs::read(&file).unwrap()[24 * 8..25 * 8].to_vec();
    let before = head();
    program.read();
    assert_eq!(head(), before, "tracing continues without a tracer");
    program.end();
}

#[test]
fn prometheus_page_is_valid() {
    let Some(bench) = Bench::new() else { return };
    let program = bench.start(&[]);
    let once = stdout(&bench.spinio().args(["stat", "--prometheus"]).assert().success());
    let line = format!(
        "spinio_requests_total{{pid=\"{}\",program=\"watched\",direction=\"read\",outcome=\"ok\"}} 11",
        program.pid()
    );
    assert!(once.contains(&line), "{once}");
    let mut server = Command::new(env!("CARGO_BIN_EXE_spinio"))
        .env("XDG_RUNTIME_DIR", bench.dir.path().join("run"))
        .args(["stat", "--prometheus", "--listen", "127.0.0.1:0"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(server.stderr.take().unwrap()).read_line(&mut said).unwrap();
    let address = said.trim().trim_start_matches("spinio: http://").trim_end_matches("/metrics");
    let mut client = TcpStream::connect(address).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n").unwrap();
    let mut page = String::new();
    client.read_to_string(&mut page).unwrap();
    server.kill().unwrap();
    server.wait().unwrap();
    assert!(page.starts_with("HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4;"), "{page}");
    let page = page.split("\r\n\r\n").nth(1).unwrap();
    assert!(page.contains(&line), "{page}");
    check_prometheus_page(page);
    program.end();
}

/// What `promtool check metrics` and a scrape require of a page of version 0.0.4.
fn check_prometheus_page(page: &str) {
    let (mut helped, mut typed) = (Vec::new(), HashMap::new());
    let mut series: HashMap<&str, f64> = HashMap::new();
    // For each histogram, the sum of its buckets so far, and its last bound.
    let mut buckets: HashMap<String, (f64, f64)> = HashMap::new();
    for line in page.lines() {
        let words: Vec<&str> = line.splitn(4, ' ').collect();
        match words[..] {
            ["#", "HELP", name, text] => {
                assert!(!text.is_empty() && !helped.contains(&name), "{line}");
                helped.push(name);
            }
            ["#", "TYPE", name, kind] => {
                assert_eq!(helped.last(), Some(&name), "{line}");
                assert!(["counter", "gauge", "histogram"].contains(&kind), "{line}");
                assert_eq!(name.ends_with("_total"), kind == "counter", "{line}");
                assert!(typed.insert(name, kind).is_none(), "{line}");
            }
            ["#", ..] => panic!("another comment: {line}"),
            _ => {
                let (key, value) = line.rsplit_once(' ').unwrap();
                let value: f64 = value.parse().unwrap_or_else(|_| panic!("{line}"));
                assert!(value >= 0.0 && series.insert(key, value).is_none(), "twice, or below zero: {line}");
                let (name, labels) = key.split_once('{').unwrap();
                let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| name.strip_suffix(end));
                let family = family.filter(|family| typed.get(family) == Some(&"histogram")).unwrap_or(name);
                assert!(family != name || typed.get(name).is_some_and(|kind| *kind != "histogram"), "no TYPE: {line}");
                // The metrics of a name are consecutive, after its TYPE.
                assert_eq!(helped.last(), Some(&family), "{line}");
                if name.ends_with("_bucket") {
                    let (bound, others) = labels.strip_prefix("le=\"").unwrap().split_once("\",").unwrap();
                    let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
                    let of = format!("{family}_count{{{others}");
                    let (before, last) = buckets.insert(of, (value, bound)).unwrap_or((0.0, 0.0));
                    assert!(value >= before && bound > last, "no sums, or out of order: {line}");
                }
            }
        }
    }
    assert!(buckets.len() >= 2 && series.len() > 40, "{page}");
    for (of, (sum, bound)) in buckets {
        let count = series[of.as_str()];
        assert_eq!((sum, bound), (count, f64::INFINITY), "{of}");
    }
}

#[test]
fn top_without_terminal_prints_message() {
    let assert = spinio().arg("top").assert().success();
    assert!(stderr(&assert).contains("no terminal"), "{}", stderr(&assert));
}

#[test]
fn top_reads_keys_if_an_update_takes_longer_than_its_interval() {
    // The other end of a pseudo terminal: a key when the screen is in use, then it must end.
    const OTHER_END: &str = r#"
import os, pty, signal, sys
signal.alarm(600)
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], "top", "--every", "0.01"])
seen = b""
while b"?1049h" not in seen: seen += os.read(fd, 65536)
os.write(fd, b"q")
try:
    while os.read(fd, 65536): pass
except OSError: pass
how = os.waitpid(pid, 0)[1]
assert os.WIFEXITED(how) and os.WEXITSTATUS(how) == 0, how
"#;
    let dir = folder();
    let tables = dir.path().join("spinio");
    std::fs::create_dir(&tables).unwrap();
    std::fs::set_permissions(&tables, std::fs::Permissions::from_mode(0o700)).unwrap();
    // So many that to look at them takes longer than the interval: none of them is a living process.
    for number in 0..4000 {
        let table = std::fs::File::create(tables.join(number.to_string())).unwrap();
        table.set_len(spinio_io::stats::trace::file::COUNTERS_BYTES as u64).unwrap();
    }
    let mut python = std::process::Command::new("python3");
    python.env("XDG_RUNTIME_DIR", dir.path());
    match python.args(["-c", OTHER_END, common::PROGRAM]).output() {
        Err(e) => eprintln!("skipped: no python3: {e}"),
        Ok(out) => assert!(out.status.success(), "{out:?}"),
    }
}

#[test]
fn counters_are_read_through_a_link() {
    let Some(bench) = Bench::new() else { return };
    let (table, link) = (bench.dir.path().join("table"), bench.dir.path().join("link"));
    std::fs::write(&table, "").unwrap();
    std::os::unix::fs::symlink(&table, &link).unwrap();
    let mut command = spinio();
    command.env("SPINIO_STATS", &link).args(["run", "--stats", "--"]).arg(&bench.program).arg(&bench.data);
    let text = stderr(&command.write_stdin("").assert().success());
    assert!(text.contains("1.0 MiB") || text.contains("1 MiB"), "{text}");
    let text = stdout(&spinio().args(["stat", "--file"]).arg(&link).assert().success());
    assert!(text.contains("read"), "{text}");
}

#[test]
fn stat_takes_the_interval_after_an_equals_sign_only() {
    // Not an interval of so many seconds: a process, which there is not.
    let assert = spinio().args(["stat", "--watch", "28924000"]).assert().code(1);
    assert!(stderr(&assert).contains("No counters of process 28924000"), "{}", stderr(&assert));
    let assert = spinio().args(["stat", "--watch=0", "1"]).assert().code(2);
    assert!(stderr(&assert).contains("between 0.01"), "{}", stderr(&assert));
}

#[test]
fn top_restores_terminal_on_signal() {
    // The other end of a pseudo terminal: waits until the screen is in use, then for the end.
    const OTHER_END: &str = r#"
import os, pty, signal, sys
pid, fd = pty.fork()
if pid == 0:
    os.execv(sys.argv[1], [sys.argv[1], "top", "--every", "3600"])
seen = b""
def more():
    global seen
    try:
        got = os.read(fd, 65536)
    except OSError:
        got = b""
    seen += got
    return got
while b"?1049h" not in seen and more(): pass
os.kill(pid, signal.SIGTERM)
while more(): pass
how = os.waitpid(pid, 0)[1]
assert os.WIFSIGNALED(how) and os.WTERMSIG(how) == signal.SIGTERM, how
assert b"?1049l" in seen and seen.rfind(b"?25h") > seen.rfind(b"?25l"), seen
"#;
    let mut python = std::process::Command::new("python3");
    match python.args(["-c", OTHER_END, env!("CARGO_BIN_EXE_spinio")]).output() {
        Err(e) => eprintln!("skipped: no python3: {e}"),
        Ok(out) => assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr)),
    }
}
