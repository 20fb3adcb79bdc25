//! Processes that fork while they have a session.

use std::fs;

use crate::common::{Buffer, bytes, runtime};
use spinio_nvmmu::Direction::Download;
use spinio_nvmmu::{ErrorKind, Session};
use spinio_testkit::in_child;

#[test]
fn session_belongs_to_process_that_began_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("out");
    let device = Buffer::with_bytes(&bytes(5000, 2));
    let mut session = Session::begin_with_stripes(runtime(), &path, 65536, 0).unwrap();
    session.move_range(&path, device.at(0), 0, 2000, Download).unwrap();
    let mut session_slot = Some(session);
    in_child("use of the parent's session", || {
        let Some(mut session) = session_slot.take() else { return 1 };
        let error_reported =
            session.move_range(&path, device.at(0), 0, 5000, Download).is_err_and(|e| e.kind == ErrorKind::NoSession);
        session.hint_range(0, 100);
        let flushed = session.flush().is_ok();
        session.report();
        drop(session);
        i32::from(!error_reported || flushed)
    });
    let mut session = session_slot.take().unwrap();
    session.move_range(&path, device.at(2000), 2000, 3000, Download).unwrap();
    session.end().unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes(5000, 2));
}
