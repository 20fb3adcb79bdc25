//! `cargo x stage DIR`: the only place that defines the installed files. Every package is built from this tree.
//!
//! ```text
//!   bin/spinio                   the command; it looks for the library in ../lib
//!   lib/libspinio.so.0           the library under its SONAME
//!   lib/libspinio.so             a link to it, for programs that are linked with it
//!   lib/spinio/                  demo-reader and its libgpu.so: the compiled program of `spinio demo`
//!   include/                     spinio.h, spinio_gaia.h, spinio_net.h, nvmmu.h, spinio/: headers of code that runs on a device
//!   lib/systemd/                 units: a mount at boot, the daemon of leased files
//!   share/doc/spinio/            README.md, CHANGELOG.md, docs/, licences
//! ```
//!
//! `--wheel` creates the tree for a wheel. A wheel has no links: `libspinio.so` is a linker script there, because a
//! second copy of the library would be a second runtime for a program that loads both. And it omits `share`: pip
//! removes a directory that had our files only, but not `share` and `share/doc`, which contain directories only.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::tools;

/// The sources in the repository.
mod source {
    pub(super) const PACKAGES: [&str; 2] = ["spinio-cli", "spinio-preload"];
    pub(super) const HEADERS: [&str; 4] = [
        "crates/capi/include/spinio.h",
        "crates/capi/include/spinio_gaia.h",
        "crates/capi/include/spinio_net.h",
        "crates/capi/include/nvmmu.h",
    ];
    pub(super) const DEVICE_HEADERS: &str = "device/include/spinio";
    pub(super) const DEMO: &str = "examples/demo";
    pub(super) const DOCUMENTS: [&str; 4] = ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"];
    pub(super) const DOCS: &str = "docs";
    pub(super) const UNITS: [(&str, &str); 4] = [
        ("packaging/systemd/spinio-gaia@.service", "system"),
        ("packaging/systemd/spinio-gaia-serve.service", "system"),
        ("packaging/systemd/spinio-gaia-serve.service", "user"),
        ("packaging/systemd/user/spinio-gaia@.service", "user"),
    ];
}

/// The environment variable by which a test arms an injection point.
const INJECTION: &[u8] = b"SPINIO_INJECTION";

/// The library's name after installation.
pub(crate) const SONAME: &str = "libspinio.so.0";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directory for the tree: a new one, or one made by this chore
    dir: PathBuf,
    /// The tree for a wheel: no links, no share/
    #[arg(long)]
    wheel: bool,
}

/// The compilers of a tree.
pub(crate) struct Compilers {
    /// C compiler, and linker of Rust programs where `target` is set.
    pub(crate) cc: PathBuf,
    /// Target triple, where it is passed to cargo: build products are then in a directory of that name.
    pub(crate) target: Option<&'static str>,
}

impl Compilers {
    /// This machine's.
    fn host() -> Compilers {
        let cc = std::env::var_os("CC").filter(|c| !c.is_empty()).unwrap_or_else(|| "cc".into());
        Compilers { cc: cc.into(), target: None }
    }

