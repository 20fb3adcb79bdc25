//! Attributes, symbolic links, and the file system's own.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{AtFlags, Gid, Statx, StatxFlags, StatxTimestamp, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid};
use rustix::io::Errno;
use spinio_fuse::abi::{AttrOut, SetattrIn, StatfsOut, StatxOut, Sx, SxTime, setattr};
use spinio_sys::injection_point;

use super::lookup::{attr, stat};
use super::modes::chmod;
use super::{Handlers, Reply, Result, VALID_SECONDS};
use crate::backing::Access;

/// Set-user-ID, set-group-ID, group may execute.
const SUID: u32 = 0o4000;
const SGID: u32 = 0o2000;
const GROUP_EXECUTE: u32 = 0o010;

impl Handlers {
    pub(super) fn getattr(&self, node: u64, reply: &mut Reply) -> Result<()> {
        let fd = self.backing.open(node, Access::Path)?;
        reply.push(&AttrOut { valid: VALID_SECONDS, attr: attr(&stat(&fd)?), ..AttrOut::default() });
        Ok(())
    }

    /// STATX. The Linux kernel gives programs the birth time, and the rest as after GETATTR.
    pub(super) fn statx(&self, node: u64, reply: &mut Reply) -> Result<()> {
        let fd = self.backing.open(node, Access::Path)?;
        let want = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let stat = rustix::fs::statx(&fd, c"", AtFlags::EMPTY_PATH, want)?;
        reply.push(&StatxOut { valid: VALID_SECONDS, stat: sx(&stat, want), ..StatxOut::default() });
        Ok(())
    }

    /// Order: the owner first, since changing it clears set-user-ID bits; times last, since truncation changes them.
    /// The change time cannot be set; the backing file system has its own.
    pub(super) fn setattr(&self, node: u64, args: &SetattrIn, reply: &mut Reply) -> Result<()> {
        let sets = |flag: u32| args.valid & flag != 0;
        let fd = self.backing.open(node, Access::Path)?;
        if sets(setattr::UID | setattr::GID) {
            let uid = sets(setattr::UID).then(|| Uid::from_raw(args.uid));
            let gid = sets(setattr::GID).then(|| Gid::from_raw(args.gid));
            let chown = || rustix::fs::chownat(&fd, c"", uid, gid, AtFlags::EMPTY_PATH);
            self.content.set_mode(node, None, chown)?;
            injection_point!("server: owner set");
        }
        if sets(setattr::MODE) {
            let mode = args.mode & 0o7777;
            self.changing_mode(node, &fd, Some(mode), || chmod(&fd, mode))?;
            injection_point!("server: mode set");
        }
        if sets(setattr::SIZE) {
            let file = self.backing.open(node, Access::Write)?;
            if sets(setattr::KILL_SUIDGID) {
                self.drop_suidgid(node, &fd)?;
            }
            self.content.truncate(node, file.as_fd(), args.size)?;
            injection_point!("server: size set");
        }
        if sets(setattr::ATIME | setattr::MTIME) {
            let time = |set, now, seconds: u64, nsec: u32| Timespec {
                tv_sec: seconds as i64,
                tv_nsec: if !sets(set) {
                    UTIME_OMIT
                } else if sets(now) {
                    UTIME_NOW
                } else {
                    nsec.into()
                },
            };
            let times = Timestamps {
                last_access: time(setattr::ATIME, setattr::ATIME_NOW, args.atime, args.atime_nsec),
                last_modification: time(setattr::MTIME, setattr::MTIME_NOW, args.mtime, args.mtime_nsec),
            };
            let set = || rustix::fs::utimensat(&fd, c"", &times, AtFlags::EMPTY_PATH);
            let modified = sets(setattr::MTIME);
            self.content
                .set_times(node, fd.as_fd(), modified, || set().or_else(|error| times_of_another(&fd, args, error)))?;
            injection_point!("server: times set");
        }
        reply.push(&AttrOut { valid: VALID_SECONDS, attr: attr(&stat(&fd)?), ..AttrOut::default() });
        Ok(())
    }

    /// What a write by a program without CAP_FSETID does to an executable file.
    pub(super) fn drop_suidgid(&self, node: u64, fd: &OwnedFd) -> Result<()> {
        let mode = u32::from(stat(fd)?.stx_mode);
        let group = if mode & GROUP_EXECUTE != 0 { SGID } else { 0 };
        let kept = mode & !(SUID | group) & 0o7777;
        if kept == mode & 0o7777 {
            return Ok(());
        }
        self.content.set_mode(node, Some(kept), || match chmod(fd, kept) {
            // A file of another user: the file system below does it when the server writes.
            Err(Errno::PERM) => Ok(()),
            result => result,
        })
    }

    pub(super) fn readlink(&self, node: u64, reply: &mut Reply) -> Result<()> {
        let fd = self.backing.open(node, Access::Path)?;
        let target = rustix::fs::readlinkat(&*fd, c"", Vec::new())?;
        reply.head.extend_from_slice(target.to_bytes());
        Ok(())
    }

    pub(super) fn statfs(&self, reply: &mut Reply) -> Result<()> {
        let is = rustix::fs::fstatvfs(self.backing.mount())?;
        reply.push(&StatfsOut {
            blocks: is.f_blocks,
            blocks_free: is.f_bfree,
            blocks_available: is.f_bavail,
            files: is.f_files,
            files_free: is.f_ffree,
            block_size: is.f_bsize as u32,
            name_length: is.f_namemax as u32,
            fragment_size: is.f_frsize as u32,
            ..StatfsOut::default()
        });
        Ok(())
    }
}

/// Attributes as STATX has them, of those in `mask`.
fn sx(stat: &Statx, mask: StatxFlags) -> Sx {
    let time = |time: StatxTimestamp| SxTime { seconds: time.tv_sec, nsec: time.tv_nsec, reserved: 0 };
    Sx {
        mask: stat.stx_mask & mask.bits(),
        block_size: stat.stx_blksize,
        nlink: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        mode: stat.stx_mode,
        ino: stat.stx_ino,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        atime: time(stat.stx_atime),
        btime: time(stat.stx_btime),
        ctime: time(stat.stx_ctime),
        mtime: time(stat.stx_mtime),
        rdev_major: stat.stx_rdev_major,
        rdev_minor: stat.stx_rdev_minor,
        ..Sx::default()
    }
}

/// The server may not set times of this file, which belongs to another user than the server's. The Linux kernel has
/// refused that to programs already: it sends the times of what they have written, or "now".
fn times_of_another(fd: &OwnedFd, args: &SetattrIn, error: Errno) -> Result<()> {
    if error != Errno::PERM || stat(fd)?.stx_uid == rustix::process::geteuid().as_raw() {
        return Err(error);
    }
    let sets = |flag: u32| args.valid & flag != 0;
    if sets(setattr::ATIME_NOW) && sets(setattr::MTIME) {
        let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
        let times = Timestamps { last_access: now, last_modification: now };
        return rustix::fs::utimensat(fd, c"", &times, AtFlags::EMPTY_PATH);
    }
    // That of the write below, which was later.
    Ok(())
}
