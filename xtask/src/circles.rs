//! No import circle between the source files of a crate.
//!
//! ```text
//!   a.rs ── use crate::b::X ──> b.rs ── use crate::c::Y ──> c.rs      fine: arrows point down
//! ^──────── use crate::b::Z ──┘       a circle: neither can be understood alone
//! ```
//!
//! A file is a node. Every path in its code that begins with `crate::`, `super::` or `self::` is an arrow to the file
//! that defines the name: a re-export (`pub use`) is followed to its source, and is no arrow of the file that makes it,
//! which is a table of contents. Tests (`#[cfg(test)]` at the start of a line, up to the end of that item) are ignored.
//!
//! Known flaws: it reads text, not syntax. Names that a macro makes, and paths through a type (`Type::method`), are not
//! seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// Circles that are allowed: a registry and its back ends. The file, as it is printed.
const ALLOWED: [&str; 1] = ["crates/device/src/"];

/// The module tree of one crate: module path (`read::engine`) to file.
struct Crate {
    files: BTreeMap<String, PathBuf>,
    /// The re-exports of a module: name to full path.
    exports: BTreeMap<String, BTreeMap<String, String>>,
}

/// The circles of the crate in `folder`, each as the files on it.
pub(crate) fn of(folder: &Path, root: &Path) -> Result<Vec<Vec<String>>> {
    let src = folder.join("src");
    let mut found = Crate { files: BTreeMap::new(), exports: BTreeMap::new() };
    collect(&src, "", &mut found.files)?;
    let mut texts = BTreeMap::new();
    for (module, path) in &found.files {
        let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        texts.insert(module.clone(), code(&text));
    }
    for (module, text) in &texts {
        let exports = re_exports(text, module, &found.files);
        found.exports.insert(module.clone(), exports);
    }
    let mut arrows: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for (module, text) in &texts {
        let all = arrows.entry(module).or_default();
        for path in paths(text, module) {
            if let Some(to) = found.resolve(&path).filter(|to| *to != module.as_str()) {
                all.insert(to);
            }
        }
    }
    let name = |module: &str| {
        let path = &found.files[module];
        path.strip_prefix(root).unwrap_or(path).display().to_string()
    };
    let circles = components(&arrows).into_iter().map(|circle| circle.into_iter().map(name).collect::<Vec<_>>());
    Ok(circles.filter(|circle| !ALLOWED.iter().any(|ok| circle.iter().all(|file| file.starts_with(ok)))).collect())
}

impl Crate {
    /// The module that defines a path's name.
    fn resolve(&self, path: &[String]) -> Option<&str> {
        let mut path = path.to_vec();
        // A re-export may lead to another one, but not endlessly.
        for _ in 0..8 {
            let (module, rest) = (0..=path.len()).rev().find_map(|n| {
                let (module, _) = self.files.get_key_value(&path[..n].join("::"))?;
                Some((module.as_str(), &path[n..]))
            })?;
            let Some(name) = rest.first() else { return Some(module) };
            match self.exports.get(module).and_then(|exports| exports.get(name)) {
                Some(target) => path = target.split("::").map(str::to_owned).collect(),
                None => return Some(module),
            }
        }
        None
    }
}

/// The files below a directory by their module paths.
fn collect(folder: &Path, prefix: &str, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let module = if prefix.is_empty() { stem.clone() } else { format!("{prefix}::{stem}") };
        if path.is_dir() {
            collect(&path, &module, files)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let at_root = prefix.is_empty() && matches!(stem.as_str(), "lib" | "main");
            files.insert(
                if stem == "mod" {
                    prefix.to_owned()
                } else if at_root {
                    String::new()
                } else {
                    module
                },
                path,
            );
        }
    }
    Ok(())
}

/// The text without comments and tests.
fn code(text: &str) -> String {
    let mut out = String::new();
    let (mut test, mut depth) = (false, 0i32);
    for line in text.lines() {
        let bare = line.split("//").next().unwrap_or_default();
        if !test && line.starts_with("#[cfg(") && line.contains("test") {
            (test, depth) = (true, 0);
            continue;
        }
        if test {
            depth += bare.matches('{').count() as i32 - bare.matches('}').count() as i32;
            if depth <= 0 && (bare.contains('}') || bare.ends_with(';')) {
                test = false;
            }
            continue;
        }
        out.push_str(bare);
        out.push('\n');
    }
    out
}

