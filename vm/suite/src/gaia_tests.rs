//! The tests of GAIA's daemon (`crates/gaiad/tests`), as programs that the host has built: the same ones that run on the
//! host's kernel run under the guest's, on its ext4.
//!
//! A test that finds something missing prints why and passes, so those lines are printed here.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use crate::case::{Case, CaseError, Outcome, fail};
use crate::gaia::has_maps;
use crate::place::{Guest, Place};

/// Those that need no maps.
const WITHOUT_MAPS: [&str; 1] = ["attributes"];
/// Seconds, of which the slowest needs a tenth on 2 busy processors.
const LIMIT: &str = "600";

pub(crate) fn cases() -> Vec<Case> {
    let Ok(programs) = programs() else { return Vec::new() };
    let entries = fs::read_dir(programs).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.retain(|name| has_maps() || WITHOUT_MAPS.contains(&name.as_str()));
    names.sort();
    let case = |name: String| Case::new(format!("gaia: the daemon's tests, {name}"), move |guest| run(guest, &name));
    names.into_iter().map(case).collect()
}

/// What `vm/run` has built.
fn programs() -> Result<PathBuf, std::env::VarError> {
    Ok(PathBuf::from(std::env::var("VM_PROGRAMS")?).join("gaia-tests"))
}

fn run(guest: &Guest, name: &str) -> Outcome {
    let program = programs().map_err(|_| CaseError::Skipped("VM_PROGRAMS is not set".into()))?.join(name);
    let scratch = guest.mount(Place::Ext4)?.join("gaia-tests");
    fs::create_dir_all(&scratch)?;
    // Some run as an ordinary user too.
    fs::set_permissions(&scratch, fs::Permissions::from_mode(0o1777))?;
    let ran = Command::new("timeout")
        .args(["-k", "5", LIMIT])
        .arg(program)
        .args(["--nocapture", "--test-threads", "2"])
        .env("TMPDIR", &scratch)
        .output()?;
    let said = [ran.stdout, ran.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    for line in said.lines().filter(|line| line.contains("skipped: ")) {
        println!("         {line}");
    }
    fs::remove_dir_all(&scratch)?;
    if ran.status.success() {
        return Ok(());
    }
    let failed: Vec<&str> = said.lines().filter(|line| line.ends_with("FAILED")).collect();
    let last: Vec<&str> = said.lines().rev().take(30).collect();
    fail(format!("{}: {failed:?}\n{}", ran.status, last.into_iter().rev().collect::<Vec<_>>().join("\n")))
}
