//! A word that a forked child finds zero.
//!
//! `fork` copies locks that other threads hold, without those threads. So
//! SPIN's state from the parent must not be used in the child. A page under
//! MADV_WIPEONFORK distinguishes the two with one load, without a hook on `fork`,
//! and also for a raw `clone`. A `vfork` child shares the memory and correctly reads
//! the parent's value.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::sync::atomic::AtomicU64;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::memory::{PAGE, madvise, mmap};

/// A new word, zero now and zero again in every forked child. It is never unmapped.
pub fn wipe_on_fork_word() -> Result<&'static AtomicU64, Errno> {
    // SAFETY: a fresh anonymous mapping replaces nothing; the advice concerns this page alone; the
    // kernel hands it out zeroed and aligned, a valid AtomicU64, and it is never unmapped.
    unsafe {
        let page =
            mmap(core::ptr::null_mut(), PAGE, k::PROT_READ | k::PROT_WRITE, k::MAP_PRIVATE | k::MAP_ANONYMOUS, -1, 0)?;
        madvise(page, PAGE, k::MADV_WIPEONFORK)?;
        Ok(&*page.cast::<AtomicU64>())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn child_reads_zero_and_parent_keeps_value() {
        let word = wipe_on_fork_word().unwrap();
        word.store(7, Relaxed);
        // SAFETY: the child only loads a word and exits.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let seen = word.load(Relaxed);
            // SAFETY: ends the child at once, without the test harness's exit handlers.
            unsafe { libc::_exit(seen as i32) };
        }
        let mut status = 0;
        // SAFETY: waits for our own child.
        unsafe { libc::waitpid(child, &mut status, 0) };
        assert_eq!(libc::WEXITSTATUS(status), 0);
        assert_eq!(word.load(Relaxed), 7);
    }
}