/// Lines of source below a directory, tests excluded.
pub(crate) fn lines(folder: &Path) -> Result<usize> {
    let mut files = BTreeMap::new();
    collect(folder, "", &mut files)?;
    let is_test = |path: &&PathBuf| {
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        stem == "tests" || stem.ends_with("_tests") || path.components().any(|c| c.as_os_str() == "tests")
    };
    let mut all = 0;
    for path in files.values().filter(|path| !is_test(path)) {
        let text = std::fs::read_to_string(path)?;
        let mut test = false;
        for line in text.lines() {
            test |= line.starts_with("#[cfg(") && line.contains("test");
            all += usize::from(!test);
            test &= !(line == "}" || line.ends_with(';'));
        }
    }
    Ok(all)
}

/// All names of `use` in a text: (is it public, the full path, the name it gets here).
fn uses(text: &str, module: &str) -> Vec<(bool, Vec<String>, String)> {
    let mut out = Vec::new();
    for (at, _) in text.match_indices("use ") {
        let start = text[..at].rfind('\n').map_or(0, |n| n + 1);
        let before = text[start..at].trim();
        if !(before.is_empty() || before.starts_with("pub")) {
            continue;
        }
        let Some(end) = text[at..].find(';') else { continue };
        let tree: String = text[at + 4..at + end].split_whitespace().collect::<Vec<_>>().join(" ");
        flatten(&tree, &mut Vec::new(), &mut |path, name| {
            if let Some(path) = absolute(&path, module) {
                out.push((!before.is_empty(), path, name));
            }
        });
    }
    out
}

/// Calls `each` for every leaf of a `use` tree.
fn flatten(tree: &str, prefix: &mut Vec<String>, each: &mut impl FnMut(Vec<String>, String)) {
    let tree = tree.trim();
    if let Some(open) = tree.find('{') {
        let depth = prefix.len();
        prefix.extend(tree[..open].split("::").map(str::trim).filter(|s| !s.is_empty()).map(str::to_owned));
        let inner = tree[open + 1..].trim_end().strip_suffix('}').unwrap_or(&tree[open + 1..]);
        let (mut level, mut from) = (0, 0);
        for (i, c) in inner.char_indices().chain([(inner.len(), ',')]) {
            match c {
                '{' => level += 1,
                '}' => level -= 1,
                ',' if level == 0 => {
                    if !inner[from..i].trim().is_empty() {
                        flatten(&inner[from..i], prefix, each);
                    }
                    from = i + 1;
                }
                _ => {}
            }
        }
        prefix.truncate(depth);
        return;
    }
    let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(path, alias)| (path, Some(alias.trim())));
    let mut full = prefix.clone();
    full.extend(path.split("::").map(str::trim).filter(|s| !s.is_empty() && *s != "self").map(str::to_owned));
    // A leading `self` means the module itself; a trailing one the prefix.
    if path.trim().starts_with("self::") {
        full.insert(prefix.len(), "self".to_owned());
    }
    let name = alias.map_or_else(|| full.last().cloned().unwrap_or_default(), str::to_owned);
    each(full, name);
}

/// A path from the root of the crate; `None` if it leads out of it.
fn absolute(path: &[String], module: &str) -> Option<Vec<String>> {
    let here: Vec<String> = module.split("::").filter(|s| !s.is_empty()).map(str::to_owned).collect();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "self" => Some(here.into_iter().chain(path[1..].iter().cloned()).collect()),
        "super" => {
            let ups = path.iter().take_while(|s| *s == "super").count();
            let kept = here.len().checked_sub(ups)?;
            Some(here[..kept].iter().cloned().chain(path[ups..].iter().cloned()).collect())
        }
        _ => None,
    }
}

