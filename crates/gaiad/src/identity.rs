//! The identity of the caller, for calls that make files: these belong to the caller then.
//!
//! The server runs as root and the kernel has checked permissions already (`default_permissions`), with the caller's
//! supplementary groups, which a request does not contain. So the thread takes the caller's user and group for the
//! owner of the new inode, and keeps CAP_DAC_OVERRIDE for the directory. Without CAP_FSETID the backing file system
//! clears a set-group-ID bit that the caller may not set; for this the kernel sends the one supplementary group that
//! matters: that of a directory whose group new files get.

use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use spinio_fuse::Request;
use spinio_sys::linux::{set_thread_fs_identity, set_thread_groups};

/// What the kernel has checked: the directory, devices, and whose access control list is set.
const KEPT: CapabilitySet = CapabilitySet::DAC_OVERRIDE.union(CapabilitySet::MKNOD).union(CapabilitySet::FOWNER);

/// Ends the identity when dropped.
#[derive(Debug)]
pub(crate) struct AsCaller {
    changed: bool,
    has_group: bool,
}

impl AsCaller {
    /// The calling thread has the identity of the caller of a request until the value is dropped.
    pub(crate) fn new(request: &Request<'_>) -> AsCaller {
        let caller = &request.header;
        let changed = (caller.uid, caller.gid) != (0, 0) && rustix::process::geteuid().is_root();
        let has_group = changed && request.group.is_some_and(|group| set_thread_groups(&[group]).is_ok());
        if changed {
            set_thread_fs_identity(caller.uid, caller.gid);
            if let Ok(mut sets) = capabilities(None) {
                sets.effective |= sets.permitted & KEPT;
                let _ = set_capabilities(None, sets);
            }
        }
        AsCaller { changed, has_group }
    }
}

impl Drop for AsCaller {
    fn drop(&mut self) {
        if self.changed {
            // With user 0 the kernel sets the capabilities for files again.
            set_thread_fs_identity(0, 0);
        }
        if self.has_group {
            let _ = set_thread_groups(&[]);
        }
    }
}
