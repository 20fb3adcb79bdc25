//! System calls and flags, tried on a file of a real disk.

use std::fs::File;
use std::io::{IoSliceMut, Write};
use std::os::fd::AsRawFd;

use rustix::io::{Errno, ReadWriteFlags};
use spinio_sys::linux::{self, DirectAlign, FdTableError, FdTableRoot, RWF_DONTCACHE, RWF_NOWAIT};

use super::{Fact, State, text_of};
use crate::scratch;

const GROUP: &str = "Kernel";

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    let system = rustix::system::uname();
    facts.push(Fact::new(GROUP, "Linux", State::Found, system.release().to_string_lossy()));
    let (folder, warning) = scratch::disk_dir();
    let place = folder.display().to_string();
    match small_file(&folder) {
        Ok(file) => {
            facts.push(cachestat(&file));
            facts.push(nowait(&file, &place));
            facts.push(dont_cache(&file, &place));
            facts.push(direct(&file, &place));
        }
        Err(e) => facts.push(
            Fact::new(GROUP, "file tests", State::Limited, format!("not done: no file can be created in {place}"))
                .because(e.to_string())
                .cure("set TMPDIR to a directory on a disk that you may write to"),
        ),
    }
    if let Some(warning) = warning {
        facts.push(Fact::new(GROUP, "a disk to test on", State::Limited, warning));
    }
    facts.push(io_uring());
    facts.push(unshare_fd_table());
}

/// A file of two pages, in the page cache, deleted when closed.
fn small_file(folder: &std::path::Path) -> std::io::Result<File> {
    let mut file = tempfile::tempfile_in(folder)?;
    file.write_all(&[1; 8192])?;
    file.sync_all()?;
    Ok(file)
}

fn cachestat(file: &File) -> Fact {
    let name = "cachestat";
    match linux::cachestat(file.as_raw_fd(), 0, 8192) {
        Ok(stat) => Fact::new(GROUP, name, State::Found, format!("answers ({} of 2 pages cached)", stat.cached)),
        Err(e) => Fact::new(GROUP, name, State::Limited, "is not available: mincore and trial reads are used instead")
            .because(cause(e, "came with Linux 6.5"))
            .cure("Linux 6.5 or newer; in a container, a seccomp profile that knows the call"),
    }
}

fn nowait(file: &File, place: &str) -> Fact {
    let name = "RWF_NOWAIT";
    match try_read(file, RWF_NOWAIT) {
        Ok(_) | Err(Errno::AGAIN) => Fact::new(GROUP, name, State::Found, "reads only what is cached"),
        Err(e) => {
            let detail = format!("refused in {place}: what is cached of other owners' files stays unknown");
            Fact::new(GROUP, name, State::Limited, detail)
                .because(cause(e, "this file system does not have it"))
                .cure("keep such files on ext4, xfs or btrfs")
        }
    }
}

fn dont_cache(file: &File, place: &str) -> Fact {
    let name = "RWF_DONTCACHE";
    match try_read(file, RWF_DONTCACHE) {
        Ok(_) => Fact::new(
            GROUP,
            name,
            State::Found,
            "works; not used: SPIN drops the pages that it read in (SPINIO_READAHEAD_KEEP)",
        ),
        Err(e) => Fact::new(GROUP, name, State::Absent, format!("refused in {place}; SPIN does not use it"))
            .because(cause(e, "came with Linux 6.14, for some file systems")),
    }
}

fn try_read(file: &File, flags: u32) -> Result<usize, Errno> {
    let mut byte = [0u8];
    rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut byte)], 0, ReadWriteFlags::from_bits_retain(flags))
}

fn direct(file: &File, place: &str) -> Fact {
    let name = "O_DIRECT";
    let fact = |state, detail: String| Fact::new(GROUP, name, state, detail);
    match linux::direct_io_align(file.as_raw_fd()) {
        Ok(Some(DirectAlign { offset: 0, .. })) => {
            fact(State::Limited, format!("not in {place}: absent data goes through the page cache"))
                .because("this file system has no direct I/O")
                .cure("keep large files on ext4, xfs or btrfs, on a disk")
        }
        Ok(Some(DirectAlign { memory, offset })) => {
            fact(State::Found, format!("in {place}: offsets aligned to {offset}, memory to {memory}"))
        }
        Ok(None) => fact(State::Limited, "the kernel does not report its alignment".to_owned())
            .because("STATX_DIOALIGN came with Linux 6.1, for some file systems"),
        Err(e) => fact(State::Limited, format!("statx fails in {place}")).because(e.to_string()),
    }
}

fn io_uring() -> Fact {
    let name = "io_uring";
    let refused = |cause: &str, cure: &str| {
        Fact::new(GROUP, name, State::Absent, "refused: what is read from storage, a few threads read instead")
            .because(cause)
            .cure(cure)
    };
    match linux::io_uring() {
        Ok(features) => Fact::new(
            GROUP,
            name,
            State::Found,
            format!(
                "works (features {features:#x}): reads of storage start without a worker thread, batches have 128 in flight"
            ),
        ),
        Err(Errno::NOSYS) => refused("this kernel was built without it", "a kernel with CONFIG_IO_URING"),
        Err(Errno::PERM) => match text_of("/proc/sys/kernel/io_uring_disabled").as_deref() {
            Some("1") => refused(
                "sysctl kernel.io_uring_disabled is 1: only for privileged processes and one group",
                "join the group that kernel.io_uring_group names, or: sysctl kernel.io_uring_disabled=0",
            ),
            Some("2") => {
                refused("sysctl kernel.io_uring_disabled is 2: for no process", "sysctl kernel.io_uring_disabled=0")
            }
            _ => refused(
                "a seccomp filter denies it, as container engines do by default",
                "a seccomp profile that allows io_uring_setup, io_uring_enter and io_uring_register",
            ),
        },
        Err(Errno::NOMEM) => refused("not enough locked memory (RLIMIT_MEMLOCK)", "raise it: ulimit -l unlimited"),
        Err(e) => refused(&e.to_string(), "find out which security policy answers so"),
    }
}

fn unshare_fd_table() -> Fact {
    let name = "private descriptors";
    let without = "SPIN works without worker threads, and kernels have no sockets";
    match FdTableRoot::new() {
        Ok(_) => Fact::new(GROUP, name, State::Found, "worker threads get an unshared fd table"),
        Err(FdTableError::Unshare(e)) => {
            Fact::new(GROUP, name, State::Limited, format!("no unshared fd table for worker threads: {without}"))
                .because(cause(e, "close_range with CLOSE_RANGE_UNSHARE came with Linux 5.11"))
                .cure("Linux 5.11 or newer; in a container, a seccomp profile that knows the call")
        }
        Err(FdTableError::Spawn(e)) => {
            Fact::new(GROUP, name, State::Limited, format!("no thread can be started: {without}"))
                .because(e.to_string())
                .cure("raise the limit on processes: ulimit -u")
        }
    }
}

/// An errno, and its usual cause.
fn cause(errno: Errno, usual: &str) -> String {
    match errno {
        Errno::NOSYS | Errno::OPNOTSUPP | Errno::INVAL => format!("{usual} ({errno})"),
        Errno::PERM | Errno::ACCESS => format!("a security policy denies it ({errno})"),
        other => other.to_string(),
    }
}
