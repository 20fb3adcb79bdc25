//! Splitting at stripes against a byte-by-byte oracle.

use proptest::prelude::*;
use spinio_plan::stripe_layout::{DeviceExtent, Span, StripeLayout, StripePart};

/// Runs that do not overlap in the file; they may touch, in the file and on the device.
fn runs() -> impl Strategy<Value = Vec<DeviceExtent>> {
    let run = (0u64..5, 0u64..60, 1u64..70, any::<bool>());
    proptest::collection::vec(run, 0..6).prop_map(|parts| {
        let (mut file, mut end) = (0, 0);
        let mut runs = Vec::new();
        for (gap, device, len, follows) in parts {
            file += gap;
            let device = if follows { end } else { 100 * runs.len() as u64 + device };
            runs.push(DeviceExtent { file, device, len });
            file += len;
            end = device + len;
        }
        runs
    })
}

/// The stripe of each byte: its number if every byte of it is in the file, in order.
fn stripe_of(runs: &[DeviceExtent], width: u64, phase: u64, at: u64) -> Option<u64> {
    let device = |at: u64| runs.iter().find(|r| (r.file..r.file + r.len).contains(&at)).map(|r| r.device + at - r.file);
    let position = device(at)? + phase;
    let start = at.checked_sub(position % width)?;
    let whole = (0..width).all(|i| device(start + i).is_some_and(|d| d + phase == position / width * width + i));
    whole.then_some(start)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn every_byte_matches_oracle(runs in runs(), width in 1u64..13, phase in 0u64..30, a in 0u64..200, b in 0u64..200) {
        let range = a.min(b)..a.max(b);
        let shape = StripeLayout::new(width, phase, runs.iter().copied());
        let spans = shape.split(range.clone());
        let mut at = range.start;
        for Span { range: span, part } in spans {
            prop_assert_eq!(span.start, at);
            prop_assert!(!span.is_empty());
            for byte in span.clone() {
                let stripe = stripe_of(&runs, width, phase, byte);
                let covered = stripe.is_some_and(|s| range.start <= s && s + width <= range.end);
                match part {
                    StripePart::Full => prop_assert!(covered, "byte {byte} is of no full stripe"),
                    StripePart::Partial(start) => prop_assert!(stripe == Some(start) && !covered, "byte {byte}: {stripe:?}"),
                    StripePart::Unaligned => prop_assert_eq!(stripe, None),
                }
            }
            if part == StripePart::Full {
                prop_assert_eq!(stripe_of(&runs, width, phase, span.start), Some(span.start));
                prop_assert_eq!((span.end - span.start) % width, 0);
            }
            at = span.end;
        }
        prop_assert_eq!(at, range.end);
        let whole = (0..1000).filter(|&byte| stripe_of(&runs, width, phase, byte).is_some()).count() as u64;
        prop_assert_eq!(shape.full_stripe_bytes(), whole);
    }

    #[test]
    fn chunks_end_with_stripes(runs in runs(), width in 1u64..13, phase in 0u64..30, from in 0u64..200, most in 1u64..100) {
        let shape = StripeLayout::new(width, phase, runs.iter().copied());
        let limit = from + most;
        // The position of a byte, or its extrapolation past the end.
        let device = |at: u64| runs.iter().rev().find(|r| r.file <= at).map(|r| r.device + at - r.file);
        let touches = |next: &DeviceExtent| runs.iter().any(|r| (r.file + r.len, r.device + r.len) == (next.file, next.device));
        let jumps = |at: u64| runs.iter().any(|r| r.file == at && !touches(r));
        let splits_no_stripe = |at: u64| jumps(at) || device(at - 1).is_some_and(|last| (last + 1 + phase).is_multiple_of(width));
        let wanted = (from + 1..=limit).rev().find(|&at| splits_no_stripe(at)).filter(|&at| at - from >= most / 2);
        prop_assert_eq!(shape.end_of_chunk(from, most), wanted);
    }

    #[test]
    fn requests_are_full_stripes(width in 1u64..50, stripes in 1u64..40, start in 0u64..1000, most in 0u64..300) {
        let shape = StripeLayout::new(width, 0, []);
        let span = start..start + stripes * width;
        let mut at = start;
        for request in shape.split_requests(span.clone(), most) {
            prop_assert_eq!(request.start, at);
            prop_assert!((request.end - at).is_multiple_of(width) && request.end > at);
            prop_assert!(request.end - at <= most.max(width));
            at = request.end;
        }
        prop_assert_eq!(at, span.end);
    }
}

#[test]
fn write_in_middle_of_file() {
    // 64 KiB x 3; the file begins 64 KiB past a stripe's beginning.
    let (kib, width) = (1 << 10, 192 << 10);
    let shape = StripeLayout::new(width, 0, [DeviceExtent { file: 0, device: 10 * width + 64 * kib, len: 3 * width }]);
    let span = |start, end, piece| Span { range: start * kib..end * kib, part: piece };
    assert_eq!(
        shape.split(4 * kib..520 * kib),
        [span(4, 128, StripePart::Unaligned), span(128, 512, StripePart::Full), span(512, 520, StripePart::Unaligned)]
    );
    assert_eq!(
        shape.split(130 * kib..400 * kib),
        [span(130, 320, StripePart::Partial(128 * kib)), span(320, 400, StripePart::Partial(320 * kib))]
    );
    assert_eq!(shape.split(5..5), []);
}

#[test]
fn chunks_of_long_write() {
    let (kib, width) = (1 << 10, 192 << 10);
    let shape = StripeLayout::new(width, 0, [DeviceExtent { file: 0, device: 10 * width + 64 * kib, len: 1000 * kib }]);
    // The first stripe ends 128 KiB into the file; each next one 192 KiB further on.
    assert_eq!(shape.end_of_chunk(0, 512 * kib), Some(512 * kib));
    assert_eq!(shape.end_of_chunk(0, 511 * kib), Some(320 * kib));
    assert_eq!(shape.end_of_chunk(320 * kib, 400 * kib), Some(704 * kib));
    // Not written yet, so unknown; the file continues anywhere.
    assert_eq!(shape.end_of_chunk(2000 * kib, 512 * kib), Some((128 + 12 * 192) * kib));
    // Stripes so wide that half a chunk would be left, or less.
    assert_eq!(shape.end_of_chunk(320 * kib, 191 * kib), None);
    assert_eq!(StripeLayout::new(width, 0, []).end_of_chunk(0, 512 * kib), None);
    assert_eq!(shape.end_of_chunk(u64::MAX - 5, 6), None);
}

#[test]
fn extents_past_u64_range_are_ignored() {
    let far = u64::MAX - 10;
    let shape = StripeLayout::new(
        8,
        3,
        [DeviceExtent { file: far, device: 0, len: 100 }, DeviceExtent { file: 0, device: far, len: 9 }],
    );
    assert_eq!(shape.split(far..u64::MAX), [Span { range: far..u64::MAX, part: StripePart::Unaligned }]);
}
