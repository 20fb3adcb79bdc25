//! The block devices under a file, read from sysfs.
//!
//! ```text
//!   file on ext4, xfs ...   its device number ──> /sys/dev/block ──> layers
//!   on btrfs                the file system's UUID (an unprivileged ioctl) ──> /sys/fs/btrfs
//!   on an overlay           mountinfo ──> the lower directories ──> the same file there ──> again
//!   in memory, by network   no block device
//! ```
//!
//! Reading costs about 10 us per layer, so results are cached per device for two seconds: long enough for a thousand
//! files of one data set, short enough that a failed disk, or a number that is reused for another device, is soon
//! noticed. Correctness does not depend on it: it selects cost models, split points and messages.
//!
//! Without /sys, as in some containers, the storage of every file is unknown.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spinio_plan::geometry::{self, BlockStack, SysfsReader, overlay};
use spinio_sys::linux::fs_magic::{self, BTRFS, OVERLAYFS};
use spinio_sys::linux::{self, Fd, FileKind, Stat};

use spinio_host::lock;
use spinio_host::syscalls::Syscalls;

/// How long a cached stack is valid.
const TTL: Duration = Duration::from_secs(2);

/// Stacks cached at once.
const MAX_CACHED: usize = 64;

/// The limit in bytes of a sysfs file, and of mountinfo.
const SYSFS_MAX: usize = 4096;
const MOUNTINFO_MAX: usize = 4 << 20;

/// The most nested overlays.
const MAX_OVERLAY_DEPTH: u32 = 4;

/// Reads sysfs by system calls.
struct Sysfs<'a>(&'a dyn Syscalls);

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

impl SysfsReader for Sysfs<'_> {
    fn read_text(&self, path: &str) -> Option<String> {
        self.0.read_sysfs(&CString::new(path).ok()?, SYSFS_MAX).ok().map(lossy)
    }

    fn list_dir(&self, path: &str) -> Vec<String> {
        let names = CString::new(path).ok().and_then(|path| self.0.list_dir(&path).ok());
        names.unwrap_or_default().into_iter().map(|name| lossy(name.into_bytes())).collect()
    }

    fn read_link(&self, path: &str) -> Option<String> {
        self.0.read_link(&CString::new(path).ok()?).ok().map(lossy)
    }
}

/// Magic number of a file system, 0 for a block device itself, and device number.
type Key = (u64, u64);

/// The stacks that were read recently.
#[derive(Default)]
pub struct BlockStackCache {
    entries: Mutex<HashMap<Key, (Instant, Arc<BlockStack>)>>,
}

impl BlockStackCache {
    /// The block devices under `fd`, a descriptor of the calling thread; `magic`: as `fstatfs` reported.
    pub fn get(&self, sys: &dyn Syscalls, fd: Fd, stat: Stat, magic: u64) -> Arc<BlockStack> {
        self.resolve(sys, fd, stat, magic, MAX_OVERLAY_DEPTH)
    }

    fn resolve(&self, sys: &dyn Syscalls, fd: Fd, stat: Stat, magic: u64, depth: u32) -> Arc<BlockStack> {
        if stat.kind == FileKind::Block {
            return self.get_or_read((0, stat.rdev), || geometry::read_device(&Sysfs(sys), "", dev_numbers(stat.rdev)));
        }
        let name = fs_magic::name(magic).map_or_else(|| format!("file system {magic:#x}"), str::to_owned);
        match magic {
            OVERLAYFS => self.resolve_overlay(sys, fd, stat, depth),
            BTRFS => self.get_or_read((magic, stat.dev), || match sys.btrfs_uuid(fd) {
                Ok(uuid) => geometry::read_btrfs(&Sysfs(sys), &uuid_text(uuid)),
                Err(_) => geometry::without_device(&name),
            }),
            _ if linux::major(stat.dev) == 0 => Arc::new(geometry::without_device(&name)),
            _ => {
                self.get_or_read((magic, stat.dev), || geometry::read_device(&Sysfs(sys), &name, dev_numbers(stat.dev)))
            }
        }
    }

