//! Unmounting by path, from another process than the supervisor.
//!
//! The daemon ends when the file system is mounted nowhere any more. Where it is mounted elsewhere too (other_mounts.rs),
//! unmounting here does not end it: programs there go on.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use spinio_fuse::mount;

use crate::other_mounts::other_mounts;
use crate::status::status;
use crate::supervisor::{MountError, Running, await_end, is_trusted, mount_of, mount_point};

/// How long the daemon may take to end after the mount is gone.
const END: Duration = Duration::from_secs(30);
/// The same while it is mounted elsewhere too. A container that starts has a copy of all mounts for a moment.
const OTHERS: Duration = Duration::from_secs(3);
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Unmounts GAIA from a directory, and waits until all is written and the daemon has ended.
///
/// # Errors
/// If it is not mounted there, or in use, or if released bytes cannot be written: they would be lost. After it was
/// unmounted: if its daemon does not end, since the file system is mounted elsewhere too.
pub fn unmount(directory: &Path) -> Result<(), MountError> {
    let error = |words: String| MountError::new(format!("{}: {words}", directory.display()));
    let point = mount_point(directory).map_err(|e| error(e.to_string()))?;
    let Some(entry) = mount_of(&point).map_err(|e| error(e.to_string()))? else {
        return Err(error("GAIA is not mounted here".into()));
    };
    let own = rustix::process::getuid().as_raw();
    if !is_trusted(&entry) || !mount::is_privileged() && entry.user != Some(own) {
        return Err(error("is a mount of another user, who can unmount it so that nothing is lost".into()));
    }
    write_out(&point)?;
    let supervisor = Running::of(&entry);
    mount::unmount(&point).map_err(|e| {
        if e.is_busy() {
            return error("in use; `fuser -vm` or `lsof +f --` names the programs".into());
        }
        error(format!("cannot unmount: {e}"))
    })?;
    let begun = Instant::now();
    while !await_end(&supervisor, LOOK_EVERY) {
        let waited = begun.elapsed();
        let others = if waited > OTHERS { other_mounts(&entry.kind, entry.minor, entry.id) } else { Vec::new() };
        if let Some(other) = others.first() {
            return Err(error(format!("unmounted here, but {other}: its daemon serves it there")));
        }
        if waited > END {
            return Err(error("unmounted, but its daemon still runs".into()));
        }
    }
    Ok(())
}

/// Writes what GPU programs have released, while the daemon still has it if that fails.
fn write_out(point: &Path) -> Result<(), MountError> {
    // Where no server answers, the caller waits for one.
    let Ok(status) = status(point) else { return Ok(()) };
    for file in status.files.iter().filter(|file| file.dirty > 0) {
        let path = point.join(file.path.trim_start_matches('/'));
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // It may have no name, or another one by now.
        let Ok(opened) = rustix::fs::open(&path, flags, Mode::empty()) else { continue };
        rustix::fs::fsync(&opened).map_err(|e| {
            let pages = file.dirty;
            MountError::new(format!("{}: {pages} released pages cannot be written: {e}", path.display()))
        })?;
    }
    Ok(())
}
