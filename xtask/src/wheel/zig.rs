//! Compilers for an older C library: zig's, which includes the symbols of every glibc.
//!
//! A program that is linked here needs the newest symbols of this machine. `zig cc -target ...gnu.2.28` links
//! against a stub of glibc 2.28, and with it a program runs on every later one.
//!
//! The unwinder stays the machine's. zig has no libgcc_s and would link its libunwind into each object, while
//! `pthread_cancel` unwinds with the libgcc_s of the process, through frames of the library: a frame with a clean-up
//! would pass the state of one unwinder to the other. No such frame is known (the tests of `pthread_cancel` pass either
//! way), but libgcc_s is what every other build and test uses. Its old symbols are on every system.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

use crate::stage::Compilers;
use crate::tools;

/// The oldest C library that the wheel runs with.
pub(super) const GLIBC: (u32, u32) = (2, 28);

/// A compiler and linker for cargo and for C, written to `folder`; `python` has the package `ziglang`.
pub(super) fn compilers(python: &Path, folder: &Path, cache: &Path) -> Result<Compilers> {
    fs::create_dir_all(folder)?;
    let cc = folder.join("zig-cc");
    // Options that zig would refuse or interpret differently are only here.
    let script = format!(
        "#!/bin/sh
# Written by cargo x wheel.
export ZIG_GLOBAL_CACHE_DIR={cache}
for argument do
  shift
  case $argument in
    -lgcc_s) set -- \"$@\" {unwinder} -Wl,--allow-shlib-undefined ;;
    *) set -- \"$@\" \"$argument\" ;;
  esac
done
exec {python} -m ziglang cc -target x86_64-linux-gnu.{}.{} \"$@\"
",
        GLIBC.0,
        GLIBC.1,
        cache = quoted(cache)?,
        unwinder = quoted(&unwinder()?)?,
        python = quoted(python)?,
    );
    fs::write(&cc, script)?;
    fs::set_permissions(&cc, fs::Permissions::from_mode(0o755))?;
    Ok(Compilers { cc, target: Some("x86_64-unknown-linux-gnu") })
}

/// The machine's libgcc_s, as found by its compiler.
fn unwinder() -> Result<PathBuf> {
    let path = tools::output(tools::command("cc").arg("-print-file-name=libgcc_s.so.1"))?;
    let path = PathBuf::from(path.trim());
    ensure!(path.is_absolute(), "the C compiler finds no libgcc_s.so.1");
    Ok(path)
}

fn quoted(path: &Path) -> Result<String> {
    let text = path.to_str().context("a path that is not UTF-8")?;
    Ok(format!("'{}'", text.replace('\'', r"'\''")))
}
