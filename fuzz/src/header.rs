//! A safetensors header of anybody: what is believed must hold.
#![no_main]

#[path = "../../crates/python/src/safetensors.rs"]
mod safetensors;

use libfuzzer_sys::fuzz_target;
use safetensors::{LONGEST, PREFIX, header_len, parse};

fuzz_target!(|bytes: &[u8]| {
    // The file as it is, and with what the first two bytes say about its length, so that data is there without bytes.
    if let Ok(len) = header_len(bytes, bytes.len() as u64) {
        assert!((2..=LONGEST).contains(&len) && len + PREFIX <= bytes.len() as u64);
        let from = PREFIX as usize;
        judge(&bytes[from..from + len as usize], bytes.len() as u64 - PREFIX - len);
    }
    let Some((claim, text)) = bytes.split_first_chunk::<2>() else { return };
    judge(text, u64::from(u16::from_le_bytes(*claim)));
});

fn judge(text: &[u8], data: u64) {
    let Ok(header) = parse(text, data) else { return };
    let mut at = 0;
    let mut names = std::collections::HashSet::new();
    for tensor in &header.tensors {
        assert_eq!(tensor.begin, at, "a gap or an overlap");
        assert!(tensor.end >= tensor.begin && tensor.end <= data);
        at = tensor.end;
        assert!(names.insert(&tensor.name), "a name stands there twice");
        let elements = tensor.shape.iter().try_fold(1u64, |n, &len| n.checked_mul(len));
        let elements = elements.expect("a shape whose size cannot be computed");
        assert!(elements > 0 || tensor.begin == tensor.end);
        assert!(tensor.begin == tensor.end || elements > 0 && !tensor.dtype.is_empty());
    }
    assert_eq!(at, data, "bytes that no tensor has");
    assert_eq!(parse(text, data), Ok(header), "read again, it differs");
    assert!(parse(text, data + 1).is_err(), "a byte more belongs to nobody");
}
