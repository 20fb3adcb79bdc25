//! The requirements on an installed wheel, in an environment with nothing else.
//!
//! Every program of it runs with the environment's directory as the only search path, so without a compiler, and with a
//! home and a directory for temporary files that must be empty afterwards. After it is uninstalled, the environment
//! must contain nothing that was not there before.
//!
//! Known flaw: uv leaves empty directories, of every package that has files outside of site-packages.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::{stage, tools};

/// Reads a file into the emulated device by the module, writes it out from there: `python -c MODULE FILE COPY`.
const MODULE: &str = "
import os, sys, spinio
source, copy = sys.argv[1:]
size = os.path.getsize(source)
array = spinio.emulated.empty(size, 'uint8')
with spinio.open(source) as f:
    assert f.pread(array, 0) == size
with spinio.open(copy, 'w') as f:
    assert f.pwrite(array, 0) == size
assert os.path.exists(spinio.include() + '/spinio/net/stream.h')
";

const PROGRAM: &str = r#"
#include <nvmmu.h>
#include <spinio.h>
#include <stdio.h>
int main(void)
{
    return puts(spinio_version()) < 0;
}
"#;

/// The environment's own Python installs and uninstalls; `what` is a wheel, or the directory of the sources.
pub(super) fn with_pip(what: &Path) -> Result<()> {
    let environment = Environment::make("pip", |dir| {
        tools::run(tools::command("python3").args(["-m", "venv"]).arg(dir))
            .context("a Python with its venv module is needed (Debian: python3-venv)")
    })?;
    let pip = || {
        let mut pip = tools::command(environment.program("python"));
        // So that pip leaves no compiled modules of its own, which would count as leftovers.
        pip.env("PYTHONDONTWRITEBYTECODE", "1").args(["-m", "pip", "--quiet", "--disable-pip-version-check"]);
        // Cargo's own variables would make maturin use another workspace.
        pip.env_remove("CARGO_MANIFEST_DIR");
        pip
    };
    let before = environment.entries()?;
    tools::run(pip().arg("install").arg(what))?;
    environment.works()?;
    tools::run(pip().args(["uninstall", "--yes", "spinio"]))?;
    environment.holds_only(&before, |_| false)?;
    println!("pip, {}: installed, used, uninstalled", if what.is_dir() { "from source" } else { "wheel" });
    Ok(())
}

/// uv, a module of `python`, installs and uninstalls.
pub(super) fn with_uv(python: &Path, wheel: &Path) -> Result<()> {
    let cache = Scratch::make("uv-cache")?;
    let uv = || {
        let mut uv = tools::command(python);
        uv.args(["-m", "uv", "--quiet", "--no-config", "--offline", "--cache-dir"]).arg(&cache.0);
        uv
    };
    let environment = Environment::make("uv", |dir| tools::run(uv().args(["venv", "--python"]).arg(python).arg(dir)))?;
    let before = environment.entries()?;
    let of = environment.program("python");
    tools::run(uv().args(["pip", "install", "--no-index", "--python"]).arg(&of).arg(wheel))?;
    environment.works()?;
    tools::run(uv().args(["pip", "uninstall", "--python"]).arg(&of).arg("spinio"))?;
    // The lock is uv's own.
    environment.holds_only(&before, |path| path.is_dir() || path.ends_with(".lock"))?;
    println!("uv, wheel: installed, used, uninstalled");
    Ok(())
}

/// A directory that is removed when the check ends, however it ends.
struct Scratch(PathBuf);

