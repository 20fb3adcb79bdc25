//! `cargo x preload-suite`: real programs with and without the library.
//!
//! Each job is a script in `xtask/preload`, run in an empty directory of the same name every time:
//!
//! ```text
//!   plain, plain again, library     under strace: same status, same output, same system calls
//!   library with a device in use    every hook takes its slow path: same status, same output
//! ```
//!
//! The second plain run shows which calls vary without the library. If none do, every call of the library run must be
//! the same, argument by argument and process by process. Else the calls are counted by name, and a count that is the
//! same in all plain runs must be the library's too. Runs may agree by chance, so before a difference counts, both
//! sides run again.
//!
//! The calls by which the loader loads a library are ignored. So are calls about memory and time, whose number varies.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::tools;
use crate::trace::{SyscallTrace, TRACED};

/// How often both sides run again before a difference counts.
const RETRIES: usize = 4;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Only these jobs; all without it
    jobs: Vec<String>,
    /// Keep the directory with scripts' outputs and traces, and print its path
    #[arg(long)]
    keep: bool,
}

struct Job {
    name: String,
    script: PathBuf,
    needs: Vec<String>,
    calls: bool,
}

/// The result of a run.
#[derive(PartialEq, Eq)]
struct RunOutput {
    status: Option<i32>,
    output: String,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    // With the command, as it is installed and as other chores build it: alone the library would be built once more.
    tools::run(tools::cargo().args(["build", "--quiet", "--release", "-p", "spinio-preload", "-p", "spinio-cli"]))?;
    let library = tools::target()?.join("release/libspinio.so");
    let folder = std::env::temp_dir().join(format!("spinio-preload-{}", std::process::id()));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let device = build_device(&folder)?;
    let strace = is_installed("strace");
    if !strace {
        println!("no strace here: system calls are not compared");
    }

    let mut failed = 0;
    let mut ran = 0;
    for job in jobs(&args.jobs)? {
        let missing: Vec<_> = job.needs.iter().filter(|p| !is_installed(p)).map(String::as_str).collect();
        if !missing.is_empty() {
            println!("{:<12} skipped: no {} here", job.name, missing.join(", "));
            continue;
        }
        ran += 1;
        match check(&job, &folder, &library, &device, strace && job.calls) {
            Ok(what) => println!("{:<12} {what}", job.name),
            Err(error) => {
                failed += 1;
                println!("{:<12} FAILED: {error:#}", job.name);
            }
        }
    }
    if args.keep {
        println!("kept: {}", folder.display());
    } else {
        let _ = std::fs::remove_dir_all(&folder);
    }
    ensure!(ran > 0, "no job could be run");
    ensure!(failed == 0, "{failed} of {ran} jobs differ under the library");
    Ok(())
}

/// The scripts, with the settings of their first lines.
fn jobs(wanted: &[String]) -> Result<Vec<Job>> {
    let folder = tools::root().join("xtask/preload");
    let mut found = Vec::new();
    for entry in std::fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let script = entry?.path();
        let name = script.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        if script.extension().is_none_or(|e| e != "sh") || !(wanted.is_empty() || wanted.contains(&name)) {
            continue;
        }
        let text = std::fs::read_to_string(&script)?;
        let header = |key: &str| text.lines().find_map(|l| l.strip_prefix(&format!("# {key}: ")).map(str::to_owned));
        let needs = header("needs").unwrap_or_default().split_whitespace().map(str::to_owned).collect();
        let calls = header("compare").is_none_or(|c| c != "output");
        found.push(Job { name, script, needs, calls });
    }
    for name in wanted {
        ensure!(found.iter().any(|j| &j.name == name), "there is no job {name}");
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn is_installed(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| std::env::split_paths(&path).any(|p| p.join(program).is_file()))
}

/// A second preloaded library, which uses a device as soon as it is loaded.
fn build_device(folder: &Path) -> Result<PathBuf> {
    let out = folder.join("libdevice.so");
    let source = tools::root().join("xtask/preload/device.c");
    tools::run(tools::command("cc").args(["-shared", "-fPIC", "-O1", "-o"]).arg(&out).arg(source).arg("-ldl"))?;
    Ok(out)
}

