//! Fingerprints of pages: how a client of GAIA finds the pages that GPU kernels have changed.
//!
//! A GPU has no dirty bits that a program can read. So each page of an epoch has a fingerprint of 128 bits from its
//! begin; at its end a kernel computes them again, at the speed of the memory, and only pages whose fingerprint differs
//! are read back.
//!
//! ```text
//!   page = 512 words of 64 bits      key(i) = (i + 1) * 0x9e3779b97f4a7c15
//!   low  = sum over i of mix_a(word(i) ^ key(i))          mod 2^64
//!   high = sum over i of mix_b(word(i) ^ key(i))          mod 2^64
//! ```
//!
//! The sum has no order, so a GPU kernel may add the words of a page in any. Both mixes are bijections (finalizers of
//! MurmurHash3 and SplitMix64): a page in which one word changed never has the same fingerprint. If several words
//! change, it has with a probability of about 2^-128. It is no cryptographic hash: a client that constructs a collision
//! loses its own stores.
//!
//! This file is the reference: a GPU kernel must return the same bits (test `fingerprint_of_known_pages`).

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// The fingerprint of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Fingerprint {
    /// The first sum.
    pub low: u64,
    /// The second sum.
    pub high: u64,
}

impl Fingerprint {
    /// The fingerprint of a page's bytes.
    pub fn of(page: &[u8; PAGE_BYTES]) -> Fingerprint {
        let mut sum = Fingerprint::default();
        for (i, word) in page.as_chunks::<8>().0.iter().enumerate() {
            sum.add(i as u64, u64::from_le_bytes(*word));
        }
        sum
    }

    /// Adds the word at position `i` of the page.
    #[inline]
    pub(crate) fn add(&mut self, i: u64, word: u64) {
        let keyed = word ^ (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.low = self.low.wrapping_add(mix_a(keyed));
        self.high = self.high.wrapping_add(mix_b(keyed));
    }
}

/// The finalizer of MurmurHash3.
#[inline]
fn mix_a(mut x: u64) -> u64 {
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// The finalizer of SplitMix64.
#[inline]
fn mix_b(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted() -> [u8; PAGE_BYTES] {
        std::array::from_fn(|i| (i * 31 + 7) as u8)
    }

    #[test]
    fn fingerprint_of_known_pages() {
        let zeros = Fingerprint { low: 0x6ece_6502_61be_d3d3, high: 0x26f2_2f79_bfea_f10d };
        assert_eq!(Fingerprint::of(&[0; PAGE_BYTES]), zeros);
        let numbers = Fingerprint { low: 0x00cb_988e_a77e_2a6f, high: 0x5123_de0e_bbfd_4805 };
        assert_eq!(Fingerprint::of(&counted()), numbers);
    }

    #[test]
    fn every_changed_bit_changes_the_fingerprint() {
        let original = Fingerprint::of(&counted());
        for bit in 0..PAGE_BYTES * 8 {
            let mut page = counted();
            page[bit / 8] ^= 1 << (bit % 8);
            let changed = Fingerprint::of(&page);
            assert!(changed.low != original.low && changed.high != original.high, "bit {bit}");
        }
    }

    #[test]
    fn moved_words_change_the_fingerprint() {
        let original = Fingerprint::of(&counted());
        for i in (0..PAGE_BYTES - 8).step_by(8) {
            let mut page = counted();
            let (a, b) = page.split_at_mut(i + 8);
            a[i..].swap_with_slice(&mut b[..8]);
            assert_ne!(a[i..], b[..8]);
            assert_ne!(Fingerprint::of(&page), original, "word {}", i / 8);
        }
    }
}
