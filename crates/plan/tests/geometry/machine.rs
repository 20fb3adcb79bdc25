//! A sysfs in a table.

use std::collections::BTreeMap;

use spinio_plan::geometry::SysfsReader;

#[derive(Default)]
pub(crate) struct Machine {
    texts: BTreeMap<String, String>,
    links: BTreeMap<String, String>,
}

impl Machine {
    /// A disk whose directory in /sys/devices is `path`.
    pub(crate) fn disk(mut self, number: &str, path: &str) -> Machine {
        let dir = format!("/sys/dev/block/{number}");
        self.links.insert(dir.clone(), format!("../../devices/{path}"));
        self.texts.insert(format!("{dir}/dev"), format!("{number}\n"));
        self.file(number, "size", "2097152").file(number, "queue/read_ahead_kb", "128").file(
            number,
            "queue/logical_block_size",
            "512",
        )
    }

    pub(crate) fn nvme(self, number: &str, name: &str) -> Machine {
        let controller = &name[..name.len() - 2];
        self.disk(number, &format!("pci0000:00/0000:00:02.0/0000:03:00.0/nvme/{controller}/{name}"))
    }

    /// A file in a device's directory.
    pub(crate) fn file(mut self, number: &str, name: &str, text: &str) -> Machine {
        self.texts.insert(format!("/sys/dev/block/{number}/{name}"), format!("{text}\n"));
        self
    }

    pub(crate) fn at(mut self, path: &str, text: &str) -> Machine {
        self.texts.insert(path.to_owned(), format!("{text}\n"));
        self
    }

    pub(crate) fn slaves(mut self, number: &str, of: &[(&str, &str)]) -> Machine {
        for (name, member) in of {
            self = self.file(number, &format!("slaves/{name}/dev"), member);
        }
        self
    }

    /// An md array over members, all in sync.
    pub(crate) fn md(self, number: &str, level: &str, chunk: &str, layout: &str, members: &[(&str, &str)]) -> Machine {
        let mut machine = self
            .disk(number, "virtual/block/md0")
            .file(number, "md/level", level)
            .file(number, "md/chunk_size", chunk)
            .file(number, "md/layout", layout)
            .file(number, "md/raid_disks", &members.len().to_string())
            .file(number, "md/degraded", "0")
            .file(number, "md/sync_action", "idle")
            .slaves(number, members);
        for (slot, (name, member)) in members.iter().enumerate() {
            machine = machine
                .file(number, &format!("md/dev-{name}/slot"), &slot.to_string())
                .file(number, &format!("md/dev-{name}/state"), "in_sync")
                .file(number, &format!("md/dev-{name}/block/dev"), member);
        }
        machine
    }
}

impl SysfsReader for Machine {
    fn read_text(&self, path: &str) -> Option<String> {
        self.texts.get(path).cloned()
    }

    fn list_dir(&self, path: &str) -> Vec<String> {
        let inside = self.texts.keys().filter_map(|p| p.strip_prefix(path)?.strip_prefix('/'));
        let mut names: Vec<String> = inside.filter_map(|p| p.split('/').next()).map(str::to_owned).collect();
        names.dedup();
        // In an unspecified order.
        names.reverse();
        names
    }

    fn read_link(&self, path: &str) -> Option<String> {
        self.links.get(path).cloned()
    }
}
