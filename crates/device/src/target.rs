//! Device memory that a request fills or empties.

use crate::{Allocation, DeviceAddr};

/// Device memory that a request fills or empties.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The allocation that holds the address.
    pub allocation: Allocation,
    /// First byte.
    pub addr: DeviceAddr,
}
