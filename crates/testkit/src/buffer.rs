//! Memory of an emulated device, as a test sees it.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::ops::Range;

use spinio_device::Target;
use spinio_device::emulated::{Config, Emulated, POISON};
use spinio_device::{Allocation, Device, DeviceAddr, StreamId, WaitMode};

/// An allocation, freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    device: &'static Emulated,
    start: DeviceAddr,
    len: usize,
}

/// A separate emulated device for a test; `text` as in `SPINIO_EMULATED`.
pub fn emulated(text: &str) -> &'static Emulated {
    let config = Config::parse(text).unwrap_or_else(|e| panic!("{e}"));
    Emulated::start(config).unwrap_or_else(|e| panic!("No emulated device: {e}"))
}

impl Buffer {
    /// Fresh memory, full of poison.
    pub fn new(device: &'static Emulated, len: usize) -> Buffer {
        Buffer { device, start: device.alloc(len, false).expect("device memory"), len }
    }

    /// The same, host-mapped.
    pub fn host_mapped(device: &'static Emulated, len: usize) -> Buffer {
        Buffer { device, start: device.alloc(len, true).expect("host-mapped device memory"), len }
    }

    /// Its first address.
    pub fn addr(&self) -> DeviceAddr {
        self.start
    }

    /// Its length.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The allocation, as the registry would find it.
    pub fn allocation(&self) -> Allocation {
        self.device.allocation(self.start, self.len as u64).expect("allocated")
    }

    /// The target of a read into it that starts at byte `at`.
    pub fn target(&self, at: usize) -> Target {
        Target { allocation: self.allocation(), addr: self.start.offset(at as u64) }
    }

    /// The same through another device that wraps this one.
    pub fn target_via(&self, device: &'static dyn Device, at: usize) -> Target {
        let allocation = device.allocation(self.start, self.len as u64).expect("allocated");
        Target { allocation, addr: self.start.offset(at as u64) }
    }

    /// The bytes, after everything queued on the program's stream.
    pub fn bytes(&self) -> Vec<u8> {
        self.range_bytes(0..self.len)
    }

    /// Some of the bytes.
    pub fn range_bytes(&self, range: Range<usize>) -> Vec<u8> {
        let mut bytes = vec![0; range.len()];
        if bytes.is_empty() {
            return bytes;
        }
        let queue = self.device.app_stream().id();
        let from = self.start.offset(range.start as u64);
        // SAFETY: `bytes` stays until the drain returns.
        unsafe { self.device.copy_out(queue, bytes.as_mut_ptr(), from, bytes.len()) }.expect("copy out");
        self.device.synchronize(queue, WaitMode::Block).expect("drain");
        bytes
    }

    /// Writes some of the bytes.
    pub fn write_at(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.len, "outside the buffer");
        if bytes.is_empty() {
            return;
        }
        // SAFETY: `bytes` stays until the drain returns.
        unsafe { self.device.copy_in(StreamId(0), self.start.offset(at as u64), bytes.as_ptr(), bytes.len()) }
            .expect("copy in");
        self.device.synchronize(StreamId(0), WaitMode::Block).expect("drain");
    }

    /// Writes all of it.
    pub fn fill(&self, byte: u8) {
        let bytes = vec![byte; self.len];
        // SAFETY: `bytes` stays until the drain returns.
        unsafe { self.device.copy_in(StreamId(0), self.start, bytes.as_ptr(), bytes.len()) }.expect("copy in");
        self.device.synchronize(StreamId(0), WaitMode::Block).expect("drain");
    }

    /// Fails unless everything from `from` on is still poison.
    pub fn assert_poison_from(&self, from: usize) {
        let rest = self.range_bytes(from..self.len);
        if let Some(at) = rest.iter().position(|&b| b != POISON) {
            panic!("byte {} was written, though only {from} were reported", from + at);
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // In a forked child there is nothing to free.
        let _ = self.device.free(self.start);
    }
}
