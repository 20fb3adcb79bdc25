//! Who has copies of the pages of a file, as a server tells people.

use super::BadMessage;

/// How kernels load the pages of a map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MapKind {
    /// From a copy in device memory.
    #[default]
    Replica = 0,
    /// From pages of the Linux kernel's page cache that are registered with the device.
    Registered = 1,
    /// From a mapping of the file, as CPU programs do.
    Coherent = 2,
}

impl MapKind {
    /// The kind of a number in a message.
    pub(super) fn of(number: u64) -> Result<MapKind, BadMessage> {
        match number {
            0 => Ok(MapKind::Replica),
            1 => Ok(MapKind::Registered),
            2 => Ok(MapKind::Coherent),
            _ => Err(BadMessage::Kind),
        }
    }
}

/// A map of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Holder {
    /// The process that has it.
    pub pid: u64,
    /// Its user.
    pub user: u64,
    /// The map's first page in the file.
    pub first: u64,
    /// Its length.
    pub pages: u64,
    /// Pages of which it has head.
    pub current: u64,
    /// Pages of which it has an older version.
    pub stale: u64,
    /// Pages in an epoch for writing.
    pub open: u64,
    /// Pages that it has got from other maps, since it was made.
    pub from_peers: u64,
    /// How its kernels load the pages.
    pub kind: MapKind,
}

/// How a range of pages is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RangeState {
    /// Head is released bytes that are not in the file yet.
    pub unwritten: bool,
    /// The Linux kernel is being told to drop its copies.
    pub invalidating: bool,
    /// Maps that have head; 255 are as many or more. As the two that follow.
    pub current: u8,
    /// Maps that have an older version.
    pub stale: u8,
    /// Maps that have the pages in an epoch for writing.
    pub open: u8,
}

impl RangeState {
    pub(super) fn to_flags(self) -> u32 {
        let counts = u32::from_le_bytes([self.current, self.stale, self.open, 0]);
        counts | u32::from(self.unwritten) << 24 | u32::from(self.invalidating) << 25
    }

    pub(super) fn from_flags(flags: u32) -> Option<RangeState> {
        let [current, stale, open, bits] = flags.to_le_bytes();
        let state = RangeState { unwritten: bits & 1 != 0, invalidating: bits & 2 != 0, current, stale, open };
        (bits < 4).then_some(state)
    }
}
