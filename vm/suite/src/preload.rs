//! An unmodified program under `LD_PRELOAD=libspinio.so`: the demo's reader (`examples/demo/reader.c`), whose
//! memory comes from the p2pmem device (`vm/suite/preload/gpu.c`).

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use spinio_io::stats::Snapshot;
use spinio_plan::Route;

use crate::as_user::{DevicePermission, PROGRAMS, ordinary, publish};
use crate::case::{Case, CaseError, Outcome, fail};
use crate::place::{Guest, Place, remove};
use crate::spin::MIB;

const SIZE: usize = 20 * MIB + 333;

/// The user that runs the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunAs {
    Root,
    /// The user `nobody`, which owns neither the file nor the disk.
    Ordinary,
}

pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for (place, user) in [
        (Place::Ext4, RunAs::Root),
        (Place::Xfs, RunAs::Root),
        (Place::Raid0, RunAs::Root),
        (Place::Far, RunAs::Root),
        (Place::Ext4, RunAs::Ordinary),
        (Place::Raid0, RunAs::Ordinary),
    ] {
        let who = if user == RunAs::Root { "root" } else { "an ordinary user" };
        let name = format!("preload: the demo's reader as {who}, {}", place.name());
        all.push(Case::new(name, move |g| reader(g, place, user, "spinio")));
    }
    all.push(Case::new("preload: memory that the program mapped itself, ext4", |g| {
        reader(g, Place::Ext4, RunAs::Root, "mapped")
    }));
    all
}

fn reader(guest: &Guest, place: Place, user: RunAs, memory: &str) -> Outcome {
    let programs = programs()?;
    let (path, _) = guest.cold(place, "preload", SIZE)?;
    let stats = Path::new("/dev/shm").join("preload-stats");
    let _ = fs::remove_file(&stats);
    let (mut command, _leave) = match user {
        RunAs::Root => (Command::new(programs.join("reader")), None),
        RunAs::Ordinary => (ordinary(&programs.join("reader")), Some(DevicePermission::give()?)),
    };
    let ran = command
        .arg(&path)
        .env("LD_PRELOAD", programs.join("libspinio.so"))
        .env("SPINIO_STATS", &stats)
        .env("VM_MEMORY", memory)
        .output()?;
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    if !ran.status.success() || !said.contains(&format!("equal_bytes={SIZE}")) {
        let complaint = String::from_utf8_lossy(&ran.stderr);
        return fail(format!("{}, output: {} {}", ran.status, said.trim().replace('\n', " "), complaint.trim()));
    }
    let counted = fs::read(&stats).ok().and_then(|bytes| Snapshot::from_bytes(&bytes).ok()).unwrap_or_default();
    check_route(place, memory, &counted, &programs)?;
    remove(&path);
    Ok(())
}

/// Whether the bytes took the expected route.
fn check_route(place: Place, memory: &str, counted: &Snapshot, programs: &Path) -> Outcome {
    if memory == "mapped" && !exports(&programs.join("libspinio.so"), b"\0mmap\0")? {
        return Err(CaseError::Skipped(
            "read correctly, but by the Linux kernel alone: libspinio.so does not hook mmap".to_owned(),
        ));
    }
    let by = |route| counted.rows.iter().filter(|l| l.route == route).map(|l| l.bytes).sum::<u64>();
    let p2p = by(Route::P2p);
    if counted.read.bytes != SIZE as u64 {
        return fail(format!("the library counted {} bytes of {SIZE}: {:?}", counted.read.bytes, counted.rows));
    }
    match place {
        Place::Far if p2p > 0 => fail(format!("{p2p} bytes are counted as peer to peer from an unreachable disk")),
        // The first of three requests decides whether the pair is trusted.
        Place::Ext4 | Place::Xfs | Place::Raid0 if p2p < 8 << 20 => {
            fail(format!("only {p2p} bytes went peer to peer: {:?}", counted.rows))
        }
        _ => Ok(()),
    }
}

fn exports(library: &Path, name: &[u8]) -> Result<bool, CaseError> {
    Ok(fs::read(library)?.windows(name.len()).any(|w| w == name))
}

/// The programs, copied to a directory where every user may run them.
fn programs() -> Result<PathBuf, CaseError> {
    let built: OsString = std::env::var_os("VM_PROGRAMS")
        .ok_or_else(|| CaseError::Skipped("VM_PROGRAMS does not name the directory of the programs".to_owned()))?;
    for name in ["libgpu.so", "libspinio.so", "reader"] {
        publish(&Path::new(&built).join(name), name)?;
    }
    Ok(PathBuf::from(PROGRAMS))
}
