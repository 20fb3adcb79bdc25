//! What survives the server: state memory and the backing file. Both can stop the server before any store.

use std::cell::{Cell, RefCell};
use std::io;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use crate::layout::{SlotMemory, words};
use crate::page::{PageBytes, ZEROS};

pub(super) const RECORDS: u32 = 6;

/// The payload of the panic that stands for SIGKILL of the server.
pub(super) struct Killed;

/// The state memory, and the moment at which the server dies.
pub(super) struct Machine {
    slots: u32,
    words: Mutex<Vec<u64>>,
    bytes: Mutex<Vec<PageBytes>>,
    /// Stores until the server is killed; negative: it lives on.
    fuse: AtomicI64,
    /// The server is dead: what its destructors store does not happen.
    dead: AtomicBool,
}

impl Machine {
    pub(super) fn new(slots: u32) -> Arc<Machine> {
        Arc::new(Machine {
            slots,
            words: Mutex::new(vec![0; words(slots, RECORDS)]),
            bytes: Mutex::new(vec![ZEROS; slots as usize]),
            fuse: AtomicI64::new(-1),
            dead: AtomicBool::new(false),
        })
    }

    pub(super) fn set_fuse(&self, stores: i64) {
        self.fuse.store(stores, Relaxed);
    }

    pub(super) fn set_dead(&self, dead: bool) {
        self.dead.store(dead, Relaxed);
    }

    /// Performs a store of `len` bytes, or half of it and the server's death.
    fn store_bytes(&self, len: usize, store: impl FnOnce(usize)) {
        if self.dead.load(Relaxed) {
            return;
        }
        let left = self.fuse.load(Relaxed);
        if left == 0 {
            store(len / 2);
            self.die();
        }
        self.fuse.store(left - i64::from(left > 0), Relaxed);
        store(len);
    }

    fn die(&self) -> ! {
        self.fuse.store(-1, Relaxed);
        self.dead.store(true, Relaxed);
        resume_unwind(Box::new(Killed));
    }
}

impl SlotMemory for Machine {
    fn slots(&self) -> u32 {
        self.slots
    }

    fn records(&self) -> u32 {
        RECORDS
    }

    fn load(&self, index: usize) -> u64 {
        self.words.lock().unwrap()[index]
    }

    fn store(&self, index: usize, value: u64) {
        self.store_bytes(1, |len| {
            if len == 1 {
                self.words.lock().unwrap()[index] = value;
            }
        });
    }

    fn read(&self, slot: u32, bytes: &mut PageBytes) {
        *bytes = self.bytes.lock().unwrap()[slot as usize];
    }

    fn write(&self, slot: u32, at: usize, bytes: &[u8]) {
        self.store_bytes(bytes.len(), |len| {
            self.bytes.lock().unwrap()[slot as usize][at..at + len].copy_from_slice(&bytes[..len]);
        });
    }
}

/// The backing file.
pub(super) struct Disk {
    pub(super) machine: Arc<Machine>,
    bytes: RefCell<Vec<u8>>,
    /// The next hole fails after this many bytes.
    pub(super) hole_fails: Cell<Option<u64>>,
}

impl Disk {
    pub(super) fn new(machine: Arc<Machine>, size: u64) -> Disk {
        Disk { machine, bytes: RefCell::new(vec![0; size as usize]), hole_fails: Cell::new(None) }
    }

    /// The size, to the model.
    pub(super) fn len(&self) -> u64 {
        self.bytes.borrow().len() as u64
    }
}

impl crate::Backing for Disk {
    fn size(&self) -> io::Result<u64> {
        Ok(self.len())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
        let file = self.bytes.borrow();
        let (from, to) = (offset as usize, offset as usize + bytes.len());
        let inside = &file[from.min(file.len())..to.min(file.len())];
        bytes.fill(0);
        bytes[..inside.len()].copy_from_slice(inside);
        Ok(inside.len())
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.machine.store_bytes(bytes.len(), |len| {
            let mut file = self.bytes.borrow_mut();
            let (from, to) = (offset as usize, offset as usize + len);
            if file.len() < to {
                file.resize(to, 0);
            }
            file[from..to].copy_from_slice(&bytes[..len]);
        });
        Ok(())
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        self.machine.store_bytes(1, |len| {
            if len == 1 {
                self.bytes.borrow_mut().resize(size as usize, 0);
            }
        });
        Ok(())
    }

    fn punch(&self, mut bytes: Range<u64>) -> io::Result<()> {
        let fails = self.hole_fails.get();
        if let Some(after) = fails {
            bytes.end = bytes.end.min(bytes.start + after);
        }
        self.machine.store_bytes(1, |len| {
            let mut file = self.bytes.borrow_mut();
            let to = file.len().min(bytes.end as usize);
            if len == 1 && (bytes.start as usize) < to {
                file[bytes.start as usize..to].fill(0);
            }
        });
        if fails.is_none() { Ok(()) } else { Err(io::ErrorKind::StorageFull.into()) }
    }
}
