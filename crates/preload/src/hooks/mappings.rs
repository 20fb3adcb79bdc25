//! Hooks of `mmap` and `munmap`, for maps of files in device memory and for peer-to-peer memory.
//!
//! **Device memory.** `mmap` with MAP_ONGPU makes a map of GAIA. Those flags fail in the Linux kernel, so that no other
//! program uses them. `munmap` of a map unmaps it there, since its addresses are the device's. Other calls compare the
//! flags, or the range with the bounds of all maps: no lock, no allocation, because allocators call `munmap`. The
//! device's driver may unmap parts of what it has: its calls are passed through.
//!
//! **Peer-to-peer memory.** To see `mmap` is the only way to learn that an address is memory of a PCI device. The CPU
//! can load and store there, so the kernel reads into it without an error, and nothing would show that a storage device
//! could have written to it by DMA. Until an `open` of `.../p2pmem/allocate` has succeeded, that is one load.
//!
//! Known flaws:
//! - A mapping of the CPU that the program puts over a map, by MAP_FIXED or `mremap`, is not noticed.
//! - A mapping made through a descriptor that no hook of `open` has seen (inherited, received), or moved by
//!   `mremap`, is not recognised. It is read into as host memory: correct, but never peer-to-peer.

#![expect(unsafe_code, reason = "interposed C functions")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use spinio_capi::gaia;
use spinio_device::registry;
use spinio_sys::linux;

use super::hook;
use crate::{caller, disabled, errno, next_symbol as next};

/// Which files of this kind the program has opened; 0 for none. There is one for each provider.
static P2PMEM_FILES: [AtomicU64; 16] = [const { AtomicU64::new(0) }; 16];

/// A key for a file, never 0. Two files with one key cost the registry a look at the mapping, which decides.
fn file_key(fd: c_int) -> Option<u64> {
    let stat = linux::fstat(fd).ok()?;
    Some((stat.ino ^ stat.dev.rotate_left(40)).max(1))
}

/// A path was opened.
pub(super) fn after_open(fd: c_int, path: &[u8]) {
    if !path.ends_with(b"/p2pmem/allocate") {
        return;
    }
    if let Some(new) = file_key(fd) {
        // Filled from the front, so an empty first slot means an empty table.
        let _ = P2PMEM_FILES.iter().any(|slot| {
            let old = slot.compare_exchange(0, new, Relaxed, Relaxed);
            old.is_ok() || old == Err(new)
        });
    }
}

/// Whether the program may have mappings of this kind at all.
#[inline(always)]
fn has_candidates() -> bool {
    P2PMEM_FILES[0].load(Relaxed) != 0
}

macro_rules! maps {
    ($($name:ident = $next:ident;)+) => {$(
        #[unsafe(no_mangle)]
        unsafe extern "C-unwind" fn $name(
            at: *mut c_void,
            len: usize,
            prot: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void {
            if gaia::is_on_gpu(flags) && !disabled::is_disabled() {
                return gaia::map_on_gpu(len, prot, flags, fd, offset);
            }
            // SAFETY: the program's own arguments.
            let made = unsafe { next::$next.get()(at, len, prot, flags, fd, offset) };
            if has_candidates() && made != libc::MAP_FAILED {
                after_mmap(made, len, flags, fd);
            }
            made
        }
    )+};
}

maps! {
    mmap = MMAP;
    mmap64 = MMAP64;
}

hook! {
    fn munmap(at: *mut c_void, len: usize) -> c_int, caller in "rdx" => unmap(at, len, caller);
}

/// # Safety
/// The program's call of `munmap`.
#[inline(always)]
unsafe fn unmap(at: *mut c_void, len: usize, caller: usize) -> c_int {
    if gaia::touches_map(at, len)
        && !caller::is_driver(caller)
        && let Some(done) = gaia::unmap_on_gpu(at, len)
    {
        return done;
    }
    if has_candidates() {
        // Before the range can be mapped again by another thread.
        let entry = errno::Saved::now();
        registry::unregister_mapping(at.cast(), len);
        entry.restore();
    }
    // SAFETY: the program's own arguments.
    unsafe { next::MUNMAP.get()(at, len) }
}

#[cold]
fn after_mmap(at: *mut c_void, len: usize, flags: c_int, fd: c_int) {
    let saved = errno::get();
    if flags & libc::MAP_FIXED != 0 {
        registry::unregister_mapping(at.cast(), len);
    }
    if fd >= 0
        && let Some(file_key) = file_key(fd)
        && P2PMEM_FILES.iter().any(|slot| slot.load(Relaxed) == file_key)
    {
        registry::register_mapping(at.cast(), len);
    }
    errno::set(saved);
}
