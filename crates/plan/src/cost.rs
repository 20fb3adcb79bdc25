//! The cost of a transfer.
//!
//! ```text
//!   one after another: SPIN's Eq. 1              in flight together
//!
//!   T │            ╱ slope 1/BW                  T(n commands, s bytes) =
//!     │          ╱                                   latency            once
//!   C │────────╯                                   + n * cost per command
//!     └────────┴──────── s                         + s / BW
//!          S_cutoff
//! ```
//!
//! A fit of Eq. 1 must keep `C >= S_cutoff / BW`. Otherwise two transfers of half the size would be
//! predicted cheaper than one, and every planner would split where it should merge.
//!
//! Times are nanoseconds in `f64`. A page costs hundreds of them and a request has less than 2^40
//! bytes, so sums lose no relevant precision; no code compares two times for equality.
//!
//! Known flaws: a dirty page's write-back is counted by bandwidth only, not by the latency of its
//! command. The defaults describe only the machines named; calibration (calibration.rs) replaces them.

use std::fmt;

use crate::Route;

/// SPIN's Eq. 1: constant below the cutoff, linear above.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    fixed: f64,
    cutoff: u64,
    per_byte: f64,
}

/// Invalid cost parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CostError {
    /// A bandwidth or time that is zero where it must not be, negative, infinite or NaN.
    InvalidValue,
    /// `C < S_cutoff / BW`: splitting a transfer in two would be 'cheaper'.
    SplittingIsCheaper,
}

impl fmt::Display for CostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            CostError::InvalidValue => "time and bandwidth of a cost must be finite, and the bandwidth above 0",
            CostError::SplittingIsCheaper => {
                "the fixed cost is below cutoff / bandwidth: cutting a transfer would make it cheaper"
            }
        })
    }
}

impl std::error::Error for CostError {}

impl Cost {
    /// `fixed` nanoseconds up to `cutoff` bytes, then `bandwidth` bytes a second.
    pub const fn new(fixed: f64, cutoff: u64, bandwidth: f64) -> Result<Cost, CostError> {
        if !(fixed >= 0.0 && fixed.is_finite() && bandwidth > 0.0 && bandwidth.is_finite()) {
            return Err(CostError::InvalidValue);
        }
        let per_byte = 1e9 / bandwidth;
        if fixed < cutoff as f64 * per_byte {
            return Err(CostError::SplittingIsCheaper);
        }
        Ok(Cost { fixed, cutoff, per_byte })
    }

    /// For the defaults, which are checked at compile time.
    const fn from_constants(fixed: f64, cutoff: u64, bandwidth: f64) -> Cost {
        match Cost::new(fixed, cutoff, bandwidth) {
            Ok(cost) => cost,
            Err(_) => panic!("a default cost breaks its own rule"),
        }
    }

    /// Nanoseconds for one transfer; 0 bytes cost 0.
    #[inline]
    pub fn time(&self, bytes: u64) -> f64 {
        if bytes == 0 { 0.0 } else { self.fixed + bytes.saturating_sub(self.cutoff) as f64 * self.per_byte }
    }

    /// `C` in nanoseconds.
    pub const fn fixed(&self) -> f64 {
        self.fixed
    }

    /// `S_cutoff` in bytes.
    pub const fn cutoff(&self) -> u64 {
        self.cutoff
    }

    /// `1 / BW` in nanoseconds.
    pub const fn per_byte(&self) -> f64 {
        self.per_byte
    }
}

/// Commands in flight together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueCost {
    /// Nanoseconds before the first byte, once.
    pub latency: f64,
    /// Nanoseconds per command.
    pub per_command: f64,
    /// Nanoseconds per byte.
    pub per_byte: f64,
}

impl QueueCost {
    /// From nanoseconds, nanoseconds, and bytes a second.
    pub const fn new(latency: f64, per_command: f64, bandwidth: f64) -> QueueCost {
        QueueCost { latency, per_command, per_byte: 1e9 / bandwidth }
    }

    /// The cost of one command, without the latency.
    #[inline]
    pub fn command_time(&self, bytes: u64) -> f64 {
        self.per_command + bytes as f64 * self.per_byte
    }
}

/// The cost of each kind of transfer for one pair of file system and device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Model {
    /// `copy`, one transfer at a time on one thread.
    pub cache: Cost,
    /// `dma`, likewise, registration included.
    pub cache_dma: Cost,
    /// `store`, likewise.
    pub cache_store: Cost,
    /// `p2p` or `direct`, one command at a time.
    pub storage: Cost,
    /// `copy` with all the threads a request may use.
    pub cache_queue: QueueCost,
    /// `dma`: registrations hold a lock of the driver, so its latency is paid by every segment.
    pub cache_dma_queue: QueueCost,
    /// `store` with all the threads a request may use.
    pub cache_store_queue: QueueCost,
    /// `p2p` or `direct`, a queue full of commands.
    pub storage_queue: QueueCost,
    /// Nanoseconds per byte to write dirty pages back, which storage must do before they can be read.
    pub writeback: f64,
}

