//! `SPINIO_DISABLE=1`: every hook becomes a plain call to the next function.
//!
//! Read once, when the library is loaded: later changes of the environment have no effect.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

static DISABLED: AtomicBool = AtomicBool::new(false);

/// Whether the hooks must do nothing.
#[inline]
pub(crate) fn is_disabled() -> bool {
    DISABLED.load(Relaxed)
}

/// Reads the settings, and says that the hooks count; for the constructor, while no other thread changes the environment.
pub(crate) fn init() {
    let disabled = spinio_io::Settings::of_process().disable;
    DISABLED.store(disabled, Relaxed);
    if !disabled {
        spinio_io::set_changes_counted();
    }
}
