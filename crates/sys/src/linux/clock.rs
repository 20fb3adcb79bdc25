//! Clocks of the Linux kernel.

#![expect(unsafe_code, reason = "C calls")]

/// Nanoseconds of CLOCK_MONOTONIC, which all processes share.
pub fn monotonic_ns() -> u64 {
    clock_ns(libc::CLOCK_MONOTONIC)
}

/// Nanoseconds since 1970.
pub fn realtime_ns() -> u64 {
    clock_ns(libc::CLOCK_REALTIME)
}

/// Nanoseconds since boot, including suspend.
pub fn boottime_ns() -> u64 {
    clock_ns(libc::CLOCK_BOOTTIME)
}

/// Processor time that the calling thread has used.
pub fn thread_cpu_time() -> core::time::Duration {
    core::time::Duration::from_nanos(clock_ns(libc::CLOCK_THREAD_CPUTIME_ID))
}

fn clock_ns(clock_id: libc::clockid_t) -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is alive across the call; libc returns without a system call where the vDSO supports it.
    unsafe { libc::clock_gettime(clock_id, &raw mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_monotonic() {
        let (a, b) = (monotonic_ns(), monotonic_ns());
        assert!(a > 0 && b >= a && realtime_ns() > 1_600_000_000_000_000_000);
    }
}
