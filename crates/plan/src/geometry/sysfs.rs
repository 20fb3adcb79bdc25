//! From sysfs to a tree of layers.

use super::parse::{device_number, disk_path, md_role, number};
use super::{BlockStack, Kind, Layer, Level, Md, QueueLimits, Role, Transport};

/// The source of sysfs data. Paths are absolute, and `..` after a link is resolved as the Linux kernel does: the
/// directory that contains the link's target.
pub trait SysfsReader {
    /// The contents of a file, its first few KiB.
    fn read_text(&self, path: &str) -> Option<String>;
    /// The names in a directory, in any order.
    fn list_dir(&self, path: &str) -> Vec<String>;
    /// The target of a symbolic link.
    fn read_link(&self, path: &str) -> Option<String>;
}

/// The limit of stacked layers.
const MAX_DEPTH: u32 = 16;

/// The limit of all layers.
const MAX_LAYERS: u32 = 1024;

/// Sectors of sysfs, whatever the sector size of the disk is.
const SECTOR: u64 = 512;

/// A file system on one block device, or the device itself.
pub fn read_device(source: &dyn SysfsReader, file_system: &str, number: (u32, u32)) -> BlockStack {
    let mut walk = Walker { source, layers_left: MAX_LAYERS };
    BlockStack { file_system: file_system.to_owned(), top: walk.layer(number, MAX_DEPTH) }
}

/// btrfs, by its UUID ("d7a4…-…", as in sysfs).
pub fn read_btrfs(source: &dyn SysfsReader, uuid: &str) -> BlockStack {
    let mut walk = Walker { source, layers_left: MAX_LAYERS };
    let directory = format!("/sys/fs/btrfs/{}", file_name_only(uuid));
    let mut members: Vec<Layer> = sorted(source.list_dir(&format!("{directory}/devices")))
        .iter()
        .filter_map(|name| {
            device_number(&source.read_text(&format!("{directory}/devices/{}/dev", file_name_only(name)))?)
        })
        .filter_map(|number| walk.layer(number, MAX_DEPTH - 1))
        .collect();
    let top = match members.len() {
        0 => None,
        1 => members.pop(),
        _ => {
            const PROFILES: [&str; 9] =
                ["single", "dup", "raid0", "raid1", "raid1c3", "raid1c4", "raid10", "raid5", "raid6"];
            let in_use = source.list_dir(&format!("{directory}/allocation/data"));
            let mut profiles = PROFILES.iter().filter(|p| in_use.iter().any(|name| name == *p));
            let profile = match (profiles.next(), profiles.next()) {
                (Some(only), None) => (*only).to_owned(),
                _ => String::new(),
            };
            let read_ahead = walk.kib(&format!("{directory}/bdi/read_ahead_kb"));
            Some(Layer {
                name: "btrfs".to_owned(),
                number: None,
                kind: Kind::Btrfs { profile },
                bytes: members.iter().fold(0, |sum, m| m.bytes.saturating_add(sum)),
                queue: QueueLimits { read_ahead, ..QueueLimits::default() },
                role: Role::Active,
                members,
            })
        }
    };
    BlockStack { file_system: "btrfs".to_owned(), top }
}

/// A file system without a block device, or with an unknown one.
pub fn without_device(file_system: &str) -> BlockStack {
    BlockStack { file_system: file_system.to_owned(), top: None }
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

/// A name that stays in its directory.
fn file_name_only(name: &str) -> &str {
    if name.is_empty() || name.contains('/') || name == ".." { "." } else { name }
}

struct Walker<'a> {
    source: &'a dyn SysfsReader,
    layers_left: u32,
}

