//! The block devices under a file, read from sysfs.
//!
//! ```text
//!   file on ext4, xfs ...   its device number ──> /sys/dev/block ──> layers
//!   on btrfs                the file system's identity (an ioctl that everybody may) ──> /sys/fs/btrfs
//!   on an overlay           mountinfo ──> the folders below ──> the same file there ──> again
//!   in memory, by network   nothing is under it
//! ```
//!
//! Reading costs some 10 us a layer, so what was found is kept per device for two seconds: long enough for a thousand
//! files of one data set, short enough that a failed disk, or a number given to another device, is soon seen. Nothing
//! right depends on it: it chooses cost models, cuts and words.
//!
//! Without /sys, as in some containers, every file lies on storage that is not known.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use spinio_plan::geometry::{self, Source, Stack, overlay};
use spinio_sys::linux::fs_magic::{self, BTRFS, OVERLAYFS};
use spinio_sys::linux::{self, Fd, FileKind, Stat};

use spinio_host::syscalls::Kernel;
use spinio_host::lock;

/// How long a stack is believed.
const BELIEVED: Duration = Duration::from_secs(2);

/// Stacks remembered at once.
const KEPT: usize = 64;

/// Bytes of a file of sysfs, at most; of mountinfo there may be more.
const TEXT: usize = 4096;
const MOUNTS: usize = 4 << 20;

/// Overlays on overlays, at most.
const DEEP: u32 = 4;

/// sysfs as the layers are read from.
struct Sysfs<'a>(&'a dyn Kernel);

fn lossy(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

impl Source for Sysfs<'_> {
    fn text(&self, path: &str) -> Option<String> {
        self.0.text(&CString::new(path).ok()?, TEXT).ok().map(lossy)
    }

    fn list(&self, path: &str) -> Vec<String> {
        let names = CString::new(path).ok().and_then(|path| self.0.list(&path).ok());
        names.unwrap_or_default().into_iter().map(|name| lossy(name.into_bytes())).collect()
    }

    fn link(&self, path: &str) -> Option<String> {
        self.0.link(&CString::new(path).ok()?).ok().map(lossy)
    }
}

/// Magic number of a file system, 0 for a block device itself, and device number.
type Key = (u64, u64);

/// The stacks that were read lately.
#[derive(Default)]
pub struct Stacks {
    kept: Mutex<HashMap<Key, (Instant, Arc<Stack>)>>,
}

impl Stacks {
    /// What the file behind `fd` lies on; `fd` is of the calling thread's table, `magic` is what `fstatfs` said.
    pub fn of(&self, kernel: &dyn Kernel, fd: Fd, stat: Stat, magic: u64) -> Arc<Stack> {
        self.below(kernel, fd, stat, magic, DEEP)
    }

    fn below(&self, kernel: &dyn Kernel, fd: Fd, stat: Stat, magic: u64, deep: u32) -> Arc<Stack> {
        if stat.kind == FileKind::Block {
            return self.kept((0, stat.rdev), || geometry::device(&Sysfs(kernel), "", number(stat.rdev)));
        }
        let name = fs_magic::name(magic).map_or_else(|| format!("file system {magic:#x}"), str::to_owned);
        match magic {
            OVERLAYFS => self.under_overlay(kernel, fd, stat, deep),
            BTRFS => self.kept((magic, stat.dev), || match kernel.btrfs_uuid(fd) {
                Ok(uuid) => geometry::btrfs(&Sysfs(kernel), &uuid_text(uuid)),
                Err(_) => geometry::no_device(&name),
            }),
            _ if linux::major(stat.dev) == 0 => Arc::new(geometry::no_device(&name)),
            _ => self.kept((magic, stat.dev), || geometry::device(&Sysfs(kernel), &name, number(stat.dev))),
        }
    }

    fn under_overlay(&self, kernel: &dyn Kernel, fd: Fd, stat: Stat, deep: u32) -> Arc<Stack> {
        let real = || {
            let deep = deep.checked_sub(1)?;
            let proc = Sysfs(kernel);
            let path = proc.link(&format!("/proc/thread-self/fd/{fd}"))?;
            let about = proc.text(&format!("/proc/thread-self/fdinfo/{fd}"))?;
            let id = about.lines().find_map(|l| l.strip_prefix("mnt_id:"))?.trim().parse().ok()?;
            let mounts = lossy(kernel.text(c"/proc/thread-self/mountinfo", MOUNTS).ok()?);
            let here = overlay::candidates(&mounts, id, &path);
            here.iter().find_map(|path| self.real_file(kernel, path, stat, deep))
        };
        let under = real().unwrap_or_default();
        let name = if under.file_system.is_empty() {
            "overlay".to_owned()
        } else {
            format!("overlay on {}", under.file_system)
        };
        Arc::new(Stack { file_system: name, top: under.top.clone() })
    }

    /// The file of an overlay in one of the folders below, if this is it.
    fn real_file(&self, kernel: &dyn Kernel, path: &str, shown: Stat, deep: u32) -> Option<Arc<Stack>> {
        let path = CString::new(path).ok()?;
        let fd = linux::open(&path, (linux::O_PATH | linux::O_NOFOLLOW) as i32, 0).ok()?;
        let stack = kernel.fstat(fd).ok().and_then(|stat| {
            let same = stat.kind == shown.kind && stat.size == shown.size && stat.mtime_ns == shown.mtime_ns;
            same.then(|| {
                let magic = kernel.file_system(fd).unwrap_or(0);
                // Such a descriptor answers no ioctl, which btrfs needs.
                let again = match magic {
                    BTRFS => kernel.open_again(linux::gettid(), fd, linux::O_RDONLY as i32).ok(),
                    _ => None,
                };
                let stack = self.below(kernel, again.unwrap_or(fd), stat, magic, deep);
                again.into_iter().for_each(|fd| kernel.close(fd));
                stack
            })
        });
        let _ = linux::close(fd);
        stack
    }

    fn kept(&self, key: Key, read: impl FnOnce() -> Stack) -> Arc<Stack> {
        if let Some((when, stack)) = lock(&self.kept).get(&key)
            && when.elapsed() < BELIEVED
        {
            return Arc::clone(stack);
        }
        let stack = Arc::new(read());
        let mut kept = lock(&self.kept);
        if kept.len() >= KEPT {
            kept.retain(|_, (when, _)| when.elapsed() < BELIEVED);
        }
        kept.insert(key, (Instant::now(), Arc::clone(&stack)));
        stack
    }
}

fn number(dev: u64) -> (u32, u32) {
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
    fn identities_are_written_as_in_sysfs() {
        let uuid = core::array::from_fn(|i| i as u8 * 16);
        assert_eq!(uuid_text(uuid), "00102030-4050-6070-8090-a0b0c0d0e0f0");
    }

    #[test]
    fn what_was_read_is_believed_for_a_while() {
        let stacks = Stacks::default();
        let first = stacks.kept((1, 2), || geometry::no_device("a"));
        assert!(Arc::ptr_eq(&first, &stacks.kept((1, 2), || geometry::no_device("b"))));
        for dev in 0..1000 {
            stacks.kept((2, dev), || geometry::no_device("c"));
        }
        assert_eq!(stacks.kept((2, 999), || geometry::no_device("d")).file_system, "c");
    }
}
