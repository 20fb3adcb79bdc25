//! `cargo x mutate-net`: takes the rules of the sockets' protocol away, one by one, and some test must fail each time.
//!
//! ```text
//!   tree ── copy ──> target/mutants/tree ── one rule less ── its tests ── one fails: noticed    none: the run fails
//!                          └──────────────── put back <──────┘
//! ```
//!
//! rules.rs has the table: file, text, replacement, and the tests that should notice, the cheapest first. Before the first
//! mutant, each test passes without one. `--write` writes what failed into `crates/ring/ORDER.md`; `--quick` takes a short
//! selection, and `--some N` takes N rules of the kernels' side by the hash of the commit: other ones at each commit. A text that is no longer in its file is an error too, so that the table follows the code.
//!
//! Known limits: instructions of a GPU are not run here (the PTX of word.h and doorbell.h, and its fences); the processors that
//! run this order stores, so that a lost release of a relaxed word shows in models and in ThreadSanitizer only.

mod checks;
mod rules;
mod rules_calls;
mod rules_kernel;
mod rules_shared;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};

use self::checks::{Check, Workshop};
use crate::tools;

/// A rule, and how it is taken away.
pub(crate) struct Mutant {
    /// Short, for the command line.
    pub(crate) name: &'static str,
    /// What holds.
    pub(crate) rule: &'static str,
    pub(crate) file: &'static str,
    /// Occurs once in the file.
    pub(crate) from: &'static str,
    pub(crate) to: &'static str,
    /// The cheapest first.
    pub(crate) checks: &'static [Check],
    /// In the short selection.
    pub(crate) quick: bool,
}

/// A rule of the table.
const fn rule(
    name: &'static str,
    rule: &'static str,
    file: &'static str,
    [from, to]: [&'static str; 2],
    checks: &'static [Check],
) -> Mutant {
    Mutant { name, rule, file, from, to, checks, quick: false }
}

/// The same in the short selection.
const fn quick(mutant: Mutant) -> Mutant {
    Mutant { quick: true, ..mutant }
}

/// A unit test of crates/ring.
const fn unit(name: &'static str) -> Check {
    Check::Cargo("spinio-ring", &["--lib"], name)
}

/// A test of hostile kernels and programs.
const fn hostile(name: &'static str) -> Check {
    Check::Cargo("spinio-net", &["--test", "hostile"], name)
}

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rules to take away, by their names; all of them without one
    names: Vec<String>,
    /// Only a short selection
    #[arg(long)]
    quick: bool,
    /// Only so many of the rules whose tests need no library, other ones at each commit
    #[arg(long, value_name = "N", conflicts_with_all = ["names", "quick"])]
    some: Option<usize>,
    /// Print the rules
    #[arg(long)]
    list: bool,
    /// Write what failed without each rule into crates/ring/ORDER.md; the rows of other rules stay
    #[arg(long)]
    write: bool,
}

/// All rules.
fn all() -> impl Iterator<Item = &'static Mutant> {
    rules::RULES.iter().chain(rules_kernel::RULES).chain(rules_shared::RULES).chain(rules_calls::RULES)
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if let Some(unknown) = args.names.iter().find(|name| all().all(|mutant| mutant.name != **name)) {
        anyhow::bail!("no rule is called {unknown}: see --list");
    }
    let wanted = |mutant: &Mutant| {
        (args.names.is_empty() || args.names.iter().any(|name| name == mutant.name)) && (!args.quick || mutant.quick)
    };
    let mutants: Vec<&Mutant> = match args.some {
        Some(count) => some(count, commit()),
        None => all().filter(|mutant| wanted(mutant)).collect(),
    };
    for mutant in all() {
        mutant.text()?;
    }
    if args.list {
        mutants.iter().for_each(|mutant| println!("{:32} {}", mutant.name, mutant.rule));
        return Ok(());
    }
    let mut workshop = Workshop::new()?;
    let (mut survivors, mut rows) = (Vec::new(), Vec::new());
    for mutant in &mutants {
        for check in mutant.checks {
            workshop.passes(*check).with_context(|| format!("{check}, without any mutant"))?;
        }
        let changed = mutant.text()?.replacen(mutant.from, mutant.to, 1);
        workshop.put(mutant.file, &changed)?;
        let mut noticed = None;
        for check in mutant.checks {
            if let Some(how) = workshop.fails(*check, mutant.file).with_context(|| mutant.name)? {
                noticed = Some((check, how));
                break;
            }
        }
        workshop.put(mutant.file, &mutant.text()?)?;
        match noticed {
            Some((check, how)) => {
                println!("{:32} {check}: {how}", mutant.name);
                rows.push(mutant.row(check));
            }
            None => {
                println!("{:32} SURVIVES", mutant.name);
                survivors.push(mutant.name);
            }
        }
    }
    ensure!(survivors.is_empty(), "no test fails without these rules: {}", survivors.join(", "));
    println!("{} rules taken away, each noticed", rows.len());
    if args.write {
        let path = tools::root().join(TABLE);
        let old = std::fs::read_to_string(&path).unwrap_or_default();
        let mut kept: Vec<&str> =
            all().filter_map(|mutant| mutant.find_row(rows.iter().map(String::as_str), &old)).collect();
        kept.dedup();
        std::fs::write(path, format!("{HEAD}{}\n{TAIL}", kept.join("\n")))?;
    }
    Ok(())
}