    fn resolve_overlay(&self, sys: &dyn Syscalls, fd: Fd, stat: Stat, depth: u32) -> Arc<BlockStack> {
        let lower = || {
            let depth = depth.checked_sub(1)?;
            let proc = Sysfs(sys);
            let path = proc.read_link(&format!("/proc/thread-self/fd/{fd}"))?;
            let fdinfo = proc.read_text(&format!("/proc/thread-self/fdinfo/{fd}"))?;
            let id = fdinfo.lines().find_map(|l| l.strip_prefix("mnt_id:"))?.trim().parse().ok()?;
            let mounts = lossy(sys.read_sysfs(c"/proc/thread-self/mountinfo", MOUNTINFO_MAX).ok()?);
            let candidates = overlay::candidates(&mounts, id, &path);
            candidates.iter().find_map(|path| self.overlay_lower_file(sys, path, stat, depth))
        };
        let lower_stack = lower().unwrap_or_default();
        let name = if lower_stack.file_system.is_empty() {
            "overlay".to_owned()
        } else {
            format!("overlay on {}", lower_stack.file_system)
        };
        Arc::new(BlockStack { file_system: name, top: lower_stack.top.clone() })
    }

    /// The stack of an overlay's file in one of the lower directories, if `path` is that file.
    fn overlay_lower_file(&self, sys: &dyn Syscalls, path: &str, merged: Stat, depth: u32) -> Option<Arc<BlockStack>> {
        let path = CString::new(path).ok()?;
        let fd = linux::open(&path, (linux::O_PATH | linux::O_NOFOLLOW) as i32, 0).ok()?;
        let stack = sys.fstat(fd).ok().and_then(|stat| {
            let same = stat.kind == merged.kind && stat.size == merged.size && stat.mtime_ns == merged.mtime_ns;
            same.then(|| {
                let magic = sys.file_system(fd).unwrap_or(0);
                // An O_PATH descriptor has no ioctl, which btrfs needs.
                let reopened = match magic {
                    BTRFS => sys.reopen(linux::gettid(), fd, linux::O_RDONLY as i32).ok(),
                    _ => None,
                };
                let stack = self.resolve(sys, reopened.unwrap_or(fd), stat, magic, depth);
                reopened.into_iter().for_each(|fd| sys.close(fd));
                stack
            })
        });
        let _ = linux::close(fd);
        stack
    }

    fn get_or_read(&self, key: Key, read: impl FnOnce() -> BlockStack) -> Arc<BlockStack> {
        if let Some((when, stack)) = lock(&self.entries).get(&key)
            && when.elapsed() < TTL
        {
            return Arc::clone(stack);
        }
        let stack = Arc::new(read());
        let mut entries = lock(&self.entries);
        if entries.len() >= MAX_CACHED {
            entries.retain(|_, (when, _)| when.elapsed() < TTL);
        }
        entries.insert(key, (Instant::now(), Arc::clone(&stack)));
        stack
    }
}

fn dev_numbers(dev: u64) -> (u32, u32) {
    (linux::major(dev) as u32, linux::minor(dev) as u32)
}

fn uuid_text(uuid: [u8; 16]) -> String {
    let hex: String = uuid.iter().map(|b| format!("{b:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_text_matches_sysfs() {
        let uuid = core::array::from_fn(|i| i as u8 * 16);
        assert_eq!(uuid_text(uuid), "00102030-4050-6070-8090-a0b0c0d0e0f0");
    }

    #[test]
    fn stacks_are_cached_for_ttl() {
        let stacks = BlockStackCache::default();
        let first = stacks.get_or_read((1, 2), || geometry::without_device("a"));
        assert!(Arc::ptr_eq(&first, &stacks.get_or_read((1, 2), || geometry::without_device("b"))));
        for dev in 0..1000 {
            stacks.get_or_read((2, dev), || geometry::without_device("c"));
        }
        assert_eq!(stacks.get_or_read((2, 999), || geometry::without_device("d")).file_system, "c");
    }
}
