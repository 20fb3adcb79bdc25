//! `cargo x test-pack DIR`: all test programs of the workspace in one file, for repetitions on a large machine without
//! cargo.
//!
//! ```text
//!   cargo test --no-run ──> target/debug/deps/NAME-HASH   ─┐ stripped
//!                           target/debug/spinio, ...       ├──> DIR/tree.tar.xz ──> DIR/repeat DIR, there
//!   git ls-files ─────────> C programs, headers, fixtures  │    DIR/repeat         (tests/repeat/repeat)
//!                           this machine's stress-ng      ─┘
//! ```
//!
//! Tests find files by paths that were compiled in, so `tests.json` in the archive names the directory of this checkout, and
//! the script makes the tree visible under that path. The programs are alike: a dictionary larger than a few of them makes
//! the archive a tenth of them.
//!
//! Known flaw: examples in documentation comments are compiled by rustdoc, and are not in it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::gpu_pack;
use crate::tools;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Target directory
    #[arg(default_value = "pack-tests")]
    out: PathBuf,
}

/// Records of measurements, which no test reads.
const LEFT_OUT: &str = "benches/runs/";

pub(crate) fn run(args: &Args) -> Result<()> {
    let (root, target) = (tools::root(), tools::target()?);
    ensure!(target.starts_with(&root), "{} is not in the checkout: tests would not find it there", target.display());
    let mut build = tools::cargo();
    build.args(["test", "--workspace", "--no-run", "--quiet", "--message-format=json"]);
    let built = Built::parse(&tools::output(&mut build)?)?;

    let out = std::path::absolute(&args.out)?;
    fs::create_dir_all(&out)?;
    let tree = target.join("test-pack");
    if tree.exists() {
        fs::remove_dir_all(&tree)?;
    }
    for file in &built.files {
        let to = tree.join(file.strip_prefix(&root)?);
        fs::create_dir_all(to.parent().context("a file in a directory")?)?;
        tools::run(tools::command("strip").arg("--strip-all").arg("-o").arg(&to).arg(file))?;
    }
    let tracked = tools::output(tools::command("git").args(["ls-files", "-z"]))?;
    for name in tracked.split_terminator('\0').filter(|name| !name.starts_with(LEFT_OUT)) {
        let to = tree.join(name);
        fs::create_dir_all(to.parent().context("a file in a directory")?)?;
        fs::copy(root.join(name), &to).with_context(|| format!("cannot copy {name}"))?;
    }
    let commit = tools::output(tools::command("git").args(["describe", "--always", "--dirty"]))?;
    let list = json!({"root": root, "target": target, "commit": commit.trim(), "tests": built.tests});
    fs::write(tree.join("tests.json"), serde_json::to_string_pretty(&list)?)?;

    gpu_pack::stress_ng(&tree.join("stress-ng"))?;
    compress(&tree, &out.join("tree.tar.xz"))?;
    fs::copy(root.join("tests/repeat/repeat"), out.join("repeat"))?;
    fs::remove_dir_all(&tree)?;
    println!("{}: {} test programs of {}", out.display(), built.tests.len(), commit.trim());
    Ok(())
}

/// What cargo built.
struct Built {
    tests: Vec<Value>,
    files: BTreeSet<PathBuf>,
}

impl Built {
    fn parse(messages: &str) -> Result<Built> {
        let mut built = Built { tests: Vec::new(), files: BTreeSet::new() };
        for line in messages.lines() {
            let message: Value = serde_json::from_str(line)?;
            if message["reason"] != "compiler-artifact" {
                continue;
            }
            // "path+file:///checkout/crates/io#spinio-io@0.1.0"
            let id = message["package_id"].as_str().context("a package")?;
            let Some(id) = id.strip_prefix("path+file://") else { continue };
            let (directory, package) = id.split_once('#').context("a package in a directory")?;
            let package = package.split('@').next().unwrap_or(package);
            let directory = Path::new(directory);
            if let Some(program) = message["executable"].as_str() {
                built.files.insert(program.into());
                if message["profile"]["test"] == true {
                    let package = if package.contains('.') {
                        directory.file_name().unwrap_or_default().to_string_lossy().into()
                    } else {
                        package.to_owned()
                    };
                    let target = message["target"]["name"].as_str().context("a target")?;
                    let name = format!("{package}/{target}");
                    built.tests.push(json!({"name": name, "program": program, "directory": directory}));
                }
            }
            let libraries = message["filenames"].as_array().into_iter().flatten().filter_map(Value::as_str);
            built.files.extend(libraries.filter(|f| f.ends_with("/libspinio.so")).map(PathBuf::from));
        }
        ensure!(!built.tests.is_empty(), "cargo names no test program");
        Ok(built)
    }
}

/// Packs a directory. The window covers the largest programs several times; higher presets take minutes.
fn compress(tree: &Path, archive: &Path) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--sort=name", "--owner=0", "--group=0", "-C"]).arg(tree).args(["-c", "."]).stdout(Stdio::piped());
    let mut tar = tar.spawn().context("cannot start tar")?;
    let mut xz = Command::new("xz");
    xz.args(["-T1", "--format=xz", "--x86", "--lzma2=preset=3,dict=192MiB", "-c"]);
    xz.stdin(tar.stdout.take().context("a pipe")?).stdout(fs::File::create(archive)?);
    let packed = xz.status().context("cannot start xz")?;
    ensure!(packed.success() && tar.wait()?.success(), "{} is not whole", archive.display());
    Ok(())
}
