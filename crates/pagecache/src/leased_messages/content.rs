//! The content of a leased file, and the grid of chunks in which devices have it.
//!
//! ```text
//!   file up to 128 MiB   | 2 MiB | 2 MiB | ... | last, a multiple of 2 MiB |
//!   up to 4 GiB          | 64 MiB            | 64 MiB            | ... | last |
//!   longer               | 256 MiB                                         | ... | last |
//! ```
//!
//! The driver takes nearly the same time for a chunk of any size, and a descriptor each; an acquire brings whole chunks.

/// Chunks that a client is to read from the file at a time, in one large read, and bytes, if it is more than a chunk.
pub const FILLS: u64 = 4;
const FILL_BYTES: u64 = 256 << 20;

/// The least chunk.
pub const MIN_CHUNK: u64 = 2 << 20;

/// The largest chunk.
pub const MAX_CHUNK: u64 = 256 << 20;

const LARGE_CHUNK: u64 = 64 << 20;

/// Files up to this have chunks of [`MIN_CHUNK`].
pub const LARGE_FILE: u64 = 128 << 20;

/// Files above this have chunks of [`MAX_CHUNK`]; those between have chunks of 64 MiB. On two H200 a second one got 8 GiB in
/// 37 ms in chunks of 256 MiB, and in 44 in chunks of 512.
pub const HUGE_FILE: u64 = 4 << 30;

/// The content of a file between two writers: a random number, so that no two daemons use the same.
pub type ContentId = u64;

/// The content that chunks are of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Content {
    /// Which.
    pub id: ContentId,
    /// Bytes of the file.
    pub size: u64,
}

impl Content {
    /// Bytes of every chunk but the last.
    pub fn chunk_bytes(&self) -> u64 {
        if self.size <= LARGE_FILE {
            MIN_CHUNK
        } else if self.size <= HUGE_FILE {
            LARGE_CHUNK
        } else {
            MAX_CHUNK
        }
    }

    /// Chunks that a client is to read from the file at a time.
    pub fn fills(&self) -> u64 {
        (FILL_BYTES / self.chunk_bytes()).clamp(1, FILLS)
    }

    /// The number of chunks.
    pub fn chunks(&self) -> u64 {
        self.size.div_ceil(self.chunk_bytes())
    }

    /// Bytes of the memory of a chunk: the last one ends soon after the file.
    pub fn len_of(&self, chunk: u64) -> u64 {
        let left = self.size.saturating_sub(chunk * self.chunk_bytes());
        left.min(self.chunk_bytes()).next_multiple_of(MIN_CHUNK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_chunk_is_as_long_as_the_file_needs() {
        let small = Content { id: 1, size: 5 };
        assert_eq!((small.chunks(), small.len_of(0)), (1, MIN_CHUNK));
        let large = Content { id: 1, size: LARGE_FILE + 1 };
        assert_eq!((large.chunks(), large.len_of(0), large.len_of(2)), (3, LARGE_CHUNK, MIN_CHUNK));
        let huge = Content { id: 1, size: HUGE_FILE + 1 };
        assert_eq!((huge.chunks(), huge.len_of(0), huge.len_of(16)), (17, MAX_CHUNK, MIN_CHUNK));
        assert_eq!([small, large, huge].map(|content| content.fills()), [4, 4, 1]);
        assert_eq!(Content { id: 1, size: 0 }.chunks(), 0);
    }
}
