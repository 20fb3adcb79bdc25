//! Device memory that a request reads into or writes from.

use crate::{Allocation, DeviceAddr};

/// Device memory that a request reads into or writes from.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The allocation that contains the address.
    pub allocation: Allocation,
    /// First byte.
    pub addr: DeviceAddr,
}
