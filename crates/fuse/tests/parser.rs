//! Requests are parsed without panic from any bytes, and as the kernel means them.

use spinio_fuse::abi::{InHeader, UNIQUE_RESEND, WriteIn, opcode};
use spinio_fuse::{Operation, Request};
use zerocopy::IntoBytes;

fn request(code: u32, extensions: u16, body: &[&[u8]]) -> Vec<u8> {
    let body = body.concat();
    let len = (size_of::<InHeader>() + body.len()) as u32;
    let header = InHeader { len, opcode: code, unique: 4 | UNIQUE_RESEND, node: 9, extensions, ..InHeader::default() };
    [header.as_bytes(), &body].concat()
}

#[test]
fn resent_write_is_recognized() {
    let args = WriteIn { offset: 4096, size: 5, ..WriteIn::default() };
    let bytes = request(opcode::WRITE, 0, &[args.as_bytes(), b"hello"]);
    let parsed = Request::parse(&bytes).unwrap();
    assert!(parsed.is_resent());
    assert_eq!((parsed.id(), parsed.header.node), (4, 9));
    let Operation::Write { args, data } = parsed.operation else { panic!("{parsed:?}") };
    assert_eq!((args.offset, data), (4096, &b"hello"[..]));
}

#[test]
fn names_that_leave_the_directory_are_refused() {
    for name in [&b"\0"[..], b".\0", b"..\0", b"a/b\0", b"/\0", b"no end", b""] {
        assert!(Request::parse(&request(opcode::LOOKUP, 0, &[name])).is_err(), "{name:?}");
    }
    let bytes = request(opcode::LOOKUP, 0, &[b"...\0"]);
    assert!(matches!(Request::parse(&bytes).unwrap().operation, Operation::Lookup { name } if name == c"..."));
    // The target of a symbolic link is free.
    let bytes = request(opcode::SYMLINK, 0, &[b"name\0../target\0"]);
    assert!(
        matches!(Request::parse(&bytes).unwrap().operation, Operation::Symlink { target, .. } if target == c"../target")
    );
}

#[test]
fn lengths_that_do_not_fit_are_refused() {
    let long = WriteIn { size: 6, ..WriteIn::default() };
    assert!(Request::parse(&request(opcode::WRITE, 0, &[long.as_bytes(), b"hello"])).is_err());
    let huge = WriteIn { size: u32::MAX, ..WriteIn::default() };
    assert!(Request::parse(&request(opcode::WRITE, 0, &[huge.as_bytes(), b"hello"])).is_err());
    assert!(Request::parse(&request(opcode::BATCH_FORGET, 0, &[&u32::MAX.to_ne_bytes(), &[0; 4]])).is_err());
    let forgets = [2u64, 0, 7, 1, 8, 3].map(u64::to_ne_bytes).concat();
    let parsed = request(opcode::BATCH_FORGET, 0, &[&2u32.to_ne_bytes(), &[0; 4], &forgets[16..]]);
    let Operation::BatchForget(nodes) = Request::parse(&parsed).unwrap().operation else { panic!("forgets") };
    assert_eq!(nodes.map(|n| (n.node, n.lookups)).collect::<Vec<_>>(), [(7, 1), (8, 3)]);
    // Extensions at the end are not part of the operation; more of them than bytes are refused.
    let bytes = request(opcode::LOOKUP, 1, &[b"name\0", &[1; 8]]);
    assert!(matches!(Request::parse(&bytes).unwrap().operation, Operation::Lookup { name } if name == c"name"));
    assert!(Request::parse(&request(opcode::LOOKUP, 2, &[b"name\0"])).is_err());
    let mut cut = request(opcode::GETATTR, 0, &[&[0; 16]]);
    cut.pop();
    assert!(Request::parse(&cut).is_err());
}

#[test]
fn supplementary_group_is_found_among_extensions() {
    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_ne_bytes()).collect::<Vec<u8>>();
    let group = |extensions: &[u32]| {
        let bytes = words(extensions);
        Request::parse(&request(opcode::LOOKUP, (bytes.len() / 8) as u16, &[b"name\0", &bytes])).unwrap().group
    };
    assert_eq!(group(&[16, 32, 1, 4321]), Some(4321));
    // After another extension, of 12 bytes and padding.
    assert_eq!(group(&[12, 1, 9, 0, 16, 32, 1, 4321]), Some(4321));
    assert_eq!(group(&[]), None);
    assert_eq!(group(&[12, 32, 0, 0]), None);
    for malformed in [&[0, 1, 0, 0][..], &[u32::MAX, 1], &[16, 32], &[16, 32, 1, 0, 0, 0][..2], &[100, 1, 0, 0]] {
        assert_eq!(group(malformed), None, "{malformed:?}");
    }
}

/// Any bytes after a plausible header, for every operation; and any bytes at all.
#[test]
fn no_bytes_panic() {
    let mut state = 1u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut parsed = 0;
    for round in 0..200_000u32 {
        let len = (random() % 160) as usize;
        // Small values make lengths that nearly fit.
        let mask = if round % 2 == 0 { 0xff } else { 0x0f };
        let body: Vec<u8> = (0..len).map(|_| if random() % 3 == 0 { 0 } else { random() as u8 & mask }).collect();
        let extensions = if random() % 4 == 0 { random() as u16 } else { 0 };
        let mut bytes = request(round % 60, extensions, &[&body]);
        if round % 5 == 0 {
            let at = random() as usize % bytes.len();
            bytes[at] = random() as u8;
            bytes.truncate(random() as usize % (bytes.len() + 1));
        }
        if let Ok(request) = Request::parse(&bytes) {
            parsed += 1;
            if let Operation::BatchForget(nodes) = request.operation {
                assert!(nodes.count() <= len / 16);
            }
        }
    }
    assert!(parsed > 10_000, "only {parsed} were requests");
}
