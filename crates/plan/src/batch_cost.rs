//! Cached ops of a batch: whether to register the pages with the device for this batch alone, to copy by the CPU, or
//! both.
//!
//! ```text
//!   register   every page of the span, wanted or not; the device fetches the wanted bytes meanwhile
//!   copy       every op: a system call and its bytes, by several threads
//!   hybrid     one thread registers from the front of the file, the others copy from its end, until they meet
//! ```
//!
//! Registration costs per page and holds a lock of the driver, so one thread does it; concurrently with copying threads
//! it is half as slow again, because they use the same memory. Copying costs per op and is divided among threads.
//! Before anything is registered the ops are sorted by file offset, and no thread copies meanwhile. So dense ops are
//! registered, sparse ones are copied, and between the two both are used where that saves enough.
//!
//! Known flaws: the figures are those of one machine class (H200, PCIe 5, Xeon; 16 processors, two of which share a
//! core), like the default cost models; ops are assumed to be spread evenly over their span.

/// Cached ops of one file with one destination device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DensityStats {
    /// Number of ops.
    pub ops: u64,
    /// Their total bytes.
    pub bytes: u64,
    /// Bytes that would have to be registered.
    pub span: u64,
    /// Bytes that are registered at once.
    pub chunk: u64,
    /// Threads that would copy, if none registers.
    pub threads: u64,
    /// Threads that would copy concurrently with one that registers.
    pub concurrent_threads: u64,
}

/// How cached ops are transferred.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchStrategy {
    /// Nothing is registered.
    Copy,
    /// One thread registers, and the others copy.
    Hybrid,
    /// Nothing is copied.
    Register,
}

/// Nanoseconds to register one page, the same concurrently with copying threads, and beforehand; bytes per nanosecond
/// that a GPU kernel fetches, and nanoseconds that it needs per op.
const REGISTER_PAGE: f64 = 80.0;
const REGISTER_PAGE_CONCURRENT: f64 = 124.0;
const REGISTER_SETUP: f64 = 210_000.0;
const GATHER_BANDWIDTH: f64 = 48.0;
const GATHER_ENTRY: f64 = 25.0;

/// Nanoseconds to sort one op into file order: 15, divided among some threads.
const PARTITION_ENTRY: f64 = 4.0;

/// Nanoseconds of one read of the page cache in addition to its bytes, anywhere in a large file, and the increase for
/// each thread that reads: they share caches, memory and, two by two, a core. Bytes per nanosecond that one thread
/// copies, and that all together transfer over the link.
const READ_CALL: f64 = 600.0;
const READ_CONTENTION: f64 = 60.0;
const COPY_BANDWIDTH: f64 = 6.3;
const LINK_BANDWIDTH: f64 = 45.0;

/// The copying threads must do at least one part in this many of a hybrid transfer to be worth waking.
const MIN_COPY_SHARE: f64 = 8.0;

/// Hybrid must save one part in this many: the registering thread also launches the buffers of the others.
const MIN_SAVING: f64 = 5.0;

impl DensityStats {
    /// Nanoseconds to register, at the given cost per page, and to fetch. They hardly overlap: 8 GiB, whose
    /// registration alone takes 170 ms, took 300 to 340 with 1 M ops of 4 KiB fetched out of them
    /// (benches/runs/2026-11-22-h200-pairs). The cause is not known.
    fn register_time_at(&self, page: f64) -> f64 {
        let pages = self.span.div_ceil(4096) as f64;
        pages * page + (self.bytes as f64 / GATHER_BANDWIDTH).max(self.ops as f64 * GATHER_ENTRY)
    }

    /// Nanoseconds before the first page is registered.
    fn setup_time(&self) -> f64 {
        REGISTER_SETUP + self.ops as f64 * PARTITION_ENTRY
    }

    /// Nanoseconds that this many threads need to copy.
    fn copy_time_with(&self, threads: u64) -> f64 {
        let (pieces, bytes, threads) = (self.ops as f64, self.bytes as f64, threads as f64);
        let work = (pieces * (READ_CALL + READ_CONTENTION * threads) + bytes / COPY_BANDWIDTH) / threads;
        work.max(bytes / LINK_BANDWIDTH)
    }

    /// Nanoseconds to register and fetch.
    pub fn register_time(&self) -> f64 {
        self.setup_time() + self.register_time_at(REGISTER_PAGE)
    }

    /// Nanoseconds to copy.
    pub fn copy_time(&self) -> f64 {
        self.copy_time_with(self.threads.max(1))
    }