impl Scratch {
    fn make(name: &str) -> Result<Scratch> {
        let path = tools::target()?.join(format!("wheel-check-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path)?;
        Ok(Scratch(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A fresh environment in `prefix`, with the other directories that its programs see.
struct Environment {
    scratch: Scratch,
}

impl Environment {
    fn make(name: &str, create: impl FnOnce(&Path) -> Result<()>) -> Result<Environment> {
        let environment = Environment { scratch: Scratch::make(name)? };
        create(&environment.prefix())?;
        for folder in ["home", "tmp", "work"] {
            fs::create_dir(environment.scratch.0.join(folder))?;
        }
        Ok(environment)
    }

    fn prefix(&self) -> PathBuf {
        self.scratch.0.join("prefix")
    }

    fn program(&self, name: &str) -> PathBuf {
        self.prefix().join("bin").join(name)
    }

    /// Runs a program of the environment with nothing else installed; returns its output.
    fn output<S: AsRef<OsStr>>(&self, program: &str, args: &[S]) -> Result<String> {
        let at = |name: &str| self.scratch.0.join(name);
        let mut command = Command::new(self.program(program));
        command.env_clear().current_dir(at("work")).stdin(Stdio::null());
        command.env("PATH", self.prefix().join("bin")).env("HOME", at("home")).env("TMPDIR", at("tmp"));
        tools::output(command.args(args))
    }

    /// Uses all installed programs and files.
    fn works(&self) -> Result<()> {
        let version = self.output("spinio", &["--version"])?;
        ensure!(version.contains(env!("CARGO_PKG_VERSION")), "spinio --version printed {version}");
        let demo = self.output("spinio", &["demo", "--size", "24M", "--device", "emulated"])?;
        ensure!(demo.contains("✓ every byte"), "spinio demo said\n{demo}");

        let work = self.scratch.0.join("work");
        let file = work.join("data");
        let bytes: Vec<u8> = (0..3_000_001_u32).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        fs::write(&file, &bytes)?;
        let reader = tools::root().join("examples/python/read.py");
        let words: [&OsStr; 5] = ["run".as_ref(), "--".as_ref(), "python".as_ref(), reader.as_ref(), file.as_ref()];
        let said = self.output("spinio", &words)?;
        ensure!(said.contains("equal to the file: True"), "spinio run -- python {} printed\n{said}", reader.display());

        let copy = work.join("copy");
        self.output("python", &["-c".as_ref(), MODULE.as_ref(), file.as_os_str(), copy.as_os_str()])?;
        ensure!(fs::read(&copy)? == bytes, "the module has read or written other bytes");

        self.links(&work)?;
        for folder in ["home", "tmp"] {
            let left: Vec<_> = fs::read_dir(self.scratch.0.join(folder))?.flatten().map(|e| e.path()).collect();
            ensure!(left.is_empty(), "left over: {left:?}");
        }
        Ok(())
    }

    /// The library by its SONAME, and the headers: with this machine's compilers.
    fn links(&self, work: &Path) -> Result<()> {
        let (lib, include) = (self.prefix().join("lib"), self.prefix().join("include"));
        let library = lib.join(stage::SONAME);
        let dynamic = tools::output(tools::command("readelf").args(["--dynamic", "--wide"]).arg(&library))?;
        let soname = format!("[{}]", stage::SONAME);
        ensure!(
            dynamic.lines().any(|line| line.contains("(SONAME)") && line.contains(&soname)),
            "{} has another SONAME than {}:\n{dynamic}",
            library.display(),
            stage::SONAME
        );
        let (source, program) = (work.join("program.c"), work.join("program"));
        fs::write(&source, PROGRAM)?;
        let mut cc = tools::command("cc");
        cc.arg("-o").arg(&program).arg(&source).arg("-I").arg(&include).arg("-L").arg(&lib).arg("-lspinio");
        tools::run(cc.arg(format!("-Wl,-rpath,{}", lib.display())))?;
        let version = tools::output(&mut Command::new(&program))?;
        ensure!(version.contains(env!("CARGO_PKG_VERSION")), "spinio_version() said {version}");
        let kernel = include.join("spinio/kernel.h");
        let mut cxx = tools::command("c++");
        cxx.args(["-std=c++17", "-fsyntax-only", "-x", "c++", "-w", "-I"]).arg(&include).arg(&kernel);
        tools::run(&mut cxx)
    }

    /// All files, directories and links under the prefix.
    fn entries(&self) -> Result<BTreeSet<PathBuf>> {
        let mut found = BTreeSet::new();
        let mut folders = vec![self.prefix()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(&folder)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    folders.push(entry.path());
                }
                found.insert(entry.path());
            }
        }
        Ok(found)
    }

    fn holds_only(&self, before: &BTreeSet<PathBuf>, but: impl Fn(&Path) -> bool) -> Result<()> {
        let left: Vec<_> = self.entries()?.difference(before).filter(|path| !but(path)).cloned().collect();
        ensure!(left.is_empty(), "left by the uninstallation: {left:#?}");
        Ok(())
    }
}
