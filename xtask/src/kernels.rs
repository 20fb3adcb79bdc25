//! The programs of `device/tests`: kernels that the host's compiler builds against `device/include`, plain or with a sanitizer.
//!
//! ```text
//!   device/tests/NAME.cpp ── c++ ──> NAME ── libspinio.so ── the proxy of their sockets, built with the same sanitizer
//! ```
//!
//! A program with a sanitizer is linked with the runtime of rustc, which knows what both compilers emit. The one of an older
//! g++ lacks functions that the library calls.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tools;

/// A sanitizer of both compilers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Sanitizer {
    Address,
    Thread,
}

impl Sanitizer {
    const fn name(self) -> &'static str {
        match self {
            Sanitizer::Address => "address",
            Sanitizer::Thread => "thread",
        }
    }

    /// rustc's runtime of it.
    fn runtime(self) -> Result<PathBuf> {
        let name = if self == Sanitizer::Address { "asan" } else { "tsan" };
        let sysroot = tools::output(tools::command("rustc").args(["--print", "target-libdir"]))?;
        Ok(Path::new(sysroot.trim()).join(format!("librustc-stable_rt.{name}.a")))
    }
}

/// The target directory for what is built with it.
pub(crate) fn target_of(sanitizer: Sanitizer) -> Result<PathBuf> {
    Ok(tools::target()?.join(sanitizer.name()))
}

/// Makes cargo build with a sanitizer: the compiler's own, enabled in a stable compiler. The thread sanitizer needs the standard
/// library built with it too, hence its source.
pub(crate) fn sanitize(cargo: &mut Command, target: &Path, sanitizer: Sanitizer) -> Result<String> {
    let host = tools::output(tools::command("rustc").args(["--print", "host-tuple"]))?.trim().to_owned();
    cargo.env("RUSTC_BOOTSTRAP", "1").env("CARGO_TARGET_DIR", target);
    cargo.env("RUSTFLAGS", format!("-Zsanitizer={}", sanitizer.name())).args(["--target", &host]);
    if sanitizer == Sanitizer::Thread {
        let source = tools::output(tools::command("rustc").args(["--print", "sysroot"]))?;
        let source = Path::new(source.trim()).join("lib/rustlib/src/rust/library");
        ensure!(source.exists(), "the thread sanitizer needs: rustup component add rust-src");
        cargo.env("SPINIO_SANITIZE_THREAD", "1").arg("-Zbuild-std");
    }
    Ok(host)
}

/// Builds a package of the workspace at `root` in release form with a sanitizer; returns the folder of its products.
pub(crate) fn sanitized(root: &Path, target: &Path, sanitizer: Sanitizer, package: &str) -> Result<PathBuf> {
    let mut cargo = tools::cargo_without_lto();
    cargo.current_dir(root).args(["build", "--release", "--quiet", "-p", package]);
    let host = sanitize(&mut cargo, target, sanitizer)?;
    tools::run(&mut cargo)?;
    Ok(target.join(host).join("release"))
}

/// A program of `device/tests`.
#[derive(Clone, Copy)]
pub(crate) struct Program<'a> {
    /// The tree of its source and headers.
    pub(crate) root: &'a Path,
    /// Without `.cpp`.
    pub(crate) name: &'a str,
    pub(crate) sanitizer: Option<Sanitizer>,
    /// The folder of a `libspinio.so` that is built with the same sanitizer; none for a program that needs no library.
    pub(crate) library: Option<&'a Path>,
}

impl Program<'_> {
    /// Builds it.
    pub(crate) fn build(&self, out: &Path) -> Result<()> {
        let object = out.with_extension("o");
        let mut compiler = tools::command("c++");
        compiler.args(["-std=c++17", "-O1", "-g", "-pthread", "-c", "-o"]).arg(&object);
        for headers in ["device/include", "crates/capi/include"] {
            compiler.arg("-I").arg(self.root.join(headers));
        }
        if let Some(sanitizer) = self.sanitizer {
            compiler.arg(format!("-fsanitize={}", sanitizer.name()));
        }
        tools::run(compiler.arg(self.root.join(format!("device/tests/{}.cpp", self.name))))?;
        let mut linker = tools::command("c++");
        linker.args(["-pthread", "-o"]).arg(out).arg(object);
        if let Some(folder) = self.library {
            linker.arg(folder.join("libspinio.so")).arg(format!("-Wl,-rpath,{}", folder.display()));
        }
        if let Some(sanitizer) = self.sanitizer {
            // All of it: the library finds in the program what it calls.
            linker.args(["-Wl,--export-dynamic", "-Wl,--whole-archive"]).arg(sanitizer.runtime()?);
            linker.args(["-Wl,--no-whole-archive", "-ldl", "-lrt", "-lm", "-lresolv"]);
        }
        tools::run(&mut linker)
    }

    /// A run of it with a time limit. Reports of a sanitizer are files in `reports`: the proxy's thread, which has a table of
    /// descriptors of its own, has no standard error.
    pub(crate) fn command(&self, program: &Path, reports: &Path, seconds: u64) -> Command {
        let mut run = Command::new("timeout");
        run.args(["--signal=KILL", &seconds.to_string()]);
        // Shadow memory has fixed addresses, which a randomised layout may take.
        run.args(self.sanitizer.map_or(&[][..], |_| &["setarch", "-R"])).arg(program).env_remove("LD_LIBRARY_PATH");
        let log = format!("log_path={}", reports.join("report").display());
        let suppressions = tools::root().join("device/tests/races.txt");
        run.env("TSAN_OPTIONS", format!("halt_on_error=1 {log} suppressions={}", suppressions.display()));
        run.env("ASAN_OPTIONS", format!("detect_leaks=0:abort_on_error=1:{log}"));
        run
    }
}

/// An empty folder for reports.
pub(crate) fn reports() -> Result<PathBuf> {
    let reports = tools::target()?.join("reports");
    let _ = std::fs::remove_dir_all(&reports);
    std::fs::create_dir_all(&reports).context("a folder for reports")?;
    Ok(reports)
}

/// What sanitizers have written there.
pub(crate) fn read_reports(reports: &Path) -> Result<String> {
    let files = std::fs::read_dir(reports)?.flatten();
    Ok(files.filter_map(|file| std::fs::read_to_string(file.path()).ok()).collect())
}
