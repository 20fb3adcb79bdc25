//! Reads of a file server that does not answer.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::fs::File;
use std::os::fd::AsRawFd;

use crate::mount_fixture::{self, MountFixture};
use crate::{eventually, file};

/// A mounted file system whose server never answers reads of its files; or why there is none here.
pub struct HungServer {
    place: MountFixture,
    /// One for each reader.
    pub files: Vec<File>,
}

impl HungServer {
    /// Mounts it, with `count` files of `len` bytes.
    pub fn start(count: usize, len: u64) -> Result<HungServer, String> {
        let place = mount_fixture::create("fuse")?;
        let files = (0..count).map(|at| file::create_filled(&place.file(&format!("hang{at}")), len));
        let files = files.inspect(file::evict).collect();
        Ok(HungServer { place, files })
    }

    /// Waits until this many threads of this process wait in a positioned read.
    pub fn wait_for_readers(&self, count: usize) {
        eventually("reads wait for the server", || threads_in_pread() >= count);
    }

    /// Ends the server and waits until its connection is gone; the errno that a host read of a file of it has then. A
    /// read that the end met in the kernel has ECONNABORTED, also one that began after the answer to `end`, since the
    /// kernel ends the connection later than that.
    pub fn end(&self) -> Option<i32> {
        assert!(File::open(self.place.file("end")).is_err());
        let mut errno = None;
        eventually("the connection is gone", || {
            errno = Some(self.errno_of_host_read());
            errno != Some(libc::ECONNABORTED)
        });
        errno
    }

    fn errno_of_host_read(&self) -> i32 {
        let mut byte = 0u8;
        // SAFETY: one byte is read into a local.
        let got = unsafe { libc::pread(self.files[0].as_raw_fd(), (&raw mut byte).cast(), 1, 0) };
        assert_eq!(got, -1, "the server still answers");
        std::io::Error::last_os_error().raw_os_error().unwrap()
    }
}

/// A test that fails must not leave threads that wait forever: with them its process would not end.
impl Drop for HungServer {
    fn drop(&mut self) {
        let _ = File::open(self.place.file("end"));
    }
}

/// Threads of this process that wait in a positioned read.
pub fn threads_in_pread() -> usize {
    let call = format!("{} ", libc::SYS_pread64);
    let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    threads.filter(|t| std::fs::read_to_string(t.path().join("syscall")).is_ok_and(|s| s.starts_with(&call))).count()
}
