//! The P2P probe: storage that reports a read into the device, but did not do it, is detected before it is trusted.
//!
//! The machine's own peer-to-peer DMA is correct, so a system call layer in between makes it wrong: it flips one byte
//! of each `p2p` read.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_io::kernel::{LinuxSyscalls, Syscalls};
use spinio_io::{Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_sys::Errno;
use spinio_sys::linux::Fd;

use super::{MIB, by, explained, memory_for, read_and_check};
use crate::case::{Case, Outcome, expect, fail};
use crate::place::{Guest, Place, drop_cache, remove};

pub(super) fn cases() -> Vec<Case> {
    vec![Case::new("spin: a wrong peer-to-peer read is detected", wrong_p2p_is_detected)]
}

fn wrong_p2p_is_detected(guest: &Guest) -> Outcome {
    let (path, bytes) = guest.cold(Place::Ext4, "p2p_probe", 8 * MIB)?;
    let file = File::open(&path)?;
    let liar: &'static WrongP2p = Box::leak(Box::new(WrongP2p(AtomicU64::new(0))));
    let runtime = Runtime::with_kernel(Settings::default(), liar);
    let mut memory = memory_for(8 * MIB)?;
    for _ in 0..3 {
        let stats = read_and_check(&runtime, &file, &mut memory, (0, 0, 8 * MIB), &bytes)?;
        expect("bytes by p2p", by(&stats, Route::P2p), 0)?;
        drop_cache(&file)?;
    }
    let wrong = liar.0.load(Relaxed);
    if !(1..=4).contains(&wrong) {
        return fail(format!("{wrong} reads were tried peer to peer, expected a few and then no more"));
    }
    let reasons = explained(&runtime, &file, &memory)?;
    if !reasons.contains(&Reason::P2pUntrusted) {
        return fail(format!("no reason reports that the pair is not trusted: {reasons:?}"));
    }
    remove(&path);
    Ok(())
}

/// The real system calls, but peer-to-peer reads are wrong by one byte; counts them.
#[derive(Debug)]
struct WrongP2p(AtomicU64);

impl Syscalls for WrongP2p {
    unsafe fn pread(
        &self,
        route: Route,
        fd: Fd,
        buf: *mut u8,
        len: usize,
        offset: u64,
        flags: u32,
    ) -> Result<usize, Errno> {
        // SAFETY: guaranteed by the caller.
        let got = unsafe { LinuxSyscalls.pread(route, fd, buf, len, offset, flags) };
        if route == Route::P2p && got.is_ok_and(|n| n > 0) {
            self.0.fetch_add(1, Relaxed);
            // SAFETY: the Linux kernel has just written this byte, and p2pmem can be stored to.
            unsafe { *buf.add(len / 2) ^= 1 };
        }
        got
    }
}
