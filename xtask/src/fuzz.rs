//! `cargo x fuzz`: random and malformed input, target by target.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::tools;

/// LLVM's coverage pass, as libFuzzer needs it; stable compilers have it too.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares -Clink-args=-rdynamic --cfg fuzzing";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Targets to run; all of them without one
    targets: Vec<String>,
    /// How long each runs
    #[arg(long, default_value_t = 20)]
    seconds: u64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let root = tools::root();
    let folder = tools::target()?.join("fuzz");
    let known = targets(&root)?;
    if let Some(unknown) = args.targets.iter().find(|t| !known.contains(t)) {
        anyhow::bail!("no target is called {unknown}; there are {}", known.join(", "));
    }
    let wanted = if args.targets.is_empty() { &known } else { &args.targets };

    let instrumented = |cargo: &mut std::process::Command| {
        // The flags are for the code under test, not for build scripts: hence an explicit target.
        let host = tools::output(tools::command("rustc").args(["--print", "host-tuple"]))?;
        cargo.env("RUSTFLAGS", COVERAGE).env("CARGO_TARGET_DIR", &folder).args(["--release", "--quiet", "--target"]);
        tools::run(cargo.arg(host.trim()))?;
        Ok::<_, anyhow::Error>(folder.join(host.trim()).join("release"))
    };
    let programs =
        instrumented(tools::cargo_without_lto().args(["build", "--manifest-path"]).arg(root.join("fuzz/Cargo.toml")))?;
    instrumented(tools::cargo_without_lto().args(["build", "-p", "spinio-preload"]))?;

    std::fs::create_dir_all(folder.join("failures"))?;
    // As many at a time as there are processors.
    let together = std::thread::available_parallelism().map_or(1, usize::from);
    for some in wanted.chunks(together) {
        let done = std::thread::scope(|scope| {
            let (folder, programs) = (&folder, &programs);
            let mut running = Vec::new();
            for target in some {
                running.push(scope.spawn(move || fuzz(target, folder, programs, args.seconds)));
            }
            running.into_iter().map(|one| one.join().expect("no panic")).collect::<Vec<_>>()
        });
        done.into_iter().collect::<Result<()>>()?;
    }
    Ok(())
}

/// Runs a target.
fn fuzz(target: &str, folder: &Path, programs: &Path, seconds: u64) -> Result<()> {
    let corpus = folder.join("corpus").join(target);
    std::fs::create_dir_all(&corpus)?;
    let mut fuzzer = tools::command(programs.join(target));
    fuzzer.env("SPINIO_FUZZ_LIBRARY", programs.join("libspinio.so")).arg(&corpus).args([
        format!("-max_total_time={seconds}"),
        format!("-artifact_prefix={}/failures/{target}-", folder.display()),
        "-timeout=60".into(),
        "-rss_limit_mb=4096".into(),
        "-print_final_stats=1".into(),
        "-verbosity=0".into(),
    ]);
    let output = fuzzer.output().with_context(|| format!("cannot start {target}"))?;
    let log = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        eprintln!("{log}");
    }
    ensure!(output.status.success(), "{target} failed; the input is in {}", folder.join("failures").display());
    let runs = log.lines().find_map(|l| l.strip_prefix("stat::number_of_executed_units:")).map_or("?", str::trim);
    println!("{target}: {runs} inputs, no failure");
    Ok(())
}

/// The names of the targets, from their package.
fn targets(root: &Path) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(root.join("fuzz/Cargo.toml"))?;
    let mut names: Vec<String> = text
        .split("[[bin]]")
        .skip(1)
        .filter_map(|b| b.lines().find_map(|l| l.strip_prefix("name = \"")?.strip_suffix('"').map(Into::into)))
        .collect();
    names.sort();
    Ok(names)
}
