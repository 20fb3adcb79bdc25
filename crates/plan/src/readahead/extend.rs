//! Extends the Linux kernel's read-ahead beyond its default distance.
//!
//! ```text
//!   default:            ──●──[ being read ]![ in flight ]
//!
//!   extended:           ──●──[ being read ]![ in flight ]![ in flight ]![ in flight ]
//!                         at                                                     end
//! ```
//!
//! The Linux kernel requests the next window from storage when a reader comes to the marker (!) at the beginning of the
//! last one. So one window is in flight while another is read, and where a device takes the bytes as fast as storage
//! delivers them, the reader waits for every single one: two windows of 128 KiB do not keep a disk busy.
//!
//! A read of one byte at the marker, before the reader gets there, requests the next window, and so on from window to
//! window. These windows are the Linux kernel's own: of its size, in folios as large as it uses. Advice
//! (POSIX_FADV_WILLNEED) takes single pages, which costs about twice the processor time. The page cache shows the end
//! of the last window: pages in flight are counted as cached.
//!
//! After a read that found nothing cached the marker is on the window's last page. So both offsets are tried, and no
//! others. A wrong guess does nothing where the page is in flight already; where cached pages follow further ahead, so
//! that the last window ends before the count suggests, it fetches what a read there would have, usually one page. Then
//! the reader itself comes to the marker.

/// Bytes in flight ahead of a reader: enough to keep a disk of a few GB/s busy, and four streams at once within the
/// 512 pages that SPIN may leave in the page cache.
pub const READAHEAD_BYTES: u64 = 512 << 10;

/// Bytes that a stream must read before read-ahead is extended: if it ends or jumps, the unused bytes are an eighth of
/// the bytes read at most.
pub const MIN_SEQUENTIAL_BYTES: u64 = 8 * READAHEAD_BYTES;

/// Bytes that are read until read-ahead is extended again.
pub const EXTEND_STEP: u64 = 128 << 10;

/// Whole pages only: the granularity of the page cache.
const PAGE: u64 = 4096;

/// The possible offsets of the last window's marker, for a reader at `at`; none if `distance` bytes are in flight.
/// `cached`: bytes from `at` that are cached or will soon be; `window`: the Linux kernel's; `limit`: the bound of the
/// next one's end.
pub fn marker_offsets(at: u64, cached: u64, window: u64, distance: u64, limit: u64) -> Option<[u64; 2]> {
    let at = at / PAGE * PAGE;
    let end = at.saturating_add(cached);
    // Where nothing is in flight the Linux kernel has decided not to read ahead.
    let extends = cached >= PAGE && window >= PAGE && cached < distance && end.saturating_add(window) <= limit;
    extends.then(|| [end.saturating_sub(window), end - PAGE])
}