// Costs of the cache routes: measured on an H200 behind PCIe 5 x16, unless noted.
const COPY: Cost = Cost::from_constants(2_400.0, 0, 6.3e9);
const COPY_QUEUE: QueueCost = QueueCost::new(9_000.0, 3_000.0, 27e9);
// 8 MiB whole in 575 us; of these 365 us are registration, DMA and unregistration by the byte.
const DMA: Cost = Cost::from_constants(210_000.0, 0, 23e9);
const DMA_QUEUE: QueueCost = QueueCost::new(210_000.0, 0.0, 51e9);
// Not measured: write-combined CPU stores, one thread.
const STORE: Cost = Cost::from_constants(500.0, 0, 4e9);
const STORE_QUEUE: QueueCost = QueueCost::new(500.0, 500.0, 8e9);

impl Model {
    /// An NVMe drive of PCIe 4: 80 us, 6.5 GB/s, half a million commands per second. From data sheets, not measured.
    pub const fn nvme() -> Model {
        Model {
            cache: COPY,
            cache_dma: DMA,
            cache_store: STORE,
            storage: Cost::from_constants(85_000.0, 128 << 10, 6.5e9),
            cache_queue: COPY_QUEUE,
            cache_dma_queue: DMA_QUEUE,
            cache_store_queue: STORE_QUEUE,
            storage_queue: QueueCost::new(80_000.0, 2_000.0, 6.5e9),
            writeback: 1.0 / 3.0,
        }
    }

    /// The disk of a virtual machine, as measured: reads alone 4 KiB 30 us, 64 KiB 49 us, 1 MiB 379 us; direct writes 3.2
    /// GB/s. In flight together (benches/gpu/ring.c, half of 1 MiB): 1 read 274 us, 8 reads 340, 16 reads 419, 32 reads 598;
    /// all of it in one read 503 us.
    pub const fn virtual_disk() -> Model {
        Model {
            storage: Cost::from_constants(30_000.0, 4 << 10, 3.0e9),
            storage_queue: QueueCost::new(40_000.0, 10_500.0, 2.2e9),
            writeback: 1.0 / 3.2,
            ..Model::nvme()
        }
    }

    /// One transfer at a time on this route.
    pub fn cost(&self, route: Route) -> &Cost {
        match route {
            Route::Copy | Route::Gather => &self.cache,
            Route::Dma => &self.cache_dma,
            Route::Store => &self.cache_store,
            Route::Direct | Route::P2p => &self.storage,
        }
    }

    /// Many commands in flight on this route.
    pub fn queue(&self, route: Route) -> &QueueCost {
        match route {
            Route::Copy | Route::Gather => &self.cache_queue,
            Route::Dma => &self.cache_dma_queue,
            Route::Store => &self.cache_store_queue,
            Route::Direct | Route::P2p => &self.storage_queue,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equation_1() {
        let cost = Cost::new(100.0, 50, 1e9).expect("valid");
        assert_eq!(cost.time(0), 0.0);
        assert_eq!(cost.time(1), 100.0);
        assert_eq!(cost.time(50), 100.0);
        assert_eq!(cost.time(80), 130.0);
    }

    #[test]
    fn cost_that_rewards_splitting_is_refused() {
        assert_eq!(Cost::new(49.0, 50, 1e9), Err(CostError::SplittingIsCheaper));
        assert_eq!(Cost::new(0.0, 0, 0.0), Err(CostError::InvalidValue));
        assert_eq!(Cost::new(f64::NAN, 0, 1.0), Err(CostError::InvalidValue));
        assert_eq!(Cost::new(-1.0, 0, 1.0), Err(CostError::InvalidValue));
        assert_eq!(Cost::new(1.0, 0, f64::INFINITY), Err(CostError::InvalidValue));
    }

    #[test]
    fn virtual_disk_model_matches_measurements() {
        let storage = Model::virtual_disk().storage;
        for (bytes, measured) in [(4 << 10, 30e3), (64 << 10, 49e3), (1 << 20, 379e3)] {
            let relative_error = storage.time(bytes) / measured;
            assert!((0.95..1.05).contains(&relative_error), "{bytes} bytes: {relative_error} of the measured time");
        }
    }

    #[test]
    fn virtual_disk_model_matches_reads_in_flight_together() {
        let queue = Model::virtual_disk().storage_queue;
        for (reads, bytes, measured) in
            [(1, 512, 274e3), (8, 512, 340e3), (16, 512, 419e3), (32, 512, 598e3), (1, 1024, 503e3)]
        {
            let predicted =
                queue.latency + f64::from(reads) * queue.per_command + f64::from(bytes << 10) * queue.per_byte;
            let relative_error = predicted / measured;
            assert!((0.9..1.1).contains(&relative_error), "{reads} reads: {relative_error} of the measured time");
        }
    }

    #[test]
    fn dma_of_8_mib_matches_measurement() {
        let off = Model::nvme().cache_dma.time(8 << 20) / 575e3;
        assert!((0.95..1.05).contains(&off), "{off}");
    }
}
