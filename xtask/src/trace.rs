//! Makes strace's files comparable.
//!
//! Addresses, PIDs and the loading of libraries differ between any two runs, or between the compared
//! runs, without meaning anything: they are removed.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result};

/// The traced calls: files, descriptors, children and signals.
pub(crate) const TRACED: &[&str] = &[
    "read",
    "pread64",
    "readv",
    "preadv",
    "preadv2",
    "write",
    "pwrite64",
    "writev",
    "pwritev",
    "pwritev2",
    "open",
    "openat",
    "openat2",
    "close",
    "close_range",
    "dup",
    "dup2",
    "dup3",
    "fcntl",
    "lseek",
    "fadvise64",
    "ftruncate",
    "pipe",
    "pipe2",
    "socket",
    "socketpair",
    "splice",
    "sendfile",
    "copy_file_range",
    "clone",
    "clone3",
    "fork",
    "vfork",
    "execve",
    "exit",
    "exit_group",
    "kill",
    "tgkill",
    "rt_sigaction",
    "unlink",
    "unlinkat",
    "rename",
    "renameat2",
];

/// Calls whose arguments and results are PIDs or layouts of memory.
const CALLS_WITHOUT_ARGUMENTS: &[&str] = &["clone", "clone3", "fork", "vfork", "kill", "tgkill", "rt_sigaction"];

/// The calls of all processes of a run: for each process, in order. The order of processes does not count, since
/// concurrent children get their PIDs in any order.
#[derive(PartialEq, Eq, Default)]
pub(crate) struct SyscallTrace {
    processes: Vec<Vec<String>>,
}

impl SyscallTrace {
    /// Reads the files of `strace -ff -o folder/call`.
    pub(crate) fn read(folder: &Path) -> Result<SyscallTrace> {
        let mut processes = Vec::new();
        for entry in std::fs::read_dir(folder)? {
            let path = entry?.path();
            let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
            processes.push(normalize(&String::from_utf8_lossy(&text)));
        }
        processes.sort();
        Ok(SyscallTrace { processes })
    }

    pub(crate) fn total(&self) -> usize {
        self.processes.iter().map(Vec::len).sum()
    }

    pub(crate) fn by_name(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for line in self.processes.iter().flatten() {
            *counts.entry(name(line).to_owned()).or_insert(0) += 1;
        }
        counts
    }

    /// The first call in which this run differs from the other.
    pub(crate) fn difference(&self, other: &SyscallTrace) -> Option<String> {
        let lost = other.processes.iter().find(|p| !self.processes.contains(p));
        let new = self.processes.iter().find(|p| !other.processes.contains(p));
        match (lost, new) {
            (Some(a), Some(b)) => {
                let at = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
                let line = |p: &[String]| p.get(at).map_or("the end", String::as_str).to_owned();
                Some(format!("{} instead of {} (call {at} of a process)", line(b), line(a)))
            }
            (None, None) if self == other => None,
            _ => Some(format!("{} processes instead of {}", self.processes.len(), other.processes.len())),
        }
    }
}

fn name(line: &str) -> &str {
    line.split('(').next().unwrap_or(line)
}

/// One process.
fn normalize(text: &str) -> Vec<String> {
    let mut kept = Vec::new();
    let mut loading: Option<String> = None;
    for line in text.lines() {
        if let Some(end) = &loading {
            if line.starts_with(end) {
                loading = None;
            }
            continue;
        }
        if line.starts_with("open") && is_library(line) {
            loading = result(line).filter(|r| *r >= 0).map(|fd| format!("close({fd})"));
            continue;
        }
        if line.starts_with("+++") || line.starts_with("---") {
            continue;
        }
        kept.push(if CALLS_WITHOUT_ARGUMENTS.contains(&name(line)) {
            format!("{}(...)", name(line))
        } else {
            without_addresses(line)
        });
    }
    kept
}

/// Whether a path in the call is a shared object, the loader's cache, or the list of mappings.
fn is_library(line: &str) -> bool {
    let path = line.split('"').nth(1).unwrap_or_default();
    path.ends_with(".so") || path.contains(".so.") || path.ends_with("/ld.so.cache") || path == "/proc/self/maps"
}

/// The result of the call.
fn result(line: &str) -> Option<i64> {
    line.rsplit(" = ").next()?.split(' ').next()?.parse().ok()
}

fn without_addresses(line: &str) -> String {
    let mut parts = line.split("0x");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        out.push_str("0x");
        out.push_str(part.trim_start_matches(|c: char| c.is_ascii_hexdigit()));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn library_loading_is_filtered_out() {
        let plain = "execve(\"/bin/cat\", [\"cat\"], 0x7ffe /* 9 vars */) = 0\nread(3, \"\"..., 10) = 4\n+++ exited with 0 +++\n";
        let loaded = "execve(\"/bin/cat\", [\"cat\"], 0x7fff /* 9 vars */) = 0\n\
                      openat(AT_FDCWD, \"/x/libspinio.so\", O_RDONLY|O_CLOEXEC) = 3\nread(3, \"\"..., 832) = 832\nclose(3) = 0\n\
                      openat(AT_FDCWD, \"/y/libgcc_s.so.1\", O_RDONLY) = -1 ENOENT (No such file or directory)\n\
                      read(3, \"\"..., 10) = 4\n";
        assert_eq!(normalize(plain), normalize(loaded));
        assert_eq!(normalize(plain).len(), 2);
    }

    #[test]
    fn different_call_is_reported() {
        let calls = |text: &str| SyscallTrace { processes: vec![normalize(text)] };
        let (a, b) = (calls("read(3, 0x1, 10) = 4\nclose(3) = 0\n"), calls("read(3, 0x2, 10) = 4\nclose(4) = 0\n"));
        assert_eq!(a.difference(&a), None);
        assert!(b.difference(&a).unwrap().contains("close(4) = 0 instead of close(3) = 0"));
    }
}
