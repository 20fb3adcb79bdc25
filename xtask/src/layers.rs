//! `cargo x layers`: an arrow between crates may point only down.
//!
//! ```text
//!   10  lab ...................... on the library of cli: tables, units, devices
//!    9  preload  python  cli ..... cli builds preload, but never links it
//!    8  capi
//!    7  runtime
//!    6  batch  nvmmu  gaiad
//!    5  io  gaia  net
//!    4  pinned
//!    3  files  pagecache
//!    2  stats  transfer
//!    1  device  host  fuse
//!    0  sys  plan  ring
//!
//!   testkit: a dev-dependency of any crate; itself on top of layers below 4
//!   outside crates/ (xtask, examples): on top of everything but preload; no crate depends on them
//! ```
//!
//! `cli -> preload` is the one exception. It makes `cargo run` build libspinio.so too. If its
//! Rust side were linked, its symbols would hook the command itself, so no source file of `cli` may name it.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{circles, tools};

const RANKS: &[(&str, u8)] = &[
    ("spinio-sys", 0),
    ("spinio-plan", 0),
    ("spinio-ring", 0),
    ("spinio-device", 1),
    ("spinio-host", 1),
    ("spinio-fuse", 1),
    ("spinio-stats", 2),
    ("spinio-transfer", 2),
    ("spinio-files", 3),
    ("spinio-pagecache", 3),
    ("spinio-pinned", 4),
    ("spinio-io", 5),
    ("spinio-gaia", 5),
    ("spinio-net", 5),
    ("spinio-batch", 6),
    ("spinio-nvmmu", 6),
    ("spinio-gaiad", 6),
    ("spinio-runtime", 7),
    ("spinio-capi", 8),
    ("spinio-preload", 9),
    ("spinio-python", 9),
    ("spinio-cli", 9),
    ("spinio-lab", 10),
];
const TESTKIT: &str = "spinio-testkit";
const PRELOAD: &str = "spinio-preload";
const CLI: &str = "spinio-cli";
const TOP: u8 = 4;

/// Crates that programs do not link: not part of the library.
const TOOLS: [&str; 6] = ["spinio-cli", "spinio-lab", "spinio-python", "spinio-fuse", "spinio-gaiad", TESTKIT];

/// Percent of the library that one crate may have.
const MOST_PERCENT: usize = 20;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CratePlace {
    Layer(u8),
    Testkit,
    NotACrate,
}

struct Dependency<'a> {
    from: &'a str,
    to: &'a str,
    dev: bool,
}

impl fmt::Display for Dependency<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}{}", self.from, self.to, if self.dev { " (dev)" } else { "" })
    }
}

pub(crate) fn run() -> Result<()> {
    let json = tools::output(tools::cargo().args(["metadata", "--format-version", "1", "--no-deps"]))?;
    let metadata: Value = serde_json::from_str(&json)?;
    let packages = metadata["packages"].as_array().context("cargo metadata names no packages")?;
    let name = |p: &Value| p["name"].as_str().unwrap_or_default().to_owned();
    let folder = |p: &Value| {
        let manifest = PathBuf::from(p["manifest_path"].as_str().unwrap_or_default());
        manifest.parent().map(Path::to_owned).unwrap_or_default()
    };
    let crates = tools::root().join("crates");

    let mut wrong = Vec::new();
    let mut members = Vec::new();
    for package in packages {
        let name = name(package);
        match place(&name, folder(package).starts_with(&crates)) {
            Some(place) => members.push((name, place)),
            None => wrong.push(format!("{name} is in crates/ but has no layer: name it in xtask/src/layers.rs")),
        }
    }
    for package in packages {
        let from = name(package);
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = dependency["name"].as_str().unwrap_or_default();
            let arrow = Dependency { from: &from, to, dev: dependency["kind"] == "dev" };
            let at = |n: &str| members.iter().find(|m| m.0 == n).map(|m| m.1);
            let (Some(start), Some(end)) = (at(&from), at(to)) else { continue };
            if from == CLI && to == PRELOAD {
                wrong.extend(library_references(&folder(package))?);
            } else if !allowed(&arrow, start, end) {
                wrong.push(format!("{arrow} does not point down"));
            }
        }
    }
    for package in packages.iter().filter(|p| folder(p).starts_with(&crates)) {
        for circle in circles::of(&folder(package), &tools::root())? {
            wrong.push(format!("import circle: {}", circle.join(", ")));
        }
    }
    let mut lines = Vec::new();
    for package in packages.iter().filter(|p| folder(p).starts_with(&crates)) {
        lines.push((name(package), circles::lines(&folder(package).join("src"))?));
    }
    lines.sort_by_key(|(_, lines)| std::cmp::Reverse(*lines));
    let is_library = |name: &str| !TOOLS.contains(&name);
    let library: usize = lines.iter().filter(|(name, _)| is_library(name)).map(|(_, lines)| lines).sum();
    println!("lines of source, tests excluded; the library has {library}");
    for (name, lines) in &lines {
        let share = if is_library(name) {
            format!("{:5.1} %", *lines as f64 * 100.0 / library as f64)
        } else {
            "      -".into()
        };
        println!("  {name:<16} {lines:>6} {share}");
        if is_library(name) && lines * 100 > library * MOST_PERCENT {
            wrong.push(format!("{name} has more than {MOST_PERCENT} % of the library"));
        }
    }
    ensure!(wrong.is_empty(), "layers:\n  {}", wrong.join("\n  "));
    Ok(())
}