fn check(job: &Job, folder: &Path, library: &Path, device: &Path, calls: bool) -> Result<String> {
    let preload = library.display().to_string();
    let with_device = format!("{preload}:{}", device.display());
    let (expected, first) = start(job, folder, "", calls)?;
    let same = |preload: &str, calls: bool, what: &str| {
        let (outcome, calls) = start(job, folder, preload, calls)?;
        ensure!(outcome == expected, "{what}: {}", difference(&expected, &outcome));
        Ok(calls)
    };
    let mut plain = vec![first, same("", calls, "the output varies even without the library")?];
    same(&with_device, false, "with the library and a device in use")?;
    // Last, so that its traces are what `--keep` keeps.
    let mut hooked = vec![same(&preload, calls, "with the library")?];
    if !calls {
        return Ok("same status and output".into());
    }
    for _ in 0..RETRIES {
        if let Ok(what) = compare(&plain, &hooked) {
            return Ok(what);
        }
        plain.push(same("", true, "the output varies even without the library")?);
        hooked.push(same(&preload, true, "with the library")?);
    }
    compare(&plain, &hooked)
}

/// One run of the script in a fresh directory, and the system calls of all its processes.
fn start(job: &Job, folder: &Path, preload: &str, calls: bool) -> Result<(RunOutput, SyscallTrace)> {
    let (inside, traces) = (folder.join(&job.name), folder.join(format!("{}.traces", job.name)));
    for each in [&inside, &traces] {
        if each.exists() {
            std::fs::remove_dir_all(each)?;
        }
        std::fs::create_dir(each).with_context(|| format!("cannot make {}", each.display()))?;
    }
    // The variable is set in every run, since its length moves the stack and shows in `env`.
    let setting = format!("LD_PRELOAD={preload}");
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "100"]);
    if calls {
        command.args(["strace", "--quiet=all", "-ff", "--seccomp-bpf", "-s", "0", "-e"]);
        command.arg(format!("trace={}", TRACED.join(","))).arg("-e").arg("signal=none");
        command.arg("-o").arg(traces.join("call")).arg("-E").arg(setting).args(["sh", "-e"]);
    } else {
        command.args(["env", &setting, "sh", "-e"]);
    }
    command.arg(&job.script).current_dir(&inside).stdin(std::process::Stdio::null());
    command.env("SOURCE", tools::root()).env("LC_ALL", "C").env("HOME", &inside).env_remove("LD_PRELOAD");
    // Cargo's, which would make every program search for its libraries here first.
    command.env_remove("LD_LIBRARY_PATH");
    let done = command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let output = format!("{}--- errors\n{}", text(&done.stdout), text(&done.stderr));
    Ok((RunOutput { status: done.status.code(), output }, SyscallTrace::read(&traces)?))
}

fn difference(plain: &RunOutput, other: &RunOutput) -> String {
    if plain.status != other.status {
        return format!("status {:?} instead of {:?}; {}", other.status, plain.status, other.output.trim_end());
    }
    let lines = plain.output.lines().zip(other.output.lines());
    match lines.enumerate().find(|(_, (a, b))| a != b) {
        Some((at, (a, b))) => format!("line {} of the output is {b:?} instead of {a:?}", at + 1),
        None => format!("{} bytes of output instead of {}", other.output.len(), plain.output.len()),
    }
}

/// Compares the library's calls with those of plain runs.
fn compare(plain: &[SyscallTrace], hooked: &[SyscallTrace]) -> Result<String> {
    let first = &plain[0];
    let total = first.total();
    ensure!(total > 0, "strace saw no system call");
    if plain.iter().all(|p| p == first) {
        return match hooked[0].difference(first) {
            None => Ok(format!("same status, output and all of {total} system calls")),
            Some(_) if hooked.contains(first) => Ok(format!("same status, output and all of {total} system calls")),
            Some(difference) => bail!("system calls: {difference}"),
        };
    }
    let counts = |runs: &[SyscallTrace]| runs.iter().map(SyscallTrace::by_name).collect::<Vec<_>>();
    let (plain, hooked) = (counts(plain), counts(hooked));
    let names: BTreeSet<&String> = plain.iter().chain(&hooked).flat_map(BTreeMap::keys).collect();
    let (mut steady, mut calls) = (0, 0);
    for name in &names {
        let of = |run: &BTreeMap<String, usize>| run.get(*name).copied().unwrap_or(0);
        let least = plain.iter().map(of).min().unwrap_or(0);
        let most = plain.iter().map(of).max().unwrap_or(0);
        if least < most {
            continue;
        }
        let seen: Vec<usize> = hooked.iter().map(of).collect();
        ensure!(seen.contains(&least), "{seen:?} calls of {name} in runs with the library, {least} in every plain one");
        steady += 1;
        calls += least;
    }
    let kinds = format!("{steady} of {} kinds", names.len());
    Ok(format!(
        "same status and output; {calls} of {total} system calls by number ({kinds}: the rest varies by itself)"
    ))
}
