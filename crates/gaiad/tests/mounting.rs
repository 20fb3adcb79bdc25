//! Mounts that are refused leave nothing mounted, and the end of a mount loses nothing.

mod common;

use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::gpu::{Gpu, PAGE, open};
use common::{FAILURES, TestMount, is_root, unavailable};
use spinio_fuse::mount::mount_at;
use spinio_gaiad::{Supervisor, connection_of, unmount};
use spinio_testkit::eventually;

#[test]
fn server_role() {
    common::server_role();
}

fn refusal(directory: &Path) -> String {
    match Supervisor::mount(directory, 0) {
        Ok(_) => panic!("mounted over {}", directory.display()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn refused_mounts_name_the_cause() {
    if let Some(reason) = unavailable() {
        eprintln!("skipped: {reason}");
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(refusal(&file).ends_with("not a directory"), "{}", refusal(&file));
    assert!(refusal(&root.path().join("missing")).contains("No such file"));
    assert!(refusal(Path::new("/")).contains("root directory"));
    if rustix::process::geteuid().is_root() {
        // No file handles here.
        assert!(refusal(Path::new("/proc/self")).contains("file handles"), "{}", refusal(Path::new("/proc/self")));
    } else {
        assert!(refusal(Path::new("/usr")).contains("another user"), "{}", refusal(Path::new("/usr")));
        let fixed = root.path().join("fixed");
        std::fs::create_dir(&fixed).unwrap();
        std::fs::set_permissions(&fixed, std::os::unix::fs::PermissionsExt::from_mode(0o555)).unwrap();
        assert!(refusal(&fixed).contains("not writable"), "{}", refusal(&fixed));
    }
    assert!(unmount(root.path()).unwrap_err().to_string().ends_with("not mounted here"));
    assert_eq!(mount_at(root.path()).unwrap(), None);
}

#[test]
fn second_mount_and_busy_unmount_are_refused() {
    let Some(mount) = TestMount::new(|dir| std::fs::create_dir(dir.join("sub")).unwrap()) else { return };
    assert!(refusal(&mount.dir).ends_with("already mounted here"), "{}", refusal(&mount.dir));
    assert!(refusal(&mount.dir.join("sub")).contains("FUSE"), "{}", refusal(&mount.dir.join("sub")));
    assert!(mount.socket.exists());
    let file = std::fs::File::create(mount.dir.join("file")).unwrap();
    assert!(unmount(&mount.dir).unwrap_err().to_string().contains("in use"));
    drop(file);
    // Another mount may get the number, and so the path, at once.
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|m| (m.ino(), m.ctime(), m.ctime_nsec()));
    let (socket, made) = (mount.socket.clone(), identity(&mount.socket));
    let (below, _root) = mount.unmount();
    assert_ne!(identity(&socket), made);
    assert!(below.join("file").exists());
}

/// The descriptor of a map is in no table that `fuser` or `lsof` looks at.
#[test]
fn map_that_keeps_the_mount_in_use_is_named() {
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [1; PAGE]).unwrap()) else { return };
    let file = open(&mount.dir.join("file"));
    let gpu = Gpu::new(&file, 1);
    drop(file);
    let refused = unmount(&mount.dir).unwrap_err().to_string();
    let path = mount.dir.join("file");
    let wanted = format!("in use: 1 map of GPU programs of {} by process {}", path.display(), std::process::id());
    assert!(refused.ends_with(&wanted), "{refused}");
    drop(gpu);
    mount.unmount();
}

/// Times that threads of a process have waited for something.
fn waits(process: u32) -> u64 {
    let threads = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let status = threads.filter_map(|thread| std::fs::read_to_string(thread.unwrap().path().join("status")).ok());
    let count = |status: String| {
        let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
        line.and_then(|count| count.trim().parse::<u64>().ok()).unwrap_or_default()
    };
    status.map(count).sum()
}

/// Ticks of processor time that a process has used: `utime` and `stime`.
fn ticks(process: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_whitespace().skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum()
}

#[test]
fn daemon_without_work_uses_no_processor_time() {
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [1; PAGE]).unwrap()) else { return };
    let file = open(&mount.dir.join("file"));
    let gpu = Gpu::new(&file, 1);
    gpu.epoch(1, 7);
    drop((gpu, file));
    let rests = || {
        let daemon = || [mount.server(), mount.supervisor(), mount.invalidator()].map(ticks);
        let before = daemon();
        std::thread::sleep(std::time::Duration::from_secs(10));
        daemon().into_iter().zip(before).all(|(after, before)| after <= before + 1)
    };
    // Looks may see what it does after the last map.
    eventually("a daemon without work uses no processor time", rests);
}

