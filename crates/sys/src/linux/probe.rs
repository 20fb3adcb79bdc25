//! Probes features of the Linux kernel without side effects.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use rustix::io::Errno;

use super::files::{Fd, close};
use super::raw::syscall;

/// Creates the smallest ring and closes it; returns the Linux kernel's feature bits.
/// ENOSYS: not built in; EPERM: forbidden by a sysctl or by seccomp.
pub fn io_uring() -> Result<u32, Errno> {
    const NR_IO_URING_SETUP: u32 = 425;
    const FEATURES: usize = 5;
    // `struct io_uring_params`: 120 bytes, of which the Linux kernel fills in its features.
    let mut params = [0u32; 30];
    // SAFETY: `params` has the size of the structure and lives across the call.
    let ring = unsafe { syscall(NR_IO_URING_SETUP, [1, params.as_mut_ptr() as usize, 0, 0, 0, 0]) }?;
    close(ring as Fd)?;
    Ok(params[FEATURES])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_uring_probe_returns_features_or_errno() {
        match io_uring() {
            // IORING_FEAT_SINGLE_MMAP and _NODROP came with the first Linux versions in use.
            Ok(features) => assert!(features & 3 != 0, "{features:x}"),
            Err(e) => assert!(matches!(e, Errno::NOSYS | Errno::PERM | Errno::NOMEM), "{e}"),
        }
    }
}