/// So many of the rules whose tests need a compiler only: which ones, a number says.
fn some(count: usize, number: usize) -> Vec<&'static Mutant> {
    let cheap: Vec<&Mutant> = all().filter(|mutant| mutant.checks.iter().all(Check::is_cheap)).collect();
    // Neighbours have the same tests, which are run without a mutant once.
    let first = number % cheap.len();
    cheap.iter().cycle().skip(first).take(count.min(cheap.len())).copied().collect()
}

/// The beginning of the commit's hash; 0 outside of a repository.
fn commit() -> usize {
    let hash = tools::output(tools::command("git").args(["-c", "safe.directory=*", "rev-parse", "HEAD"]));
    hash.ok().and_then(|hash| usize::from_str_radix(hash.get(..8)?, 16).ok()).unwrap_or_default()
}

impl Mutant {
    fn path(&self) -> PathBuf {
        tools::root().join(self.file)
    }

    /// Its row of the table.
    fn row(&self, check: &Check) -> String {
        format!("| {} | `{}` | `{}` | {check} |", self.rule, self.name, self.file)
    }

    /// Its row in new ones, or else in the old table.
    fn find_row<'a>(&self, mut new: impl Iterator<Item = &'a str>, old: &'a str) -> Option<&'a str> {
        let cell = format!("| `{}` |", self.name);
        new.find(|row| row.contains(&cell)).or_else(|| old.lines().find(|row| row.contains(&cell)))
    }

    /// The file as it is, if the rule is there once.
    fn text(&self) -> Result<String> {
        let text = std::fs::read_to_string(self.path()).with_context(|| self.file)?;
        let count = text.matches(self.from).count();
        ensure!(count == 1, "the text of the rule {} is {count} times in {}, and not once", self.name, self.file);
        Ok(text)
    }
}

const TABLE: &str = "crates/ring/ORDER.md";

const HEAD: &str = "\
# The rules of order, and what fails without each

Written by `cargo x mutate-net --write`, which takes each rule away in a copy of the tree and runs the tests of its row:
`interleavings`: models under loom; `net_rules`: kernels with a proxy that the test plays; `TSan`: built with ThreadSanitizer,
of which a report is the failure; the other programs are in `device/tests`, with the real proxy. The rules are in
`xtask/src/mutate_net`.

| rule | name | file | fails without it |
|---|---|---|---|
";

const TAIL: &str = "
Not noticed by any test, since no GPU runs here: the PTX of `word.h` and `doorbell.h` (`.release.sys`, `.acquire.sys`,
`fence.acq_rel.sys`). The number of fences of a call is counted (`device/tests/net_costs.cpp`), their place is not.
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rule_has_its_own_name_is_in_its_file_and_has_a_test() {
        let mut names: Vec<_> = all().map(|mutant| mutant.name).collect();
        for mutant in all() {
            mutant.text().unwrap();
            assert!(!mutant.checks.is_empty() && mutant.from != mutant.to, "{}", mutant.name);
        }
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all().count());
    }

    #[test]
    fn table_has_a_row_for_each_rule_with_a_test_of_it() {
        let table = std::fs::read_to_string(tools::root().join(TABLE)).unwrap();
        for mutant in all() {
            let rows: Vec<String> = mutant.checks.iter().map(|check| mutant.row(check)).collect();
            assert!(table.lines().any(|line| rows.iter().any(|row| row == line)), "no row of {}", mutant.name);
        }
        assert_eq!(table.lines().filter(|line| line.starts_with("| ")).count(), 1 + all().count());
    }

    #[test]
    fn each_rule_that_needs_no_library_comes_at_some_commit() {
        let mut names: Vec<_> = (0..100).flat_map(|number| some(3, number)).map(|mutant| mutant.name).collect();
        names.sort_unstable();
        names.dedup();
        let cheap = all().filter(|mutant| mutant.checks.iter().all(Check::is_cheap));
        assert!(names.len() > 40 && names.len() == cheap.count());
        assert_eq!(some(3, 7).len(), 3);
    }
}