#[test]
fn daemon_without_work_never_wakes_up() {
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [1; PAGE]).unwrap()) else { return };
    let rests = || {
        let daemon = || [mount.server(), mount.supervisor(), mount.invalidator()].map(waits);
        let before = daemon();
        std::thread::sleep(std::time::Duration::from_secs(3));
        daemon() == before
    };
    eventually("a daemon without maps rests", rests);
    let file = open(&mount.dir.join("file"));
    let gpu = Gpu::new(&file, 1);
    gpu.epoch(1, 7);
    drop((gpu, file));
    eventually("a daemon whose last map has ended rests", rests);
    let (below, _root) = mount.unmount();
    assert_eq!(std::fs::read(below.join("file")).unwrap(), [7; PAGE]);
}

/// Stopped while a program has a file open: no new program sees the mount, this one loses nothing.
#[test]
fn stopped_mount_serves_open_files() {
    // What the supervisor says has no reader.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let Some(mut mount) = TestMount::with_supervisor(|_| (), |command| _ = command.stderr(writer)) else { return };
    let mut file = std::fs::File::create(mount.dir.join("file")).unwrap();
    file.write_all(b"before").unwrap();
    mount.stop();
    while connection_of(&mount.dir).unwrap().is_some() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    mount.kill_server();
    file.write_all(b" after").unwrap();
    drop(file);
    mount.ended();
    assert_eq!(std::fs::read_to_string(mount.dir.join("file")).unwrap(), "before after");
}

/// The system has no process or memory to spare when a server has died.
#[test]
fn server_that_cannot_be_started_at_once_is_started_later() {
    let Some(mount) = TestMount::with_supervisor(|_| (), |command| _ = command.env(FAILURES, "1")) else { return };
    let mut file = std::fs::File::create(mount.dir.join("file")).unwrap();
    file.write_all(b"before").unwrap();
    mount.kill_server();
    file.write_all(b" after").unwrap();
    file.sync_all().unwrap();
    drop(file);
    let (below, _root) = mount.unmount();
    assert_eq!(std::fs::read_to_string(below.join("file")).unwrap(), "before after");
}

#[test]
fn dead_mount_is_replaced() {
    let Some(mut mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), "content").unwrap()) else { return };
    // The kernel may answer from its cache afterwards.
    assert!(std::fs::metadata(&mount.dir).is_ok());
    mount.kill_supervisor();
    let error = std::fs::read(mount.dir.join("file")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NOTCONN.raw_os_error()));
    // Its server is not started, so that nothing may touch it.
    let again = Supervisor::mount(&mount.dir, 0).unwrap();
    drop(again);
    assert_eq!(connection_of(&mount.dir).unwrap(), None);
    assert_eq!(std::fs::read_to_string(mount.dir.join("file")).unwrap(), "content");
}

/// Names, links and content are those of a program that is not root.
#[test]
fn new_files_belong_to_the_caller() {
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::process::CommandExt;
    if !is_root() {
        return;
    }
    let Some(mount) = TestMount::new(|_| ()) else { return };
    for path in [mount.dir.parent().unwrap(), &mount.dir] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let own = mount.dir.join("own");
    std::fs::create_dir(&own).unwrap();
    chown(&own, Some(1234), Some(1235)).unwrap();
    let script = "umask 027; cd \"$0\"; echo x > own/file; mkdir own/dir; ln -s file own/link; mkfifo own/pipe
        echo y > forbidden && exit 1; cat own/file";
    let mut program = std::process::Command::new("sh");
    let output = program.args(["-c", script]).arg(&mount.dir).uid(1234).gid(1235).output().unwrap();
    assert_eq!(output.stdout, b"x\n", "{}", String::from_utf8_lossy(&output.stderr));
    for (name, mode) in [("file", 0o100_640), ("dir", 0o040_750), ("link", 0o120_777), ("pipe", 0o010_640)] {
        let metadata = std::fs::symlink_metadata(own.join(name)).unwrap();
        assert_eq!((metadata.uid(), metadata.gid(), metadata.mode()), (1234, 1235, mode), "{name}");
    }
    assert!(!mount.dir.join("forbidden").exists());
    // A write by this user clears the set-user-ID bit.
    std::fs::set_permissions(own.join("file"), std::fs::Permissions::from_mode(0o4755)).unwrap();
    let mut writer = std::process::Command::new("sh");
    assert!(
        writer.args(["-c", "echo z >> \"$0\""]).arg(own.join("file")).uid(1234).gid(1235).status().unwrap().success()
    );
    assert_eq!(std::fs::metadata(own.join("file")).unwrap().mode() & 0o7777, 0o755);
}
