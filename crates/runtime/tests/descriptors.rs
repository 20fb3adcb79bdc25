//! Numbers from 2^28 on are those of files that the library has opened in its own table. No caller of the table of
//! functions may name them.

use std::os::fd::AsRawFd;

use spinio_device::{DeviceKind, registry};
use spinio_runtime::client::{self, Arg, Error, Target};
use spinio_sys::linux::{self, Advice};

const SIZE: usize = 1 << 20;

#[test]
fn descriptors_of_the_library_are_refused() {
    let memory = registry::alloc(DeviceKind::Emulated, 0, SIZE, false).expect("device memory");
    let to = || Target::find(memory.0, SIZE).expect("the memory made above");
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("descriptors");
    std::fs::write(&path, vec![7; SIZE]).unwrap();
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.sync_all().unwrap();
    linux::fadvise(file.as_raw_fd(), 0, 0, Advice::DontNeed).unwrap();
    // From now on the library has descriptors of this file.
    assert_eq!(client::read(file.as_raw_fd(), Some(0), to(), SIZE, true).unwrap(), SIZE);
    let is_refused = |done: Result<usize, Error>| assert_eq!(done.unwrap_err().errno, libc::EBADF);
    for number in (1 << 28)..(1 << 28) + 64 {
        is_refused(client::read(number, Some(0), to(), SIZE, true));
        is_refused(client::read(number, Some(0), to(), 10, true));
        is_refused(client::write(number, Some(0), to(), 10));
        is_refused(client::pin_file(number, Some(to())).map(|_| 0));
        is_refused(client::Map::new(number, 0, 4096, Some(to())).map(|_| 0));
        assert!(!client::is_pinned(number));
        let mut results = [0; 2];
        let failed = client::read_many(number, &[0, 4096], Arg::Same(4096), Arg::Same(memory.0), &mut results, None);
        assert_eq!((failed.unwrap(), results), (2, [-i64::from(libc::EBADF); 2]));
    }
}