    /// Makes `command`, which starts cargo directly or indirectly, link with this linker.
    pub(crate) fn link<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        match self.target {
            Some(target) => {
                let triple = target.to_uppercase().replace('-', "_");
                command.env(format!("CARGO_TARGET_{triple}_LINKER"), &self.cc).args(["--target", target])
            }
            None => command,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let dir = std::env::current_dir()?.join(&args.dir);
    lay_out(&dir, &Compilers::host(), args.wheel)
}

/// Builds everything and replaces the tree at `dir`.
pub(crate) fn lay_out(dir: &Path, compilers: &Compilers, wheel: bool) -> Result<()> {
    if dir.exists() {
        let ours = dir.join("bin/spinio").exists() || fs::read_dir(dir)?.next().is_none();
        ensure!(ours, "{} exists, and is not a tree of this chore", dir.display());
        fs::remove_dir_all(dir)?;
    }
    let root = tools::root();
    let built = build(compilers)?;
    for folder in ["bin", "lib/spinio"] {
        fs::create_dir_all(dir.join(folder))?;
    }
    place(&built.join("spinio"), &dir.join("bin/spinio"), 0o755)?;
    place(&built.join("libspinio.so"), &dir.join("lib").join(SONAME), 0o755)?;
    demo(&compilers.cc, &dir.join("lib/spinio"))?;
    for program in ["bin/spinio", "lib/libspinio.so.0", "lib/spinio/demo-reader", "lib/spinio/libgpu.so"] {
        tools::run(tools::command("strip").arg("--strip-unneeded").arg(dir.join(program)))?;
    }
    for program in ["bin/spinio", "lib/libspinio.so.0"] {
        has_no_injection_points(&dir.join(program))?;
    }
    headers(&dir.join("include"))?;
    if wheel {
        let script = format!("/* Linker script */\nINPUT({SONAME})\n");
        return fs::write(dir.join("lib/libspinio.so"), script).context("cannot write lib/libspinio.so");
    }
    symlink(SONAME, dir.join("lib/libspinio.so"))?;
    for (unit, whose) in source::UNITS {
        let units = dir.join("lib/systemd").join(whose);
        fs::create_dir_all(&units)?;
        place(&root.join(unit), &units.join(name(unit)), 0o644)?;
    }
    let documents = dir.join("share/doc/spinio");
    fs::create_dir_all(&documents)?;
    for document in source::DOCUMENTS {
        place(&root.join(document), &documents.join(document), 0o644)?;
    }
    copy_folder(&root.join(source::DOCS), &documents.join("docs"))
}

/// The headers of host and device.
pub(crate) fn headers(into: &Path) -> Result<()> {
    let root = tools::root();
    fs::create_dir_all(into)?;
    for header in source::HEADERS {
        place(&root.join(header), &into.join(name(header)), 0o644)?;
    }
    copy_folder(&root.join(source::DEVICE_HEADERS), &into.join("spinio"))
}

/// What is installed has none of the places where tests end a process (`spinio_sys::injection`).
fn has_no_injection_points(program: &Path) -> Result<()> {
    let bytes = fs::read(program).with_context(|| format!("cannot read {}", program.display()))?;
    let found = bytes.windows(INJECTION.len()).any(|part| part == INJECTION);
    ensure!(!found, "{} has injection points: it was built with debug assertions", program.display());
    Ok(())
}

/// Builds the command and the library; returns their directory.
fn build(compilers: &Compilers) -> Result<PathBuf> {
    let mut cargo = tools::cargo();
    cargo.args(["build", "--quiet", "--release"]);
    cargo.args(source::PACKAGES.iter().flat_map(|package| ["--package", *package]));
    tools::run(compilers.link(&mut cargo))?;
    let target = tools::target()?;
    Ok(compilers.target.map_or(target.clone(), |triple| target.join(triple)).join("release"))
}

/// The program of `spinio demo`, as the command itself would compile it.
fn demo(cc: &Path, into: &Path) -> Result<()> {
    let sources = tools::root().join(source::DEMO);
    let compile = |args: &[&str]| {
        let mut command = Command::new(cc);
        command.current_dir(into).args(["-O2", "-std=gnu11", "-I"]).arg(&sources);
        tools::run(command.args(args)).context("a C compiler is needed; CC names another one than `cc`")
    };
    let file = |name: &str| sources.join(name).to_string_lossy().into_owned();
    compile(&["-shared", "-fPIC", "-o", "libgpu.so", "-Wl,-soname,libgpu.so", &file("shim.c"), "-ldl", "-pthread"])?;
    compile(&["-o", "demo-reader", &file("reader.c"), "-L.", "-lgpu", "-Wl,-rpath,$ORIGIN"])
}

fn copy_folder(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            place(&entry.path(), &target, 0o644)?;
        }
    }
    Ok(())
}

/// Copies a file; its mode does not depend on the checkout.
fn place(from: &Path, to: &Path, mode: u32) -> Result<()> {
    fs::copy(from, to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(fs::set_permissions(to, fs::Permissions::from_mode(mode))?)
}

fn name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}
