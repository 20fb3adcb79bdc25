//! Calls that must not spoil a graph capture.

use spinio_sys::cuda::{CaptureMode, Driver};

/// While it lives, the thread's own calls are not held against captures: it waits for, and registers, only what is
/// its own and on no stream that is captured.
pub(super) struct RelaxedCapture {
    driver: &'static Driver,
    previous: Option<CaptureMode>,
}

impl RelaxedCapture {
    pub(super) fn enter(driver: &'static Driver) -> RelaxedCapture {
        RelaxedCapture { driver, previous: driver.exchange_capture_mode(CaptureMode::RELAXED) }
    }
}

impl Drop for RelaxedCapture {
    fn drop(&mut self) {
        if let Some(mode) = self.previous {
            self.driver.exchange_capture_mode(mode);
        }
    }
}
