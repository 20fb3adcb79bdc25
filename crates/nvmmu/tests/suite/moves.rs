//! Moves of a session: the right bytes, the right count, a clear error.

#![expect(unsafe_code, reason = "tests call C functions and hand out raw buffers")]

use std::fs;
use std::path::Path;

use crate::common::{Buffer, bytes, runtime};
use spinio_nvmmu::Direction::{Download, Upload};
use spinio_nvmmu::{ErrorKind, OutputMode, Session};
use spinio_testkit::with_deadline;

#[test]
fn upload_then_download_round_trips() {
    let folder = tempfile::tempdir().unwrap();
    for len in [1, 4095, 65536, 65537, 5 << 20] {
        let (from, to) = (folder.path().join("in"), folder.path().join("out"));
        fs::write(&from, bytes(len, 3)).unwrap();
        let device = Buffer::new(len);
        let mut session = Session::begin(runtime(), Some(&to)).unwrap();
        assert_eq!(session.move_range(&from, device.at(0), 0, len as u64, Upload).unwrap(), len as u64);
        assert_eq!(device.bytes(), bytes(len, 3));
        assert_eq!(session.move_range(&to, device.at(0), 0, len as u64, Download).unwrap(), len as u64);
        let report = session.end().unwrap();
        assert_eq!((report.uploaded, report.downloaded), (len as u64, len as u64));
        assert!(matches!(report.mode, OutputMode::Passthrough(_)), "{}", report.mode);
        assert_eq!(fs::read(&to).unwrap(), bytes(len, 3));
        fs::remove_file(&to).unwrap();
    }
}

#[test]
fn ranges_land_at_given_offsets_and_nothing_else_changes() {
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("in"), folder.path().join("out"));
    fs::write(&from, bytes(300_000, 1)).unwrap();
    fs::write(&to, vec![9; 100_000]).unwrap();
    let device = Buffer::new(100_000);
    let mut session = Session::begin(runtime(), Some(&to)).unwrap();
    assert_eq!(session.move_range(&from, device.at(1000), 200_000, 50_000, Upload).unwrap(), 50_000);
    assert_eq!(session.move_range(&to, device.at(1500), 40_000, 10_000, Download).unwrap(), 10_000);
    assert_eq!(session.move_range(&to, device.at(0), 99, 0, Download).unwrap(), 0);
    // The end of the file comes first.
    assert_eq!(session.move_range(&from, device.at(60_000), 299_000, 20_000, Upload).unwrap(), 1000);
    assert_eq!(session.move_range(&from, device.at(60_000), 300_000, 20_000, Upload).unwrap(), 0);
    session.end().unwrap();
    let mut expected = vec![9; 100_000];
    expected[40_000..50_000].copy_from_slice(&bytes(300_000, 1)[200_500..210_500]);
    assert!(fs::read(&to).unwrap() == expected);
    assert_eq!(device.bytes()[60_000..61_000], bytes(300_000, 1)[299_000..]);
}

#[test]
fn replaced_file_is_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("in");
    let device = Buffer::new(10);
    let mut session = Session::begin(runtime(), None).unwrap();
    for round in 0..3 {
        let other = folder.path().join("other");
        fs::write(&other, bytes(10, round)).unwrap();
        fs::rename(&other, &path).unwrap();
        for _ in 0..2 {
            session.move_range(&path, device.at(0), 0, 10, Upload).unwrap();
            assert_eq!(device.bytes(), bytes(10, round));
        }
    }
    assert_eq!(session.end().unwrap().mode, OutputMode::NoOutput);
}

#[test]
fn downloaded_bytes_can_be_uploaded_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let (one, two) = (Buffer::with_bytes(&bytes(100_000, 5)), Buffer::new(100_000));
    for output in [Some(path.as_path()), None] {
        let mut session = Session::begin(runtime(), output).unwrap();
        session.move_range(&path, one.at(0), 7, 90_000, Download).unwrap();
        assert_eq!(session.move_range(&path, two.at(0), 7, 100_000, Upload).unwrap(), 90_000);
        assert!(two.bytes()[..90_000] == bytes(100_000, 5)[..90_000]);
        session.end().unwrap();
    }
}

