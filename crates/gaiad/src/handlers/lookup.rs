//! How an inode of the backing file system becomes a node and an entry of a reply.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Statx, StatxFlags, makedev};
use rustix::io::Errno;
use spinio_fuse::abi::{Attr, EntryOut};
use spinio_sys::injection_point;
use spinio_sys::linux::handle_of;

use super::{Handlers, Reply, Result, VALID_SECONDS};
use crate::backing::Access;
use crate::nodes::Identity;

impl Handlers {
    /// LOOKUP. A name that does not exist is an entry without a node, which the kernel remembers.
    pub(super) fn lookup(&self, parent: u64, name: &CStr, reply: &mut Reply) -> Result<()> {
        let entry = match self.entry(parent, name) {
            Err(Errno::NOENT) => EntryOut { entry_valid: VALID_SECONDS, ..EntryOut::default() },
            entry => entry?,
        };
        reply.push(&entry);
        Ok(())
    }

    /// FORGET.
    pub(super) fn forget(&self, node: u64, lookups: u64) {
        if self.nodes.forget(node, lookups, || self.content.forget(node)) {
            self.backing.forget(node);
            injection_point!("server: node forgotten");
        }
    }

    /// An entry for a name; counts a look-up.
    pub(super) fn entry(&self, parent: u64, name: &CStr) -> Result<EntryOut> {
        let child = self.child(parent, name)?;
        self.entry_of(&child)
    }

    /// An entry for an inode; counts a look-up.
    pub(super) fn entry_of(&self, fd: &Arc<OwnedFd>) -> Result<EntryOut> {
        let stat = stat(fd)?;
        let node = self.nodes.look_up(&identity(fd, &stat)?)?;
        injection_point!("server: node counted");
        if let Err(error) = self.backing.found(node, fd) {
            self.forget(node, 1);
            return Err(error);
        }
        Ok(EntryOut {
            node,
            entry_valid: VALID_SECONDS,
            attr_valid: VALID_SECONDS,
            attr: attr(&stat),
            ..EntryOut::default()
        })
    }

    /// The inode of a name in a directory (O_PATH). Mount points below the directory fail with EXDEV: what is mounted
    /// there has other handles.
    pub(super) fn child(&self, parent: u64, name: &CStr) -> Result<Arc<OwnedFd>> {
        let directory = self.backing.open(parent, Access::Path)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::NO_XDEV;
        rustix::io::retry_on_intr(|| rustix::fs::openat2(&directory, name, flags, Mode::empty(), resolve)).map(Arc::new)
    }
}

/// `statx` of a descriptor.
pub(crate) fn stat(fd: &OwnedFd) -> Result<Statx> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

/// What the node table needs of an inode.
pub(crate) fn identity(fd: &OwnedFd, stat: &Statx) -> Result<Identity> {
    Ok(Identity {
        device: makedev(stat.stx_dev_major, stat.stx_dev_minor),
        inode: stat.stx_ino,
        file_type: FileType::from_raw_mode(stat.stx_mode.into()),
        handle: handle_of(fd.as_fd())?,
    })
}

/// Attributes as the protocol has them.
pub(super) fn attr(stat: &Statx) -> Attr {
    let (major, minor) = (stat.stx_rdev_major, stat.stx_rdev_minor);
    Attr {
        ino: stat.stx_ino,
        size: stat.stx_size,
        blocks: stat.stx_blocks,
        atime: stat.stx_atime.tv_sec as u64,
        mtime: stat.stx_mtime.tv_sec as u64,
        ctime: stat.stx_ctime.tv_sec as u64,
        atime_nsec: stat.stx_atime.tv_nsec,
        mtime_nsec: stat.stx_mtime.tv_nsec,
        ctime_nsec: stat.stx_ctime.tv_nsec,
        mode: stat.stx_mode.into(),
        nlink: stat.stx_nlink,
        uid: stat.stx_uid,
        gid: stat.stx_gid,
        // The kernel's own encoding of device numbers.
        rdev: (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12),
        block_size: stat.stx_blksize,
        flags: 0,
    }
}
