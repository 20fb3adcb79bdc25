//! Flags of calls, with Linux's values.

pub(super) const MSG_PEEK: u32 = 2;
pub(super) const MSG_DONTWAIT: u32 = 0x40;
pub(super) const MSG_WAITALL: u32 = 0x100;
