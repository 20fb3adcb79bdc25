//! Tags of pages: keyed fingerprints, by which the server knows bytes of a file again that come from a client's memory.
//!
//! ```text
//!   page = 512 words w of 64 bits      k: 512 random words, made when the server starts, and known to it alone
//!   tag  = sum over i of (w[2i] + k[2i]) * (w[2i + 1] + k[2i + 1])      sums of words mod 2^64, of products mod 2^128
//! ```
//!
//! This is NH, the hash of UMAC (RFC 4418): a program that does not know the key finds two pages with one tag with a probability of
//! 2^-64 at each attempt, whatever the pages are. The key and the tags never leave the server.

use rustix::io::Errno;
use spinio_pagecache::PAGE;

/// The fingerprint of a page.
pub(super) type Tag = u128;

const WORDS: usize = PAGE / 8;

/// What makes tags unknown to others.
pub(crate) struct Key(Box<[u64; WORDS]>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    /// A random one.
    pub(super) fn random() -> Result<Key, Errno> {
        let mut bytes = [0; PAGE];
        let mut done = 0;
        while done < PAGE {
            match rustix::rand::getrandom(&mut bytes[done..], rustix::rand::GetRandomFlags::empty()) {
                Ok(got) => done += got,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error),
            }
        }
        let mut key = Box::new([0; WORDS]);
        for (word, bytes) in key.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_ne_bytes(*bytes);
        }
        Ok(Key(key))
    }

    /// The tag of a page.
    pub(super) fn tag(&self, page: &[u8]) -> Tag {
        let mut tag: Tag = 0;
        for (pair, key) in page.as_chunks::<16>().0.iter().zip(self.0.as_chunks::<2>().0) {
            let both = u128::from_le_bytes(*pair);
            let (low, high) = ((both as u64).wrapping_add(key[0]), ((both >> 64) as u64).wrapping_add(key[1]));
            tag = tag.wrapping_add(u128::from(low) * u128::from(high));
        }
        tag
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_change_of_a_page_changes_its_tag_and_keys_differ() {
        let (key, other) = (Key::random().unwrap(), Key::random().unwrap());
        let mut page = vec![0u8; PAGE];
        let zeros = key.tag(&page);
        assert!(zeros == key.tag(&vec![0; PAGE]) && zeros != other.tag(&page));
        for bit in 0..PAGE * 8 {
            page[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(key.tag(&page), zeros, "bit {bit}");
            page[bit / 8] = 0;
        }
        // Words that change places, and words that change by as much in opposite directions.
        page[0] = 1;
        let first = key.tag(&page);
        page.swap(0, 16);
        assert_ne!(key.tag(&page), first);
        page[0] = 255;
        assert_ne!(key.tag(&page), zeros);
    }
}
