//! A release whose pages stay in device memory until the server has copied them.

use super::{BadMessage, Cursor, HAND_OVER, ReleaseId, Run, check_range, encode_run, numbers, start};

/// The most chunks that one release hands over: 8 GiB in chunks of 64 MiB.
pub const MAX_CHUNKS: usize = 128;

/// A [`Request::HandOver`](super::Request::HandOver) without its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// The release.
    pub id: ReleaseId,
    /// The epoch's range: its first page.
    pub first: u64,
    /// The epoch's range: how many pages.
    pub pages: u32,
    /// The UUID of the device.
    pub device: [u8; 16],
    /// The page of the map where the first chunk begins.
    pub chunk: u64,
    /// Chunks, side by side; as many descriptors come with the message. At least 1, at most [`MAX_CHUNKS`].
    pub chunks: u32,
    /// Pages of each chunk but the last.
    pub chunk_pages: u32,
    /// Pages of the last one.
    pub last_pages: u32,
}

/// Appends a [`Request::HandOver`](super::Request::HandOver) to an empty buffer.
pub fn hand_over(out: &mut Vec<u8>, part: HandOver, runs: &[Run]) {
    head(out, part, runs.len());
    for run in runs {
        encode_run(out, *run, 0);
    }
}

pub(super) fn head(out: &mut Vec<u8>, part: HandOver, count: usize) {
    let HandOver { id, first, pages, device, chunk, chunks, chunk_pages, last_pages } = part;
    let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
    start(out, HAND_OVER, count);
    numbers(out, &[id, first, pair(pages, chunks), chunk, pair(chunk_pages, last_pages)]);
    out.extend(device);
}

pub(super) fn parse(at: &mut Cursor<'_>) -> Result<HandOver, BadMessage> {
    let (id, first, sizes, chunk, lens) = (at.number()?, at.number()?, at.number()?, at.number()?, at.number()?);
    let (pages, chunks) = (sizes as u32, (sizes >> 32) as u32);
    let (chunk_pages, last_pages) = (lens as u32, (lens >> 32) as u32);
    let device = at.take()?;
    check_range(first, pages.into())?;
    if !(1..=MAX_CHUNKS as u32).contains(&chunks) || last_pages == 0 || last_pages > chunk_pages {
        return Err(BadMessage::Run);
    }
    check_range(chunk, u64::from(chunks) * u64::from(chunk_pages))?;
    Ok(HandOver { id, first, pages, device, chunk, chunks, chunk_pages, last_pages })
}
