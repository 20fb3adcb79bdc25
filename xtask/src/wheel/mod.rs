//! `cargo x wheel`: the wheel that is distributed, and the check that it is complete.
//!
//! ```text
//!   cargo x stage, with zig ──> spinio._spinio.data/data ──┐
//!   maturin build, with zig ──> module ────────────────────┴──> spinio-*-cp310-abi3-manylinux_2_28_x86_64.whl
//!                                                                   │ auditwheel
//!                       pip, uv ──> fresh environments ──> everything used once ──> uninstalled: nothing is left
//! ```
//!
//! The wheel built by `pip install .` (packaging/spinio_build.py) has the same files, linked with this machine's C
//! library; it is checked the same way.

mod check;
mod zig;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::{python, stage, tools};

const REQUIREMENTS: &str = "packaging/requirements.txt";
const TAG: &str = "cp310-abi3-manylinux_2_28_x86_64";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory for the wheel [default: wheel in cargo's target directory]
    #[arg(long)]
    out: Option<PathBuf>,
    /// Audit and check this wheel instead of building one
    #[arg(long, value_name = "WHEEL")]
    check: Option<PathBuf>,
    /// Also build from source with `pip install .`, and check the installation
    #[arg(long)]
    source: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let python = python::environment_with(Path::new(REQUIREMENTS))?;
    let here = std::env::current_dir()?;
    let wheel = match (&args.check, &args.out) {
        (Some(wheel), _) => here.join(wheel),
        (None, Some(out)) => build(&python, &here.join(out))?,
        (None, None) => build(&python, &tools::target()?.join("wheel"))?,
    };
    audit(&python, &wheel)?;
    println!("{} ({} KiB)", wheel.display(), fs::metadata(&wheel)?.len() >> 10);
    check::with_pip(&wheel)?;
    check::with_uv(&python, &wheel)?;
    if args.source {
        check::with_pip(&tools::root())?;
    }
    Ok(())
}

fn build(python: &Path, out: &Path) -> Result<PathBuf> {
    let compilers = zig::compilers(python, &tools::target()?.join("zig"), &python::cache()?.join("zig"))?;
    let data = python::WheelData::new();
    stage::lay_out(&data.folder(), &compilers, true)?;

    let made = out.join("made");
    let _ = fs::remove_dir_all(&made);
    let mut maturin = tools::command(python);
    maturin.args(["-m", "maturin", "build", "--quiet", "--profile", "release", "--compatibility", "manylinux_2_28"]);
    maturin.arg("--out").arg(&made);
    // Cargo's own variables would make maturin use another workspace.
    tools::run(compilers.link(maturin.env_remove("CARGO_MANIFEST_DIR")))?;
    drop(data);

    let mut wheels = fs::read_dir(&made)?.map(|e| Ok(e?.path())).collect::<Result<Vec<_>>>()?;
    let wheel = wheels.pop().filter(|_| wheels.is_empty()).context("maturin did not make one wheel")?;
    let name = wheel.file_name().context("a wheel has a name")?;
    ensure!(wheel.to_string_lossy().ends_with(&format!("-{TAG}.whl")), "not {TAG}: {}", wheel.display());
    fs::rename(&wheel, out.join(name))?;
    fs::remove_dir(&made)?;
    Ok(out.join(name))
}

/// Of every program and library in the wheel: maturin itself checks the module only.
fn audit(python: &Path, wheel: &Path) -> Result<()> {
    let said = tools::output(tools::command(python).args(["-m", "auditwheel", "show"]).arg(wheel))?;
    // "... is consistent with the following platform tag: "manylinux_2_28_x86_64".", maybe over several lines.
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    let glibc = said
        .split_once("is consistent with the following platform tag: \"manylinux_")
        .and_then(|(_, rest)| rest.split_once("_x86_64\""))
        .and_then(|(version, _)| version.split_once('_'))
        .and_then(|(major, minor)| Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?)));
    ensure!(glibc.is_some_and(|found| found <= zig::GLIBC), "auditwheel refuses {}: {said}", wheel.display());
    Ok(())
}
