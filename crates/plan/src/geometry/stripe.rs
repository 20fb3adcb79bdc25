//! The beginnings and the width of stripes, and the data of each member.
//!
//! ```text
//!   RAID-5 of 4, 64 KiB chunks, left-symmetric        bytes of the array
//!              disk 0   1   2   3
//!   stripe 0        0   1   2   P      width = 3 x 64 KiB: bytes that must be written together
//!   stripe 1        4   5   P   3      to avoid reads of old parity
//!   stripe 2        8   P   6   7
//!                   └── chunk: commands are split at its ends, so that each is for one disk
//! ```
//!
//! Offsets are those of the uppermost block device. A file's own offsets differ by the positions of its extents; file
//! systems that are aware of the stripe begin large extents on it.
//!
//! Reads are not distributed to the members one by one: the Linux kernel splits a command at the chunks and has all
//! members work on it at once, so many small commands only cost more. Tried on btrfs RAID-0 over four loop devices,
//! each throttled: 128 MiB in commands of 2 MiB 270 MB/s, of one chunk each, distributed by member, 228 MB/s, of one
//! chunk in order 193; requests of 8 MiB 425, 228 and 198. So the only useful step is to end a command where a chunk
//! ends.
//!
//! Known flaws: zones of a RAID-0 whose members differ in length, md's far and offset layouts of RAID-10 and its rarer
//! RAID-5 layouts are split correctly, but the member that stores a chunk is not known.

use super::{Kind, Layer, Level};

/// How chunks are distributed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Round-robin: RAID-0, the device mapper's stripes; not btrfs (it allocates each GiB separately).
    RoundRobin,
    /// Each chunk on this many neighbours: RAID-10, near.
    Near(u32),
    /// The parity of this many disks moves left from stripe to stripe, and data begins after it: the default layout of
    /// RAID-5 and -6 today.
    LeftSymmetric(u32),
    /// It is not known which member stores a chunk.
    Unknown,
}

/// The stripes of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stripe {
    /// Contiguous bytes on a member; not 0.
    pub chunk: u64,
    /// Chunks of data in a stripe; not 0.
    pub data: u32,
    /// Members, parity and copies included.
    pub members: u32,
    /// Chunks of parity in a stripe.
    pub parity: u32,
    /// How the chunks are distributed.
    pub layout: Layout,
    /// The position in a stripe of byte 0 of the uppermost device; none if unknown.
    pub phase: Option<u64>,
}

impl Stripe {
    /// The stripes under a layer, of the uppermost array that has any.
    pub fn from_layer(layer: &Layer) -> Option<Stripe> {
        let only = || match &layer.members[..] {
            [member] => Stripe::from_layer(member),
            _ => None,
        };
        match &layer.kind {
            Kind::Partition { start } => {
                let stripe = only()?;
                let phase = stripe.phase.and_then(|phase| Some(phase.checked_add(*start)? % stripe.width()));
                Some(Stripe { phase, ..stripe })
            }
            Kind::Md(md) => {
                let disks = md.disks;
                let parity = md.level.parity();
                let (layout, data) = match md.level {
                    Level::Raid0 => (Layout::RoundRobin, disks),
                    Level::Raid10 => raid10(md.layout, disks)?,
                    Level::Raid5 | Level::Raid6 if md.layout == 2 => {
                        (Layout::LeftSymmetric(parity), disks.checked_sub(parity)?)
                    }
                    Level::Raid4 | Level::Raid5 | Level::Raid6 => (Layout::Unknown, disks.checked_sub(parity)?),
                    Level::Raid1 if layer.active().count() == 1 => return only(),
                    _ => return None,
                };
                Stripe::new(md.chunk, data, disks, parity, layout)
            }
            Kind::Striped { chunk } => {
                let members = u32::try_from(layer.members.len()).ok()?;
                Stripe::new(*chunk, members, members, 0, Layout::RoundRobin)
            }
            Kind::LvmRaid { chunk, data } => {
                let members = u32::try_from(layer.members.len() / 2).ok()?.max(*data);
                // Mirrored stripes and parity look alike from outside; writers need to know about parity.
                Stripe::new(*chunk, *data, members, members - *data, Layout::Unknown)
            }
            Kind::Linear | Kind::Crypt | Kind::Mapper | Kind::Thin | Kind::Multipath | Kind::Bcache => {
                // LVM and cryptsetup begin at whole MiB, which is a stripe boundary only if the stripe divides it.
                only()
                    .map(|stripe| Stripe { phase: stripe.phase.filter(|_| (1 << 20) % stripe.width() == 0), ..stripe })
            }
            Kind::Btrfs { profile } => {
                let members = u32::try_from(layer.members.len()).ok()?;
                let (data, parity) = match profile.as_str() {
                    "raid0" => (members, 0),
                    "raid10" => (members / 2, 0),
                    "raid5" => (members.checked_sub(1)?, 1),
                    "raid6" => (members.checked_sub(2)?, 2),
                    _ => return None,
                };
                let stripe = Stripe::new(64 << 10, data, members, parity, Layout::Unknown)?;
                Some(Stripe { phase: None, ..stripe })
            }
            Kind::Disk { .. } | Kind::Loop { .. } | Kind::Unknown => None,
        }
    }

    /// None for values that no driver would produce.
    fn new(chunk: u64, data: u32, members: u32, parity: u32, layout: Layout) -> Option<Stripe> {
        let sane = (512..=1 << 32).contains(&chunk) && data > 0 && members >= data && members <= 4096;
        sane.then_some(Stripe { chunk, data, members, parity, layout, phase: Some(0) })
    }

    /// Bytes of data in a stripe.
    pub const fn width(&self) -> u64 {
        self.chunk * self.data as u64
    }

