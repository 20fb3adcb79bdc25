//! How many processors this process may use, and whether the threads that copy get them.
//!
//! ```text
//!   at start         affinity mask, cgroup quota ──> usable()
//!   while copying    a thread's wall time against its processor time ──> record ──> is_crowded()
//! ```
//!
//! Load averages, PSI and /proc/stat tell of the whole machine, late, and not of this process's cgroup. A thread that
//! copies cached bytes never sleeps: whatever it was off the processor, another thread was on it. So the copying threads
//! themselves tell. When they were kept waiting, long reads copy with few threads for a while, twice as long each time in
//! succession, and then try again.

use std::sync::atomic::{
    AtomicU32, AtomicU64,
    Ordering::{Relaxed, SeqCst},
};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use spinio_sys::linux::{self, FdTableRoot};

/// Processors of the affinity mask, and of the CPU quota of the process's cgroups (cgroup version 2), rounded up.
pub fn usable() -> usize {
    let quota = quota_read_by_shadow_thread();
    linux::available_cpus().min(quota.map_or(usize::MAX, |processors| processors.ceil() as usize)).max(1)
}

/// The quota is in files, whose descriptors must not be in the program's table, not even for a moment. Before Linux 5.11 there
/// is no other table, and no quota is known.
fn quota_read_by_shadow_thread() -> Option<f64> {
    let root = FdTableRoot::new().ok()?;
    let (sender, quota) = mpsc::channel();
    let read = move || {
        let text = |path: &str| std::fs::read_to_string(path).ok();
        let _ = sender.send(text("/proc/thread-self/cgroup").and_then(|own| quota_of(&own, text)));
    };
    root.spawn("spinio-quota", read).then(|| quota.recv().ok()).flatten()?
}

/// The smallest quota of a cgroup and of those above it, in processors. `own`: /proc/thread-self/cgroup.
fn quota_of(own: &str, read: impl Fn(&str) -> Option<String>) -> Option<f64> {
    let mut path = own.lines().find_map(|line| line.strip_prefix("0::"))?.trim_end_matches('/');
    let mut smallest: Option<f64> = None;
    loop {
        if let Some(text) = read(&format!("/sys/fs/cgroup{path}/cpu.max"))
            && let Some((quota, period)) = text.trim().split_once(' ')
            && let (Ok(quota), Ok(period)) = (quota.parse::<f64>(), period.parse::<f64>())
            && period > 0.0
        {
            smallest = Some(smallest.unwrap_or(f64::MAX).min(quota / period));
        }
        match path.rfind('/') {
            Some(parent) => path = &path[..parent],
            None => return smallest,
        }
    }
}

/// Of the time that a thread copied, the part that it was kept off the processor from which on processors are scarce.
const CROWDED: f64 = 0.25;

/// Less copying than this says nothing.
const MIN_SAMPLE: Duration = Duration::from_millis(4);

/// How long the first time, and at most.
const RETREAT: Duration = Duration::from_secs(1);
const MAX_DOUBLINGS: u32 = 5;

/// What copying threads have found out.
#[derive(Debug)]
pub struct ProcessorWatch {
    created: Instant,
    /// Milliseconds after `created` until which processors count as scarce.
    crowded_until: AtomicU64,
    times: AtomicU32,
}

impl Default for ProcessorWatch {
    fn default() -> ProcessorWatch {
        ProcessorWatch { created: Instant::now(), crowded_until: AtomicU64::new(0), times: AtomicU32::new(0) }
    }
}

impl ProcessorWatch {
    /// A thread copied for `wall`, and was on a processor for `processor` of it.
    pub fn record(&self, wall: Duration, processor: Duration) {
        self.record_at(self.created.elapsed(), wall, processor);
    }

    fn record_at(&self, now: Duration, wall: Duration, processor: Duration) {
        if wall < MIN_SAMPLE {
            return;
        }
        let kept_off = wall.saturating_sub(processor).as_secs_f64() / wall.as_secs_f64();
        let now = now.as_millis() as u64;
        let crowded = now < self.crowded_until.load(SeqCst);
        if kept_off > CROWDED && !crowded {
            let times = self.times.fetch_add(1, Relaxed).min(MAX_DOUBLINGS);
            self.crowded_until.store(now + ((RETREAT.as_millis() as u64) << times), SeqCst);
        } else if kept_off <= CROWDED && !crowded {
            self.times.store(0, Relaxed);
        }
    }

    /// Whether processors are scarce now.
    pub fn is_crowded(&self) -> bool {
        self.is_crowded_at(self.created.elapsed())
    }

    fn is_crowded_at(&self, now: Duration) -> bool {
        (now.as_millis() as u64) < self.crowded_until.load(SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn smallest_quota_of_the_cgroups_counts() {
        let files = |path: &str| match path {
            "/sys/fs/cgroup/a/b/cpu.max" => Some("max 100000\n".to_owned()),
            "/sys/fs/cgroup/a/cpu.max" => Some("250000 100000\n".to_owned()),
            "/sys/fs/cgroup/cpu.max" => Some("800000 100000\n".to_owned()),
            _ => None,
        };
        assert_eq!(quota_of("0::/a/b\n", files), Some(2.5));
        assert_eq!(quota_of("0::/\n", files), Some(8.0));
        assert_eq!(quota_of("0::/a/b/c\n", |path| files(path).filter(|_| path.len() > 24)), None, "no limit");
        assert_eq!(quota_of("1:cpu:/a\n", files), None, "version 1");
        assert!(usable() >= 1);
    }

    #[test]
    fn threads_kept_off_the_processor_make_it_crowded_for_longer_each_time() {
        let (watch, ms, s) = (ProcessorWatch::default(), Duration::from_millis, Duration::from_secs);
        watch.record_at(s(0), ms(1), ms(0));
        watch.record_at(s(0), ms(100), ms(90));
        assert!(!watch.is_crowded_at(s(0)), "too short, and on the processor");
        watch.record_at(s(1), ms(100), ms(50));
        assert!(watch.is_crowded_at(ms(1999)) && !watch.is_crowded_at(s(2)));
        // Others that still copy say the same: that is no second time.
        watch.record_at(ms(1500), ms(100), ms(50));
        assert!(!watch.is_crowded_at(s(2)));
        watch.record_at(s(3), ms(100), ms(50));
        assert!(watch.is_crowded_at(ms(4999)) && !watch.is_crowded_at(s(5)));
        watch.record_at(s(6), ms(100), ms(99));
        watch.record_at(s(7), ms(100), ms(50));
        assert!(watch.is_crowded_at(ms(7999)) && !watch.is_crowded_at(s(8)), "after a good time from the start");
    }
}