/// The layer of a member; `None` for a crate without a layer.
fn place(name: &str, in_crates: bool) -> Option<CratePlace> {
    match RANKS.iter().find(|r| r.0 == name) {
        Some(&(_, rank)) => Some(CratePlace::Layer(rank)),
        None if name == TESTKIT => Some(CratePlace::Testkit),
        None => (!in_crates).then_some(CratePlace::NotACrate),
    }
}

fn allowed(arrow: &Dependency<'_>, start: CratePlace, end: CratePlace) -> bool {
    use CratePlace::{Layer, NotACrate, Testkit};
    match (start, end) {
        (_, Layer(_)) if arrow.to == PRELOAD => false,
        (Layer(from), Layer(to)) => from > to,
        (Layer(_), Testkit) => arrow.dev,
        (Testkit, Layer(to)) => to < TOP,
        (NotACrate, _) => true,
        (_, NotACrate) | (Testkit, Testkit) => false,
    }
}

/// Lines of `cli` that name the library crate.
fn library_references(folder: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).with_context(|| format!("cannot list {}", next.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path)?;
                for (number, line) in text.lines().enumerate().filter(|(_, l)| names_library(l)) {
                    let at = path.strip_prefix(tools::root()).unwrap_or(&path).display();
                    found.push(format!("{at}:{} names the preloaded library's crate: {}", number + 1, line.trim()));
                }
            }
        }
    }
    Ok(found)
}

/// By its package name, or by the name of its library target (`spinio`), which is also the command's own.
fn names_library(line: &str) -> bool {
    let code = line.trim_start();
    let code = code.strip_prefix("pub ").unwrap_or(code);
    line.contains("spinio_preload")
        || ["use spinio::", "use spinio;", "use ::spinio::", "extern crate spinio"].iter().any(|u| code.starts_with(u))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ok(from: &str, to: &str, dev: bool) -> bool {
        let at = |n| place(n, n != "xtask").expect("placed");
        allowed(&Dependency { from, to, dev }, at(from), at(to))
    }

    #[test]
    fn dependencies_point_down() {
        assert!(ok("spinio-io", "spinio-device", false));
        assert!(ok("spinio-preload", "spinio-io", false));
        assert!(ok("spinio-preload", "spinio-capi", false));
        assert!(ok("spinio-lab", CLI, false));
        assert!(!ok("spinio-capi", "spinio-preload", false));
        assert!(!ok(CLI, "spinio-lab", false));
        assert!(ok("xtask", "spinio-io", false));
        assert!(!ok("spinio-device", "spinio-io", false));
        assert!(!ok("spinio-device", "spinio-io", true));
        assert!(!ok("spinio-plan", "spinio-sys", false));
        assert!(!ok("spinio-io", "xtask", true));
    }

    #[test]
    fn testkit_is_dev_dependency_only() {
        assert!(ok("spinio-device", TESTKIT, true));
        assert!(!ok("spinio-device", TESTKIT, false));
        assert!(ok(TESTKIT, "spinio-files", false));
        assert!(!ok(TESTKIT, "spinio-io", false));
        assert!(!ok(TESTKIT, CLI, false));
    }

    #[test]
    fn preloaded_library_is_not_linked() {
        assert!(!ok("spinio-python", PRELOAD, false));
        assert!(!ok(TESTKIT, PRELOAD, false));
        assert!(!ok("xtask", PRELOAD, false));
        assert!(names_library("    pub use spinio::hooks;"));
        assert!(names_library("let f = spinio_preload::pread;"));
        assert!(!names_library("println!(\"spinio run: use spinio run\");"));
    }

    #[test]
    fn crate_without_rank_is_reported() {
        assert_eq!(place("spinio-new", true), None);
        assert_eq!(place("some-example", false), Some(CratePlace::NotACrate));
    }
}
