//! Untrusted safetensors headers: an accepted header must be consistent.
#![no_main]

#[path = "../../crates/python/src/safetensors.rs"]
mod safetensors;

use libfuzzer_sys::fuzz_target;
use safetensors::{LENGTH_PREFIX, MAX_HEADER, header_len, parse};

fuzz_target!(|bytes: &[u8]| {
    // The file as it is, and with a length claimed by the first two bytes, so that the data need not be in the input.
    if let Ok(len) = header_len(bytes, bytes.len() as u64) {
        assert!((2..=MAX_HEADER).contains(&len) && len + LENGTH_PREFIX <= bytes.len() as u64);
        let from = LENGTH_PREFIX as usize;
        check(&bytes[from..from + len as usize], bytes.len() as u64 - LENGTH_PREFIX - len);
    }
    let Some((claim, text)) = bytes.split_first_chunk::<2>() else { return };
    check(text, u64::from(u16::from_le_bytes(*claim)));
});

fn check(text: &[u8], data: u64) {
    let Ok(header) = parse(text, data) else { return };
    let mut at = 0;
    let mut names = std::collections::HashSet::new();
    for tensor in &header.tensors {
        assert_eq!(tensor.begin, at, "a gap or an overlap");
        assert!(tensor.end >= tensor.begin && tensor.end <= data);
        at = tensor.end;
        assert!(names.insert(&tensor.name), "a duplicate name");
        let elements = tensor.shape.iter().try_fold(1u64, |n, &len| n.checked_mul(len));
        let elements = elements.expect("a shape whose size cannot be computed");
        assert!(elements > 0 || tensor.begin == tensor.end);
        assert!(tensor.begin == tensor.end || elements > 0 && !tensor.dtype.is_empty());
    }
    assert_eq!(at, data, "bytes without a tensor");
    assert_eq!(parse(text, data), Ok(header), "parsing again gives another header");
    assert!(parse(text, data + 1).is_err(), "an extra byte must be an error");
}
