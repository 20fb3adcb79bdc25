//! Cached pieces of a batch: registered with the device for this batch alone, or copied by the CPU?
//!
//! ```text
//!   register   every page of the span, wanted or not ── the device fetches what is wanted meanwhile
//!   copy       every piece: a system call and its bytes, by several threads
//! ```
//!
//! Registering costs by the page and holds one lock of the driver; copying costs by the piece and is shared by threads.
//! So crowded pieces are registered, and scattered ones are copied.
//!
//! Known flaw: the figures are those of one machine class (H200, PCIe 5, Xeon), like the default cost models.

/// Cached pieces of one file that go to one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crowd {
    /// How many.
    pub pieces: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes that would have to be registered.
    pub span: u64,
    /// Threads that would copy.
    pub threads: u64,
}

/// Nanoseconds to register one page, and beforehand; bytes a nanosecond that a kernel fetches.
const PAGE: f64 = 76.0;
const REGISTER: f64 = 210_000.0;
const FETCH: f64 = 48.0;

/// Nanoseconds of one read of the page cache beyond its bytes, bytes a nanosecond that one thread copies, and that all
/// together bring over the link.
const READ: f64 = 350.0;
const COPY: f64 = 6.3;
const LINK: f64 = 45.0;

impl Crowd {
    /// Nanoseconds to register and fetch, side by side.
    pub fn registered(&self) -> f64 {
        let pages = self.span.div_ceil(4096) as f64;
        REGISTER + (pages * PAGE).max(self.bytes as f64 / FETCH)
    }

    /// Nanoseconds to copy.
    pub fn copied(&self) -> f64 {
        let work = self.pieces as f64 * READ + self.bytes as f64 / COPY;
        (work / self.threads.max(1) as f64).max(self.bytes as f64 / LINK)
    }

    /// Whether registering is cheaper.
    pub fn pays_to_register(&self) -> bool {
        self.registered() < self.copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn crowds_are_registered_and_scattered_pieces_copied() {
        let million = |len: u64, span, threads| Crowd { pieces: 1_000_000, bytes: len * 1_000_000, span, threads };
        assert!(!million(4096, 8 * GIB, 12).pays_to_register());
        assert!(million(4096, 8 * GIB, 4).pays_to_register());
        assert!(!million(512, 8 * GIB, 12).pays_to_register());
        assert!(million(512, GIB, 12).pays_to_register());
        assert!(!Crowd { pieces: 100, bytes: 409_600, span: GIB, threads: 1 }.pays_to_register());
    }
}
