//! Where the bytes of a version are, and how long they are kept there.

use std::fmt;
use std::sync::{Arc, LazyLock};

use crate::held_slots::HeldSlots;
use crate::page::{PAGE, PageBytes, ZEROS};
use crate::slots::{SlotRef, Slots};

/// Where the bytes of a page are, or those of pages side by side.
#[derive(Clone)]
pub enum Source {
    /// In the backing file.
    Backing,
    /// In a slot of the state memory, which keeps them while this exists.
    Slot(SlotRef),
    /// In such slots: of a fill or a READ, never of an entry.
    Slots(HeldSlots),
    /// In ordinary memory.
    Memory(Arc<Copied>),
}

impl Source {
    /// Copies the bytes of the first page; false if they are in the backing file.
    pub fn copy(&self, bytes: &mut PageBytes) -> bool {
        match self {
            Source::Backing => return false,
            Source::Slot(slot) => slot.read(bytes),
            Source::Slots(slots) => slots.read(0, bytes),
            Source::Memory(page) => *bytes = page.bytes,
        }
        true
    }

    /// Copies bytes of the pages, from byte `from` of the first one; false if they are in the backing file.
    pub fn copy_part(&self, from: usize, mut bytes: &mut [u8]) -> bool {
        let Source::Slots(slots) = self else {
            let mut page = ZEROS;
            if !self.copy(&mut page) {
                return false;
            }
            bytes.copy_from_slice(&page[from..from + bytes.len()]);
            return true;
        };
        let mut at = from;
        while !bytes.is_empty() {
            let within = at % PAGE;
            let len = (PAGE - within).min(bytes.len());
            let (part, rest) = bytes.split_at_mut(len);
            match <&mut PageBytes>::try_from(&mut *part) {
                Ok(page) => slots.read((at / PAGE) as u64, page),
                Err(_) => {
                    let mut page = ZEROS;
                    slots.read((at / PAGE) as u64, &mut page);
                    part.copy_from_slice(&page[within..within + part.len()]);
                }
            }
            at += part.len();
            bytes = rest;
        }
        true
    }

    /// The first pages are no longer of interest.
    pub(crate) fn skip(&mut self, pages: u64) {
        if let Source::Slots(slots) = self {
            slots.skip(pages);
        }
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Backing => f.write_str("Backing"),
            Source::Slot(slot) => write!(f, "{slot:?}"),
            Source::Slots(slots) => write!(f, "{slots:?}"),
            Source::Memory(_) => f.write_str("Memory"),
        }
    }
}

/// A page in ordinary memory. Those that are kept as a base count toward [`Slots::limit_copies`].
pub struct Copied {
    bytes: PageBytes,
    counted: Option<Arc<Slots>>,
}

impl Copied {
    /// For one reply to a client.
    pub(crate) fn new(bytes: PageBytes) -> Arc<Copied> {
        Arc::new(Copied { bytes, counted: None })
    }

    /// To be kept; `None`: too many are. Pages of zeros, of which a sparse file has any number, are one.
    pub(crate) fn kept(bytes: &PageBytes, slots: &Arc<Slots>) -> Option<Arc<Copied>> {
        static HOLE: LazyLock<Arc<Copied>> = LazyLock::new(|| Copied::new(ZEROS));
        if *bytes == ZEROS {
            return Some(HOLE.clone());
        }
        let counted = slots.count_copy()?;
        Some(Arc::new(Copied { bytes: *bytes, counted: Some(counted) }))
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        if let Some(slots) = &self.counted {
            slots.drop_copy();
        }
    }
}
