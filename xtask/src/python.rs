//! `cargo x python`: the wheel, its types and its tests, in a separate environment.
//!
//! ```text
//!   requirements.txt ──> ${SPINIO_CI_CACHE:-~/.cache/spinio}/python/<sum of it and of the interpreter>/   made once
//!   maturin build ──> target/wheels/*.whl ──> installed there ──> mypy, pytest
//! ```
//!
//! This wheel has the module and the headers, for tests that compile kernels; `cargo x wheel` builds the complete one.
//!
//! With `--wheel DIR` it only builds the wheel for another machine, and puts the tests next to it.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{stage, tools};

const TESTS: &str = "crates/python/tests";
/// Examples that the tests run.
const EXAMPLES: [&str; 1] = ["examples/net/cupy/echo.py"];

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Build the release wheel into this directory, with its tests next to it, and run nothing
    #[arg(long)]
    wheel: Option<PathBuf>,
    /// Passed on to pytest
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    rest: Vec<String>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(folder) = &args.wheel {
        return copy_wheel_and_tests(&tools::root().join(folder));
    }
    let python = environment()?;
    // The module is tested with this library loaded too: they share a runtime. The command makes GAIA mounts.
    tools::run(tools::cargo().args(["build", "--quiet", "-p", "spinio-preload", "-p", "spinio-cli"]))?;
    let (library, command) = (tools::target()?.join("debug/libspinio.so"), tools::target()?.join("debug/spinio"));
    // The development profile, for its assertions.
    let wheels = tools::target()?.join("wheels");
    let wheel = build(&python, &wheels, "dev")?;
    let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall"];
    tools::run(tools::command(&python).args(pip).arg(&wheel))?;
    tools::run(tools::command(&python).args(["-m", "mypy", "--strict", "-p", "spinio"]))?;
    // The stub's declarations of the Rust half, against the module itself.
    tools::run(tools::command(&python).args(["-m", "mypy.stubtest", "spinio._spinio"]))?;
    let pytest = ["-m", "pytest", "-q", "-rfEs", "-p", "no:cacheprovider"];
    let mut tests = tools::command(&python);
    tests.args(pytest).args(&args.rest).env("SPINIO_LIBRARY", library).env("SPINIO_COMMAND", command);
    tools::run(&mut tests)
}

/// The interpreter of the environment for the tests.
pub(crate) fn environment() -> Result<PathBuf> {
    environment_with(&Path::new(TESTS).join("requirements.txt"))
}

/// The interpreter of the environment with the packages in a requirements file; created if it does not exist.
pub(crate) fn environment_with(requirements: &Path) -> Result<PathBuf> {
    let requirements = tools::root().join(requirements);
    let version = tools::output(tools::command("python3").args(["-c", "import sys; print(sys.version, sys.prefix)"]))?;
    let wanted = fs::read_to_string(&requirements)?;
    let mut sum = DefaultHasher::new();
    (version, wanted).hash(&mut sum);
    let folder = cache()?.join("python").join(format!("{:016x}", sum.finish()));
    let python = folder.join("bin/python");
    if !folder.join("complete").exists() {
        tools::run(tools::command("python3").args(["-m", "venv", "--clear"]).arg(&folder))
            .context("a Python with its venv module is needed (Debian: python3-venv)")?;
        let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r"];
        tools::run(tools::command(&python).args(pip).arg(&requirements))?;
        fs::write(folder.join("complete"), "")?;
    }
    Ok(python)
}

/// The cache between runs, as for .ci/run.
pub(crate) fn cache() -> Result<PathBuf> {
    if let Some(named) = std::env::var_os("SPINIO_CI_CACHE") {
        return Ok(named.into());
    }
    Ok(PathBuf::from(std::env::var_os("HOME").context("HOME is not set")?).join(".cache/spinio"))
}

/// Where maturin looks for the other files of a wheel; see packaging/spinio_build.py. It must not outlive the build: a later one
/// would include its files.
pub(crate) struct WheelData(PathBuf);

impl WheelData {
    pub(crate) fn new() -> WheelData {
        WheelData(tools::root().join("spinio._spinio.data"))
    }

    /// For what an installer puts below the environment's prefix.
    pub(crate) fn folder(&self) -> PathBuf {
        self.0.join("data")
    }
}

impl Drop for WheelData {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Builds the wheel; the directory has no other one afterwards.
fn build(python: &Path, into: &Path, profile: &str) -> Result<PathBuf> {
    for old in wheels(into)? {
        fs::remove_file(old)?;
    }
    let data = WheelData::new();
    stage::headers(&data.folder().join("include"))?;
    let mut maturin = tools::command(python);
    maturin.args(["-m", "maturin", "build", "--quiet", "--profile", profile, "--out"]).arg(into);
    // Cargo's own variables would make maturin use another workspace.
    tools::run(maturin.env_remove("CARGO_MANIFEST_DIR"))?;
    drop(data);
    let mut made = wheels(into)?;
    ensure!(made.len() == 1, "maturin made {} wheels in {}", made.len(), into.display());
    made.pop().context("no wheel")
}

fn wheels(folder: &Path) -> Result<Vec<PathBuf>> {
    if !folder.exists() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
    let is_ours = |p: &PathBuf| p.extension().is_some_and(|e| e == "whl") && name(p).starts_with("spinio-");
    Ok(entries.into_iter().map(|e| e.path()).filter(is_ours).collect())
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The release wheel and its tests, for a machine that has neither cargo nor a network.
pub(crate) fn copy_wheel_and_tests(folder: &Path) -> Result<()> {
    let python = environment()?;
    let tests = folder.join("tests");
    fs::create_dir_all(&tests)?;
    build(&python, folder, "release")?;
    for entry in fs::read_dir(tools::root().join(TESTS))? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "py" || e == "cpp") {
            fs::copy(&path, tests.join(name(&path)))?;
        }
    }
    for example in EXAMPLES {
        let path = tools::root().join(example);
        fs::copy(&path, tests.join(name(&path)))?;
    }
    Ok(())
}
