//! Common functions of the chores: the repository's path, and running programs in it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The directory of the workspace.
pub(crate) fn root() -> PathBuf {
    // Cargo sets the variable at run time too; the compiled-in value serves a binary started by hand.
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let mut root = PathBuf::from(manifest);
    root.pop();
    root
}

/// The cargo that started xtask.
pub(crate) fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
}

/// Cargo, for an optimised build that is only tested: linking without optimising all crates once more takes half the time.
pub(crate) fn cargo_without_lto() -> Command {
    let mut cargo = cargo();
    cargo.env("CARGO_PROFILE_RELEASE_LTO", "off").env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    cargo
}

/// A program, to run in the repository.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root());
    command
}

/// Runs it with our standard output; an exit status other than 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    ensure!(status.success(), "{}: {status}", line(command));
    Ok(())
}

/// Runs it and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    command.stderr(std::process::Stdio::inherit());
    let output = command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    ensure!(output.status.success(), "{}: {}", line(command), output.status);
    Ok(String::from_utf8(output.stdout)?)
}

/// Cargo's target directory.
pub(crate) fn target() -> Result<PathBuf> {
    let json = output(cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: serde_json::Value = serde_json::from_str(&json)?;
    Ok(metadata["target_directory"].as_str().context("cargo metadata names no target directory")?.into())
}

/// The command as one would type it.
fn line(command: &Command) -> String {
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
    let args = command.get_args().map(|a| a.to_string_lossy());
    std::iter::once(program.into()).chain(args).collect::<Vec<_>>().join(" ")
}

/// The files of the tree, each with a NUL after it; new ones count before they are added.
pub(crate) fn files() -> Result<String> {
    output(command("git").args([
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]))
}
