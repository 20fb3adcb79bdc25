//! Folders on file systems of several kinds, for tests that must hold on all of them.
//!
//! What needs privilege or a kernel feature may be missing: then [`each`] prints why and goes on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A folder on a file system; unmounted and removed when dropped.
#[derive(Debug)]
pub struct Place {
    /// `ext4`, `tmpfs`, ...
    pub kind: &'static str,
    path: PathBuf,
    mounted: Vec<PathBuf>,
    _folder: TempDir,
}

impl Place {
    /// A folder of its own.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for mount in self.mounted.iter().rev() {
            let lazy = Command::new("umount").arg("-l").arg(mount).output();
            if !lazy.is_ok_and(|o| o.status.success()) {
                eprintln!("could not unmount {}", mount.display());
            }
        }
    }
}

/// The kinds that are tried.
pub const KINDS: [&str; 7] = ["tree", "tmpfs", "overlay", "btrfs", "xfs", "data=journal", "fuse"];

/// A folder on one kind of file system, or why there is none here.
pub fn on(kind: &'static str) -> Result<Place, String> {
    match kind {
        "tree" => plain(kind, tempfile::tempdir()),
        "tmpfs" => plain(kind, tempfile::tempdir_in("/dev/shm")),
        "overlay" => overlay(),
        "btrfs" => image(kind, 120 << 20, &["mkfs.btrfs", "-q", "-f"], ""),
        "xfs" => image(kind, 320 << 20, &["mkfs.xfs", "-q", "-f"], ""),
        "data=journal" => image(kind, 64 << 20, &["mkfs.ext4", "-q", "-F"], "data=journal"),
        "fuse" => fuse(),
        _ => Err("unknown kind".to_owned()),
    }
}

/// A small file system of its own, `tmpfs` or `ext4`, that can be filled; for `quota` a larger one, of which this much may
/// be used; or why there is none here.
pub fn small(kind: &'static str, size: u64) -> Result<Place, String> {
    match kind {
        "tmpfs" => {
            let mut place = root_place(kind)?;
            let options = format!("size={size}");
            let folder = place.path.clone();
            run(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&folder))?;
            place.mounted.push(folder);
            Ok(place)
        }
        "ext4" => image(kind, size, &["mkfs.ext4", "-q", "-F"], ""),
        "quota" => {
            // Of quotas those of btrfs need nothing that is not here.
            let place = image(kind, 200 << 20, &["mkfs.btrfs", "-q", "-f"], "")?;
            let btrfs = |args: &[&str]| run(Command::new("btrfs").args(args).arg(place.path()));
            btrfs(&["quota", "enable"])?;
            btrfs(&["quota", "rescan", "-w"])?;
            btrfs(&["qgroup", "limit", &size.to_string()])?;
            Ok(place)
        }
        _ => Err("unknown kind".to_owned()),
    }
}

/// Runs `body` on every kind that this machine and this user can have, and prints why on the others not.
pub fn each(mut body: impl FnMut(&Place)) {
    for kind in KINDS {
        match on(kind) {
            Ok(place) => body(&place),
            Err(why) => println!("skipped on {kind}: {why}"),
        }
    }
}

fn plain(kind: &'static str, folder: std::io::Result<TempDir>) -> Result<Place, String> {
    let folder = folder.map_err(|e| e.to_string())?;
    Ok(Place { kind, path: folder.path().to_owned(), mounted: Vec::new(), _folder: folder })
}

/// A folder to mount something on.
fn root_place(kind: &'static str) -> Result<Place, String> {
    if !crate::user::is_root() {
        return Err("mounting needs root".to_owned());
    }
    plain(kind, tempfile::tempdir())
}

fn run(command: &mut Command) -> Result<(), String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| format!("{name}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("{name}: {}", text.trim().lines().last().unwrap_or("failed")))
}

fn overlay() -> Result<Place, String> {
    let mut place = plain("overlay", tempfile::tempdir())?;
    let root = place.path.clone();
    let part = |name: &str| {
        let path = root.join(name);
        fs::create_dir(&path).map_err(|e| e.to_string()).map(|()| path)
    };
    let (lower, upper, work, merged) = (part("lower")?, part("upper")?, part("work")?, part("merged")?);
    let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged))?;
    place.mounted.push(merged.clone());
    place.path = merged;
    Ok(place)
}

fn fuse() -> Result<Place, String> {
    let mut place = root_place("fuse")?;
    crate::fuse::mount(&place.path)?;
    place.mounted.push(place.path.clone());
    Ok(place)
}

fn image(kind: &'static str, size: u64, make: &[&str], options: &str) -> Result<Place, String> {
    let mut place = root_place(kind)?;
    let (image, mount) = (place.path.join("image"), place.path.join("mount"));
    fs::File::create(&image).and_then(|f| f.set_len(size)).map_err(|e| e.to_string())?;
    fs::create_dir(&mount).map_err(|e| e.to_string())?;
    run(Command::new(make[0]).args(&make[1..]).arg(&image))?;
    let options = if options.is_empty() { "loop".to_owned() } else { format!("loop,{options}") };
    run(Command::new("mount").args(["-o", &options]).arg(&image).arg(&mount))?;
    place.mounted.push(mount.clone());
    place.path = mount;
    Ok(place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_takes_files_and_leaves_nothing_behind() {
        let mut paths = Vec::new();
        each(|place| {
            fs::write(place.file("one"), "two").unwrap();
            assert_eq!(fs::read(place.file("one")).unwrap(), b"two");
            paths.push(place.path().to_owned());
        });
        assert!(!paths.is_empty());
        assert!(paths.iter().all(|p| !p.join("one").exists()));
        assert!(on("no such kind").is_err());
    }
}
