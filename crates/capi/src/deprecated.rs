//! C names of earlier releases; the next release no longer has them (docs/deprecated.md).

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_int, c_void};

use crate::nvmmu::nvmmu_hint_range;
use crate::pinned::{spinio_is_pinned, spinio_map_revoked, spinio_pin_file, spinio_unpin_file};

#[unsafe(no_mangle)]
extern "C" fn spinio_hold(fd: c_int) -> c_int {
    spinio_pin_file(fd)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_release(fd: c_int) -> c_int {
    spinio_unpin_file(fd)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_is_held(fd: c_int) -> c_int {
    spinio_is_pinned(fd)
}

#[unsafe(no_mangle)]
extern "C" fn spinio_map_wanted(address: *const c_void) -> c_int {
    spinio_map_revoked(address)
}

#[unsafe(no_mangle)]
extern "C-unwind" fn nvmmu_expect(offset: i64, length: i64) -> c_int {
    nvmmu_hint_range(offset, length)
}