impl Walker<'_> {
    fn read_text(&self, path: &str) -> Option<String> {
        self.source.read_text(path)
    }

    fn number(&self, path: &str) -> Option<u64> {
        number(&self.read_text(path)?)
    }

    fn bytes(&self, path: &str) -> u64 {
        self.number(path).unwrap_or(0)
    }

    fn kib(&self, path: &str) -> u64 {
        self.bytes(path).saturating_mul(1024)
    }

    fn layer(&mut self, id: (u32, u32), depth: u32) -> Option<Layer> {
        self.layers_left = self.layers_left.checked_sub(1)?;
        let dir = format!("/sys/dev/block/{}:{}", id.0, id.1);
        let link = self.source.read_link(&dir)?;
        let name = link.rsplit('/').next().unwrap_or_default().to_owned();
        let partition = self.read_text(&format!("{dir}/partition")).is_some();
        // A partition's queue is that of its disk.
        let queue = self.queue(&format!("{dir}{}/queue", if partition { "/.." } else { "" }));
        let below = depth.checked_sub(1)?;
        let (kind, members) = match () {
            () if partition => self.partition(&dir, below),
            () if self.read_text(&format!("{dir}/md/level")).is_some() => self.md(&dir, below),
            () if self.read_text(&format!("{dir}/dm/name")).is_some() => self.device_mapper(&dir, &queue, below),
            () => match self.read_text(&format!("{dir}/loop/backing_file")) {
                Some(file) => (Kind::Loop { file: file.trim_end_matches('\n').to_owned() }, Vec::new()),
                None if name.starts_with("bcache") => (Kind::Bcache, self.slaves(&dir, below)),
                None => {
                    let (transport, pci) = disk_path(&link);
                    match (transport, self.slaves(&dir, below)) {
                        (_, members) if members.is_empty() => (Kind::Disk { transport, pci }, members),
                        (Transport::Virtual | Transport::Unknown, members) => (Kind::Unknown, members),
                        (..) => (Kind::Disk { transport, pci }, Vec::new()),
                    }
                }
            },
        };
        let bytes = self.bytes(&format!("{dir}/size")).saturating_mul(SECTOR);
        Some(Layer { name, number: Some(id), kind, bytes, queue, role: Role::Active, members })
    }

    fn queue(&self, dir: &str) -> QueueLimits {
        QueueLimits {
            logical: self.bytes(&format!("{dir}/logical_block_size")),
            minimum: self.bytes(&format!("{dir}/minimum_io_size")),
            optimal: self.bytes(&format!("{dir}/optimal_io_size")),
            max_request: self.kib(&format!("{dir}/max_sectors_kb")),
            read_ahead: self.kib(&format!("{dir}/read_ahead_kb")),
        }
    }

    fn partition(&mut self, dir: &str, depth: u32) -> (Kind, Vec<Layer>) {
        let start = self.bytes(&format!("{dir}/start")).saturating_mul(SECTOR);
        let whole = self.read_text(&format!("{dir}/../dev")).as_deref().and_then(device_number);
        let member = whole.and_then(|whole| self.layer(whole, depth));
        (Kind::Partition { start }, member.into_iter().collect())
    }

    fn slaves(&mut self, dir: &str, depth: u32) -> Vec<Layer> {
        let names = sorted(self.source.list_dir(&format!("{dir}/slaves")));
        let numbers = names.iter().map(|name| self.read_text(&format!("{dir}/slaves/{}/dev", file_name_only(name))));
        let numbers: Vec<_> = numbers.filter_map(|text| device_number(&text?)).collect();
        numbers.into_iter().filter_map(|number| self.layer(number, depth)).collect()
    }

    fn md(&mut self, dir: &str, depth: u32) -> (Kind, Vec<Layer>) {
        let md = format!("{dir}/md");
        let small = |walk: &Self, name: &str| {
            walk.number(&format!("{md}/{name}")).and_then(|n| u32::try_from(n).ok()).unwrap_or(0)
        };
        let word =
            |walk: &Self, name: &str| walk.read_text(&format!("{md}/{name}")).unwrap_or_default().trim().to_owned();
        let array = Md {
            level: Level::parse(&word(self, "level")),
            chunk: self.bytes(&format!("{md}/chunk_size")),
            disks: small(self, "raid_disks"),
            degraded: small(self, "degraded"),
            layout: small(self, "layout"),
            action: word(self, "sync_action"),
        };
        let mut found = Vec::new();
        for name in sorted(self.source.list_dir(&md)) {
            if !name.starts_with("dev-") {
                continue;
            }
            let disk = format!("{md}/{}", file_name_only(&name));
            let Some(id) = self.read_text(&format!("{disk}/block/dev")).as_deref().and_then(device_number) else {
                continue;
            };
            let slot = word(self, &format!("{}/slot", file_name_only(&name)));
            let state = word(self, &format!("{}/state", file_name_only(&name)));
            let Some(mut member) = self.layer(id, depth) else { continue };
            member.role = md_role(&state, &slot);
            found.push((number(&slot).unwrap_or(u64::MAX), member));
        }
        found.sort_by_key(|(slot, _)| *slot);
        let mut members: Vec<Layer> = found.into_iter().map(|(_, member)| member).collect();
        if members.is_empty() {
            members = self.slaves(dir, depth);
        }
        (Kind::Md(array), members)
    }

    fn device_mapper(&mut self, dir: &str, queue: &QueueLimits, depth: u32) -> (Kind, Vec<Layer>) {
        let uuid = self.read_text(&format!("{dir}/dm/uuid")).unwrap_or_default();
        let uuid = uuid.trim();
        let mut names = Vec::new();
        for slave in sorted(self.source.list_dir(&format!("{dir}/slaves"))) {
            let below = format!("{dir}/slaves/{}/dm", file_name_only(&slave));
            let text = |file: &str| self.read_text(&format!("{below}/{file}")).unwrap_or_default().trim().to_owned();
            names.push((text("name"), text("uuid")));
        }
        let members = self.slaves(dir, depth);
        let kind = match () {
            () if uuid.starts_with("CRYPT-") => Kind::Crypt,
            () if uuid.starts_with("mpath-") => Kind::Multipath,
            () if is_kpartx_partition(uuid) => Kind::Linear,
            () if names.iter().any(|(name, _)| name.contains("_rimage_")) => {
                let images = names.iter().filter(|(name, _)| name.contains("_rimage_")).count() as u64;
                match queue.optimal.checked_div(queue.minimum) {
                    Some(data) if (2..=images).contains(&data) && queue.optimal.is_multiple_of(queue.minimum) => {
                        Kind::LvmRaid { chunk: queue.minimum, data: data as u32 }
                    }
                    _ => Kind::LvmRaid { chunk: 0, data: 1 },
                }
            }
            () if names.iter().any(|(_, uuid)| uuid.ends_with("-tpool")) => Kind::Thin,
            () => match members.len() as u64 {
                n @ 2.. if queue.minimum >= 4096 && queue.minimum.checked_mul(n) == Some(queue.optimal) => {
                    Kind::Striped { chunk: queue.minimum }
                }
                2.. => Kind::Linear,
                _ if uuid.starts_with("LVM-") => Kind::Linear,
                _ => Kind::Mapper,
            },
        };
        (kind, members)
    }
}

/// "part1-mpath-...": kpartx's name of a partition.
fn is_kpartx_partition(uuid: &str) -> bool {
    uuid.strip_prefix("part")
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(digits, _)| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}
