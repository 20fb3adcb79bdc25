//! Requests to the device process, and its answers: messages of fixed sizes, in words.
//!
//! ```text
//!   request   kind │ id │ object │ file │ length or count │ device, 2 words │ 64 ranges: from, to, length      + a descriptor
//!   answer    id │ errno or 0
//! ```
//!
//! Chunks and memory files have numbers, which the server gives.

/// Ranges in one request.
pub(super) const RANGES: usize = 64;
const HEADER: usize = 7;
const WORDS: usize = HEADER + 3 * RANGES;
/// Bytes of a request.
pub(super) const REQUEST: usize = WORDS * 8;
/// Bytes of an answer.
pub(super) const ANSWER: usize = 16;

/// Bytes to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct CopyRange {
    /// In the chunk.
    pub(crate) from: u64,
    /// In the memory file.
    pub(crate) to: u64,
    pub(crate) len: u64,
}

/// What the process shall do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Import the chunk of the descriptor.
    Import { chunk: u64, device: [u8; 16], len: u64 },
    /// Take the memory file of the descriptor.
    File { file: u64 },
    /// Copy from a chunk to a file.
    Copy { chunk: u64, file: u64, ranges: Vec<CopyRange> },
    /// Forget a chunk.
    Forget { chunk: u64 },
}

impl Request {
    pub(super) fn to_bytes(&self, id: u64) -> Vec<u8> {
        let (kind, object, file, len, device): (u64, u64, u64, u64, [u8; 16]) = match self {
            Request::Import { chunk, device, len } => (1, *chunk, 0, *len, *device),
            Request::File { file } => (2, 0, *file, 0, [0; 16]),
            Request::Copy { chunk, file, ranges } => (3, *chunk, *file, ranges.len() as u64, [0; 16]),
            Request::Forget { chunk } => (4, *chunk, 0, 0, [0; 16]),
        };
        let mut bytes = Vec::with_capacity(REQUEST);
        [kind, id, object, file, len].iter().for_each(|word| bytes.extend(word.to_ne_bytes()));
        bytes.extend(device);
        if let Request::Copy { ranges, .. } = self {
            let words = ranges.iter().flat_map(|range| [range.from, range.to, range.len]);
            words.for_each(|word| bytes.extend(word.to_ne_bytes()));
        }
        bytes.resize(REQUEST, 0);
        bytes
    }

    /// The request and its id; `None`: it is none.
    pub(super) fn parse(bytes: &[u8]) -> Option<(u64, Request)> {
        let bytes: &[u8; REQUEST] = bytes.try_into().ok()?;
        let word = |at: usize| bytes[at * 8..][..8].try_into().map_or(0, u64::from_ne_bytes);
        let (object, file, len) = (word(2), word(3), word(4));
        let request = match word(0) {
            1 => Request::Import { chunk: object, device: bytes[40..56].try_into().ok()?, len },
            2 => Request::File { file },
            3 if len <= RANGES as u64 => {
                let range = |n: usize| {
                    let at = HEADER + 3 * n;
                    CopyRange { from: word(at), to: word(at + 1), len: word(at + 2) }
                };
                Request::Copy { chunk: object, file, ranges: (0..len as usize).map(range).collect() }
            }
            4 => Request::Forget { chunk: object },
            _ => return None,
        };
        Some((word(1), request))
    }
}

/// An answer as bytes.
pub(super) fn answer(id: u64, errno: i32) -> [u8; ANSWER] {
    let mut bytes = [0; ANSWER];
    bytes[..8].copy_from_slice(&id.to_ne_bytes());
    bytes[8..].copy_from_slice(&i64::from(errno).to_ne_bytes());
    bytes
}

/// The id and the errno of an answer.
pub(super) fn parse_answer(bytes: &[u8]) -> Option<(u64, i32)> {
    let (id, errno) = <&[u8; ANSWER]>::try_from(bytes).ok()?.split_at(8);
    let errno = i64::from_ne_bytes(errno.try_into().ok()?);
    Some((u64::from_ne_bytes(id.try_into().ok()?), i32::try_from(errno).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_arrive_as_they_were() {
        let range = |n: u64| CopyRange { from: n, to: n << 40, len: n + 1 };
        let all = [
            Request::Import { chunk: 3, device: *b"0123456789abcdef", len: 2 << 20 },
            Request::File { file: u64::MAX },
            Request::Copy { chunk: 1, file: 2, ranges: (0..RANGES as u64).map(range).collect() },
            Request::Copy { chunk: 1, file: 2, ranges: Vec::new() },
            Request::Forget { chunk: 9 },
        ];
        for (id, request) in (5..).zip(all) {
            let bytes = request.to_bytes(id);
            assert_eq!(Request::parse(&bytes), Some((id, request)));
            assert_eq!(Request::parse(&bytes[1..]), None);
        }
        assert_eq!(Request::parse(&[0; REQUEST]), None);
        let mut too_many = Request::Copy { chunk: 1, file: 2, ranges: Vec::new() }.to_bytes(1);
        too_many[32..40].copy_from_slice(&(RANGES as u64 + 1).to_ne_bytes());
        assert_eq!(Request::parse(&too_many), None);
        assert_eq!(parse_answer(&answer(7, 5)), Some((7, 5)));
        assert_eq!(parse_answer(&[0; 15]), None);
    }
}
