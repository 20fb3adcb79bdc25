//! Files beyond the number that the Linux kernel may know at a time.

mod common;

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use rustix::io::Errno;

use crate::common::{NODES, TestMount, is_root};

#[test]
fn server_role() {
    common::server_role();
}

/// Root's: in that of another user descriptors are the limit (user.rs).
fn mount(nodes: usize) -> Option<TestMount> {
    is_root().then_some(())?;
    TestMount::with_supervisor(|_| (), |command| _ = command.env(NODES, nodes.to_string()))
}

#[test]
fn files_that_are_not_used_do_not_count() {
    const FILES: usize = 1500;
    let Some(mount) = mount(500) else { return };
    let path = |i: usize| mount.dir.join(format!("directory{}/file{i}", i % 7));
    (0..7).for_each(|i| std::fs::create_dir(path(i).parent().unwrap()).unwrap());
    for i in 0..FILES {
        std::fs::write(path(i), i.to_string()).unwrap();
    }
    mount.kill_server();
    for i in (0..FILES).rev() {
        assert_eq!(std::fs::read_to_string(path(i)).unwrap(), i.to_string());
    }
    let listed = (0..7).flat_map(|i| std::fs::read_dir(path(i).parent().unwrap()).unwrap());
    assert_eq!(listed.map(|entry| entry.unwrap().metadata().unwrap().len()).filter(|len| *len > 0).count(), FILES);
}

/// A call that makes a name fails when the file cannot be given to the kernel, and leaves no name.
#[test]
fn name_of_a_file_that_is_refused_is_not_made() {
    let Some(mount) = mount(100) else { return };
    let mut files = Vec::new();
    let path = |name: &str| mount.dir.join(name);
    let refused = loop {
        match File::create_new(path(&files.len().to_string())) {
            Ok(file) => files.push(file),
            Err(error) => break error,
        }
        assert!(files.len() < 100);
    };
    let is_full = |error: std::io::Error| Errno::from_io_error(&error) == Some(Errno::NFILE);
    assert!(is_full(refused) && files.len() > 90, "{}", files.len());
    let last = files.len().to_string();
    assert!(is_full(std::fs::create_dir(path("directory")).unwrap_err()));
    assert!(is_full(std::os::unix::fs::symlink("target", path("link")).unwrap_err()));
    let of = |path: &Path| std::fs::symlink_metadata(path).map(drop).map_err(|error| error.kind());
    let names = [last.as_str(), "directory", "link"];
    assert_eq!(names.map(|name| of(&path(name))), [Err(ErrorKind::NotFound); 3]);
    // Once there is room they can be made.
    let count = files.len();
    files.clear();
    for i in 0..count {
        std::fs::remove_file(path(&i.to_string())).unwrap();
    }
    let listed = std::fs::read_dir(&mount.dir).unwrap().map(|entry| entry.unwrap().file_name()).collect::<Vec<_>>();
    assert!(listed.is_empty(), "{listed:?}");
    drop(File::create_new(path(&last)).unwrap());
    std::fs::create_dir(path("directory")).unwrap();
    std::os::unix::fs::symlink("target", path("link")).unwrap();
    let (below, _root) = mount.unmount();
    assert_eq!(names.map(|name| of(&below.join(name))), [Ok(()); 3]);
}
