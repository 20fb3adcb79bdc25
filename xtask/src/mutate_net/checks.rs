//! The tests that should notice a missing rule, and the copy of the tree in which they run.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::kernels::{self, Program, Sanitizer};
use crate::tools;

/// Seconds of a test; one that does not end has noticed.
const LIMIT: u64 = 60;
/// Of a build.
const BUILD_LIMIT: u64 = 1200;

/// A test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Check {
    /// Models of crates/ring under loom: a filter.
    Models(&'static str),
    /// `cargo test -p PACKAGE`: what, and a filter.
    Cargo(&'static str, &'static [&'static str], &'static str),
    /// A section of device/tests/net_rules.cpp.
    Rules(&'static str),
    /// The same with ThreadSanitizer.
    Races(&'static str),
    /// A program of device/tests with the library.
    Kernels(&'static str),
    /// The same, both with ThreadSanitizer.
    KernelRaces(&'static str),
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Check::Models(name) => write!(f, "interleavings: {name}"),
            Check::Cargo(package, _, name) => write!(f, "{package}: {name}"),
            Check::Rules(section) => write!(f, "net_rules {section}"),
            Check::Races(section) => write!(f, "net_rules {section}, TSan"),
            Check::Kernels(program) => write!(f, "{program}"),
            Check::KernelRaces(program) => write!(f, "{program}, TSan"),
        }
    }
}

/// A copy of the tree.
pub(crate) struct Workshop {
    folder: PathBuf,
    /// Tests that pass without a mutant.
    passed: HashSet<Check>,
    /// Programs that were built from the copy as it is.
    built: HashSet<String>,
}

impl Workshop {
    pub(crate) fn new() -> Result<Workshop> {
        let folder = tools::target()?.join("mutants");
        let files = tools::files()?;
        let workshop = Workshop { folder, passed: HashSet::new(), built: HashSet::new() };
        let is_copied = |file: &&str| {
            let from = tools::root().join(file);
            from.is_file() && !from.is_symlink()
        };
        let files: HashSet<&str> = files.split('\0').filter(|file| !file.is_empty()).filter(is_copied).collect();
        for file in &files {
            workshop.put_bytes(file, &std::fs::read(tools::root().join(file))?)?;
        }
        workshop.remove_others(&workshop.tree(), &files)?;
        Ok(workshop)
    }

    /// Removes what the tree does not have any more: cargo would find tests there.
    fn remove_others(&self, folder: &Path, files: &HashSet<&str>) -> Result<()> {
        for entry in std::fs::read_dir(folder)? {
            let entry = entry?;
            let path = entry.path();
            let name = path.strip_prefix(self.tree())?.to_str().context("a name")?;
            if entry.file_type()?.is_dir() {
                self.remove_others(&path, files)?;
            } else if !files.contains(name) {
                std::fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    fn tree(&self) -> PathBuf {
        self.folder.join("tree")
    }

    /// Writes a file of the copy, if it is another one: cargo looks at times.
    fn put_bytes(&self, file: &str, bytes: &[u8]) -> Result<()> {
        let path = self.tree().join(file);
        if std::fs::read(&path).is_ok_and(|old| old == bytes) {
            return Ok(());
        }
        std::fs::create_dir_all(path.parent().context("a folder")?)?;
        std::fs::write(path, bytes)?;
        Ok(())
    }

    pub(crate) fn put(&mut self, file: &str, text: &str) -> Result<()> {
        self.built.clear();
        self.put_bytes(file, text.as_bytes())
    }

    /// Whether a test passes without a mutant: looked at once.
    pub(crate) fn passes(&mut self, check: Check) -> Result<()> {
        if self.passed.contains(&check) {
            return Ok(());
        }
        let failed = self.fails(check, "")?;
        ensure!(failed.is_none(), "it fails: {}", failed.unwrap_or_default());
        self.passed.insert(check);
        Ok(())
    }

    /// Runs a test of the copy, in which `file` is changed: how it fails, if it does. What cannot be built is an error.
    pub(crate) fn fails(&mut self, check: Check, file: &str) -> Result<Option<String>> {
        match check {
            Check::Models(filter) => {
                let test = |limit: u64, more: &[&str]| {
                    let mut cargo = self.cargo(limit, &["test", "--release", "--quiet", "--lib", "-p", "spinio-ring"]);
                    cargo.env("RUSTFLAGS", "--cfg loom").env("CARGO_TARGET_DIR", self.folder.join("loom"));
                    // A model that never ends is stopped by the number of its branches.
                    cargo.args(more);
                    cargo
                };
                tools::output(&mut test(BUILD_LIMIT, &["--no-run"]))?;
                ended(&mut test(LIMIT, &["--", filter]))
            }
            Check::Cargo(package, what, filter) => {
                let test = |limit: u64, more: &[&str]| {
                    let mut cargo = self.cargo(limit, &["test", "--quiet", "-p", package]);
                    cargo.args(what).args(more);
                    cargo
                };
                tools::output(&mut test(BUILD_LIMIT, &["--no-run"]))?;
                ended(&mut test(LIMIT, &["--", filter]))
            }
            Check::Rules(section) => self.runs("net_rules", &[section], None, ""),
            Check::Races(section) => self.runs("net_rules", &[section], Some(Sanitizer::Thread), ""),
            Check::Kernels(program) => self.runs(program, &[], None, file),
            Check::KernelRaces(program) => self.runs(program, &[], Some(Sanitizer::Thread), file),
        }
    }

    /// Cargo in the copy, ended after a time.
    fn cargo(&self, limit: u64, args: &[&str]) -> Command {
        let mut cargo = Command::new("timeout");
        cargo.args(["--signal=KILL", &limit.to_string()]);
        cargo.arg(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())).args(args);
        cargo.current_dir(self.tree()).env("CARGO_TARGET_DIR", &self.folder);
        // Of the cargo that runs this one.
        cargo.env_remove("CARGO_MANIFEST_DIR").env_remove("RUSTFLAGS");
        cargo
    }

    /// Builds and runs a program of device/tests.
    fn runs(&mut self, name: &str, args: &[&str], sanitizer: Option<Sanitizer>, file: &str) -> Result<Option<String>> {
        let library = if name == "net_rules" { None } else { Some(self.library(sanitizer, file)?) };
        let tree = self.tree();
        let program = Program { root: &tree, name, sanitizer, library: library.as_deref() };
        let key = format!("{name}-{sanitizer:?}");
        let out = self.folder.join(&key);
        if self.built.insert(key) {
            program.build(&out)?;
        }
        let reports = kernels::reports()?;
        // A race of two accesses is found only while the first one is remembered: not in each run.
        for _ in 0..if sanitizer.is_some() { 3 } else { 1 } {
            if let Some(how) = ended(program.command(&out, &reports, LIMIT).args(args))? {
                let races = kernels::read_reports(&reports)?;
                return Ok(Some(if races.is_empty() { how } else { first_race(&races) }));
            }
        }
        Ok(None)
    }

    /// The folder of the library: of the copy if a crate is changed in it.
    fn library(&self, sanitizer: Option<Sanitizer>, file: &str) -> Result<PathBuf> {
        let root = if file.starts_with("crates/") { self.tree() } else { tools::root() };
        let (target, here) = (tools::target()?, file.starts_with("crates/"));
        match sanitizer {
            Some(sanitizer) => {
                let target = if here { self.folder.join("thread") } else { kernels::target_of(sanitizer)? };
                kernels::sanitized(&root, &target, sanitizer, "spinio-preload")
            }
            None => {
                let target = if here { self.folder.clone() } else { target };
                let mut cargo = self.cargo(BUILD_LIMIT, &["build", "--quiet", "-p", "spinio-preload"]);
                tools::run(cargo.current_dir(&root).env("CARGO_TARGET_DIR", &target))?;
                Ok(target.join("debug"))
            }
        }
    }
}

impl Check {
    /// Whether it needs a compiler only, neither the library nor cargo.
    pub(crate) fn is_cheap(&self) -> bool {
        matches!(self, Check::Rules(_) | Check::Races(_))
    }
}

/// How a command fails, if it does.
fn ended(command: &mut Command) -> Result<Option<String>> {
    let done = command.output().with_context(|| format!("cannot start {:?}", command.get_program()))?;
    if done.status.success() {
        return Ok(None);
    }
    let text = [done.stdout, done.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let telling = |line: &&str| ["check failed", "assertion", "panicked"].iter().any(|word| line.contains(word));
    let line = text.lines().find(telling).unwrap_or("").trim();
    let line = line.rsplit('/').next().unwrap_or(line);
    // Of timeout and of the loader: the test has not begun.
    ensure!(!matches!(done.status.code(), Some(125..=127)), "{:?} does not start: {text}", command.get_args());
    let hang = done.status.code().is_none_or(|code| code == 137);
    Ok(Some(if hang { "does not end".into() } else { format!("{} {line}", done.status) }))
}

/// The first function of a report.
fn first_race(reports: &str) -> String {
    let functions = reports.lines().filter_map(|line| line.trim().strip_prefix("#0 "));
    let functions = functions.map(|line| line.split(['(', '<']).next().unwrap_or(line)).take(2);
    format!("race of {}", functions.collect::<Vec<_>>().join(" with "))
}
