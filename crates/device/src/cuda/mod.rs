//! CUDA: not here yet. These four functions are all that the registry needs of it.

use crate::Allocation;

/// Whether this process could own CUDA memory: it has loaded the driver, or opened its device files.
/// Asked after each hint; once it says yes, the registry asks about addresses.
pub(crate) fn possible() -> bool {
    false
}

/// The allocation that holds `addr`. May believe its caches, the negative one too.
pub(crate) fn find(addr: *const u8, want: usize) -> Option<Allocation> {
    let _ = (addr, want);
    None
}

/// As [`find`] after the kernel refused the address: believes no negative cache, and looks whether the driver has
/// been loaded meanwhile.
pub(crate) fn find_after_fault(addr: *const u8, want: usize) -> Option<Allocation> {
    let _ = (addr, want);
    None
}

/// The program opened a path.
pub(crate) fn hint_open(path: &[u8]) {
    let _ = path;
}
