//! File handles: a name of an inode that outlives renames, descriptors and processes.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::raw::syscall;

type Result<T> = core::result::Result<T, Errno>;

/// Bytes of the longest handle (MAX_HANDLE_SZ).
pub const HANDLE_BYTES: usize = 128;

/// `struct file_handle`. Opaque; equal for the same inode of the same file system.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub struct FileHandle {
    len: u32,
    kind: i32,
    bytes: [u8; HANDLE_BYTES],
}

impl FileHandle {
    /// From its type and bytes; `None` if it is longer than a handle can be.
    pub fn new(kind: i32, bytes: &[u8]) -> Option<FileHandle> {
        let mut handle = FileHandle { len: bytes.len().try_into().ok()?, kind, bytes: [0; HANDLE_BYTES] };
        handle.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(handle)
    }

    /// The type, which has a meaning for the file system only.
    pub fn kind(&self) -> i32 {
        self.kind
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..(self.len as usize).min(HANDLE_BYTES)]
    }
}

impl PartialEq for FileHandle {
    fn eq(&self, other: &FileHandle) -> bool {
        self.kind == other.kind && self.bytes() == other.bytes()
    }
}

impl Eq for FileHandle {}

impl std::fmt::Debug for FileHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FileHandle({}, {:02x?})", self.kind, self.bytes())
    }
}

/// `name_to_handle_at` of the inode of a descriptor, which may be O_PATH. EOPNOTSUPP: its file system has no handles.
pub fn handle_of(fd: BorrowedFd<'_>) -> Result<FileHandle> {
    let mut handle = FileHandle { len: HANDLE_BYTES as u32, kind: 0, bytes: [0; HANDLE_BYTES] };
    let (mut mount_id, name) = (0i32, c"");
    let (to, id) = (&raw mut handle as usize, &raw mut mount_id as usize);
    let flags = k::AT_EMPTY_PATH as usize;
    // SAFETY: the name, the handle (of the length it states) and the mount number live across the call.
    unsafe { syscall(k::__NR_name_to_handle_at, [fd.as_raw_fd() as usize, name.as_ptr() as usize, to, id, flags, 0]) }?;
    Ok(handle)
}

/// `open_by_handle_at` with O_CLOEXEC. `mount` is any descriptor of the file system that is not O_PATH. Needs
/// CAP_DAC_READ_SEARCH; ESTALE: the inode is gone.
pub fn open_by_handle(mount: BorrowedFd<'_>, handle: &FileHandle, flags: u32) -> Result<OwnedFd> {
    let flags = (flags | k::O_CLOEXEC) as usize;
    let from = (&raw const *handle) as usize;
    // SAFETY: the handle lives across the call.
    let fd = unsafe { syscall(k::__NR_open_by_handle_at, [mount.as_raw_fd() as usize, from, flags, 0, 0, 0]) }?;
    // SAFETY: the Linux kernel has just made this descriptor, which has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// `mount_setattr` (Linux 5.12): no file can be opened for writing through the mount that this descriptor is on, nor
/// executed, which would keep others from writing it. Takes CAP_SYS_ADMIN; EINVAL: the descriptor is not of the root of a mount.
pub fn make_mount_read_only(mount: BorrowedFd<'_>) -> Result<()> {
    let attr_set = (k::MOUNT_ATTR_RDONLY | k::MOUNT_ATTR_NOEXEC).into();
    let attributes = k::mount_attr { attr_set, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let (name, flags) = (c"".as_ptr() as usize, k::AT_EMPTY_PATH as usize);
    let (at, len) = ((&raw const attributes) as usize, size_of::<k::mount_attr>());
    // SAFETY: the name and the attributes, of the length that is stated, live across the call.
    unsafe { syscall(k::__NR_mount_setattr, [mount.as_raw_fd() as usize, name, flags, at, len, 0]) }.map(drop)
}

/// Sets the user and group that the Linux kernel checks and records when the calling thread accesses files. It reports
/// no failure.
pub fn set_thread_fs_identity(uid: u32, gid: u32) {
    // SAFETY: no memory is involved. The group first: a thread without privileges could not change it afterwards.
    let _ = unsafe { syscall(k::__NR_setfsgid, [gid as usize, 0, 0, 0, 0, 0]) };
    // SAFETY: as above.
    let _ = unsafe { syscall(k::__NR_setfsuid, [uid as usize, 0, 0, 0, 0, 0]) };
}

/// `setgroups` for the calling thread alone: its supplementary groups.
pub fn set_thread_groups(groups: &[u32]) -> Result<()> {
    // SAFETY: the groups live across the call.
    unsafe { syscall(k::__NR_setgroups, [groups.len(), groups.as_ptr() as usize, 0, 0, 0, 0]) }.map(drop)
}

/// `fchmodat2` of the inode of a descriptor, which may be O_PATH (Linux 6.6; ENOSYS before).
pub fn chmod_fd(fd: BorrowedFd<'_>, mode: u32) -> Result<()> {
    let name: &CStr = c"";
    let flags = k::AT_EMPTY_PATH as usize;
    // SAFETY: the name is NUL-terminated and lives across the call.
    unsafe { syscall(k::__NR_fchmodat2, [fd.as_raw_fd() as usize, name.as_ptr() as usize, mode as usize, flags, 0, 0]) }
        .map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn file_opens_by_handle_after_rename() {
        let dir = std::env::temp_dir().join(format!("spinio-handle-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("a"), b"content").unwrap();
        let mount = File::open(&dir).unwrap();
        match handle_of(File::open(dir.join("a")).unwrap().as_fd()) {
            Ok(handle) => {
                std::fs::rename(dir.join("a"), dir.join("b")).unwrap();
                assert_eq!(handle_of(File::open(dir.join("b")).unwrap().as_fd()), Ok(handle));
                assert_eq!(FileHandle::new(handle.kind(), handle.bytes()), Some(handle));
                match open_by_handle(mount.as_fd(), &handle, k::O_RDONLY) {
                    Ok(fd) => {
                        let mut text = String::new();
                        File::from(fd).read_to_string(&mut text).unwrap();
                        assert_eq!(text, "content");
                    }
                    Err(e) => eprintln!("skipped: no right to open by handle: {e}"),
                }
            }
            Err(e) => eprintln!("skipped: no file handles here: {e}"),
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn handle_longer_than_any_is_refused() {
        assert_eq!(FileHandle::new(1, &[0; HANDLE_BYTES + 1]), None);
    }
}
