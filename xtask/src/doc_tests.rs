//! No comment has code that rustdoc would run as a test: the tests of `.ci/run` leave rustdoc out, which would read every
//! crate to find none.

use anyhow::{Result, ensure};

use crate::tools;

pub(crate) fn run() -> Result<()> {
    let files = tools::files()?;
    let mut found = Vec::new();
    for file in files.split('\0').filter(|file| file.ends_with(".rs")) {
        let text = std::fs::read_to_string(tools::root().join(file)).unwrap_or_default();
        found.extend(blocks(&text).map(|line| format!("  {file}:{line}")));
    }
    ensure!(found.is_empty(), "code that no test runs; write ```text, or a test:\n{}", found.join("\n"));
    Ok(())
}

/// Lines where a block of code begins that rustdoc would run.
fn blocks(text: &str) -> impl Iterator<Item = usize> {
    let mut inside = false;
    text.lines().enumerate().filter_map(move |(at, line)| {
        let line = line.trim_start();
        let comment = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"));
        // A comment ends with the block that was left open.
        inside &= comment.is_some();
        let language = comment?.trim_start().strip_prefix("```")?;
        inside = !inside;
        (inside && language.trim() != "text").then_some(at + 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_of_text_are_no_code() {
        let text = "//! ```text\n//! a\n//! ```\n/// ```\n/// b();\n/// ```\nfn c() {}\n    /// ```rust\n    /// d();\n    /// ```\n// ```\n";
        assert_eq!(blocks(text).collect::<Vec<_>>(), [4, 8]);
    }
}
