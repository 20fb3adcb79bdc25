//! Programs that are killed while they unmap a file: what the Linux kernel makes of that must fail no other program.
//!
//! ```text
//!   killed program   a store ── munmap: SETATTR ── SIGKILL ──> EINTR, kept as an error of the file
//!   server                stopped, reads no request                          ... goes on
//!   this program                                   a store ── munmap ──> EIO, kept too
//! ```
//!
//! No byte is lost by that, and the server has refused nothing: acquire and sync of a map succeed.

#![expect(unsafe_code, reason = "mappings of files")]

mod common;

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use spinio_testkit::eventually;

use crate::common::gpu::{Gpu, PAGE, open};
use crate::common::{TestMount, audit};

/// Set in the environment of the program, to its file.
const PROGRAM: &str = "SPINIO_GAIAD_TEST_UNMAPPER";

#[test]
fn server_role() {
    common::server_role();
}

fn map(file: &File) -> *mut u8 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping.
    unsafe { mmap(std::ptr::null_mut(), PAGE, protection, MapFlags::SHARED, file, 0) }.unwrap().cast()
}

#[test]
fn program_role() {
    let Some(path) = std::env::var_os(PROGRAM) else { return };
    let file = open(Path::new(&path));
    let at = map(&file);
    // The end of its last descriptor would take the error for its own.
    drop(file);
    // SAFETY: inside the mapping.
    unsafe { at.write_volatile(7) };
    println!("\nstored");
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
    // SAFETY: not used any more.
    let _ = unsafe { munmap(at.cast(), PAGE) };
    std::process::exit(0);
}

/// A program ends in the middle of `munmap`, before a server has read the new times of the file.
fn kill_in_munmap(mount: &TestMount, path: &Path, file: &File) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "program_role", "--nocapture", "-q"]).env(PROGRAM, path);
    let mut program = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "stored"));
    // The page is clean, and the time of its store is not with the server yet. Of earlier rounds there may be errors.
    eventually("the page is clean", || spinio_sys::linux::write_back_range(file.as_raw_fd(), 0, 0).is_ok());
    mount.stop_server();
    writeln!(program.stdin.as_mut().unwrap()).unwrap();
    // It waits for the server.
    let threads = format!("/proc/{}/task", program.id());
    let waits = |thread: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(thread.unwrap().path().join("wchan")).unwrap().contains("request_wait_answer")
    };
    eventually("munmap waits", || {
        assert!(program.try_wait().unwrap().is_none(), "munmap does not wait");
        std::fs::read_dir(&threads).unwrap().any(waits)
    });
    program.kill().unwrap();
    // Its request has not been read, so it does not wait for the server to end.
    assert!(!program.wait().unwrap().success());
    mount.continue_server();
}

/// The end of another mapping, with a store that is not written back.
fn unmap_with_a_store(file: &File, byte: u8) {
    let at = map(file);
    // SAFETY: inside the mapping.
    unsafe { at.add(1).write_volatile(byte) };
    // SAFETY: not used any more.
    unsafe { munmap(at.cast(), PAGE) }.unwrap();
}

#[test]
fn maps_work_after_a_program_was_killed_in_munmap() {
    let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), [0; PAGE]).unwrap()) else { return };
    let path = mount.dir.join("file");
    let (file, plain) = (open(&path), open(&path));
    let gpu = Gpu::new(&file, 1);
    for round in 1..4 {
        kill_in_munmap(&mount, &path, &plain);
        unmap_with_a_store(&plain, round);
        if round == 1 {
            // What the test rests on. A kernel without this flaw says nothing here.
            let kernel = rustix::fs::fsync(&plain);
            assert!(matches!(kernel, Ok(()) | Err(Errno::IO)), "{kernel:?}");
            println!("fsync of a program: {kernel:?}");
        }
        if round == 2 {
            gpu.1.sync(0, PAGE as u64).unwrap();
        }
        gpu.acquire();
        assert_eq!((gpu.load(0), gpu.load(1)), (7, round));
        gpu.store(2, &[round]);
        gpu.release();
        gpu.1.sync(0, PAGE as u64).unwrap();
        let mut bytes = [0; 3];
        plain.read_exact_at(&mut bytes, 0).unwrap();
        assert_eq!(bytes, [7, round, round]);
    }
    drop((gpu, file, plain));
    audit::nothing_is_left(&mount, 0);
    let (below, _root) = audit::unmount_and_look(mount);
    assert_eq!(std::fs::read(below.join("file")).unwrap()[..3], [7, 3, 3]);
}
