//! The names in a directory.

#![expect(unsafe_code, reason = "system calls and driver entry points")]

use std::ffi::CString;

use linux_raw_sys::general as k;
use rustix::io::Errno;

use super::files::{Fd, close, open};
use super::raw::syscall;

/// The names in a directory, without `.` and `..`, in the order of the file system.
pub fn read_dir(path: &std::ffi::CStr) -> Result<Vec<CString>, Errno> {
    let fd = open(path, (k::O_RDONLY | k::O_DIRECTORY) as i32, 0)?;
    let names = getdents(fd);
    let _ = close(fd);
    names
}

pub(super) fn getdents(fd: Fd) -> Result<Vec<CString>, Errno> {
    // ino, off: 8 bytes each; length of the record: 2; type: 1; then the name.
    const LEN_OFFSET: usize = 16;
    const NAME_OFFSET: usize = 19;
    let mut names = Vec::new();
    let mut buf = vec![0u8; 32 << 10];
    loop {
        // SAFETY: `buf` has the length passed to the call.
        let got = unsafe { syscall(k::__NR_getdents64, [fd as usize, buf.as_mut_ptr() as usize, buf.len(), 0, 0, 0]) }?;
        if got == 0 {
            return Ok(names);
        }
        let mut rest = &buf[..got];
        while rest.len() > NAME_OFFSET {
            let len = usize::from(u16::from_ne_bytes([rest[LEN_OFFSET], rest[LEN_OFFSET + 1]]));
            let Some(record) = rest.get(..len).filter(|r| r.len() > NAME_OFFSET) else { break };
            let name = record[NAME_OFFSET..].split(|&b| b == 0).next().unwrap_or_default();
            if name != b"." && name != b".." {
                names.extend(CString::new(name));
            }
            rest = &rest[len..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn read_dir_lists_existing_names() {
        let names = read_dir(c"/proc/self").unwrap();
        assert!(names.iter().any(|n| n.as_c_str() == c"status"));
        assert!(names.iter().all(|n| n.as_c_str() != c".."));
        assert_eq!(read_dir(c"/proc/self/no-such-folder"), Err(Errno::NOENT));
    }
}
