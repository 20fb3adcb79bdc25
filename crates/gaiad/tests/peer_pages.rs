//! Maps of a mounted file on two devices of one process: the second one copies the pages that the first one has, and only
//! while they are the newest ones.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use spinio_device::emulated::{self, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice, Info, Map, PeerRefusal};

use crate::common::TestMount;
use crate::common::gpu::open;

const PAGE: usize = 4096;
const CHUNK: usize = 2 << 20;
const LEN: usize = 4 * CHUNK + 3 * PAGE;

#[test]
fn server_role() {
    common::server_role();
}

fn contents() -> Vec<u8> {
    (0..LEN).map(|n| (n * 7 % 251) as u8).collect()
}

fn mounted() -> Option<(TestMount, File)> {
    let mount = TestMount::new(|dir| std::fs::write(dir.join("file"), contents()).unwrap())?;
    let file = open(&mount.dir.join("file"));
    Some((mount, file))
}

/// A map on `emulated:0` or `emulated:1`, of the file from this page on.
struct Gpu(&'static Emulated, Arc<Map>);

impl Gpu {
    fn from(file: &File, ordinal: u32, access: Access, first: usize) -> Gpu {
        emulated::configure("devices=3,size=64M").unwrap();
        let (device, at) = (emulated::device(ordinal).unwrap(), first * PAGE);
        Gpu(device, Arc::new(Map::new(file.as_raw_fd(), at as u64, (LEN - at) as u64, access, device).unwrap()))
    }

    fn new(file: &File, ordinal: u32, access: Access) -> Gpu {
        Gpu::from(file, ordinal, access, 0)
    }

    fn acquire(&self, access: Access) {
        self.1.acquire(0, self.1.len(), access).unwrap();
    }

    fn release(&self) {
        self.1.release(0, self.1.len()).unwrap();
    }

    fn load(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.1.len() as usize];
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.0.copy_out(StreamId(0), bytes.as_mut_ptr(), DeviceAddr(self.1.address()), bytes.len()) }.unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
        bytes
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        // SAFETY: as above.
        unsafe { self.0.copy_in(StreamId(0), DeviceAddr(self.1.address() + at as u64), bytes.as_ptr(), bytes.len()) }
            .unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }

    fn info(&self) -> Info {
        self.1.info()
    }

    /// Bytes from the file, from released pages, and from the other device.
    fn sources(&self) -> (u64, u64, u64) {
        let info = self.info();
        (info.bytes_from_file, info.bytes_from_snapshots, info.bytes_from_peer)
    }
}

fn whole() -> u64 {
    LEN.next_multiple_of(PAGE) as u64
}

#[test]
fn second_device_reads_nothing_of_the_file_and_then_what_was_changed() {
    let Some((_mount, file)) = mounted() else { return };
    let (first, second) = (Gpu::new(&file, 0, Access::Read), Gpu::new(&file, 1, Access::Write));
    first.acquire(Access::Read);
    second.acquire(Access::Write);
    assert!(second.load() == contents());
    assert_eq!((first.sources(), second.sources()), ((whole(), 0, 0), (0, 0, whole())));
    second.release();
    let mut wanted = contents();
    for page in [3, 700, 1500] {
        file.write_all_at(&[9; 10], (page * PAGE + 5) as u64).unwrap();
        wanted[page * PAGE + 5..][..10].fill(9);
    }
    second.acquire(Access::Read);
    assert!(second.load() == wanted);
    assert_eq!(second.sources(), (3 * PAGE as u64, 0, whole()));
    assert_eq!((second.info().peer_refused, second.info().peer_bytes_refused), (0, 0));
}