#[test]
fn errors_have_readable_messages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    fs::write(&path, b"some").unwrap();
    let device = Buffer::new(100);
    let host = [0u8; 100];
    let mut session = Session::begin(runtime(), None).unwrap();
    let mut error_of = |path: &Path, at, offset, len, direction| {
        let error = session.move_range(path, at, offset, len, direction).unwrap_err();
        (error.kind.clone(), error.to_string())
    };
    let (kind, text) = error_of(&path, host.as_ptr().cast_mut().cast(), 0, 4, Upload);
    assert_eq!(kind, ErrorKind::NotDeviceMemory);
    assert!(
        text.starts_with("Cannot upload 4 bytes at offset 0 of ") && text.ends_with("is no device memory"),
        "{text}"
    );
    let (kind, text) = error_of(&path, device.at(50), 0, 51, Download);
    assert_eq!(kind, ErrorKind::NotDeviceMemory);
    assert!(text.ends_with("ends after 50 bytes"), "{text}");
    let (kind, _) = error_of(&path, device.at(0), u64::MAX, 4, Upload);
    assert_eq!(kind, ErrorKind::BadRange);
    let (kind, text) = error_of(Path::new("/no/such/file"), device.at(0), 0, 4, Upload);
    assert_eq!(kind.errno(), spinio_sys::Errno::NOENT);
    assert!(text.starts_with("Cannot open /no/such/file: No such file"), "{text}");
    let (kind, _) = error_of(folder.path(), device.at(0), 0, 4, Download);
    assert_eq!(kind.errno(), spinio_sys::Errno::ISDIR);
    let (kind, _) = error_of(Path::new(""), device.at(0), 0, 4, Upload);
    assert_eq!(kind.errno(), spinio_sys::Errno::NOENT);
    let error = Session::begin(runtime(), Some(Path::new("/no/such/folder/file"))).err().unwrap();
    assert!(error.to_string().starts_with("Cannot open the output /no/such/folder/file: "), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"some");
}

#[test]
fn dropped_session_writes_everything() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let device = Buffer::with_bytes(&bytes(5000, 2));
    let mut session = Session::begin_with_stripes(runtime(), &path, 65536, 0).unwrap();
    session.move_range(&path, device.at(0), 0, 5000, Download).unwrap();
    drop(session);
    assert_eq!(fs::read(&path).unwrap(), bytes(5000, 2));
}

#[test]
fn pipe_is_refused_without_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: the name is NUL-terminated.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let device = Buffer::new(100);
    with_deadline("a pipe that no process has open", || {
        let mut session = Session::begin(runtime(), None).unwrap();
        for direction in [Upload, Download, Upload] {
            let error = session.move_range(&path, device.at(0), 0, 100, direction).unwrap_err();
            assert_eq!(error.kind.errno(), spinio_sys::Errno::SPIPE, "{error}");
        }
        session.end().unwrap();
    });
}

#[test]
fn full_file_is_reported() {
    let full = Path::new("/dev/full");
    let device = Buffer::with_bytes(&bytes(100_000, 2));
    for output in [Some(full), None] {
        let mut session = Session::begin(runtime(), output).unwrap();
        let error = session.move_range(full, device.at(0), 0, 100_000, Download).unwrap_err();
        assert_eq!(error.kind.errno(), spinio_sys::Errno::NOSPC, "{error}");
        session.end().unwrap();
    }
}

#[test]
fn write_only_file_can_be_written() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    fs::write(&path, [1; 10]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o200)).unwrap();
    let device = Buffer::with_bytes(&bytes(5000, 2));
    for striped in [false, true] {
        let mut session = match striped {
            true => Session::begin_with_stripes(runtime(), &path, 65536, 0).unwrap(),
            false => Session::begin(runtime(), Some(&path)).unwrap(),
        };
        session.hint_range(100, 5000);
        session.move_range(&path, device.at(0), 100, 5000, Download).unwrap();
        session.end().unwrap();
    }
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    assert_eq!(fs::read(&path).unwrap()[100..], bytes(5000, 2));
}

#[test]
fn callback_into_busy_session_fails() {
    spinio_nvmmu::begin(90, None).unwrap();
    spinio_nvmmu::current("run", |_| {
        let error = spinio_nvmmu::current("move", |_| Ok(())).unwrap_err();
        assert_eq!(error.kind, ErrorKind::AlreadyBegun);
        assert!(error.to_string().starts_with("Cannot move: the session is in use"), "{error}");
        assert_eq!(spinio_nvmmu::end(90).unwrap_err().kind, ErrorKind::AlreadyBegun);
        Ok(())
    })
    .unwrap();
    spinio_nvmmu::end(90).unwrap();
}

#[test]
fn one_thread_wins_concurrent_begin_with_same_id() {
    for round in 0..20 {
        let start = std::sync::Barrier::new(4);
        let left = std::sync::Barrier::new(4);
        let begun_count: u32 = std::thread::scope(|scope| {
            let one = || {
                start.wait();
                let begun = spinio_nvmmu::begin(91, None).is_ok();
                left.wait();
                let has = spinio_nvmmu::current("move", |_| Ok(())).is_ok();
                left.wait();
                let ended = spinio_nvmmu::end(91).is_ok();
                assert_eq!((has, ended), (begun, begun));
                u32::from(begun)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(one)).collect();
            threads.into_iter().map(|t| t.join().unwrap()).sum()
        });
        assert_eq!(begun_count, 1, "round {round}");
    }
}
