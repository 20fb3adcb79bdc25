//! Cached pieces of a batch: registered with the device for this batch alone, copied by the CPU, or both at once?
//!
//! ```text
//!   register   every page of the span, wanted or not ── the device fetches what is wanted meanwhile
//!   copy       every piece: a system call and its bytes, by several threads
//!   both       one thread registers from the front of the file, the others copy from its end, until they meet
//! ```
//!
//! Registering costs by the page and holds one lock of the driver, so one thread does it; beside others that copy it is
//! half as slow again, because they use the same memory. Copying costs by the piece and is shared by threads. Before
//! anything is registered the pieces are laid in the order of the file, and nobody copies meanwhile. So crowded pieces are
//! registered, scattered ones are copied, and what is in between is done by both where that saves enough.
//!
//! Known flaws: the figures are those of one machine class (H200, PCIe 5, Xeon; 16 processors, two of which share a
//! core), like the default cost models; pieces are taken to lie evenly in their span.

/// Cached pieces of one file that go to one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crowd {
    /// How many.
    pub pieces: u64,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes that would have to be registered.
    pub span: u64,
    /// Bytes that are registered at once.
    pub part: u64,
    /// Threads that would copy, if none registers.
    pub threads: u64,
    /// Threads that would copy beside one that registers.
    pub beside: u64,
}

/// What is to be done with a crowd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// Nothing is registered.
    Copy,
    /// One thread registers, and the others copy.
    Both,
    /// Nothing is copied.
    Register,
}

/// Nanoseconds to register one page, the same beside threads that copy, and beforehand; bytes a nanosecond that a kernel
/// fetches, and nanoseconds that it needs for a piece.
const PAGE: f64 = 80.0;
const PAGE_BESIDE: f64 = 124.0;
const REGISTER: f64 = 210_000.0;
const FETCH: f64 = 48.0;
const PIECE: f64 = 25.0;

/// Nanoseconds to lay a piece in the order of the file: 15, shared by some threads.
const LAY: f64 = 4.0;

/// Nanoseconds of one read of the page cache beyond its bytes, anywhere in a large file, and as many more for each thread
/// that reads: they share caches, memory and, two and two, a core. Bytes a nanosecond that one thread copies, and that all
/// together bring over the link.
const READ: f64 = 600.0;
const TOGETHER: f64 = 60.0;
const COPY: f64 = 6.3;
const LINK: f64 = 45.0;

/// Of what both would do, the copying threads must do one part in so many to be worth waking.
const WAKE: f64 = 8.0;

/// Both together must save one part in so many: who registers also launches what the others have copied.
const WORTH: f64 = 5.0;

impl Crowd {
    /// Nanoseconds to register, at so many a page, and to fetch. It is as if they hardly overlapped: 8 GiB, whose registering
    /// alone takes 170 ms, took 300 to 340 with 1 M pieces of 4 KiB fetched out of them (benches/runs/2026-11-22-h200-pairs).
    /// Why is not known.
    fn registering(&self, page: f64) -> f64 {
        let pages = self.span.div_ceil(4096) as f64;
        pages * page + (self.bytes as f64 / FETCH).max(self.pieces as f64 * PIECE)
    }

    /// Nanoseconds before the first page is registered.
    fn before(&self) -> f64 {
        REGISTER + self.pieces as f64 * LAY
    }

    /// Nanoseconds that so many threads need to copy.
    fn copying(&self, threads: u64) -> f64 {
        let (pieces, bytes, threads) = (self.pieces as f64, self.bytes as f64, threads as f64);
        let work = (pieces * (READ + TOGETHER * threads) + bytes / COPY) / threads;
        work.max(bytes / LINK)
    }

    /// Nanoseconds to register and fetch.
    pub fn registered(&self) -> f64 {
        self.before() + self.registering(PAGE)
    }

    /// Nanoseconds to copy.
    pub fn copied(&self) -> f64 {
        self.copying(self.threads.max(1))
    }

