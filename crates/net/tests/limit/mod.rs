//! The limit of descriptors (RLIMIT_NOFILE), which is one for all tables of the process.

#![expect(unsafe_code, reason = "limits of the process")]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The limit of descriptors is one for all tests.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn limit() -> libc::rlimit {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct lives across the call.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit
}

/// New descriptors have smaller numbers than this.
pub(crate) fn set_limit(below: u64) {
    let limit = libc::rlimit { rlim_cur: below, ..limit() };
    // SAFETY: the struct lives across the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

/// The numbers that are in use in the table of the proxy, of the only net.
pub(crate) fn proxy_descriptors() -> Vec<u64> {
    let begun = Instant::now();
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
        let is_proxy = |name: String| name.trim_end() == "spinio-net";
        let proxies: Vec<_> = tasks.filter(|it| std::fs::read_to_string(it.join("comm")).is_ok_and(is_proxy)).collect();
        if let [proxy] = &proxies[..]
            && let Ok(numbers) = std::fs::read_dir(proxy.join("fd"))
        {
            return numbers.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok()).collect();
        }
        // That of a net that was closed may be there for a moment.
        assert!(begun.elapsed() < Duration::from_secs(120), "{} proxies", proxies.len());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// As before, once this is dropped.
pub(crate) struct Limited(u64);

impl Drop for Limited {
    fn drop(&mut self) {
        set_limit(self.0);
    }
}

/// The same once it has not changed for a while: other threads of the net close some of its descriptors.
fn settled_descriptors() -> Vec<u64> {
    let (mut seen, mut equal) = (proxy_descriptors(), 0);
    while equal < 20 {
        std::thread::sleep(Duration::from_millis(1));
        let now = proxy_descriptors();
        equal = if now == seen { equal + 1 } else { 0 };
        seen = now;
    }
    seen
}

/// The proxy of the only net has so many free descriptors left; this process has few, or none.
pub(crate) fn leave(count: usize) -> Limited {
    let used = settled_descriptors();
    let free = (0..).filter(|number| !used.contains(number));
    // Descriptor 0 is in use everywhere; with a limit of 0 poll would fail.
    limit_to(free.take(count).last().map_or(1, |last| last + 1))
}

/// New descriptors have smaller numbers than this.
pub(crate) fn limit_to(below: u64) -> Limited {
    let before = limit().rlim_cur;
    set_limit(below);
    Limited(before)
}
