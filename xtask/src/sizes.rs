//! One idea per file: a source file over the limit has more than one.

use anyhow::{Result, ensure};

use crate::tools;

const MAX_LINES: usize = 700;
const SOURCES: [&str; 8] = ["rs", "c", "h", "cu", "cuh", "py", "sh", "awk"];

pub(crate) fn run() -> Result<()> {
    let files = tools::files()?;
    let mut long = Vec::new();
    for file in files.split('\0').filter(|f| !f.is_empty()) {
        let path = tools::root().join(file);
        let source = path.extension().is_none_or(|e| SOURCES.iter().any(|s| e == *s));
        let text = if source { std::fs::read(&path).unwrap_or_default() } else { continue };
        let is_code = path.extension().is_some() || text.starts_with(b"#!");
        let lines = text.iter().filter(|&&b| b == b'\n').count();
        if is_code && lines > MAX_LINES {
            long.push(format!("  {file}: {lines} lines"));
        }
    }
    ensure!(long.is_empty(), "files over {MAX_LINES} lines, split them by idea:\n{}", long.join("\n"));
    Ok(())
}
