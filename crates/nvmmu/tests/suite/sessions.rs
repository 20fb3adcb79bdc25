//! Sessions that belong to threads.

use std::fs;
use std::sync::Barrier;

use crate::common::{Buffer, bytes};
use spinio_nvmmu::Direction::{Download, Upload};
use spinio_nvmmu::{ErrorKind, begin, current, end};

#[test]
fn threads_move_concurrently_in_their_own_sessions() {
    const THREADS: usize = 6;
    let folder = tempfile::tempdir().unwrap();
    let barrier = Barrier::new(THREADS);
    let from = folder.path().join("in");
    fs::write(&from, bytes(1 << 20, 1)).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (folder, from, together) = (folder.path(), &from, &barrier);
            scope.spawn(move || {
                let to = folder.join(format!("out{thread}"));
                let device = Buffer::new(1 << 20);
                let number = 1000 + thread as i32;
                for iteration in 0..5 {
                    begin(number, Some(&to)).unwrap();
                    together.wait();
                    let skip = (thread * 1000 + iteration) as u64;
                    let len = (1 << 20) - skip;
                    let moved = current("move", |s| s.move_range(from, device.at(0), skip, len, Upload)).unwrap();
                    assert_eq!(moved, len);
                    current("move", |s| s.move_range(&to, device.at(0), 0, len, Download)).unwrap();
                    let report = end(number).unwrap();
                    assert_eq!((report.uploaded, report.downloaded), (len, len));
                    assert!(fs::read(&to).unwrap() == bytes(1 << 20, 1)[skip as usize..]);
                    fs::remove_file(&to).unwrap();
                }
            });
        }
    });
}

#[test]
fn session_ends_once_and_only_by_its_thread() {
    begin(1, None).unwrap();
    let error = std::thread::spawn(|| end(1).unwrap_err()).join().unwrap();
    assert_eq!(error.kind, ErrorKind::NotOwner);
    assert_eq!(begin(1, None).unwrap_err().kind, ErrorKind::AlreadyBegun);
    end(1).unwrap();
    assert_eq!(end(1).unwrap_err().kind, ErrorKind::NoSession);
    assert_eq!(current("move", |_| Ok(())).unwrap_err().kind, ErrorKind::NoSession);
    // A session that a thread left open when it ended does not block other threads.
    std::thread::spawn(|| begin(2, None).unwrap()).join().unwrap();
    begin(2, None).unwrap();
    end(2).unwrap();
}
