//! The paper's five ways to read a block of a file into device memory (its Table 2), each as a program would do it.
//!
//! ```text
//!   pread+copy      storage ──> page cache ──pread──> host buffer ──synchronous copy──> device
//!   pread+copy+D    storage ──O_DIRECT──────────────> host buffer ──synchronous copy──> device
//!   pread+GPU       storage ──> page cache ──pread────────────────────────────────────> mapped device memory
//!   P2P             storage ──O_DIRECT────────────────────────────────────────────────> mapped device memory
//!   SPIN            the route that the planner predicts to be the fastest
//! ```

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use anyhow::Context;
use spinio_io::{AlignedBuf, on_close, runtime};

use crate::device::{Buffer, DeviceName};
use crate::test_file::TestFile;

/// One of the five.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Method {
    /// The paper's CIWrite.
    PreadCopy,
    /// The paper's CIWrite+D.
    PreadCopyDirect,
    /// Storage DMAs into the device.
    P2p,
    /// `pread` into mapped device memory.
    PreadGpu,
    /// SPIN.
    Spin,
}

impl Method {
    /// In the order of tables.
    pub const ALL: [Method; 5] =
        [Method::PreadCopy, Method::PreadCopyDirect, Method::P2p, Method::PreadGpu, Method::Spin];

    /// Its name on the command line, in tables and charts.
    pub fn name(self) -> &'static str {
        match self {
            Method::PreadCopy => "pread+copy",
            Method::PreadCopyDirect => "pread+copy+D",
            Method::P2p => "P2P",
            Method::PreadGpu => "pread+GPU",
            Method::Spin => "SPIN",
        }
    }

    /// Whether it bypasses the page cache, which needs whole blocks of the disk.
    pub fn is_direct(self) -> bool {
        matches!(self, Method::PreadCopyDirect | Method::P2p)
    }

    /// From the command line.
    pub fn parse(text: &str) -> Result<Method, String> {
        let found = Method::ALL.into_iter().find(|m| m.name().eq_ignore_ascii_case(text));
        let names = Method::ALL.map(Method::name).join(", ");
        found.ok_or_else(|| format!("`{text}` is no transfer method: there are {names}"))
    }
}

/// The state of a thread that uses a method on a file.
pub struct Reader {
    method: Method,
    file: File,
    buffer: Buffer,
    host: AlignedBuf,
}

impl Reader {
    /// Opens the file again, so that no state of the run before remains, and allocates device memory.
    pub fn new(method: Method, subject: &TestFile, device: DeviceName, block: u64) -> anyhow::Result<Reader> {
        // A scratch file has no other name.
        let path = format!("/proc/self/fd/{}", subject.file.as_raw_fd());
        let flags = if method.is_direct() { spinio_sys::linux::O_DIRECT as i32 } else { 0 };
        let file = OpenOptions::new().read(true).custom_flags(flags).open(path);
        let file = file.with_context(|| format!("Cannot open {} for {}", subject.path.display(), method.name()))?;
        Ok(Reader { method, file, buffer: Buffer::mapped(device, block)?, host: AlignedBuf::zeroed(block as usize) })
    }

    /// Reads one block; the bytes that arrived.
    pub fn read(&mut self, at: u64, len: usize) -> anyhow::Result<usize> {
        let (to, fd) = (self.buffer.target, self.file.as_raw_fd());
        Ok(match self.method {
            Method::PreadCopy | Method::PreadCopyDirect => {
                let host = &mut self.host[..len];
                let got = self.file.read_at(host, at)?;
                runtime().copy(to, &host[..got])?;
                got
            }
            Method::P2p | Method::PreadGpu => runtime().read_by_kernel(fd, at, to, len)?,
            Method::Spin => runtime().read(fd, Some(at), to, len)?,
        })
    }

    /// Waits until everything has arrived: a small read by SPIN returns once its copy is queued.
    pub fn synchronize(&mut self) -> anyhow::Result<()> {
        if self.method == Method::Spin {
            runtime().fetch(self.buffer.target, &mut [0])?;
        }
        Ok(())
    }

    /// Whether a block in the device equals that of the file.
    pub fn check(&mut self, subject: &TestFile, at: u64, len: usize) -> anyhow::Result<()> {
        let got = self.read(at, len)?;
        let (mut there, mut here) = (vec![0u8; got], vec![0u8; got]);
        runtime().fetch(self.buffer.target, &mut there)?;
        subject.file.read_exact_at(&mut here, at)?;
        anyhow::ensure!(got == len && there == here, "{} delivered other bytes than the file's", self.method.name());
        Ok(())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // State that the runtime has stored for the file must not affect the next run.
        on_close(self.file.as_raw_fd());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_names_parse() {
        for method in Method::ALL {
            assert_eq!(Method::parse(method.name()), Ok(method));
        }
        assert!(Method::parse("warp").is_err());
    }
}
