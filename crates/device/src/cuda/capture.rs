//! Calls that must not invalidate a graph capture.

use spinio_sys::cuda::{CaptureMode, Driver};

/// While it lives, the thread's calls do not invalidate captures: it waits for, and registers, only its
/// own objects, on no stream that is captured.
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
