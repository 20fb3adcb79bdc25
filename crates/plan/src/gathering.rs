//! Cached pieces of a batch: registered with the device for this batch alone, copied by the CPU, or both at once?
//!
//! ```text
//!   register   every page of the span, wanted or not ── the device fetches what is wanted meanwhile
//!   copy       every piece: a system call and its bytes, by several threads
//!   both       one thread registers from the front of the file, the others copy from its end, until they meet
//! ```
//!
//! Registering costs by the page and holds one lock of the driver, so one thread does it; copying costs by the piece and
//! is shared by threads, though not evenly: each read counts its use of the one descriptor, and threads wait for that
//! counter. So crowded pieces are registered, scattered ones are copied, and what is in between is done by both.
//!
//! Known flaws: the figures are those of one machine class (H200, PCIe 5, Xeon), like the default cost models; pieces
//! are taken to lie evenly in their span.

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

/// Nanoseconds to register one page, and beforehand; bytes a nanosecond that a kernel fetches, and nanoseconds that it
/// needs for a piece.
const PAGE: f64 = 85.0;
const REGISTER: f64 = 210_000.0;
const FETCH: f64 = 48.0;
const PIECE: f64 = 25.0;

/// Nanoseconds of one read of the page cache beyond its bytes, bytes a nanosecond that one thread copies, and that all
/// together bring over the link.
const READ: f64 = 350.0;
const COPY: f64 = 6.3;
const LINK: f64 = 45.0;

/// Nanoseconds that a read of a descriptor keeps every other thread's read of it waiting.
const TURN: f64 = 240.0;

/// Of what both would do, the copying threads must do one part in so many to be worth waking, and together they must
/// save one part in so many.
const WORTH: f64 = 8.0;

impl Crowd {
    /// Nanoseconds to register and fetch, side by side, once begun.
    fn registering(&self) -> f64 {
        let pages = self.span.div_ceil(4096) as f64;
        (pages * PAGE).max(self.bytes as f64 / FETCH).max(self.pieces as f64 * PIECE)
    }

    /// Nanoseconds that so many threads need to copy.
    fn copying(&self, threads: u64) -> f64 {
        let (pieces, bytes, threads) = (self.pieces as f64, self.bytes as f64, threads as f64);
        let work = (pieces * READ + bytes / COPY) / threads + pieces * TURN * (1.0 - 1.0 / threads);
        work.max(bytes / LINK)
    }

    /// Nanoseconds to register and fetch.
    pub fn registered(&self) -> f64 {
        REGISTER + self.registering()
    }

    /// Nanoseconds to copy.
    pub fn copied(&self) -> f64 {
        self.copying(self.threads.max(1))
    }

    /// Nanoseconds until one thread that registers and the others, which copy, meet.
    pub fn met(&self) -> f64 {
        if self.threads < 2 {
            return f64::INFINITY;
        }
        let (one, others) = (self.registering(), self.copying(self.threads - 1));
        // The part they meet in is registered whole, whatever is left of it.
        let last = one * self.part.min(self.span) as f64 / self.span.max(1) as f64;
        REGISTER + last + one * others / (one + others)
    }

    /// What is cheapest.
    pub fn means(&self) -> Means {
        let (one, all) = (self.registered(), self.copied());
        let alone = one.min(all);
        let few = self.threads < 2 || self.copying(self.threads - 1) > WORTH * self.registering();
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

    fn million(len: u64, span: u64, threads: u64) -> Crowd {
        Crowd { pieces: 1_000_000, bytes: len * 1_000_000, span, part: 32 << 20, threads }
    }

    #[test]
    fn crowds_are_registered_scattered_pieces_copied_and_what_is_between_both() {
        assert_eq!(million(512, GIB, 12).means(), Means::Register);
        assert_eq!(million(512, 8 * GIB, 12).means(), Means::Both);
        assert_eq!(million(4096, 8 * GIB, 12).means(), Means::Both);
        assert_eq!(million(4096, 1000 * GIB, 12).means(), Means::Copy);
        let few = Crowd { pieces: 100, bytes: 409_600, span: GIB, part: 32 << 20, threads: 1 };
        assert_eq!(few.means(), Means::Copy);
        assert_eq!(Crowd { threads: 12, ..few }.means(), Means::Copy);
    }

    #[test]
    fn one_thread_does_one_thing() {
        assert_eq!(million(4096, 8 * GIB, 1).means(), Means::Register);
        assert_eq!(million(512, 64 * GIB, 1).means(), Means::Copy);
    }

    #[test]
    fn what_lies_in_one_part_is_not_shared() {
        for pieces in [1, 100, 10_000, 1_000_000] {
            for threads in [1, 2, 12, 64] {
                let crowd = Crowd { pieces, bytes: pieces * 4096, span: 32 << 20, part: 32 << 20, threads };
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
                        let crowd = Crowd { pieces, bytes: pieces * len, span, part: 32 << 20, threads };
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
    fn more_threads_wait_longer_for_each_other_but_never_slow_a_batch_down() {
        for len in [512, 4096] {
            let times: Vec<f64> = [1, 2, 6, 12, 15].iter().map(|&n| million(len, 8 * GIB, n).copied()).collect();
            assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
        }
    }
}
