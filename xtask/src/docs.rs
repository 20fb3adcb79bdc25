//! `cargo x docs`: documents that are generated from the code, so that they cannot disagree with it.

use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};
use spinio_io::settings::TABLE;

use crate::tools;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Write nothing; fail if the document differs
    #[arg(long)]
    check: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    if args.check {
        return check();
    }
    let path = tools::root().join("docs/settings.md");
    std::fs::create_dir_all(tools::root().join("docs"))?;
    std::fs::write(&path, settings()).with_context(|| format!("cannot write {}", path.display()))
}

pub(crate) fn check() -> Result<()> {
    let path = tools::root().join("docs/settings.md");
    let current = std::fs::read_to_string(&path).unwrap_or_default();
    ensure!(current == settings(), "docs/settings.md is outdated: run cargo x docs");
    Ok(())
}

fn settings() -> String {
    let mut out = String::from(
        "# Settings\n\n\
         <!-- Written by `cargo x docs` from crates/host/src/settings/table.rs: change it there. -->\n\n\
         The library reads these environment variables once, when it is loaded into a process.\n\
         A value that cannot be understood is ignored, and `spinio doctor` says so.\n\n\
         | variable | values | default |\n|---|---|---|\n",
    );
    for row in TABLE {
        // A pipe inside a cell would end it.
        let cell = |text: &str| text.replace('|', "\\|");
        let _ = writeln!(out, "| `{}` | {} | {} |", row.name, cell(row.values), cell(row.default));
    }
    for row in TABLE {
        let _ = write!(out, "\n## `{}`\n\n{}\n", row.name, row.doc);
        if let Some(old) = row.old {
            let _ = write!(out, "\nFormerly `{old}`, which still works in this release.\n");
        }
    }
    out
}
