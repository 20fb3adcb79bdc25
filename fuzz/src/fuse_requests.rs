//! Requests as the Linux kernel sends them, and the listing of a directory whose names anybody has chosen.
#![no_main]

use libfuzzer_sys::fuzz_target;
use spinio_fuse::abi::{Dirent, EntryOut};
use spinio_fuse::{DirectoryBuffer, Operation, Request};

const HEADER: usize = 40;
/// Operation codes in use, and a few more.
const CODES: u8 = 60;

fuzz_target!(|bytes: &[u8]| {
    check(bytes);
    // With a header that fits, so that short inputs reach every operation: code, length of the extensions, the rest.
    let [code, extensions, body @ ..] = bytes else { return };
    let mut request = vec![0; HEADER];
    request[..4].copy_from_slice(&((HEADER + body.len()) as u32).to_ne_bytes());
    request[4..8].copy_from_slice(&u32::from(code % CODES).to_ne_bytes());
    request[36..38].copy_from_slice(&u16::from(extensions.checked_sub(250).unwrap_or(0)).to_ne_bytes());
    request.extend_from_slice(body);
    check(&request);
    list(body);
});

fn check(bytes: &[u8]) {
    let Ok(request) = Request::parse(bytes) else { return };
    assert_eq!(request.header.len as usize, bytes.len(), "a request of another length");
    assert_eq!(request.is_resent(), request.id() != request.header.unique);
    let entry = |name: &std::ffi::CStr| {
        let name = name.to_bytes();
        assert!(!name.is_empty() && name != b"." && name != b".." && !name.contains(&b'/'), "no name of an entry");
    };
    match request.operation {
        Operation::Lookup { name }
        | Operation::Mknod { name, .. }
        | Operation::Mkdir { name, .. }
        | Operation::Unlink { name }
        | Operation::Rmdir { name }
        | Operation::Link { name, .. }
        | Operation::Symlink { name, .. }
        | Operation::Create { name, .. } => entry(name),
        Operation::Rename { name, new_name, .. } => {
            entry(name);
            entry(new_name);
        }
        Operation::BatchForget(forgets) => {
            assert!(forgets.count() * 16 <= bytes.len() - HEADER, "more nodes than bytes");
            assert!(request.operation.has_no_reply());
        }
        Operation::Write { args, data } => assert_eq!(data.len(), args.size as usize),
        Operation::Ioctl { args, data } => assert_eq!(data.len(), args.in_size as usize),
        Operation::Setxattr { value, .. } => assert!(value.len() < bytes.len()),
        _ => {}
    }
}

/// What is listed is found again by the rules that the Linux kernel reads the reply with.
fn list(bytes: &[u8]) {
    let [limit, plus, names @ ..] = bytes else { return };
    let (limit, plus) = (usize::from(*limit) * 8, plus & 1 == 1);
    let head = if plus { size_of::<EntryOut>() } else { 0 };
    let mut reply = Vec::new();
    let mut directory = DirectoryBuffer::new(&mut reply, limit);
    let mut listed = Vec::new();
    for name in names.split(|b| *b == 0 || *b == b'/').filter(|name| !name.is_empty()) {
        if !directory.fits(name, plus) {
            break;
        }
        listed.push(name);
        directory.push(7, 8, listed.len() as u64, name, plus.then(EntryOut::default).as_ref());
    }
    assert!(reply.len() <= limit, "longer than asked for");
    let mut rest = &reply[..];
    for (number, name) in listed.iter().enumerate() {
        let dirent = &rest[head..];
        let word = |at: usize| u64::from_ne_bytes(dirent[at..at + 8].try_into().expect("8 bytes"));
        assert_eq!((word(0), word(8)), (7, number as u64 + 1));
        let len = u32::from_ne_bytes(dirent[16..20].try_into().expect("4 bytes")) as usize;
        assert_eq!(&dirent[size_of::<Dirent>()..][..len], *name);
        rest = &rest[(head + size_of::<Dirent>() + len).next_multiple_of(8)..];
    }
    assert!(rest.is_empty());
}
