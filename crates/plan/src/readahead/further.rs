//! How the kernel is led further ahead of a reader than it goes by itself.
//!
//! ```text
//!   the kernel alone:   ──●──[ being read ]![ on its way ]
//!
//!   led on:             ──●──[ being read ]![ on its way ]![ on its way ]![ on its way ]
//!                         at                                                          end
//! ```
//!
//! The kernel asks storage for the next window when a reader comes to the mark (!) that it puts at the beginning of the
//! last one. So one window is under way while another is read, and where a device takes the bytes as fast as storage
//! brings them, the reader waits for every single one: two windows of 128 KiB do not keep a disk busy.
//!
//! Who reads a byte at the mark before the reader gets there has the next window sent for, and so on from window to
//! window. They are the kernel's own: as long as it makes them, in blocks of pages as large as it takes. Advice
//! (POSIX_FADV_WILLNEED) takes single pages, which costs about twice the processor time. Where the last window ends the
//! page cache tells: what is on its way is counted as cached.
//!
//! Behind a read that found nothing cached the mark is on the window's last page. So both places are tried, and no others. A
//! guess that is wrong does nothing where the page is on its way already; where cached pages lie further ahead, so that
//! the last window ends before the count says, it fetches what a read there would have, a page as a rule. Then the
//! reader itself comes to the mark.

/// Bytes on their way ahead of a reader: what keeps a disk of a few GB/s busy, and four streams at once within the 512
/// pages that SPIN may leave in the page cache.
pub const READAHEAD_BYTES: u64 = 512 << 10;

/// Bytes that a stream has to go before the kernel is led: where it ends or jumps, what was sent for in vain is an eighth of
/// what it has read at most.
pub const MIN_SEQUENTIAL_BYTES: u64 = 8 * READAHEAD_BYTES;

/// Bytes that are read until the kernel is led on again.
pub const EXTEND_STEP: u64 = 128 << 10;

/// Whole pages only: the page cache knows nothing smaller.
const PAGE: u64 = 4096;

/// The places where the mark of the last window may be, for a reader at `at`; none if `further` bytes are on their way.
/// `cached`: bytes of these that are or will soon be; `window`: the kernel's; `reach`: where the next one must end.
pub fn marker_offsets(at: u64, cached: u64, window: u64, distance: u64, limit: u64) -> Option<[u64; 2]> {
    let at = at / PAGE * PAGE;
    let end = at.saturating_add(cached);
    // Where nothing is on its way the kernel does not read ahead, and knows why.
    let extends = cached >= PAGE && window >= PAGE && cached < distance && end.saturating_add(window) <= limit;
    extends.then(|| [end.saturating_sub(window), end - PAGE])
}
