//! Moves into and out of a stream that is being captured into a graph, with the fake CUDA driver.

#[path = "../../sys/tests/fake/mod.rs"]
mod fake;

use std::ffi::c_void;
use std::fs;

use spinio_device::{StreamId, registry};
use spinio_io::{Runtime, Settings};
use spinio_nvmmu::Direction::{Download, Upload};
use spinio_nvmmu::Session;
use spinio_sys::Errno;
use spinio_sys::cuda::Driver;

#[test]
#[expect(unsafe_code, reason = "the current context of a thread")]
fn captured_stream_accepts_no_move() {
    const LEN: usize = 300_000;
    let Some(fake) = fake::open() else { return };
    registry::hint_open(b"/dev/nvidiactl");
    let driver = Driver::loaded().unwrap();
    driver.init().unwrap();
    let context = driver.primary_retain(0).unwrap();
    // SAFETY: the fake driver frees no context.
    unsafe { driver.set_current(context) }.unwrap();
    let address = fake.alloc(0, LEN as u64, 0) as *mut c_void;
    let runtime: &Runtime = Box::leak(Box::new(Runtime::new(Settings::default())));
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (from, plain, striped) = (folder.path().join("in"), folder.path().join("out"), folder.path().join("striped"));
    fs::write(&from, vec![5; LEN]).unwrap();
    let mut session = Session::begin_with_stripes(runtime, &striped, 49_152, 0).unwrap();
    for (path, direction) in [(&from, Upload), (&plain, Download), (&striped, Download)] {
        fake.capture(1);
        let moved = session.move_async(path, address, 0, LEN as u64, direction, StreamId(0));
        fake.capture(0);
        let error = moved.map(|ticket| ticket.wait()).unwrap_err();
        assert_eq!((error.kind.errno(), fake.invalidated()), (Errno::BUSY, 0), "{error}");
        let moved = session.move_async(path, address, 0, LEN as u64, direction, StreamId(0)).unwrap();
        assert_eq!(moved.wait().unwrap(), LEN as u64);
    }
    session.end().unwrap();
    assert!(fs::read(&striped).unwrap() == vec![5; LEN]);
}
