//! Which bytes of a write are full stripes of a parity array, and which are not.
//!
//! ```text
//!   device   │ stripe 7     │ stripe 8     │ stripe 9     │ stripe 10    │
//!   file             ├──── run: contiguous on the device ────────┤          stripes 8 and 9 are entirely in it
//!   write        ├───┼──────────────┼─────┤
//!     unaligned     │     full     │ partial
//! ```
//!
//! A full-stripe write needs no reads: its parity is computed from the data written. A partial write needs the stripe's
//! other bytes, or the old bytes and the old parity: reads that the writer waits for. They can be read beforehand only
//! where the whole stripe belongs to this file, contiguously; bytes that share a stripe with other files or with a hole
//! are unaligned, and are written unchanged.
//!
//! Known flaw: the stripe is the unit, though md computes parity for each 4 KiB row of it. Rows would need fewer bytes,
//! but are not contiguous in the file, and only a single request for the whole stripe surely finds them together.

use core::ops::Range;

/// A part of a file that is contiguous on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceExtent {
    /// First byte in the file.
    pub file: u64,
    /// First byte on the uppermost block device.
    pub device: u64,
    /// Bytes.
    pub len: u64,
}

/// The kind of a part of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StripePart {
    /// Full stripes.
    Full,
    /// Some bytes of the stripe that begins at this file offset and is entirely in the file.
    Partial(u64),
    /// Bytes of stripes that are not entirely in this file.
    Unaligned,
}

/// A part of a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Span {
    /// Bytes of the file.
    pub range: Range<u64>,
    /// Their kind.
    pub part: StripePart,
}

/// The stripes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripeLayout {
    width: u64,
    phase: u64,
    /// In file order; none is adjacent to the next one on the device too.
    runs: Vec<DeviceExtent>,
}

impl StripeLayout {
    /// `width`: bytes of data in a stripe. `phase`: the position of the device's byte 0 in a stripe.
    /// Runs that overlap or exceed the range of u64 are ignored.
    pub fn new(width: u64, phase: u64, runs: impl IntoIterator<Item = DeviceExtent>) -> StripeLayout {
        let width = width.max(1);
        let mut runs: Vec<DeviceExtent> = runs
            .into_iter()
            .filter(|r| r.len > 0 && r.file.checked_add(r.len).is_some())
            .filter(|r| r.device.checked_add(r.len).and_then(|end| end.checked_add(width)).is_some())
            .collect();
        runs.sort_by_key(|r| r.file);
        let mut joined: Vec<DeviceExtent> = Vec::with_capacity(runs.len());
        for run in runs {
            match joined.last_mut() {
                Some(last) if last.file + last.len > run.file => {}
                Some(last) if last.file + last.len == run.file && last.device + last.len == run.device => {
                    last.len += run.len;
                }
                _ => joined.push(run),
            }
        }
        StripeLayout { width, phase: phase % width, runs: joined }
    }

    /// Bytes of data in a stripe.
    pub fn width(&self) -> u64 {
        self.width
    }

    /// Bytes of stripes that are entirely in the file.
    pub fn full_stripe_bytes(&self) -> u64 {
        self.runs.iter().map(|run| self.full_stripes(run)).map(|r| r.end - r.start).sum()
    }

    /// The part of a run that is full stripes, as bytes of the file.
    fn full_stripes(&self, run: &DeviceExtent) -> Range<u64> {
        let at = (run.device + self.phase) % self.width;
        let skip = if at == 0 { 0 } else { self.width - at };
        if skip >= run.len {
            return run.file..run.file;
        }
        let start = run.file + skip;
        start..start + (run.len - skip) / self.width * self.width
    }

    /// Splits a range of the file, without gaps and in order.
    pub fn split(&self, range: Range<u64>) -> Vec<Span> {
        let mut parts: Vec<Span> = Vec::new();
        let mut add_part = |range: Range<u64>, piece: StripePart| {
            if range.is_empty() {
                return;
            }
            match parts.last_mut() {
                // Adjacent runs are separate on the device: their full stripes are separate requests.
                Some(last) if last.part == piece && piece == StripePart::Unaligned => last.range.end = range.end,
                _ => parts.push(Span { range, part: piece }),
            }
        };
        let mut at = range.start;
        let first = self.runs.partition_point(|r| r.file + r.len <= range.start);
        for run in &self.runs[first..] {
            if run.file >= range.end {
                break;
            }
            let whole = self.full_stripes(run);
            if whole.is_empty() || whole.start >= range.end || whole.end <= at {
                continue;
            }
            add_part(at..whole.start.max(at), StripePart::Unaligned);
            at = at.max(whole.start);
            let end = range.end.min(whole.end);
            // Up to the first stripe's end, full stripes, the last one's beginning.
            let stripe = |byte: u64| whole.start + (byte - whole.start) / self.width * self.width;
            if at != stripe(at) || stripe(at) + self.width > end {
                let part = at..end.min(stripe(at) + self.width);
                at = part.end;
                add_part(part.clone(), StripePart::Partial(stripe(part.start)));
            }
            if at < end {
                let last = stripe(end);
                add_part(at..last, StripePart::Full);
                add_part(last..end, StripePart::Partial(last));
                at = end;
            }
        }
        add_part(at..range.end, StripePart::Unaligned);
        parts
    }

    /// The preferred end of a chunk of a longer write that begins at `from` and may be `most` bytes long: the end of
    /// the last stripe that ends within it, or the offset where the file continues elsewhere on the device; `None` if
    /// the chunk would be less than half as long. Bytes without an extent are assumed to follow the last mapped bytes
    /// before them.
    pub fn end_of_chunk(&self, from: u64, max_len: u64) -> Option<u64> {
        let limit = from.checked_add(max_len)?;
        let before = self.runs.partition_point(|r| r.file <= limit);
        let run = self.runs[..before].last()?;
        let inside = limit - run.file;
        let position = u128::from(run.device) + u128::from(inside) + u128::from(self.phase);
        let over = (position % u128::from(self.width)) as u64;
        let end = limit - over.min(inside);
        (end > from && end - from >= max_len / 2).then_some(end)
    }

    /// Requests for a full-stripe range: as many stripes as fit into `most` bytes, at least one. The Linux kernel
    /// splits larger requests at an arbitrary point, and a split stripe is two partial writes for a moment.
    pub fn split_requests(&self, span: Range<u64>, max_len: u64) -> impl Iterator<Item = Range<u64>> + use<> {
        let unit = (max_len / self.width).max(1) * self.width;
        (span.start..span.end)
            .step_by(usize::try_from(unit).unwrap_or(usize::MAX))
            .map(move |at| at..span.end.min(at + unit))
    }
}
