//! Moves in the order of a queue, and the pipeline made of them.

use std::fs;

use crate::common::{Buffer, bytes, runtime};
use spinio_device::{QueueId, registry};
use spinio_nvmmu::Direction::{Download, Upload};
use spinio_nvmmu::{Pieces, Session, Slot};

fn queue() -> QueueId {
    registry::emulated().unwrap().new_queue().unwrap()
}

#[test]
fn moves_wait_for_their_queue_and_it_for_them() {
    let device = registry::emulated().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    // Larger than the blocks that are read ahead, and not a whole number of them.
    let len = (40 << 20) + 12_345;
    fs::write(&from, bytes(len, 3)).unwrap();
    let buffer = Buffer::new(len);
    let queue = queue();
    let mut session = Session::begin(runtime(), Some(&to)).unwrap();
    device.hold();
    let up = session.move_async(&from, buffer.at(0), 0, len as u64 + 99, Upload, queue).unwrap_err();
    assert!(up.to_string().ends_with("bytes"), "{up}");
    let up = session.move_async(&from, buffer.at(0), 0, len as u64, Upload, queue).unwrap();
    let down = session.move_async(&to, buffer.at(0), 0, len as u64, Download, queue).unwrap();
    assert!(!up.is_done() && !down.is_done());
    device.resume();
    assert_eq!(up.wait().unwrap(), len as u64);
    assert_eq!(down.wait().unwrap(), len as u64);
    assert!(fs::read(&to).unwrap() == bytes(len, 3));
    let report = session.end().unwrap();
    assert_eq!((report.uploaded, report.downloaded), (len as u64, len as u64));
}

#[test]
fn the_end_waits_for_what_nobody_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let buffers: Vec<Buffer> = (0..5).map(|i| Buffer::holding(&bytes(300_000, i))).collect();
    let queue = queue();
    let mut session = Session::begin(runtime(), Some(&path)).unwrap();
    for (i, buffer) in buffers.iter().enumerate() {
        session.move_async(&path, buffer.at(0), i as u64 * 300_000, 300_000, Download, queue).unwrap();
    }
    // Read again behind that, without a word.
    let back = Buffer::new(1000);
    assert_eq!(session.move_range(&path, back.at(0), 600_000, 1000, Upload).unwrap(), 1000);
    assert_eq!(back.bytes(), bytes(300_000, 2)[..1000]);
    session.end().unwrap();
    let expected: Vec<u8> = (0..5).flat_map(|i| bytes(300_000, i)).collect();
    assert!(fs::read(&path).unwrap() == expected);
}

#[test]
fn the_end_of_a_file_ends_an_upload() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in");
    fs::write(&from, bytes(5000, 1)).unwrap();
    let buffer = Buffer::holding(&[7; 10_000]);
    let mut session = Session::begin(runtime(), None).unwrap();
    let queue = queue();
    assert_eq!(session.move_async(&from, buffer.at(0), 1000, 9000, Upload, queue).unwrap().wait().unwrap(), 4000);
    assert_eq!(session.move_async(&from, buffer.at(0), 5000, 9000, Upload, queue).unwrap().wait().unwrap(), 0);
    session.end().unwrap();
    let got = buffer.bytes();
    assert_eq!(got[..4000], bytes(5000, 1)[1000..]);
    assert_eq!(got[4000..], [7; 6000]);
}

#[test]
fn a_striped_output_takes_them_too() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("out");
    let buffer = Buffer::holding(&bytes(500_000, 9));
    let queue = queue();
    let mut session = Session::begin_as_if_striped(runtime(), &path, 49_152, 0).unwrap();
    for at in (0..500_000).step_by(50_000) {
        let ticket = session.move_async(&path, buffer.at(at), at, 50_000, Download, queue).unwrap();
        assert_eq!(ticket.wait().unwrap(), 50_000);
    }
    session.end().unwrap();
    assert!(fs::read(&path).unwrap() == bytes(500_000, 9));
}

#[test]
fn pieces_go_through_the_slots_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&from, bytes(1_000_000, 5)).unwrap();
    let buffers: Vec<Buffer> = (0..3).map(|_| Buffer::new(70_000)).collect();
    let slots: Vec<Slot> = buffers.iter().map(|b| Slot { queue: queue(), input: b.at(0), output: b.at(0) }).collect();
    let pieces =
        Pieces { input: &from, input_offset: 10, input_len: 900_000, piece: 70_000, output: &to, output_offset: 100 };
    let mut session = Session::begin(runtime(), Some(&to)).unwrap();
    let mut lens = Vec::new();
    let written = session.pipeline(&pieces, &slots, |step| {
        assert_eq!(step.number as usize, lens.len());
        lens.push(step.len);
        Ok(step.len)
    });
    assert_eq!(written.unwrap(), 900_000);
    assert_eq!(lens, [vec![70_000; 12], vec![60_000]].concat());
    let error = session.pipeline(&pieces, &slots, |step| match step.number {
        5 => Err("the sixth is not wanted".to_owned()),
        _ => Ok(step.len),
    });
    assert_eq!(error.unwrap_err().to_string(), "Cannot run a kernel: the sixth is not wanted");
    let error = session.pipeline(&Pieces { input_len: 1_000_000, ..pieces }, &slots, |step| Ok(step.len));
    assert!(error.unwrap_err().to_string().ends_with("it ends after 1000000 bytes"));
    session.end().unwrap();
    let got = fs::read(&to).unwrap();
    assert_eq!(got[..100], [0; 100]);
    assert!(got[100..900_100] == bytes(1_000_000, 5)[10..900_010]);
}
