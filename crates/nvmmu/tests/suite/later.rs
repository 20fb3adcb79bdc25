//! Moves in the order of a stream, and the pipeline made of them.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use crate::common::{Buffer, FileSizeLimit, bytes, new_stream, runtime};
use spinio_device::{registry, thread_stream};
use spinio_nvmmu::Direction::{Download, Upload};
use spinio_nvmmu::{ErrorKind, PipelineSpec, Session, Slot};
use spinio_sys::Errno;
use spinio_testkit::in_child;

#[test]
fn moves_and_their_stream_wait_for_each_other() {
    let device = registry::emulated().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    // Larger than the blocks that are read ahead, and not a multiple of them.
    let len = (40 << 20) + 12_345;
    fs::write(&from, bytes(len, 3)).unwrap();
    let buffer = Buffer::new(len);
    let queue = new_stream();
    let mut session = Session::begin(runtime(), Some(&to)).unwrap();
    device.pause();
    let upload = session.move_async(&from, buffer.at(0), 0, len as u64 + 99, Upload, queue).unwrap_err();
    assert!(upload.to_string().ends_with("bytes"), "{upload}");
    let up = session.move_async(&from, buffer.at(0), 0, len as u64, Upload, queue).unwrap();
    let download = session.move_async(&to, buffer.at(0), 0, len as u64, Download, queue).unwrap();
    assert!(!up.is_done() && !download.is_done());
    device.resume();
    assert_eq!(up.wait().unwrap(), len as u64);
    assert_eq!(download.wait().unwrap(), len as u64);
    assert!(fs::read(&to).unwrap() == bytes(len, 3));
    let report = session.end().unwrap();
    assert_eq!((report.uploaded, report.downloaded), (len as u64, len as u64));
}

#[test]
fn end_waits_for_unawaited_moves() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let buffers: Vec<Buffer> = (0..5).map(|i| Buffer::with_bytes(&bytes(300_000, i))).collect();
    let queue = new_stream();
    let mut session = Session::begin(runtime(), Some(&path)).unwrap();
    for (i, buffer) in buffers.iter().enumerate() {
        session.move_async(&path, buffer.at(0), i as u64 * 300_000, 300_000, Download, queue).unwrap();
    }
    // Read again after that, without a wait.
    let back = Buffer::new(1000);
    assert_eq!(session.move_range(&path, back.at(0), 600_000, 1000, Upload).unwrap(), 1000);
    assert_eq!(back.bytes(), bytes(300_000, 2)[..1000]);
    session.end().unwrap();
    let expected: Vec<u8> = (0..5).flat_map(|i| bytes(300_000, i)).collect();
    assert!(fs::read(&path).unwrap() == expected);
}

#[test]
fn upload_ends_at_eof() {
    let folder = tempfile::tempdir().unwrap();
    let from = folder.path().join("in");
    fs::write(&from, bytes(5000, 1)).unwrap();
    let buffer = Buffer::with_bytes(&[7; 10_000]);
    let mut session = Session::begin(runtime(), None).unwrap();
    let queue = new_stream();
    assert_eq!(session.move_async(&from, buffer.at(0), 1000, 9000, Upload, queue).unwrap().wait().unwrap(), 4000);
    assert_eq!(session.move_async(&from, buffer.at(0), 5000, 9000, Upload, queue).unwrap().wait().unwrap(), 0);
    session.end().unwrap();
    let got = buffer.bytes();
    assert_eq!(got[..4000], bytes(5000, 1)[1000..]);
    assert_eq!(got[4000..], [7; 6000]);
}

#[test]
fn striped_output_accepts_async_moves() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("out");
    let buffer = Buffer::with_bytes(&bytes(500_000, 9));
    let queue = new_stream();
    let mut session = Session::begin_with_stripes(runtime(), &path, 49_152, 0).unwrap();
    for at in (0..500_000).step_by(50_000) {
        let ticket = session.move_async(&path, buffer.at(at), at, 50_000, Download, queue).unwrap();
        assert_eq!(ticket.wait().unwrap(), 50_000);
    }
    session.end().unwrap();
    assert!(fs::read(&path).unwrap() == bytes(500_000, 9));
}

