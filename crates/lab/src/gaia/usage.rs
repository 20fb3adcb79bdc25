//! What processes use, from /proc: seconds of processors, and memory.
//!
//! Known flaw: the Linux kernel counts in ticks of 10 ms, so that runs of a few milliseconds have 0 or too much.

use std::path::PathBuf;

/// Ticks a second, of all Linux kernels on x86-64.
const TICKS: f64 = 100.0;

/// Seconds of processors that these processes have used; 0 for those that have ended.
pub fn cpu_seconds(processes: &[u32]) -> f64 {
    processes.iter().filter_map(|process| ticks(&read(*process, "stat")?)).sum::<f64>() / TICKS
}

/// Bytes of memory of these processes: what several of them have in common is counted once.
pub fn memory_bytes(processes: &[u32]) -> f64 {
    let pss = |process: &u32| {
        let text = read(*process, "smaps_rollup")?;
        let line = text.lines().find_map(|line| line.strip_prefix("Pss:"))?;
        line.trim().trim_end_matches(" kB").parse::<f64>().ok()
    };
    processes.iter().filter_map(pss).sum::<f64>() * 1024.0
}

fn read(process: u32, name: &str) -> Option<String> {
    std::fs::read_to_string(PathBuf::from(format!("/proc/{process}")).join(name)).ok()
}

/// User and system time: fields 14 and 15. The name before may have spaces and parentheses.
fn ticks(stat: &str) -> Option<f64> {
    let (_, after) = stat.rsplit_once(')')?;
    let mut fields = after.split_whitespace().skip(11);
    Some(fields.next()?.parse::<f64>().ok()? + fields.next()?.parse::<f64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_is_found_after_any_name() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 0 0 0 12 30 0 0 20 0 1 0 99 1 1";
        assert_eq!(ticks(stat), Some(42.0));
        assert_eq!(ticks("7 (a"), None);
    }

    #[test]
    fn this_process_has_memory_and_an_ended_one_nothing() {
        assert!(memory_bytes(&[std::process::id()]) > 0.0);
        assert_eq!((cpu_seconds(&[u32::MAX]), memory_bytes(&[u32::MAX])), (0.0, 0.0));
    }
}
