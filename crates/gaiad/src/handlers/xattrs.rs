//! Extended attributes, by the path of a descriptor in /proc: the calls on descriptors accept no O_PATH. The path of a
//! descriptor of a symbolic link means the link itself.

use std::ffi::CStr;
use std::os::fd::OwnedFd;

use rustix::fs::{Mode, XattrFlags};
use rustix::io::Errno;
use rustix::thread::CapabilitySet;
use spinio_fuse::Request;
use spinio_fuse::abi::XattrOut;

use super::{Handlers, Reply, Result};
use crate::backing::{Access, proc_path};
use crate::identity::AsCaller;
use crate::privileges::Raised;

/// Access control lists, which the kernel enforces.
const ACL: &[u8] = b"system.posix_acl_";
/// The list that new files of a directory get.
const DEFAULT_ACL: &CStr = c"system.posix_acl_default";
/// Attributes of programs, which take no privilege.
const USER: &[u8] = b"user.";
/// File systems show these names to privileged programs only.
const TRUSTED: &[u8] = b"trusted.";
/// Bytes of the longest list of names (XATTR_LIST_MAX).
const LIST_BYTES: usize = 64 << 10;

impl Handlers {
    pub(super) fn getxattr(&self, node: u64, name: &CStr, size: u32, reply: &mut Reply) -> Result<()> {
        let fd = self.backing.open(node, Access::Path)?;
        let path = proc_path(&fd);
        let _raised = privilege_to_see(name);
        // The kernel asks for lists that it must check. It would refuse access, if there are none on this file system.
        let none = |error| if error == Errno::OPNOTSUPP && is_acl(name) { Errno::NODATA } else { error };
        if size == 0 {
            return answer_size(reply, rustix::fs::getxattr_query(&path, name).map_err(none)?);
        }
        reply.data_len = rustix::fs::getxattr(&path, name, reply.space(size)).map_err(none)?;
        Ok(())
    }

    /// The names that the caller may see. A request does not contain capabilities: user 0 has them.
    pub(super) fn listxattr(&self, node: u64, uid: u32, size: u32, reply: &mut Reply) -> Result<()> {
        let fd = self.backing.open(node, Access::Path)?;
        let _raised = (uid == 0).then(|| Raised::new(CapabilitySet::SYS_ADMIN));
        let mut names = vec![0; LIST_BYTES];
        let len = rustix::fs::listxattr(proc_path(&fd), &mut names[..])?;
        let is_seen = |name: &[u8]| uid == 0 || !name.starts_with(TRUSTED);
        let seen: Vec<u8> =
            names[..len].split_inclusive(|b| *b == 0).filter(|n| is_seen(n)).flatten().copied().collect();
        if size == 0 {
            return answer_size(reply, seen.len());
        }
        reply.space(size).get_mut(..seen.len()).ok_or(Errno::RANGE)?.copy_from_slice(&seen);
        reply.data_len = seen.len();
        Ok(())
    }

    pub(super) fn has_xattr(&self, node: u64, name: &CStr) -> bool {
        let Ok(fd) = self.backing.open(node, Access::Path) else { return false };
        let _raised = privilege_to_see(name);
        rustix::fs::getxattr_query(proc_path(&fd), name).is_ok()
    }

    /// A list is set as the caller, so that the file system below clears a set-group-ID bit that the caller may not
    /// keep. Known flaw: also that of a group which the caller has besides its own; a request does not contain it.
    pub(super) fn setxattr(&self, request: &Request<'_>, name: &CStr, value: &[u8], flags: u32) -> Result<()> {
        let fd = self.backing.open(request.header.node, Access::Path)?;
        let _as_caller = is_acl(name).then(|| AsCaller::new(request));
        let _raised = privilege_to_change(name);
        let set = || rustix::fs::setxattr(proc_path(&fd), name, value, XattrFlags::from_bits_retain(flags));
        // A list contains the mode.
        if is_acl(name) { self.changing_mode(request.header.node, &fd, None, set) } else { set() }
    }

    pub(super) fn removexattr(&self, node: u64, name: &CStr) -> Result<()> {
        let fd = self.backing.open(node, Access::Path)?;
        let _raised = privilege_to_change(name);
        rustix::fs::removexattr(proc_path(&fd), name)
    }
}

/// The mode of a new file, without the bits of the umask: but a default list of the directory takes its place.
pub(super) fn masked(mode: u32, umask: u32, directory: &OwnedFd) -> Mode {
    let mode = mode & 0o7777;
    let masked = mode & !umask;
    let has_default = || rustix::fs::getxattr_query(proc_path(directory), DEFAULT_ACL).is_ok();
    Mode::from_raw_mode(if masked != mode && has_default() { mode } else { masked })
}

/// What the Linux kernel has checked that the caller has, for a name that takes it.
fn privilege_to_see(name: &CStr) -> Option<Raised> {
    name.to_bytes().starts_with(TRUSTED).then(|| Raised::new(CapabilitySet::SYS_ADMIN))
}

fn privilege_to_change(name: &CStr) -> Option<Raised> {
    let takes_it = !is_acl(name) && !name.to_bytes().starts_with(USER);
    takes_it.then(|| Raised::new(CapabilitySet::SYS_ADMIN))
}

fn is_acl(name: &CStr) -> bool {
    name.to_bytes().starts_with(ACL)
}

/// A request with room for no bytes asks for their number.
fn answer_size(reply: &mut Reply, size: usize) -> Result<()> {
    reply.push(&XattrOut { size: size as u32, padding: 0 });
    Ok(())
}
