//! Futex calls of this process, as the kernel's tracepoint `sys_enter_futex` sees them. Needs root and tracefs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A recording of this process and of the threads that it starts from now on. Ends when dropped.
pub struct FutexTrace {
    instance: PathBuf,
    mount: TempDir,
}

/// A line of a recording.
#[derive(Debug, PartialEq, Eq)]
pub enum TraceLine {
    /// What [`FutexTrace::mark`] wrote.
    Mark(String),
    /// A call: the name of the thread, the futex's address in hexadecimal, and whether it wakes threads.
    Futex(String, String, bool),
}

impl FutexTrace {
    /// Begins to record, or says why it cannot.
    pub fn start() -> Result<FutexTrace, String> {
        let mount = tempfile::tempdir().map_err(|e| e.to_string())?;
        let mounted = Command::new("mount").args(["-t", "tracefs", "tracefs"]).arg(mount.path()).output();
        if !mounted.is_ok_and(|done| done.status.success()) {
            return Err("tracefs cannot be mounted".into());
        }
        let instance = mount.path().join(format!("instances/spinio-{}", std::process::id()));
        let trace = FutexTrace { instance, mount };
        trace.set_up().map_err(|e| format!("no tracepoint sys_enter_futex: {e}"))?;
        Ok(trace)
    }

    fn set_up(&self) -> std::io::Result<()> {
        fs::create_dir(&self.instance)?;
        fs::write(self.instance.join("options/event-fork"), "1")?;
        fs::write(self.instance.join("set_event_pid"), std::process::id().to_string())?;
        fs::write(self.instance.join("events/syscalls/sys_enter_futex/enable"), "1")
    }

    /// Writes a line.
    pub fn mark(&self, text: &str) {
        fs::write(self.instance.join("trace_marker"), text).expect("a mark in the trace");
    }

    /// All lines so far.
    pub fn lines(&self) -> Vec<TraceLine> {
        let text = fs::read_to_string(self.instance.join("trace")).expect("the trace");
        text.lines().filter_map(parse).collect()
    }
}

impl Drop for FutexTrace {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.instance);
        let _ = Command::new("umount").arg("-l").arg::<&Path>(self.mount.path()).output();
    }
}

/// `  thread-123  [001] .....  12.345678: sys_futex(uaddr: 7f00, op: 81, ...)`, or `...: tracing_mark_write: text`.
fn parse(line: &str) -> Option<TraceLine> {
    let (before, after) = line.split_once(": ")?;
    if let Some(text) = after.strip_prefix("tracing_mark_write: ") {
        return Some(TraceLine::Mark(text.trim().to_owned()));
    }
    let arguments = after.strip_prefix("sys_futex(")?;
    let value = |name: &str| arguments.split_once(name)?.1.split([',', ')']).next();
    let (thread, _) = before.split_once(" [")?;
    let (name, _) = thread.trim().rsplit_once('-')?;
    // FUTEX_WAKE and FUTEX_WAKE_BITSET, private or not.
    let operation = value("op: ").and_then(|op| u32::from_str_radix(op.trim_start_matches("0x"), 16).ok());
    let wakes = matches!(operation? & 0x7f, 1 | 10);
    Some(TraceLine::Futex(name.to_owned(), value("uaddr: ")?.to_owned(), wakes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed() {
        let futex = "  spinio-emu-dma-1627    [001] .....  2006.334: sys_futex(uaddr: 7f32a0, op: 81, val: 1)";
        assert_eq!(parse(futex), Some(TraceLine::Futex("spinio-emu-dma".into(), "7f32a0".into(), true)));
        let wait = "  test-1  [000] .....  1.5: sys_futex(uaddr: 7f32a0, op: 189, val: 2, utime: 0)";
        assert_eq!(parse(wait), Some(TraceLine::Futex("test".into(), "7f32a0".into(), false)));
        let mark = "  test-1     [000] .....  1.5: tracing_mark_write: begin";
        assert_eq!(parse(mark), Some(TraceLine::Mark("begin".into())));
        assert_eq!(parse("# tracer: nop"), None);
    }
}
