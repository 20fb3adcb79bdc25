//! Non-temporal copies.

#![expect(unsafe_code, reason = "driver calls and device memory")]

/// Copies with non-temporal stores of 16 bytes: on uncached PCI memory a bytewise copy, which the string
/// instructions may become, is a transaction per byte.
///
/// # Safety
/// `src` must be readable and `dst` writable for `len` bytes.
pub(super) unsafe fn nontemporal_copy(dst: *mut u8, src: *const u8, len: usize) {
    use core::arch::x86_64::{_mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let head = dst.align_offset(16).min(len);
    let middle = (len - head) / 16;
    // SAFETY: every access is in the caller's ranges; `dst.add(head)` is aligned to 16 wherever it is stored to.
    unsafe {
        for at in (0..head).chain(head + middle * 16..len) {
            dst.add(at).write_volatile(src.add(at).read_volatile());
        }
        for block in 0..middle {
            let at = head + block * 16;
            _mm_stream_si128(dst.add(at).cast(), _mm_loadu_si128(src.add(at).cast()));
        }
        _mm_sfence();
    }
}
