//! `spinio gaia top` on a mount.

mod common;

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Command, Output};

use common::PROGRAM;
use common::mount::Mount;
use spinio_device::emulated::{Config, Emulated};
use spinio_gaia::{Access, Map};

fn top(dir: &Path) -> Output {
    let mut command = Command::new("timeout");
    command.args(["60", PROGRAM, "gaia", "top", "--every", "0.05"]).arg(dir).output().unwrap()
}

#[test]
fn pipe_gets_a_table_of_mounts_and_files() {
    let Some(mount) = Mount::new() else { return };
    let path = mount.dir().join("file");
    std::fs::write(&path, [1; 8192]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    let device = Emulated::start(Config::parse("size=16M").unwrap()).unwrap();
    let maps = [0, 1].map(|_| Map::new(file.as_raw_fd(), 0, 8192, Access::Write, device).unwrap());
    let said = top(&mount.dir());
    let text = String::from_utf8(said.stdout).unwrap();
    assert!(said.status.success(), "{text}");
    assert!(String::from_utf8(said.stderr).unwrap().contains("no terminal"));
    let cells = |with: &str| -> Vec<&str> {
        let line = text.lines().find(|line| line.contains(with)).unwrap_or_else(|| panic!("no {with}: {text}"));
        line.split_whitespace().collect()
    };
    // Released, merges, invalidations, unwritten; then maps, processes, restarts, and as much of the path as fits.
    let of_mount = cells(" B of ");
    assert_eq!((&of_mount[..4], &of_mount[9..12]), (&["0", "B", "0", "0"][..], &["2", "1", "0"][..]), "{text}");
    assert_eq!(cells("/file"), ["0", "B", "0", "0", "B", "2", "1", "/file"]);
    drop((maps, file));
}

#[test]
fn directory_without_a_mount_is_an_error() {
    let dir = common::folder();
    let said = top(dir.path());
    assert_eq!(said.status.code(), Some(1));
    let complaint = String::from_utf8(said.stderr).unwrap();
    assert!(complaint.contains("GAIA is not mounted here"), "{complaint}");
}
