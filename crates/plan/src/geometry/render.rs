//! Formats a stack as text.
//!
//! ```text
//!   ext4
//!   └─ md0  raid5, 64 KiB x 3+1, 1 of 4 missing, recover
//!      ├─ nvme0n1  nvme, 0000:03:00.0, 1.8 TiB
//!      └─ nvme1n1  nvme, 0000:04:00.0, 1.8 TiB, rebuilding
//! ```

use std::fmt;

use super::{BlockStack, Kind, Layer, Role, Stripe};

/// The number of members of one layer that are shown, before the rest is counted.
const MAX_DRAWN: usize = 32;

/// `64 KiB`, `1.8 TiB`
fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut value = bytes as f64;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if value.fract() < 0.05 { format!("{value:.0} {}", UNITS[unit]) } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// Names from sysfs may contain anything; a terminal must not receive control characters.
fn sanitize(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kind::Disk { transport, pci } => {
                f.write_str(transport.name())?;
                pci.as_ref().map_or(Ok(()), |pci| write!(f, ", {}", sanitize(pci)))
            }
            Kind::Partition { start } => write!(f, "partition from {}", size(*start)),
            Kind::Md(md) => f.write_str(&sanitize(md.level.name())),
            Kind::Linear => f.write_str("linear"),
            Kind::Striped { .. } => f.write_str("striped"),
            Kind::LvmRaid { chunk: 0, .. } => f.write_str("LVM mirror"),
            Kind::LvmRaid { .. } => f.write_str("LVM raid"),
            Kind::Crypt => f.write_str("encrypted"),
            Kind::Multipath => f.write_str("multipath"),
            Kind::Thin => f.write_str("thin volume"),
            Kind::Mapper => f.write_str("device mapper, its table needs root"),
            Kind::Loop { file } => write!(f, "loop over {}", sanitize(file)),
            Kind::Bcache => f.write_str("bcache"),
            Kind::Btrfs { profile } if profile.is_empty() => f.write_str("several profiles"),
            Kind::Btrfs { profile } => f.write_str(&sanitize(profile)),
            Kind::Unknown => f.write_str("unknown"),
        }
    }
}

impl Layer {
    /// A short description, without the name.
    pub fn describe(&self) -> String {
        let mut text = self.kind.to_string();
        let own = matches!(self.kind, Kind::Md(_) | Kind::Striped { .. } | Kind::LvmRaid { .. } | Kind::Btrfs { .. });
        if own && let Some(stripe) = Stripe::from_layer(self) {
            text += &format!(", {} x {}", size(stripe.chunk), stripe.data);
            if stripe.parity > 0 {
                text += &format!("+{}", stripe.parity);
            }
        }
        match &self.kind {
            Kind::Md(md) => {
                if md.degraded > 0 {
                    text += &format!(", {} of {} missing", md.degraded, md.disks);
                }
                if !matches!(md.action.as_str(), "" | "idle") {
                    text += &format!(", {}", sanitize(&md.action));
                }
            }
            Kind::Disk { .. } if self.bytes > 0 => text += &format!(", {}", size(self.bytes)),
            _ => {}
        }
        match self.role {
            Role::Active => {}
            Role::Rebuilding => text += ", rebuilding",
            Role::Spare => text += ", spare",
            Role::Faulty => text += ", failed",
        }
        text
    }

    fn draw(&self, f: &mut fmt::Formatter<'_>, indent: &str, last: bool) -> fmt::Result {
        let (branch, more) = if last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        write!(f, "\n{indent}{branch}{}  {}", sanitize(&self.name), self.describe())?;
        let indent = format!("{indent}{more}");
        let shown = self.members.len().min(MAX_DRAWN);
        let hidden = self.members.len() - shown;
        for (i, member) in self.members[..shown].iter().enumerate() {
            member.draw(f, &indent, i + 1 == shown && hidden == 0)?;
        }
        if hidden > 0 { write!(f, "\n{indent}└─ ... and {hidden} more") } else { Ok(()) }
    }
}

/// The tree, without a newline after the last line.
impl fmt::Display for BlockStack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.file_system.as_str() {
            "" => f.write_str("block device")?,
            name => f.write_str(&sanitize(name))?,
        }
        match &self.top {
            Some(top) => top.draw(f, "", true),
            None => f.write_str(" (no block device is known under it)"),
        }
    }
}
