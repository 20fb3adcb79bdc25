//! Whether storage may DMA into a device, as far as the layers show: a hint and a reason. The P2P probe decides.
//!
//! ```text
//!   forwards it                                   refuses it
//!   partitions                                    md linear, -4, -5, -6: parity is computed by the CPU
//!   md RAID-0, -1, -10 (Linux 7.2 and later)      the device mapper (LVM, dm-crypt, multipath), loop, bcache
//!   NVMe on PCIe                                  every other kind of disk
//! ```

use super::{BlockStack, Kind, Layer, Level, Transport};

/// The hint from the layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum P2pHint {
    /// No layer refuses it.
    Allowed,
    /// An array that forwards it since Linux 7.2.
    Array(String),
    /// This layer refuses it, with the reason.
    Blocked(String, &'static str),
}

impl P2pHint {
    /// The layers of a file.
    pub fn from_stack(stack: &BlockStack) -> P2pHint {
        match &stack.top {
            Some(top) => from_layer(top),
            None => P2pHint::Blocked(stack.file_system.clone(), "no block device is known under it"),
        }
    }

    /// Whether a probe is worthwhile.
    pub fn worth_probing(&self) -> bool {
        !matches!(self, P2pHint::Blocked(..))
    }

    /// One sentence.
    pub fn text(&self) -> String {
        match self {
            P2pHint::Allowed => "no layer is in the way of peer-to-peer DMA".to_owned(),
            P2pHint::Array(name) => format!("{name} passes peer-to-peer DMA on since Linux 7.2; before, it refuses it"),
            P2pHint::Blocked(name, why) => format!("{name} refuses peer-to-peer DMA: {why}"),
        }
    }
}

fn from_layer(layer: &Layer) -> P2pHint {
    let closed = |why| P2pHint::Blocked(layer.name.clone(), why);
    let below = || {
        let answers: Vec<P2pHint> = layer.active().map(from_layer).collect();
        let worst =
            answers.iter().find(|a| !a.worth_probing()).or_else(|| answers.iter().find(|a| **a != P2pHint::Allowed));
        worst.cloned().unwrap_or(if answers.is_empty() {
            closed("its members are not known")
        } else {
            P2pHint::Allowed
        })
    };
    match &layer.kind {
        Kind::Disk { transport: Transport::Nvme, .. } => P2pHint::Allowed,
        Kind::Disk { .. } => closed("only NVMe drives on PCIe DMA into other devices"),
        Kind::Partition { .. } => below(),
        Kind::Md(md) => match md.level {
            Level::Raid0 | Level::Raid1 | Level::Raid10 => match below() {
                P2pHint::Allowed => P2pHint::Array(layer.name.clone()),
                other => other,
            },
            Level::Raid4 | Level::Raid5 | Level::Raid6 => {
                closed("the CPU computes parity from memory that it can read")
            }
            Level::Linear | Level::Other(_) => closed("this kind of array does not pass it on"),
        },
        Kind::Linear | Kind::Striped { .. } | Kind::LvmRaid { .. } | Kind::Thin | Kind::Mapper => {
            closed("the device mapper (LVM) does not pass it on")
        }
        Kind::Crypt => closed("the CPU has to decrypt"),
        Kind::Multipath => closed("the device mapper (multipath) does not pass it on"),
        Kind::Loop { .. } => closed("a file as a disk is read by the CPU"),
        Kind::Bcache => closed("bcache does not pass it on"),
        Kind::Btrfs { .. } => below(),
        Kind::Unknown => closed("an unknown kind of block device"),
    }
}