fn re_exports(text: &str, module: &str, files: &BTreeMap<String, PathBuf>) -> BTreeMap<String, String> {
    let mut exports = BTreeMap::new();
    for (public, path, name) in uses(text, module) {
        if public {
            exports.insert(name, path.join("::"));
        }
    }
    // `pub use child::Name`, without `self::`.
    for (at, _) in text.match_indices("pub") {
        let Some(rest) = text[at..].split_once("use ").filter(|(before, _)| before.len() < 16).map(|(_, rest)| rest)
        else {
            continue;
        };
        let tree: String = rest.split(';').next().unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ");
        flatten(&tree, &mut Vec::new(), &mut |path, name| {
            let child: Vec<&str> =
                module.split("::").filter(|s| !s.is_empty()).chain(path.iter().map(String::as_str)).collect();
            if path.first().is_some_and(|first| {
                let own: Vec<&str> = module.split("::").filter(|s| !s.is_empty()).chain([first.as_str()]).collect();
                files.contains_key(&own.join("::"))
            }) {
                exports.entry(name).or_insert_with(|| child.join("::"));
            }
        });
    }
    exports
}

/// Every path of a text that names an item of this crate, re-exports aside.
fn paths(text: &str, module: &str) -> Vec<Vec<String>> {
    let mut out: Vec<Vec<String>> =
        uses(text, module).into_iter().filter(|(public, ..)| !public).map(|(_, path, _)| path).collect();
    // Paths in code.
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in text.match_indices(start) {
            let before = text[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let line = &text[text[..at].rfind('\n').map_or(0, |n| n + 1)..at];
            if line.trim_start().starts_with("use ") || line.trim_start().starts_with("pub") && line.contains("use ") {
                continue;
            }
            let end =
                text[at..].find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).unwrap_or(text.len() - at);
            let path: Vec<String> =
                text[at..at + end].split("::").filter(|s| !s.is_empty()).map(str::to_owned).collect();
            out.extend(absolute(&path, module));
        }
    }
    out
}

/// Strongly connected components of more than one node (Tarjan, recursive: crates are small).
fn components<'a>(arrows: &BTreeMap<&'a str, BTreeSet<&'a str>>) -> Vec<Vec<&'a str>> {
    let reach = |from: &'a str| {
        let (mut seen, mut todo) = (BTreeSet::new(), vec![from]);
        while let Some(at) = todo.pop() {
            for to in arrows.get(at).into_iter().flatten() {
                if seen.insert(*to) {
                    todo.push(to);
                }
            }
        }
        seen
    };
    let reached: BTreeMap<&str, BTreeSet<&str>> = arrows.keys().map(|at| (*at, reach(at))).collect();
    let mut done = BTreeSet::new();
    let mut out = Vec::new();
    for at in arrows.keys() {
        let circle: Vec<&str> =
            reached[at].iter().copied().filter(|to| reached.get(to).is_some_and(|back| back.contains(at))).collect();
        if circle.len() > 1 && !circle.iter().any(|file| done.contains(file)) {
            done.extend(circle.iter().copied());
            out.push(circle);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn crate_of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
        let root = std::env::temp_dir().join(format!("circles-{}-{}", std::process::id(), files.len()));
        for (name, text) in files {
            let path = root.join("src").join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let found = of(&root, &root).unwrap();
        std::fs::remove_dir_all(&root).unwrap();
        found
    }

    #[test]
    fn circle_of_two_files_is_found() {
        let found = crate_of(&[
            ("lib.rs", "mod a;\nmod b;\npub use a::A;\n"),
            ("a.rs", "use crate::b::{B, C as D};\npub struct A;\n"),
            ("b.rs", "pub struct B(Option<super::a::A>);\n"),
        ]);
        assert_eq!(found, [["src/a.rs", "src/b.rs"]]);
    }

    #[test]
    fn re_exports_lead_to_their_source() {
        let found = crate_of(&[
            ("lib.rs", "mod x;\n"),
            ("x/mod.rs", "mod a;\nmod b;\npub use self::a::A;\npub use b::B;\n// c\n"),
            ("x/a.rs", "use crate::x::B;\npub struct A;\n"),
            ("x/b.rs", "pub struct B;\n#[cfg(test)]\nmod tests {\n    use crate::x::A;\n}\n"),
        ]);
        assert_eq!(found, Vec::<Vec<String>>::new());
    }
}