    /// The preferred end of a read that begins at `at` and may be `most` bytes long: the end of its last whole chunk,
    /// if any.
    pub fn end_at_chunk(&self, at: u64, max_len: u64) -> u64 {
        let phase = self.phase.unwrap_or(0);
        let limit = at.saturating_add(max_len.max(1));
        let end = (limit.saturating_add(phase) / self.chunk * self.chunk).saturating_sub(phase);
        // A chunk longer than the command is read in commands as long as they may be.
        if end > at && max_len >= self.chunk { end } else { limit }
    }

    /// The member that stores byte `at`: the one that is read, where there are copies.
    pub fn member(&self, at: u64) -> Option<u32> {
        let at = at.checked_add(self.phase?)?;
        let members = u64::from(self.members);
        let chunk = at / self.chunk;
        Some(match self.layout {
            Layout::RoundRobin => chunk % members,
            Layout::Near(copies) => chunk % members * u64::from(copies) % members,
            Layout::LeftSymmetric(parity) => {
                let (stripe, index) = (chunk / u64::from(self.data), chunk % u64::from(self.data));
                let first = members - 1 - stripe % members;
                // With one parity disk data begins after it, with two after the second.
                (first + u64::from(parity) + index) % members
            }
            Layout::Unknown => return None,
        } as u32)
    }
}

fn raid10(layout: u32, disks: u32) -> Option<(Layout, u32)> {
    let (near, far) = (layout & 0xff, layout >> 8 & 0xff);
    let copies = near.checked_mul(far).filter(|n| *n > 0)?;
    // An odd number of disks still distributes as many chunks a round as whole copies fit, on average.
    let data = (disks / copies).max(1);
    let aligned = disks.is_multiple_of(copies);
    Some((if far == 1 && aligned { Layout::Near(near) } else { Layout::Unknown }, data))
}

#[cfg(test)]
mod tests {
    use super::super::{Md, QueueLimits, Role};
    use super::*;
    use crate::stripe_layout::{DeviceExtent, StripeLayout};

    fn layer(kind: Kind, members: Vec<Layer>) -> Layer {
        Layer {
            name: "x".into(),
            number: None,
            kind,
            bytes: 0,
            queue: QueueLimits::default(),
            role: Role::Active,
            members,
        }
    }

    fn md(level: Level, chunk: u64, disks: u32, layout: u32) -> Layer {
        let md = Md { level, chunk, disks, degraded: 0, layout, action: String::new() };
        layer(Kind::Md(md), Vec::new())
    }

    #[test]
    fn stripe_widths() {
        let of = |l: Layer| Stripe::from_layer(&l).map(|s| (s.width(), s.parity));
        assert_eq!(of(md(Level::Raid0, 65536, 4, 0)), Some((262_144, 0)));
        assert_eq!(of(md(Level::Raid5, 65536, 4, 2)), Some((196_608, 1)));
        assert_eq!(of(md(Level::Raid6, 65536, 5, 2)), Some((196_608, 2)));
        assert_eq!(of(md(Level::Raid10, 65536, 4, 0x102)), Some((131_072, 0)));
        assert_eq!(of(md(Level::Raid1, 0, 2, 0)), None);
        assert_eq!(of(md(Level::Raid5, 65536, 0, 2)), None);
        assert_eq!(of(md(Level::Raid0, 0, 4, 0)), None);
    }

    #[test]
    fn partition_offset_shifts_stripes() {
        let part = layer(Kind::Partition { start: 1 << 20 }, vec![md(Level::Raid5, 65536, 4, 2)]);
        let stripe = Stripe::from_layer(&part).expect("striped");
        assert_eq!(stripe.phase, Some((1 << 20) % 196_608));
        // The first boundary on the partition is where the array's sixth stripe begins.
        let whole =
            StripeLayout::new(stripe.width(), (1 << 20) % 196_608, [DeviceExtent { file: 0, device: 0, len: 1 << 30 }]);
        assert_eq!(whole.end_of_chunk(0, 196_608), Some(6 * 196_608 - (1 << 20)));
        // Through LVM it is unknown, unless it makes no difference.
        let volume = layer(Kind::Linear, vec![md(Level::Raid5, 65536, 4, 2)]);
        assert_eq!(Stripe::from_layer(&volume).expect("striped").phase, None);
        let volume = layer(Kind::Linear, vec![md(Level::Raid0, 65536, 4, 0)]);
        assert_eq!(Stripe::from_layer(&volume).expect("striped").phase, Some(0));
    }

    #[test]
    fn left_symmetric_matches_kernel_layout() {
        let stripe = Stripe::from_layer(&md(Level::Raid5, 65536, 4, 2)).expect("striped");
        let members: Vec<_> = (0..9).map(|chunk| stripe.member(chunk * 65536).expect("a known member")).collect();
        assert_eq!(members, [0, 1, 2, 3, 0, 1, 2, 3, 0]);
        let stripe = Stripe::from_layer(&md(Level::Raid6, 65536, 4, 2)).expect("striped");
        let members: Vec<_> = (0..6).map(|chunk| stripe.member(chunk * 65536).expect("a known member")).collect();
        // P on 3 and Q on 0, then P on 2 and Q on 3, then P on 1 and Q on 2.
        assert_eq!(members, [1, 2, 0, 1, 3, 0]);
        let stripe = Stripe::from_layer(&md(Level::Raid10, 65536, 4, 0x102)).expect("striped");
        let members: Vec<_> = (0..4).map(|chunk| stripe.member(chunk * 65536).expect("a known member")).collect();
        assert_eq!(members, [0, 2, 0, 2]);
    }
}
