//! Files beyond the number that the Linux kernel may know at a time.

mod common;

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