    /// Nanoseconds until one thread that registers and the others, which copy, meet.
    pub fn met(&self) -> f64 {
        if self.beside == 0 {
            return f64::INFINITY;
        }
        let (one, others) = (self.registering(PAGE_BESIDE), self.copying(self.beside));
        // The part they meet in is registered whole, whatever is left of it.
        let last = one * self.part.min(self.span) as f64 / self.span.max(1) as f64;
        self.before() + last + one * others / (one + others)
    }

    /// What is cheapest.
    pub fn means(&self) -> Means {
        let (one, all) = (self.registered(), self.copied());
        let alone = one.min(all);
        let few = self.beside == 0 || self.copying(self.beside) > WAKE * self.registering(PAGE_BESIDE);
        if !few && self.met() < alone * (1.0 - 1.0 / WORTH) {
            Means::Both
        } else if one < all {
            Means::Register
        } else {
            Means::Copy
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn crowd(pieces: u64, len: u64, span: u64, threads: u64) -> Crowd {
        let beside = threads.saturating_sub(1);
        Crowd { pieces, bytes: len * pieces, span, part: 16 << 20, threads, beside }
    }

    fn million(len: u64, span: u64, threads: u64) -> Crowd {
        crowd(1_000_000, len, span, threads)
    }

    #[test]
    fn crowds_are_registered_scattered_pieces_copied_and_what_is_between_both() {
        assert_eq!(million(512, GIB, 12).means(), Means::Register);
        assert_eq!(million(512, 8 * GIB, 12).means(), Means::Both);
        assert_eq!(million(4096, 8 * GIB, 12).means(), Means::Both);
        assert_eq!(million(4096, 1000 * GIB, 12).means(), Means::Copy);
        assert_eq!(crowd(100, 4096, GIB, 1).means(), Means::Copy);
        assert_eq!(crowd(100, 4096, GIB, 12).means(), Means::Copy);
    }

    #[test]
    fn short_pieces_are_copied_where_they_lie_far_apart() {
        let at_one_of = |pages: u64| million(512, pages * 4096 * 1_000_000, 12).means();
        assert_eq!([2, 16, 64].map(at_one_of), [Means::Both, Means::Copy, Means::Copy]);
    }

    #[test]
    fn one_thread_does_one_thing() {
        assert_eq!(million(4096, 8 * GIB, 1).means(), Means::Register);
        assert_eq!(million(512, 128 * GIB, 1).means(), Means::Copy);
    }

    #[test]
    fn where_nobody_can_copy_beside_one_thing_is_done() {
        for span in [GIB, 8 * GIB, 64 * GIB] {
            let crowd = Crowd { beside: 0, ..million(4096, span, 12) };
            assert_ne!(crowd.means(), Means::Both, "{crowd:?}");
        }
    }

    #[test]
    fn what_lies_in_one_part_is_not_shared() {
        for pieces in [1, 100, 10_000, 1_000_000] {
            for threads in [1, 2, 12, 64] {
                let crowd = crowd(pieces, 4096, 16 << 20, threads);
                assert_ne!(crowd.means(), Means::Both, "{crowd:?}");
            }
        }
    }

    #[test]
    fn both_are_never_chosen_where_one_alone_is_as_fast() {
        for pieces in [1, 1000, 30_000, 1_000_000] {
            for len in [1, 512, 4096, 100_000] {
                for span in [1 << 20, GIB / 8, GIB, 64 * GIB] {
                    for threads in [0, 1, 2, 6, 12] {
                        let crowd = crowd(pieces, len, span, threads);
                        let alone = crowd.copied().min(crowd.registered());
                        if crowd.means() == Means::Both {
                            assert!(crowd.met() < alone, "{crowd:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn more_threads_never_slow_a_batch_down() {
        for len in [512, 4096] {
            let times: Vec<f64> = [1, 2, 6, 12, 15].iter().map(|&n| million(len, 8 * GIB, n).copied()).collect();
            assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
        }
    }
}
