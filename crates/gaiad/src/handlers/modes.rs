//! Files that a program may use, but the server may not open: where it is bound by their modes, as the server of a user's
//! own mount is.
//!
//! ```text
//!   CREATE, TMPFILE (mode 0444) ──> the descriptor that made it is held ──┐
//!   SETATTR(mode), SETXATTR(ACL)                                          ├─ the last writer closes it, the mode
//!      of a file in use ──────────> one from before the change is held ───┘  allows to open it, FORGET ──> released
//! ```
//!
//! What is held survives the server (backing.rs). A capability would do instead: with it nothing is held.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use spinio_sys::linux::chmod_fd;

use super::lookup::stat;
use super::{Handlers, Result};
use crate::backing::{Access, proc_path, reopen};

/// What the owner of a file needs so that the server can open it.
const OWNER: u32 = 0o600;
const OWNER_READS: u32 = 0o400;

impl Handlers {
    /// A file was made with this descriptor, which a program has open now.
    pub(super) fn created(&self, node: u64, fd: &Arc<OwnedFd>) -> Result<()> {
        self.backing.keep(node, Access::Write, fd);
        if self.backing.is_bound_by_modes() && u32::from(stat(fd)?.stx_mode) & OWNER != OWNER {
            self.backing.hold_opened(node, fd, true)?;
        }
        Ok(())
    }

    /// A file that an earlier server has created for this request, with a mode that may forbid to open it; `None` if it
    /// can be opened later as any other. Nobody else has it: the Linux kernel keeps its directory locked.
    pub(super) fn open_created(&self, parent: u64, name: &CStr, mode: Mode) -> Result<Option<Arc<OwnedFd>>> {
        if !self.backing.is_bound_by_modes() || mode.as_raw_mode() & OWNER == OWNER {
            return Ok(None);
        }
        let path = self.child(parent, name)?;
        chmod(&path, OWNER)?;
        let opened = reopen(&path, OFlags::RDWR);
        // Also what a server has left that was killed just here.
        chmod(&path, mode.as_raw_mode())?;
        Ok(Some(Arc::new(opened?)))
    }

    /// Runs a call that changes the mode of a file; `to`: the mode, if it is known.
    pub(super) fn changing_mode(
        &self,
        node: u64,
        fd: &OwnedFd,
        to: Option<u32>,
        call: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let kind = self.nodes.get(node)?.file_type;
        let call = || self.content.set_mode(node, to, call);
        if !self.backing.is_bound_by_modes() || kind != FileType::RegularFile && kind != FileType::Directory {
            return call();
        }
        let allows = |bits| to.is_some_and(|mode| mode & bits == bits);
        // Who reads a file, or a directory, is not counted.
        let in_use = || !allows(OWNER_READS) || self.clients.writers.may_write(node) || self.has_pages(node);
        if !allows(OWNER) && in_use() {
            self.backing.hold_content(node)?;
        }
        let changed = call();
        if stat(fd).is_ok_and(|now| u32::from(now.stx_mode) & OWNER == OWNER) {
            self.backing.release_content(node);
        }
        changed
    }

    /// A program has closed a file that it had open for writing; `others`: those that this server has seen and that still
    /// have it.
    pub(super) fn writer_closed(&self, node: u64, others: bool) {
        let Some(all_seen) = self.backing.holds_content(node) else { return };
        let in_use = if all_seen { others } else { self.clients.writers.may_write(node) };
        let readable = || {
            let fd = self.backing.open(node, Access::Path);
            fd.and_then(|fd| stat(&fd)).is_ok_and(|now| u32::from(now.stx_mode) & OWNER_READS != 0)
        };
        if !in_use && !self.has_pages(node) && readable() {
            self.backing.release_content(node);
        }
    }

    /// Whether released pages of the file may have to be written to it.
    fn has_pages(&self, node: u64) -> bool {
        self.content.files().hold_now(node).file().is_some()
    }
}

/// By descriptor, which may be O_PATH.
pub(super) fn chmod(fd: &OwnedFd, mode: u32) -> Result<()> {
    match chmod_fd(fd.as_fd(), mode) {
        Err(Errno::NOSYS) => rustix::fs::chmod(proc_path(fd), Mode::from_raw_mode(mode)),
        result => result,
    }
}
