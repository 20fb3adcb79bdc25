//! The content of a READDIR or READDIRPLUS reply: entries, each padded to 8 bytes, up to the size that was asked for.

use zerocopy::IntoBytes;

use crate::abi::{Dirent, EntryOut};

/// Entries that were added so far.
#[derive(Debug)]
pub struct DirectoryBuffer<'a> {
    bytes: &'a mut Vec<u8>,
    limit: usize,
}

impl<'a> DirectoryBuffer<'a> {
    /// Appends to `bytes`, up to `limit` bytes in it.
    pub fn new(bytes: &'a mut Vec<u8>, limit: usize) -> DirectoryBuffer<'a> {
        DirectoryBuffer { bytes, limit }
    }

    /// Whether an entry of this name still fits; `plus`: with its attributes.
    pub fn fits(&self, name: &[u8], plus: bool) -> bool {
        let head = if plus { size_of::<EntryOut>() } else { 0 } + size_of::<Dirent>();
        self.bytes.len() + (head + name.len()).next_multiple_of(8) <= self.limit
    }

    /// Adds an entry; `kind` is a DT_ constant, `offset` the position of the next entry. The caller has made sure that
    /// it fits.
    pub fn push(&mut self, ino: u64, kind: u32, offset: u64, name: &[u8], entry: Option<&EntryOut>) {
        if let Some(entry) = entry {
            self.bytes.extend_from_slice(entry.as_bytes());
        }
        let head = Dirent { ino, offset, name_length: name.len() as u32, kind };
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(name);
        self.bytes.resize(self.bytes.len().next_multiple_of(8), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_padded_and_limited() {
        let mut bytes = Vec::new();
        let mut directory = DirectoryBuffer::new(&mut bytes, 64);
        assert!(directory.fits(b"a", false));
        directory.push(7, 8, 1, b"a", None);
        assert!(directory.fits(b"12345678", false));
        assert!(!directory.fits(b"123456789", false));
        assert!(!directory.fits(b"a", true));
        assert_eq!(bytes.len(), 32);
        assert_eq!(bytes[..8], 7u64.to_ne_bytes());
    }
}
