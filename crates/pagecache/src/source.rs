//! Where the bytes of a version are, and how long they are kept there.

use std::fmt;
use std::sync::{Arc, LazyLock};

use crate::page::{PageBytes, ZEROS};
use crate::slots::{SlotRef, Slots};

/// Where the bytes of a version are.
#[derive(Clone)]
pub enum Source {
    /// In the backing file.
    Backing,
    /// In a slot of the state memory, which keeps them while this exists.
    Slot(SlotRef),
    /// In ordinary memory.
    Memory(Arc<Copied>),
}

impl Source {
    /// Copies the bytes; false if they are in the backing file.
    pub fn copy(&self, bytes: &mut PageBytes) -> bool {
        match self {
            Source::Backing => return false,
            Source::Slot(slot) => slot.read(bytes),
            Source::Memory(page) => *bytes = page.bytes,
        }
        true
    }
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Backing => f.write_str("Backing"),
            Source::Slot(slot) => write!(f, "{slot:?}"),
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
