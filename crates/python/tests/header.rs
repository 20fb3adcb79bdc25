//! The safetensors header parser, without Python.

#[path = "../src/safetensors.rs"]
mod safetensors;

use proptest::collection::vec;
use proptest::prelude::*;
use safetensors::{LENGTH_PREFIX, MAX_HEADER, header_len, parse};

/// A header of tensors of these sizes in bytes, and the size of all data.
fn header(sizes: &[u64]) -> (String, u64) {
    let mut at = 0;
    let tensors: Vec<String> = sizes
        .iter()
        .enumerate()
        .map(|(i, size)| {
            at += size;
            format!(r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{},{at}]}}"#, at - size)
        })
        .collect();
    (format!("{{{}}}", tensors.join(",")), at)
}

#[test]
fn header_length_limit_is_exact() {
    let len = |n: u64, file| header_len(&n.to_le_bytes(), file);
    assert_eq!(len(MAX_HEADER, MAX_HEADER + LENGTH_PREFIX), Ok(MAX_HEADER));
    assert!(len(MAX_HEADER + 1, u64::MAX).is_err());
    assert_eq!(len(2, 10), Ok(2));
    assert!(len(3, 10).is_err());
    assert!(len(u64::MAX, u64::MAX).is_err());
    assert!(header_len(&[0; 7], 7).is_err());
}

#[test]
fn deeply_nested_header_fails_without_stack_overflow() {
    for open in ["[", "{\"a\":"] {
        let deep = format!("{{\"a\":{{\"later\":{}", open.repeat(1 << 20));
        assert!(parse(deep.as_bytes(), 0).is_err());
    }
}

#[test]
fn tensors_are_ordered_by_offset() {
    let sizes: Vec<u64> = (0..20_000).map(|i| i % 7).collect();
    let (text, data) = header(&sizes);
    let read = parse(text.as_bytes(), data).expect("right");
    assert_eq!(read.tensors.len(), sizes.len());
    assert!(read.tensors.windows(2).all(|w| w[0].end == w[1].begin));
}

proptest! {
    /// For any bytes there is a result, and never one that leads outside the data.
    #[test]
    fn arbitrary_bytes_never_panic(text in vec(any::<u8>(), 0..300), data in any::<u64>()) {
        if let Ok(header) = parse(&text, data) {
            prop_assert!(header.tensors.iter().all(|t| t.begin <= t.end && t.end <= data));
        }
    }

    /// As above, for a valid header with a few bytes changed.
    #[test]
    fn mutated_header_stays_in_bounds(sizes in vec(0u64..50, 0..6), changes in vec((any::<prop::sample::Index>(), any::<u8>()), 0..4), more in 0u64..3) {
        let (text, data) = header(&sizes);
        let mut text = text.into_bytes();
        for (at, byte) in &changes {
            let at = at.index(text.len());
            text[at] = *byte;
        }
        match parse(&text, data + more) {
            Ok(header) => {
                let covered: u64 = header.tensors.iter().map(|t| t.end - t.begin).sum();
                prop_assert_eq!(covered, data + more);
            }
            Err(_) => prop_assert!(!changes.is_empty() || more > 0),
        }
    }

    /// A valid header is read as it was written.
    #[test]
    fn valid_header_round_trips(sizes in vec(0u64..1 << 40, 0..8)) {
        let (text, data) = header(&sizes);
        let read = parse(text.as_bytes(), data).expect("right");
        let mut named: Vec<_> = read.tensors.iter().map(|t| (t.name.clone(), t.end - t.begin)).collect();
        named.sort();
        let mut wanted: Vec<_> = sizes.iter().enumerate().map(|(i, size)| (format!("t{i}"), *size)).collect();
        wanted.sort();
        prop_assert_eq!(named, wanted);
    }
}
