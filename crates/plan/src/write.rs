//! Chooses the route of a write.
//!
//! ```text
//!   into the page cache     take + copy                  [+ command + write-back, if it is synchronous]
//!   direct                  take + command + write       bypasses the page cache, through a shadow descriptor
//!   p2p                            command + write       directly from the device's memory
//! ```
//!
//! A host `pwrite` leaves its bytes in the page cache, where the next reader finds them, and returns before storage has
//! them. So the page cache is the default, and the other routes have to be cheaper *for the caller*: where it waits for
//! storage anyway (O_SYNC, O_DSYNC), where storage accepts bytes faster than one thread copies them, and where the CPU
//! would have to fetch every byte over the bus.
//!
//! Known flaws: a write is planned as a whole, although a long one overlaps taking and writing. The cost of a read
//! command is used for a write command; the write bandwidth is the model's `writeback`.

use crate::{Model, Reason, Route};

/// A write, and its constraints.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WriteConstraints {
    /// Its length.
    pub len: u64,
    /// The route into the page cache: `copy`, or `store` where the CPU loads the bytes.
    pub cache_route: Route,
    /// The caller waits until storage has it.
    pub synchronous: bool,
    /// Pages of the range are in the page cache.
    pub cached: bool,
    /// Whether it may bypass the page cache.
    pub direct: Result<(), Reason>,
    /// Whether storage may DMA from the device.
    pub p2p: Result<(), Reason>,
}

/// The route of a write, and the reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteDecision {
    /// The route.
    pub route: Route,
    /// Why.
    pub reason: Reason,
    /// Why a faster one was refused, where one was.
    pub refused: Option<Reason>,
}

/// Nanoseconds per byte from the device by its DMA engine; measured on an H200.
const DMA_OUT_PER_BYTE: f64 = 1.0 / 50.0;

/// Nanoseconds per byte from the device by CPU loads. Not measured: 16 bytes per load, each a round trip over PCI.
const CPU_LOAD: f64 = 20.0;

/// Nanoseconds to open and close a descriptor for one write.
const REOPEN: f64 = 40_000.0;

/// The cheapest open route.
pub fn decide_write(case: &WriteConstraints, model: &Model) -> WriteDecision {
    let len = case.len as f64;
    let copy_out = len * if case.cache_route == Route::Store { CPU_LOAD } else { DMA_OUT_PER_BYTE };
    let store = model.storage.fixed() + len * model.writeback;
    let into_cache = copy_out + model.cache.time(case.len) + if case.synchronous { store } else { 0.0 };
    // Cached pages are cheap to write, and later readers still find them.
    let direct = if case.cached { case.direct.and(Err(Reason::Cached)) } else { case.direct };
    let ways = [
        (
            Route::Direct,
            copy_out + store + REOPEN,
            direct,
            if case.synchronous { Reason::Synchronous } else { Reason::CacheBypass },
        ),
        (Route::P2p, store + REOPEN, case.p2p, Reason::CacheBypass),
    ];
    let cheaper = |&&(_, time, ..): &&(Route, f64, Result<(), Reason>, Reason)| time < into_cache;
    let refused = ways.iter().filter(cheaper).find_map(|(_, _, open, _)| open.err());
    let open = ways.iter().filter(cheaper).filter(|(_, _, open, _)| open.is_ok());
    match open.min_by(|a, b| a.1.total_cmp(&b.1)) {
        Some(&(route, _, _, reason)) => {
            WriteDecision { route, reason, refused: refused.filter(|_| route != Route::P2p) }
        }
        None => WriteDecision { route: case.cache_route, reason: Reason::IntoCache, refused },
    }
}

/// Splits a write of `len` bytes at `offset` at the boundaries of whole units of `unit` bytes: length of the unaligned
/// head, and of the aligned middle. Without a whole unit, all is head.
pub fn split_aligned(offset: u64, len: u64, unit: u64) -> (u64, u64) {
    let (first, end) = (offset.next_multiple_of(unit), (offset + len) / unit * unit);
    if first >= end { (len, 0) } else { (first - offset, end - first) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(len: u64) -> WriteConstraints {
        let into_cache = Route::Copy;
        WriteConstraints {
            len,
            cache_route: into_cache,
            synchronous: false,
            cached: false,
            direct: Ok(()),
            p2p: Err(Reason::NoP2pMapping),
        }
    }

    #[test]
    fn buffered_write_goes_into_page_cache() {
        for model in [Model::nvme(), Model::virtual_disk()] {
            for len in [1, 4096, 1 << 20, 1 << 30] {
                assert_eq!(decide_write(&case(len), &model).route, Route::Copy);
            }
        }
    }

    #[test]
    fn long_uncached_sync_write_bypasses_cache() {
        let model = Model::virtual_disk();
        let with = |len, cached| decide_write(&WriteConstraints { synchronous: true, cached, ..case(len) }, &model);
        assert_eq!(with(4096, false).route, Route::Copy);
        assert_eq!((with(8 << 20, false).route, with(8 << 20, false).reason), (Route::Direct, Reason::Synchronous));
        assert_eq!((with(8 << 20, true).route, with(8 << 20, true).refused), (Route::Copy, Some(Reason::Cached)));
    }

    #[test]
    fn fast_storage_is_written_directly() {
        let fast = Model { writeback: 1.0 / 25.0, ..Model::nvme() };
        assert_eq!(decide_write(&case(1 << 30), &fast).route, Route::Direct);
        let closed = WriteConstraints { direct: Err(Reason::NoDirectIo), ..case(1 << 30) };
        assert_eq!(decide_write(&closed, &fast).refused, Some(Reason::NoDirectIo));
    }

    #[test]
    fn cpu_loaded_memory_uses_p2p_write() {
        let mapped = WriteConstraints { cache_route: Route::Store, p2p: Ok(()), ..case(64 << 10) };
        assert_eq!(decide_write(&mapped, &Model::nvme()).route, Route::P2p);
        let tiny = WriteConstraints { len: 4096, ..mapped };
        assert_eq!(decide_write(&tiny, &Model::nvme()).route, Route::Store);
        let refused = WriteConstraints { p2p: Err(Reason::P2pUnreachable), direct: Err(Reason::NoDirectIo), ..mapped };
        assert_eq!(decide_write(&refused, &Model::nvme()).refused, Some(Reason::P2pUnreachable));
    }

    #[test]
    fn split_middle_is_aligned_and_parts_add_up() {
        for unit in [512, 4096] {
            for offset in [0, 1, 511, 512, 4095, 4096, 5000] {
                for len in [0, 1, 511, 512, 4096, 4097, 20_000] {
                    let (front, middle) = split_aligned(offset, len, unit);
                    assert!(front + middle <= len && middle % unit == 0);
                    assert!(middle == 0 || (offset + front).is_multiple_of(unit));
                    assert!(middle > 0 || front == len);
                    assert!(middle == 0 || (front < unit && len - front - middle < unit));
                }
            }
        }
    }
}
