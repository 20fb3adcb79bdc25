//! Mounts of users without privileges: through `fusermount3`, the setuid program of libfuse.
//!
//! ```text
//!   this process ──start──> fusermount3 -o OPTIONS -- DIR      opens /dev/fuse, mount(2) as root
//!        │                       │                             (checks: DIR is writable and of a known file system)
//!        └──── socket pair <─────┘ one byte, and the descriptor of /dev/fuse (SCM_RIGHTS)
//! ```
//!
//! The socket is the program's standard input, which spares this crate a call between fork and exec: the number of the
//! descriptor that `_FUSE_COMMFD` names is known before.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg, socketpair,
};

use crate::failure::MountFailure;

/// The program, in Debian's package `fuse3`.
const PROGRAM: &str = "fusermount3";
/// Where it is, if PATH does not have it.
const DIRECTORIES: [&str; 3] = ["/usr/bin", "/bin", "/usr/local/bin"];
const SETUID: u32 = 0o4000;

/// Mounts over a directory of this user, for this user's programs (no `allow_other`), with the Linux kernel checking
/// permissions. Returns the connection, of which INIT is the first request.
///
/// # Errors
/// [`MountFailure`]; nothing is mounted then.
pub(crate) fn mount(point: &Path, name: &str, flags: MountFlags) -> Result<OwnedFd, MountFailure> {
    let program = find()?;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        .map_err(MountFailure::System)?;
    let mut command = Command::new(&program);
    command.args(["-o", &options(name, flags), "--"]).arg(point).env("_FUSE_COMMFD", "0").stdin(Stdio::from(theirs));
    run(command)?;
    match receive(&ours) {
        Ok(device) => Ok(device),
        Err(error) => {
            let _ = unmount(point, true);
            Err(MountFailure::System(error))
        }
    }
}

/// Unmounts a mount of this user; `lazy`: also while programs use it, from the tree of directories.
///
/// # Errors
/// [`MountFailure`].
pub(crate) fn unmount(point: &Path, lazy: bool) -> Result<(), MountFailure> {
    let mut command = Command::new(find()?);
    command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(point).stdin(Stdio::null());
    run(command)
}

/// `nosuid` and `nodev` are always set by the program.
fn options(name: &str, flags: MountFlags) -> String {
    let mut options = format!("default_permissions,fsname={name},subtype={name}");
    for (flag, word) in [(MountFlags::NOEXEC, ",noexec"), (MountFlags::RDONLY, ",ro")] {
        if flags.contains(flag) {
            options.push_str(word);
        }
    }
    options
}

/// Where the program is.
fn find() -> Result<PathBuf, MountFailure> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let program = find_in(std::env::split_paths(&path).chain(DIRECTORIES.map(PathBuf::from)))?;
    if rustix::thread::no_new_privs().unwrap_or(false) {
        let why = "cannot become root, since this process has NoNewPrivileges (as in many containers and services)";
        return Err(MountFailure::HelperNotSetuid(program, why));
    }
    Ok(program)
}

/// The first that runs as root: a package manager of a user may have one that does not.
fn find_in(directories: impl Iterator<Item = PathBuf>) -> Result<PathBuf, MountFailure> {
    let found = |directory: PathBuf| {
        let program = directory.join(PROGRAM);
        let file = std::fs::metadata(&program).ok().filter(std::fs::Metadata::is_file)?;
        Some((program, file.mode() & SETUID != 0 && file.uid() == 0))
    };
    let mut all: Vec<_> = directories.filter_map(found).collect();
    match all.iter().position(|(_, is_setuid)| *is_setuid) {
        Some(first) => Ok(all.swap_remove(first).0),
        None if all.is_empty() => Err(MountFailure::NoHelper),
        None => Err(MountFailure::HelperNotSetuid(all.swap_remove(0).0, "is not setuid root, so it cannot mount")),
    }
}

fn run(mut command: Command) -> Result<(), MountFailure> {
    let ended = command.env("LC_ALL", "C").current_dir("/").stdout(Stdio::null()).stderr(Stdio::piped()).output();
    let Output { status, stderr, .. } = ended.map_err(|e| system(&e))?;
    if status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&stderr);
    let last = words.lines().rfind(|line| !line.trim().is_empty());
    Err(MountFailure::Refused(last.map_or_else(|| format!("{PROGRAM}: {status}"), str::to_owned)))
}

fn system(error: &std::io::Error) -> MountFailure {
    MountFailure::System(Errno::from_io_error(error).unwrap_or(Errno::IO))
}

/// What the program has sent before it ended.
fn receive(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let mut byte = [0];
    rustix::io::retry_on_intr(|| recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, flags))?;
    let device = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    device.ok_or(Errno::PROTO)
}

#[cfg(test)]
mod tests {
    use std::io::IoSlice;
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    use super::*;

    #[test]
    fn options_keep_what_the_mount_below_forbids() {
        assert_eq!(options("x", MountFlags::empty()), "default_permissions,fsname=x,subtype=x");
        let all = options("x", MountFlags::NOEXEC | MountFlags::RDONLY | MountFlags::NOSUID);
        assert_eq!(all, "default_permissions,fsname=x,subtype=x,noexec,ro");
    }

    #[test]
    fn program_that_does_not_run_as_root_is_named_unless_there_is_another() {
        let dir = std::env::temp_dir().join(format!("spinio-fuse-helper-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let find = || find_in([PathBuf::from("/nonexistent"), dir.clone()].into_iter());
        assert_eq!(find(), Err(MountFailure::NoHelper));
        std::fs::write(dir.join(PROGRAM), "").unwrap();
        let failure = find().unwrap_err();
        assert!(failure.to_string().contains("is not setuid root"), "{failure}");
        if let Ok(usual) = find_in(DIRECTORIES.map(PathBuf::from).into_iter()) {
            assert_eq!(find_in([dir.clone(), usual.parent().unwrap().to_owned()].into_iter()), Ok(usual));
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn last_line_of_a_program_that_fails_is_the_error() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo first >&2; echo second >&2; echo >&2; exit 1"]).stdin(Stdio::null());
        assert_eq!(run(command), Err(MountFailure::Refused("second".to_owned())));
    }

    #[test]
    fn descriptor_is_taken_from_the_socket() {
        let pair = || socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        let (ours, theirs) = pair();
        let (reader, mut writer) = std::io::pipe().unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds = [reader.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&theirs, &[IoSlice::new(&[0])], &mut control, SendFlags::empty()).unwrap();
        drop(theirs);
        let got = receive(&ours).unwrap();
        std::io::Write::write_all(&mut writer, b"x").unwrap();
        let mut byte = [0];
        assert_eq!((rustix::io::read(&got, &mut byte), byte), (Ok(1), *b"x"));
        // Its end without a descriptor.
        let (ours, theirs) = pair();
        drop(theirs);
        assert_eq!(receive(&ours).err(), Some(Errno::PROTO));
    }
}
