//! The processes that have a file pinned (`spinio_pin_file`).
//!
//! ```text
//!   /proc/locks    7: LEASE  ACTIVE  READ  4711 fd:00:1311234 0 EOF     which process has a read lease on which inode
//!   counters       4711 python3, 2 pinned files                        which of these is SPIN's
//! ```
//!
//! Known flaws: a pinned file that needs no lease, because it is sealed, immutable or on a read-only file system, is
//! not found, nor is that of a process whose counters this user cannot see. A process that pins other files, and has a
//! lease on this one for another reason, counts as well.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use spinio_io::stats::Gauge;

use crate::processes;

/// A process that pins a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Its PID.
    pub pid: u32,
    /// Name of its program.
    pub name: String,
}

/// The processes that pin a file.
pub fn holders_of(file: &File) -> Vec<Holder> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (Ok(meta), about) = (file.metadata(), read(&format!("/proc/self/fdinfo/{}", file.as_raw_fd()))) else {
        return vec![];
    };
    let Some(device) = lease_device(&about, &read("/proc/self/mountinfo")) else { return vec![] };
    let leased = lease_holders(&read("/proc/locks"), device, meta.ino());
    if leased.is_empty() {
        return vec![];
    }
    let pins_files = |c: &processes::CounterFile| c.snapshot.gauge(Gauge::PinnedFiles).0 > 0;
    let known = processes::list().processes.into_iter().filter(pins_files).map(|c| c.snapshot.process);
    known.filter(|p| leased.contains(&p.pid)).map(|p| Holder { pid: p.pid, name: p.name }).collect()
}

/// The device of the file system itself, by which the kernel lists leases: `stat` returns another one on btrfs.
fn lease_device(fdinfo: &str, mountinfo: &str) -> Option<(u32, u32)> {
    let mount = fdinfo.lines().find_map(|l| l.strip_prefix("mnt_id:"))?.trim();
    // number, parent, major:minor, ...
    let line = mountinfo.lines().find(|l| l.split_whitespace().next() == Some(mount))?;
    let (major, minor) = line.split_whitespace().nth(2)?.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

/// The processes with a read lease on an inode.
fn lease_holders(locks: &str, device: (u32, u32), inode: u64) -> Vec<u32> {
    let one = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [_, "LEASE", _, "READ", pid, place, ..] = words[..] else { return None };
        let mut place = place.split(':');
        let major = u32::from_str_radix(place.next()?, 16).ok()?;
        let minor = u32::from_str_radix(place.next()?, 16).ok()?;
        let found = ((major, minor), place.next()?.parse().ok()?);
        (found == (device, inode)).then(|| pid.parse().ok())?
    };
    locks.lines().filter_map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_holders_match_device_and_inode() {
        let locks = "1: LEASE  ACTIVE    READ  4711 fd:00:131 0 EOF\n\
                     1: -> LEASE  BREAKING  READ 9 fd:00:131 0 EOF\n\
                     2: LEASE  BREAKING  READ  12 fd:00:131 0 EOF\n\
                     3: LEASE  ACTIVE    WRITE 13 fd:00:131 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 14 fd:00:131 0 EOF\n\
                     5: LEASE  ACTIVE    READ  15 fd:01:131 0 EOF\n\
                     6: LEASE  ACTIVE    READ  x fd:00:131 0 EOF\n7: LEASE";
        assert_eq!(lease_holders(locks, (0xfd, 0), 131), [4711, 12]);
        assert_eq!(lease_holders(locks, (0xfd, 0), 13), [0; 0]);
    }

    #[test]
    fn lease_device_comes_from_mountinfo() {
        let mounts = "21 1 0:20 / /proc rw - proc proc rw\n36 1 254:1 /sub /data rw - btrfs /dev/vda1 rw\n";
        assert_eq!(lease_device("pos:\t0\nflags:\t0100000\nmnt_id:\t36\nino:\t5\n", mounts), Some((254, 1)));
        assert_eq!(lease_device("mnt_id:\t3\n", mounts), None);
        assert_eq!(lease_device("", mounts), None);
    }

    #[test]
    fn unpinned_file_has_no_holder() {
        assert_eq!(holders_of(&tempfile::tempfile().unwrap()), []);
    }
}
