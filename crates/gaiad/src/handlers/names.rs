//! Operations that change names. Each is in the journal (journal.rs): `again` is set if an earlier server may have
//! executed it already, and then the error that this would cause is success.

use std::ffi::CStr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, OFlags, RenameFlags, makedev};
use rustix::io::Errno;
use spinio_fuse::abi::CreateIn;
use spinio_fuse::{Operation, Request};
use spinio_sys::injection_point;

use super::lookup::{identity, stat};
use super::xattrs::masked;
use super::{Handlers, Reply, Result};
use crate::backing::{Access, reopen};
use crate::identity::AsCaller;

/// Whether a request must not be executed twice.
pub(super) fn is_journaled(operation: &Operation<'_>) -> bool {
    use Operation as O;
    matches!(
        operation,
        O::Mknod { .. }
            | O::Mkdir { .. }
            | O::Symlink { .. }
            | O::Link { .. }
            | O::Create { .. }
            | O::Tmpfile { .. }
            | O::Unlink { .. }
            | O::Rmdir { .. }
            | O::Rename { .. }
            | O::Setxattr { .. }
            | O::Removexattr { .. }
    )
}

/// Success, if the operation was executed before and `error` says so.
fn unless_done<T: Default>(result: Result<T>, error: Errno, again: Option<u64>) -> Result<T> {
    match result {
        Err(e) if e == error && again.is_some() => Ok(T::default()),
        result => result,
    }
}

/// Takes away a name that was just made, and which the kernel will not hear of: it goes on to say that there is none, and
/// no program could use it or remove it until then. The kernel keeps the directory locked.
fn unmake(directory: &OwnedFd, name: &CStr) {
    if rustix::fs::unlinkat(directory, name, AtFlags::empty()) == Err(Errno::ISDIR) {
        let _ = rustix::fs::unlinkat(directory, name, AtFlags::REMOVEDIR);
    }
}

impl Handlers {
    /// What a second execution must know: for a renaming, which inode the first name had; for an extended attribute,
    /// whether it existed. Of other names the kernel knows whether they exist: it has sent the request for this reason.
    ///
    /// # Errors
    /// The first name cannot be looked at. Without a note a second execution would take the request for done.
    pub(super) fn note(&self, request: &Request<'_>) -> Result<u64> {
        Ok(match request.operation {
            Operation::Rename { name, .. } => stat(&*self.child(request.header.node, name)?)?.stx_ino,
            Operation::Setxattr { name, .. } | Operation::Removexattr { name } => {
                self.has_xattr(request.header.node, name).into()
            }
            _ => 0,
        })
    }

    pub(super) fn change_names(&self, request: &Request<'_>, reply: &mut Reply, again: Option<u64>) -> Result<()> {
        let parent = request.header.node;
        match request.operation {
            Operation::Mknod { args, name } => {
                let kind = FileType::from_raw_mode(args.mode);
                let device = if matches!(kind, FileType::BlockDevice | FileType::CharacterDevice) {
                    makedev((args.rdev >> 8) & 0xfff, (args.rdev & 0xff) | ((args.rdev >> 12) & 0xfff00))
                } else {
                    0
                };
                self.make(parent, name, request, again, reply, |dir| {
                    rustix::fs::mknodat(dir, name, kind, masked(args.mode, args.umask, dir), device)
                })
            }
            Operation::Mkdir { args, name } => self.make(parent, name, request, again, reply, |dir| {
                rustix::fs::mkdirat(dir, name, masked(args.mode, args.umask, dir))
            }),
            Operation::Symlink { name, target } => {
                self.make(parent, name, request, again, reply, |dir| rustix::fs::symlinkat(target, dir, name))
            }
            Operation::Link { args, name } => {
                let file = self.backing.open(args.node, Access::Path)?;
                let dir = self.backing.open(parent, Access::Path)?;
                unless_done(self.backing.link(&file, &dir, name), Errno::EXIST, again)?;
                reply.push(&self.entry_of(&file)?);
                Ok(())
            }
            Operation::Create { args, name } => self.create(parent, name, &args, request, again, reply),
            Operation::Tmpfile { args } => self.tmpfile(parent, &args, request, reply),
            Operation::Unlink { name } => self.remove(parent, name, AtFlags::empty(), again),
            Operation::Rmdir { name } => self.remove(parent, name, AtFlags::REMOVEDIR, again),
            Operation::Rename { name, new_parent, new_name, flags } => {
                self.rename(parent, name, new_parent, new_name, RenameFlags::from_bits_retain(flags), again)
            }
            Operation::Setxattr { flags, name, value } => {
                let missing = again.filter(|existed| *existed == 0);
                unless_done(self.setxattr(request, name, value, flags), Errno::EXIST, missing)
            }
            Operation::Removexattr { name } => {
                let existed = again.filter(|existed| *existed == 1);
                unless_done(self.removexattr(parent, name), Errno::NODATA, existed)
            }
            _ => Err(Errno::NOSYS),
        }
    }

