//! Directories on file systems of several kinds, for tests that must pass on all of them.
//!
//! Kinds that need a privilege or a kernel feature may be unavailable: then [`for_each_kind`] prints why and continues.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

/// A directory on a file system; unmounted and removed when dropped.
#[derive(Debug)]
pub struct MountFixture {
    /// `ext4`, `tmpfs`, ...
    pub kind: &'static str,
    path: PathBuf,
    mounts: Vec<PathBuf>,
    _dir: TempDir,
}

impl MountFixture {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path in it.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for MountFixture {
    fn drop(&mut self) {
        for mount in self.mounts.iter().rev() {
            let lazy = Command::new("umount").arg("-l").arg(mount).output();
            if !lazy.is_ok_and(|o| o.status.success()) {
                eprintln!("could not unmount {}", mount.display());
            }
        }
    }
}

/// All kinds.
pub const KINDS: [&str; 7] = ["tree", "tmpfs", "overlay", "btrfs", "xfs", "data=journal", "fuse"];

/// A directory on one kind of file system, or why it is unavailable.
pub fn create(kind: &'static str) -> Result<MountFixture, String> {
    match kind {
        "tree" => temp_dir(kind, tempfile::tempdir()),
        "tmpfs" => temp_dir(kind, tempfile::tempdir_in("/dev/shm")),
        "overlay" => overlay(),
        "btrfs" => image(kind, 120 << 20, &["mkfs.btrfs", "-q", "-f"], ""),
        "xfs" => image(kind, 320 << 20, &["mkfs.xfs", "-q", "-f"], ""),
        "data=journal" => image(kind, 64 << 20, &["mkfs.ext4", "-q", "-F"], "data=journal"),
        "fuse" => fuse(),
        _ => Err("unknown kind".to_owned()),
    }
}

/// A small separate file system, `tmpfs` or `ext4`, that can be filled; for `quota` a larger one, of which `size` bytes
/// may be used; or why it is unavailable.
pub fn create_small(kind: &'static str, size: u64) -> Result<MountFixture, String> {
    match kind {
        "tmpfs" => {
            let mut fixture = root_fixture(kind)?;
            let options = format!("size={size}");
            let directory = fixture.path.clone();
            run(Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&directory))?;
            fixture.mounts.push(directory);
            Ok(fixture)
        }
        "ext4" => image(kind, size, &["mkfs.ext4", "-q", "-F"], ""),
        "quota" => {
            // Quotas of btrfs need no other tools.
            let fixture = image(kind, 200 << 20, &["mkfs.btrfs", "-q", "-f"], "")?;
            let btrfs = |args: &[&str]| run(Command::new("btrfs").args(args).arg(fixture.path()));
            btrfs(&["quota", "enable"])?;
            btrfs(&["quota", "rescan", "-w"])?;
            btrfs(&["qgroup", "limit", &size.to_string()])?;
            Ok(fixture)
        }
        _ => Err("unknown kind".to_owned()),
    }
}

/// Runs `body` on every available kind, and prints why it skips the others.
pub fn for_each_kind(mut body: impl FnMut(&MountFixture)) {
    for kind in KINDS {
        match create(kind) {
            Ok(fixture) => body(&fixture),
            Err(why) => println!("skipped on {kind}: {why}"),
        }
    }
}

fn temp_dir(kind: &'static str, dir: std::io::Result<TempDir>) -> Result<MountFixture, String> {
    let directory = dir.map_err(|e| e.to_string())?;
    Ok(MountFixture { kind, path: directory.path().to_owned(), mounts: Vec::new(), _dir: directory })
}

/// A directory to mount a file system on.
fn root_fixture(kind: &'static str) -> Result<MountFixture, String> {
    if !crate::as_user::is_root() {
        return Err("mounting needs root".to_owned());
    }
    temp_dir(kind, tempfile::tempdir())
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

fn overlay() -> Result<MountFixture, String> {
    let mut fixture = temp_dir("overlay", tempfile::tempdir())?;
    let root = fixture.path.clone();
    let subdir = |name: &str| {
        let path = root.join(name);
        fs::create_dir(&path).map_err(|e| e.to_string()).map(|()| path)
    };
    let (lower, upper, work, merged) = (subdir("lower")?, subdir("upper")?, subdir("work")?, subdir("merged")?);
    let options = format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
    run(Command::new("mount").args(["-t", "overlay", "overlay", "-o", &options]).arg(&merged))?;
    fixture.mounts.push(merged.clone());
    fixture.path = merged;
    Ok(fixture)
}

fn fuse() -> Result<MountFixture, String> {
    let mut fixture = root_fixture("fuse")?;
    crate::fuse::mount(&fixture.path)?;
    fixture.mounts.push(fixture.path.clone());
    Ok(fixture)
}

fn image(kind: &'static str, size: u64, make: &[&str], options: &str) -> Result<MountFixture, String> {
    let mut fixture = root_fixture(kind)?;
    let (image, mount) = (fixture.path.join("image"), fixture.path.join("mount"));
    fs::File::create(&image).and_then(|f| f.set_len(size)).map_err(|e| e.to_string())?;
    fs::create_dir(&mount).map_err(|e| e.to_string())?;
    run(Command::new(make[0]).args(&make[1..]).arg(&image))?;
    let options = if options.is_empty() { "loop".to_owned() } else { format!("loop,{options}") };
    run(Command::new("mount").args(["-o", &options]).arg(&image).arg(&mount))?;
    fixture.mounts.push(mount.clone());
    fixture.path = mount;
    Ok(fixture)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixtures_are_usable_and_cleaned_up() {
        let mut paths = Vec::new();
        for_each_kind(|fixture| {
            fs::write(fixture.file("one"), "two").unwrap();
            assert_eq!(fs::read(fixture.file("one")).unwrap(), b"two");
            paths.push(fixture.path().to_owned());
        });
        assert!(!paths.is_empty());
        assert!(paths.iter().all(|p| !p.join("one").exists()));
        assert!(create("no such kind").is_err());
    }
}