    /// Nanoseconds until one thread that registers and the others, which copy, meet.
    pub fn hybrid_time(&self) -> f64 {
        if self.concurrent_threads == 0 {
            return f64::INFINITY;
        }
        let (one, others) =
            (self.register_time_at(REGISTER_PAGE_CONCURRENT), self.copy_time_with(self.concurrent_threads));
        // The part in which they meet is registered as a whole, whatever remains of it.
        let last = one * self.chunk.min(self.span) as f64 / self.span.max(1) as f64;
        self.setup_time() + last + one * others / (one + others)
    }

    /// The cheapest strategy.
    pub fn strategy(&self) -> BatchStrategy {
        let (one, all) = (self.register_time(), self.copy_time());
        let alone = one.min(all);
        let few = self.concurrent_threads == 0
            || self.copy_time_with(self.concurrent_threads)
                > MIN_COPY_SHARE * self.register_time_at(REGISTER_PAGE_CONCURRENT);
        if !few && self.hybrid_time() < alone * (1.0 - 1.0 / MIN_SAVING) {
            BatchStrategy::Hybrid
        } else if one < all {
            BatchStrategy::Register
        } else {
            BatchStrategy::Copy
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn density(ops: u64, len: u64, span: u64, threads: u64) -> DensityStats {
        let concurrent_threads = threads.saturating_sub(1);
        DensityStats { ops, bytes: len * ops, span, chunk: 16 << 20, threads, concurrent_threads }
    }

    fn million_ops(len: u64, span: u64, threads: u64) -> DensityStats {
        density(1_000_000, len, span, threads)
    }

    #[test]
    fn dense_is_registered_sparse_is_copied_between_is_hybrid() {
        assert_eq!(million_ops(512, GIB, 12).strategy(), BatchStrategy::Register);
        assert_eq!(million_ops(512, 8 * GIB, 12).strategy(), BatchStrategy::Hybrid);
        assert_eq!(million_ops(4096, 8 * GIB, 12).strategy(), BatchStrategy::Hybrid);
        assert_eq!(million_ops(4096, 1000 * GIB, 12).strategy(), BatchStrategy::Copy);
        assert_eq!(density(100, 4096, GIB, 1).strategy(), BatchStrategy::Copy);
        assert_eq!(density(100, 4096, GIB, 12).strategy(), BatchStrategy::Copy);
    }

    #[test]
    fn short_sparse_ops_are_copied() {
        let at_one_of = |pages: u64| million_ops(512, pages * 4096 * 1_000_000, 12).strategy();
        assert_eq!([2, 16, 64].map(at_one_of), [BatchStrategy::Hybrid, BatchStrategy::Copy, BatchStrategy::Copy]);
    }

    #[test]
    fn single_thread_is_never_hybrid() {
        assert_eq!(million_ops(4096, 8 * GIB, 1).strategy(), BatchStrategy::Register);
        assert_eq!(million_ops(512, 128 * GIB, 1).strategy(), BatchStrategy::Copy);
    }

    #[test]
    fn no_concurrent_threads_is_never_hybrid() {
        for span in [GIB, 8 * GIB, 64 * GIB] {
            let density = DensityStats { concurrent_threads: 0, ..million_ops(4096, span, 12) };
            assert_ne!(density.strategy(), BatchStrategy::Hybrid, "{density:?}");
        }
    }

    #[test]
    fn single_chunk_is_never_hybrid() {
        for ops in [1, 100, 10_000, 1_000_000] {
            for threads in [1, 2, 12, 64] {
                let density = density(ops, 4096, 16 << 20, threads);
                assert_ne!(density.strategy(), BatchStrategy::Hybrid, "{density:?}");
            }
        }
    }

    #[test]
    fn hybrid_is_chosen_only_if_faster() {
        for ops in [1, 1000, 30_000, 1_000_000] {
            for len in [1, 512, 4096, 100_000] {
                for span in [1 << 20, GIB / 8, GIB, 64 * GIB] {
                    for threads in [0, 1, 2, 6, 12] {
                        let density = density(ops, len, span, threads);
                        let alone = density.copy_time().min(density.register_time());
                        if density.strategy() == BatchStrategy::Hybrid {
                            assert!(density.hybrid_time() < alone, "{density:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn more_threads_are_never_slower() {
        for len in [512, 4096] {
            let times: Vec<f64> = [1, 2, 6, 12, 15].iter().map(|&n| million_ops(len, 8 * GIB, n).copy_time()).collect();
            assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
        }
    }
}