    /// Makes a name by `call` in its directory, as the caller.
    fn make(
        &self,
        parent: u64,
        name: &CStr,
        request: &Request<'_>,
        again: Option<u64>,
        reply: &mut Reply,
        call: impl FnOnce(&OwnedFd) -> Result<()>,
    ) -> Result<()> {
        let directory = self.backing.open(parent, Access::Path)?;
        let as_caller = AsCaller::new(request);
        let made = call(&directory);
        drop(as_caller);
        injection_point!("server: name made");
        // A name that was there already may be another program's.
        let is_new = made.is_ok();
        unless_done(made, Errno::EXIST, again)?;
        let entry = self.entry(parent, name).inspect_err(|_| {
            if is_new {
                unmake(&directory, name);
            }
        });
        reply.push(&entry?);
        Ok(())
    }

    fn create(
        &self,
        parent: u64,
        name: &CStr,
        args: &CreateIn,
        request: &Request<'_>,
        again: Option<u64>,
        reply: &mut Reply,
    ) -> Result<()> {
        let directory = self.backing.open(parent, Access::Path)?;
        // Always exclusive: the kernel has checked no permissions of a file that it did not know to exist.
        let exclusive = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = masked(args.mode, args.umask, &directory);
        let as_caller = AsCaller::new(request);
        let made = rustix::fs::openat(&directory, name, exclusive, mode);
        drop(as_caller);
        injection_point!("server: file created");
        let is_new = made.is_ok();
        let made = match made {
            Ok(fd) => Some(Arc::new(fd)),
            Err(Errno::EXIST) if again.is_some() => self.open_created(parent, name, mode)?,
            // ESTALE makes the kernel look the name up and open the file instead.
            Err(Errno::EXIST) if !OFlags::from_bits_retain(args.flags).contains(OFlags::EXCL) => {
                return Err(Errno::STALE);
            }
            Err(error) => return Err(error),
        };
        let entry = match &made {
            Some(fd) => self.entry_of(fd).and_then(|entry| {
                // The kernel does not hear of the node.
                self.created(entry.node, fd).inspect_err(|_| self.forget(entry.node, 1))?;
                Ok(entry)
            }),
            None => self.entry(parent, name),
        };
        let entry = entry.inspect_err(|_| {
            if is_new {
                unmake(&directory, name);
            }
        })?;
        reply.push(&entry);
        self.opened(entry.node, args.flags, reply);
        Ok(())
    }

    fn tmpfile(&self, parent: u64, args: &CreateIn, request: &Request<'_>, reply: &mut Reply) -> Result<()> {
        let directory = reopen(&*self.backing.open(parent, Access::Path)?, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let as_caller = AsCaller::new(request);
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let made = rustix::fs::openat(&directory, c".", flags, masked(args.mode, args.umask, &directory));
        drop(as_caller);
        injection_point!("server: nameless file created");
        let fd = Arc::new(made?);
        let entry = self.entry_of(&fd)?;
        let orphan = || {
            let path = Arc::new(reopen(&fd, OFlags::PATH)?);
            self.backing.orphan(&identity(&path, &stat(&path)?)?, &path)?;
            self.created(entry.node, &fd)
        };
        orphan().inspect_err(|_| self.forget(entry.node, 1))?;
        reply.push(&entry);
        self.opened(entry.node, args.flags, reply);
        Ok(())
    }

    fn remove(&self, parent: u64, name: &CStr, flags: AtFlags, again: Option<u64>) -> Result<()> {
        let directory = self.backing.open(parent, Access::Path)?;
        let victim = match self.child(parent, name) {
            Err(Errno::NOENT) if again.is_some() => return Ok(()),
            victim => victim?,
        };
        self.losing_name(&victim, || unless_done(rustix::fs::unlinkat(&directory, name, flags), Errno::NOENT, again))
    }

    fn rename(
        &self,
        parent: u64,
        name: &CStr,
        new_parent: u64,
        new_name: &CStr,
        flags: RenameFlags,
        again: Option<u64>,
    ) -> Result<()> {
        let from = self.backing.open(parent, Access::Path)?;
        let to = self.backing.open(new_parent, Access::Path)?;
        if let Some(inode) = again {
            // Executed before, if the first name has another inode now, or none.
            match self.child(parent, name).and_then(|fd| stat(&fd)) {
                Ok(now) if now.stx_ino != inode => return Ok(()),
                Err(Errno::NOENT) => return Ok(()),
                Ok(_) | Err(_) => {}
            }
        }
        let call = || rustix::fs::renameat_with(&from, name, &to, new_name, flags);
        if flags.contains(RenameFlags::EXCHANGE) {
            return call();
        }
        match self.child(new_parent, new_name) {
            Ok(victim) => self.losing_name(&victim, call),
            Err(_) => call(),
        }
    }

    /// Runs a call that takes a name away from an inode, and makes it an orphan if that was its last.
    fn losing_name(&self, victim: &Arc<OwnedFd>, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let before = stat(victim)?;
        let identity = identity(victim, &before)?;
        // Before the call, so that a crash right after it loses nothing.
        let last = before.stx_nlink <= 1 || identity.file_type == FileType::Directory;
        let orphan = if last { self.backing.orphan(&identity, victim)? } else { None };
        injection_point!("server: orphan held");
        if let Err(error) = call() {
            if let Some(node) = orphan {
                self.backing.keeps_name(node);
            }
            return Err(error);
        }
        injection_point!("server: name gone");
        // Two names of a file that go at the same time: each saw the other.
        if !last && stat(victim)?.stx_nlink == 0 {
            self.backing.orphan(&identity, victim)?;
        }
        Ok(())
    }
}