/// A download into stripes is complete when it returns; until then it waits for the work on its stream, and only in
/// that call.
#[test]
fn striped_output_waits_for_stream_of_its_move() {
    let device = registry::emulated().unwrap();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    let len = 24 << 20;
    fs::write(&from, bytes(len, 3)).unwrap();
    let before = thread_stream();
    for _ in 0..3 {
        let buffer = Buffer::new(len);
        let queue = new_stream();
        let mut session = Session::begin_with_stripes(runtime(), &to, 49_152, 0).unwrap();
        device.pause();
        let up = session.move_async(&from, buffer.at(0), 0, len as u64, Upload, queue).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                device.resume();
            });
            let last = len as u64 - 100_000;
            session.move_async(&to, buffer.at(last), 0, 100_000, Download, queue).unwrap();
        });
        assert!(up.is_done(), "the download came first");
        assert_eq!(thread_stream(), before);
        session.end().unwrap();
        assert!(fs::read(&to).unwrap() == bytes(len, 3)[len - 100_000..]);
    }
}

#[test]
fn chunks_pass_through_slots_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&from, bytes(1_000_000, 5)).unwrap();
    let buffers: Vec<Buffer> = (0..3).map(|_| Buffer::new(70_000)).collect();
    let slots: Vec<Slot> =
        buffers.iter().map(|b| Slot { queue: new_stream(), input: b.at(0), output: b.at(0) }).collect();
    let pieces = PipelineSpec {
        input: &from,
        input_offset: 10,
        input_len: 900_000,
        chunk: 70_000,
        output: &to,
        output_offset: 100,
    };
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
    let error = session.pipeline(&PipelineSpec { input_len: 1_000_000, ..pieces }, &slots, |step| Ok(step.len));
    assert!(error.unwrap_err().to_string().ends_with("it ends after 1000000 bytes"));
    session.end().unwrap();
    let got = fs::read(&to).unwrap();
    assert_eq!(got[..100], [0; 100]);
    assert!(got[100..900_100] == bytes(1_000_000, 5)[10..900_010]);
}

#[test]
fn forked_child_does_not_wait_for_parents_move() {
    let device = registry::emulated().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let buffer = Buffer::with_bytes(&bytes(300_000, 4));
    let queue = new_stream();
    let mut session = Session::begin(runtime(), Some(&path)).unwrap();
    device.pause();
    let ticket = session.move_async(&path, buffer.at(0), 0, 300_000, Download, queue).unwrap();
    in_child("a wait for the parent's move", || {
        i32::from(ticket.is_done() || !ticket.wait().is_err_and(|e| e.kind == ErrorKind::NoSession))
    });
    device.resume();
    assert_eq!(ticket.wait().unwrap(), 300_000);
    in_child("a look at what is over", || i32::from(ticket.wait().ok() != Some(300_000)));
    session.end().unwrap();
}

#[test]
fn pipeline_is_finished_on_return_even_after_failure() {
    let device = registry::emulated().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&from, bytes(100_000, 5)).unwrap();
    let buffers: Vec<Buffer> = (0..3).map(|_| Buffer::new(50_000)).collect();
    let slots: Vec<Slot> =
        buffers.iter().map(|b| Slot { queue: new_stream(), input: b.at(0), output: b.at(0) }).collect();
    let pieces = PipelineSpec {
        input: &from,
        input_offset: 0,
        input_len: 100_000,
        chunk: 50_000,
        output: &to,
        output_offset: 0,
    };
    let mut session = Session::begin(runtime(), Some(&to)).unwrap();
    for fails in [false, true] {
        let resumed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let done = session.pipeline(&pieces, &slots, |step| {
                if step.number == 0 {
                    device.pause();
                    scope.spawn(|| {
                        std::thread::sleep(Duration::from_millis(200));
                        resumed.store(true, SeqCst);
                        device.resume();
                    });
                }
                if fails && step.number == 1 { Err("no more".to_owned()) } else { Ok(step.len) }
            });
            assert!(resumed.load(SeqCst), "it returned while its buffers were in use");
            assert_eq!(done.is_err(), fails);
        });
    }
    session.end().unwrap();
}

#[test]
fn short_download_is_reported() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("out");
    let base = 1u64 << 30;
    let buffer = Buffer::with_bytes(&bytes(300_000, 4));
    let queue = new_stream();
    let mut session = Session::begin(runtime(), Some(&path)).unwrap();
    let limit = FileSizeLimit::set(base + 100_000);
    let ticket = session.move_async(&path, buffer.at(0), base, 300_000, Download, queue);
    let waited = ticket.map(|ticket| ticket.wait());
    // Later moves do not hide it.
    let second = session.move_async(&path, buffer.at(0), 0, 10, Download, queue).unwrap();
    assert_eq!(second.wait().unwrap(), 10);
    let ended = session.end();
    drop(limit);
    let error = waited.unwrap().unwrap_err();
    assert_eq!(error.kind.errno(), Errno::FBIG, "{error}");
    // And again at the end, in case the ticket was dropped.
    assert!(ended.is_err());
    assert!(fs::metadata(&path).map_or(0, |m| m.len()) <= base + 100_000);
}
