//! Compiles C programs and runs them under the library.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use tempfile::TempDir;

/// The library that cargo built next to this test.
pub(crate) fn library() -> PathBuf {
    let test = std::env::current_exe().expect("the test knows its own path");
    let library = test.with_file_name("libspinio.so");
    assert!(library.exists(), "cargo did not build {}", library.display());
    library
}

/// A path relative to this package.
pub(crate) fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// `spinio.h` and `nvmmu.h`.
pub(crate) fn headers() -> PathBuf {
    source("../capi/include")
}

static BUILD_DIR: OnceLock<TempDir> = OnceLock::new();

/// A directory for the programs of this test run, removed when it ends.
pub(crate) fn build_dir() -> &'static Path {
    extern "C" fn remove() {
        if let Some(dir) = BUILD_DIR.get() {
            let _ = std::fs::remove_dir_all(dir.path());
        }
    }
    BUILD_DIR
        .get_or_init(|| {
            // SAFETY: a function that lives as long as the program and does not unwind. Statics are never dropped.
            unsafe { libc::atexit(remove) };
            tempfile::Builder::new().prefix("spinio-preload-").tempdir().expect("a directory")
        })
        .path()
}

/// Compiles a program; a warning or an error of the compiler fails the test.
pub(crate) fn compile(compiler: &str, out: &Path, args: &[&str]) {
    let done = compiler_output(compiler, out, args);
    assert!(done.status.success(), "{compiler} {args:?}:\n{}", String::from_utf8_lossy(&done.stderr));
}

/// Runs a compiler with warnings as errors, and returns what it printed. The programs ignore results on purpose, of which
/// compilers that fortify by themselves (Ubuntu's) warn.
pub(crate) fn compiler_output(compiler: &str, out: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(compiler);
    command.args(["-Wall", "-Wextra", "-Werror", "-Wno-unused-result", "-O1", "-g", "-pthread"]);
    command.arg("-I").arg(headers()).arg("-I").arg(source("tests/c")).arg("-o").arg(out).args(args);
    command.output().unwrap_or_else(|e| panic!("cannot run {compiler}: {e}"))
}

/// The allocator shim as a shared library: built once.
pub(crate) fn shim() -> &'static Path {
    static SHIM: OnceLock<PathBuf> = OnceLock::new();
    SHIM.get_or_init(|| {
        let out = build_dir().join("libmemory.so");
        let source = source("tests/c/memory.c");
        compile("cc", &out, &["-shared", "-fPIC", source.to_str().expect("a path in UTF-8"), "-ldl"]);
        out
    })
}

/// Builds `tests/c/<name>.c` against the shim.
pub(crate) fn program(name: &str) -> PathBuf {
    let out = build_dir().join(name);
    let source = source("tests/c").join(format!("{name}.c"));
    let rpath = format!("-Wl,-rpath,{}", build_dir().display());
    let (source, shim) = (source.to_str().expect("a path in UTF-8"), shim().to_str().expect("a path in UTF-8"));
    compile("cc", &out, &[source, shim, &rpath, "-ldl"]);
    out
}

/// A run of the program under the library, with a deadline that only turns a hang into a failure.
pub(crate) fn run_preloaded(program: &Path, args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", "900"]).arg("env").arg(format!("LD_PRELOAD={}", library().display()));
    command.arg(program).args(args).current_dir(build_dir()).env_remove("LD_LIBRARY_PATH");
    command
}

/// Runs it; it must succeed and print no error.
pub(crate) fn assert_passes(mut command: Command) -> Output {
    let done = command.output().expect("timeout runs");
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    assert!(done.status.success() && err.is_empty(), "{command:?}: {}\n{out}{err}", done.status);
    done
}
