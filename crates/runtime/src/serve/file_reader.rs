//! Reads of files for maps: the routes of SPIN, through a descriptor that the program cannot see.

use std::ffi::CString;

use spinio_device::{Allocation, Device, DeviceAddr, Target};
use spinio_gaia::{Error, FileReader, OpenFile};
use spinio_io::{ShadowFile, runtime};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

/// Reads by the routes of this process's runtime.
#[derive(Clone, Copy, Debug)]
pub struct Routes;

struct Opened(ShadowFile);

impl FileReader for Routes {
    fn open(&self, tid: u32, fd: Fd) -> Result<Box<dyn OpenFile>, Error> {
        let cannot = |e: Errno| Error::new(e, format!("Cannot open the file again: {}", std::io::Error::from(e)));
        let path = CString::new(format!("/proc/self/task/{tid}/fd/{fd}")).map_err(|_| cannot(Errno::INVAL))?;
        let file = runtime().open(&path, linux::O_RDONLY, 0).map_err(cannot)?;
        Ok(Box::new(Opened(file)))
    }
}

impl OpenFile for Opened {
    fn read(&self, offset: u64, device: &'static dyn Device, to: DeviceAddr, len: u64) -> Result<u64, Error> {
        // Not looked up: a driver knows memory in chunks by device, not by context.
        let allocation = Allocation { device, start: to, len, host_mapped: false, p2p_mapped: false };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let read = runtime().read(self.0.fd(), Some(offset), Target { allocation, addr: to }, len);
        read.map(|got| got as u64).map_err(|e| Error::new(e.kind.errno(), e.to_string()))
    }

    fn spawn(&self, name: &str, body: Box<dyn FnOnce(Fd) + Send>) -> bool {
        self.0.spawn_dedicated(name, body)
    }
}
