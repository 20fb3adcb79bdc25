//! Host memory for O_DIRECT: aligned to whole pages, whatever alignment the storage requires.
//!
//! A `Vec<u8>` begins at a multiple of 16. The kernel refuses such memory (EINVAL) on a descriptor with O_DIRECT, and
//! the program would get that error for its own, aligned, buffer. So every private buffer that a descriptor of the
//! program, or one with O_DIRECT, is read into or written from is one of these.

use std::ops::{Deref, DerefMut};

use spinio_sys::linux::PAGE;

/// Bytes that begin at a multiple of a page; zeros at first.
#[derive(Debug, Default)]
pub struct AlignedBuf {
    /// One page more than is used. Not an allocation with the alignment of a page: zeroed ones of that kind are written
    /// at once, while these pages are not touched until they are used.
    bytes: Vec<u8>,
    skip: usize,
    len: usize,
}

impl AlignedBuf {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let bytes = vec![0; len + PAGE];
        let skip = bytes.as_ptr().align_offset(PAGE).min(PAGE);
        AlignedBuf { bytes, skip, len }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.skip..self.skip + self.len]
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.skip..self.skip + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begins_at_a_page_and_has_its_length() {
        for len in [0, 1, 511, 4096, 4097, 1 << 20] {
            let mut bytes = AlignedBuf::zeroed(len);
            assert!(bytes.as_ptr().cast::<u8>().addr().is_multiple_of(PAGE));
            assert!(bytes.len() == len && bytes.iter().all(|&b| b == 0));
            bytes.fill(7);
            assert!(bytes.iter().all(|&b| b == 7));
        }
    }
}
