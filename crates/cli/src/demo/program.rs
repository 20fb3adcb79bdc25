//! The C program of the demo: found or compiled, run, and its output parsed.
//!
//! Its sources are examples/demo. An installed command has it compiled in `../lib/spinio`, so that a demo needs no
//! compiler; any other command contains the sources and compiles them first. The reader is compiled separately from the
//! shim, which proves that the part that does the I/O contains no symbol of SPIN.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context, bail};
use spinio_io::stats::Snapshot;

use crate::compiler;
use crate::progress::Progress;

const SOURCES: [(&str, &str); 3] = [
    ("gpu.h", include_str!("../../../../examples/demo/gpu.h")),
    ("reader.c", include_str!("../../../../examples/demo/reader.c")),
    ("shim.c", include_str!("../../../../examples/demo/shim.c")),
];

/// The compiled reader, next to its `libgpu.so`: its path in an installed tree, relative to the command.
const INSTALLED: &str = "../lib/spinio/demo-reader";

/// The compiled reader, and the directory for its output.
pub struct Program {
    reader: PathBuf,
    work: PathBuf,
}

/// The output of one run of the reader.
#[derive(Debug, Default, PartialEq)]
pub struct ReaderOutput {
    /// The device that its memory came from.
    pub device: String,
    /// Bytes that `pread` returned.
    pub bytes: u64,
    /// Time from the first `pread` until the last returned.
    pub seconds: f64,
    /// Time of the first `pread` alone.
    pub first_call: f64,
    /// Bytes on the device that equal a plain `pread` of the same file, counted up to the first that differs.
    pub equal: u64,
    /// errno of a failed `pread`.
    pub errno: Option<i32>,
}

/// How a run ended.
pub struct ReaderRun {
    /// The parsed output, as far as it was written.
    pub answer: ReaderOutput,
    /// Exit status of the reader.
    pub status: ExitStatus,
    /// Its stderr.
    pub stderr: String,
}

/// The installed reader; if there is none, one compiled in `work`.
pub fn prepare(work: &Path) -> anyhow::Result<Program> {
    let bin = std::env::current_exe().ok().and_then(|p| p.parent().map(Path::to_owned));
    let reader = match bin.and_then(|bin| installed(&bin)) {
        Some(reader) => reader,
        None => compile(work)?,
    };
    Ok(Program { reader, work: work.to_owned() })
}

fn installed(bin: &Path) -> Option<PathBuf> {
    bin.join(INSTALLED).canonicalize().ok().filter(|p| p.is_file())
}

/// Writes the sources to `dir` and compiles them there.
fn compile(dir: &Path) -> anyhow::Result<PathBuf> {
    for (name, text) in SOURCES {
        let path = dir.join(name);
        std::fs::write(&path, text).with_context(|| format!("Cannot write {}", path.display()))?;
    }
    compiler::c(dir, &["-shared", "-fPIC", "-o", "libgpu.so", "shim.c", "-ldl"])?;
    compiler::c(dir, &["-o", "reader", "reader.c", "-L.", "-lgpu", "-Wl,-rpath,$ORIGIN"])?;
    Ok(dir.join("reader"))
}

impl Program {
    /// Runs the reader on `file` with these variables set, and polls the counters at `stats` meanwhile.
    pub fn run(
        &self,
        file: &Path,
        size: u64,
        stats: Option<&Path>,
        env: &[(&str, OsString)],
    ) -> anyhow::Result<ReaderRun> {
        // Into files, not pipes: no thread has to drain them while the reader runs.
        let (out, err) = (self.work.join("reader.out"), self.work.join("reader.err"));
        let make = |path: &Path| File::create(path).with_context(|| format!("Cannot create {}", path.display()));
        let mut command = Command::new(&self.reader);
        command.arg(file).stdin(std::process::Stdio::null());
        command.stdout(make(&out)?).stderr(make(&err)?);
        for (name, value) in env {
            command.env(name, value);
        }
        let mut child = command.spawn().with_context(|| format!("Cannot start {}", self.reader.display()))?;
        let doing = if stats.is_some() { "Reading into the device" } else { "Trying pread without SPIN" };
        let mut progress = Progress::bytes(size, doing);
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            let read = stats.and_then(read_stats).map_or(0, |now| now.read.bytes);
            if read >= size {
                progress.set_message("Comparing every byte");
            }
            progress.set(read.min(size));
            std::thread::sleep(Duration::from_millis(10));
        };
        drop(progress);
        let complaint = std::fs::read_to_string(&err).unwrap_or_default().trim().to_owned();
        let answer = parse(&std::fs::read_to_string(&out).unwrap_or_default())?;
        Ok(ReaderRun { answer, status, stderr: complaint })
    }
}

/// The counters that a run left; `None` if it left none.
pub fn read_stats(path: &Path) -> Option<Snapshot> {
    Snapshot::from_bytes(&std::fs::read(path).ok()?).ok()
}

fn parse(text: &str) -> anyhow::Result<ReaderOutput> {
    let mut answer = ReaderOutput::default();
    for line in text.lines() {
        let Some((name, value)) = line.split_once('=') else { bail!("The reader printed `{line}`") };
        match name {
            "device" => answer.device = value.to_owned(),
            "bytes" => answer.bytes = value.parse()?,
            "seconds" => answer.seconds = value.parse()?,
            "first_call_seconds" => answer.first_call = value.parse()?,
            "equal_bytes" => answer.equal = value.parse()?,
            "errno" => answer.errno = Some(value.parse()?),
            _ => {}
        }
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reader_references_no_spinio_symbol() {
        let reader = SOURCES.iter().find(|(name, _)| *name == "reader.c").unwrap().1;
        let code: String = reader.split("*/").skip(1).collect();
        assert!(code.contains("pread("));
        assert!(!code.contains("spinio_") && !code.contains("dlsym"), "the I/O code names our symbols");
    }

    #[test]
    fn installed_reader_is_found_from_bin() {
        let prefix = tempfile::tempdir().unwrap();
        let (bin, lib) = (prefix.path().join("bin"), prefix.path().join("lib/spinio"));
        std::fs::create_dir(&bin).unwrap();
        assert_eq!(installed(&bin), None);
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::write(lib.join("demo-reader"), "").unwrap();
        assert_eq!(installed(&bin), lib.join("demo-reader").canonicalize().ok());
    }

    #[test]
    fn answers() {
        let text = "device=a GPU\nbytes=10\nseconds=0.5\nfirst_call_seconds=0.1\nequal_bytes=10\n";
        let want =
            ReaderOutput { device: "a GPU".into(), bytes: 10, seconds: 0.5, first_call: 0.1, equal: 10, errno: None };
        assert_eq!(parse(text).unwrap(), want);
        assert_eq!(parse("errno=14\n").unwrap().errno, Some(14));
        assert!(parse("gibberish\n").is_err());
    }
}
