//! SPIN itself: the library, whether a program loads it, the settings, the emulated device.

use std::path::Path;
use std::process::{Command, Stdio};

use spinio_device::{Device, DeviceId, DeviceKind, emulated};
use spinio_io::settings;

use super::{Fact, State};
use crate::device::{self, Buffer, DeviceName};
use crate::library;

const GROUP: &str = "SPIN";

/// Collects the facts.
pub fn collect(facts: &mut Vec<Fact>) {
    facts.push(match library::find() {
        Ok(path) => check_preload(&path),
        Err(e) => Fact::new(GROUP, "libspinio.so", State::Broken, "not found")
            .because(format!("{e}").replace("\n ", "").replace('\n', ". "))
            .cure("build it, or set SPINIO_LIBRARY to its path"),
    });
    for complaint in spinio_io::check_settings(|name| std::env::var(name).ok()) {
        let fact = Fact::new(GROUP, "settings", State::Limited, complaint);
        facts.push(fact.cure("see docs/settings.md, or unset the variable"));
    }
    let names = || std::env::vars_os().filter_map(|(name, _)| name.into_string().ok());
    for name in unknown_settings(names()) {
        let fact =
            Fact::new(GROUP, "settings", State::Limited, format!("there is no setting {name}: nothing reads it"));
        facts.push(fact.cure("docs/settings.md lists them"));
    }
    for (name, row) in names().filter_map(|name| Some((settings::row(&name)?, name))).map(|(row, name)| (name, row)) {
        let cure = match row.has_no_effect() {
            true => "unset it: it has no effect".to_owned(),
            false if row.name == name => continue,
            false => format!("use {}", row.name),
        };
        facts.push(Fact::new(GROUP, "settings", State::Limited, format!("{name} is deprecated: {cure}")));
    }
    match device::emulated_devices() {
        Ok(count) => facts.extend((0..count).map(|ordinal| emulated(ordinal, count))),
        Err(e) => facts.push(emulated_does_not_start(&e)),
    }
}

/// Variables that look like settings and are not: a mistyped name has no effect.
fn unknown_settings(names: impl Iterator<Item = String>) -> Vec<String> {
    // Variables of the command itself, and of tests, xtask and the virtual machine.
    const OTHERS: [&str; 6] =
        ["SPINIO_LIBRARY", "SPINIO_COMMAND", "SPINIO_TEST_", "SPINIO_FUZZ_", "SPINIO_VM_", "SPINIO_CI_"];
    let known = |name: &str| settings::row(name).is_some() || OTHERS.iter().any(|other| name.starts_with(other));
    let mut out: Vec<_> = names.filter(|name| name.starts_with("SPINIO_") && !known(name)).collect();
    out.sort();
    out
}

/// Whether a program really starts with the library preloaded.
fn check_preload(path: &Path) -> Fact {
    let fact = |state, detail: String| Fact::new(GROUP, "libspinio.so", state, detail);
    let value = match library::preload(path, None) {
        Ok(value) => value,
        Err(e) => return fact(State::Broken, path.display().to_string()).because(e.to_string()),
    };
    // This very command: it is dynamically linked, it exists, and `--version` does nothing.
    let Ok(me) = std::env::current_exe() else { return fact(State::Found, path.display().to_string()) };
    match Command::new(me).arg("--version").env("LD_PRELOAD", value).stdin(Stdio::null()).output() {
        Ok(out) if out.status.success() && out.stderr.is_empty() => fact(State::Found, path.display().to_string()),
        Ok(out) => fact(State::Broken, format!("{} does not load", path.display()))
            .because(String::from_utf8_lossy(&out.stderr).trim().to_owned())
            .cure("build it on this machine, for this C library"),
        Err(e) => fact(State::Broken, path.display().to_string()).because(e.to_string()),
    }
}

fn emulated(ordinal: u32, count: u32) -> Fact {
    let name = DeviceName(DeviceId { kind: DeviceKind::Emulated, ordinal });
    match Buffer::new(name, 4096) {
        Ok(_) => {
            let mut what = emulated::device(ordinal).map_or_else(|_| String::new(), |d| d.describe());
            if count > 1 {
                what = format!("{name}: {what}");
            }
            Fact::new(GROUP, "emulated device", State::Found, what)
        }
        Err(e) => emulated_does_not_start(&e),
    }
}

fn emulated_does_not_start(why: &anyhow::Error) -> Fact {
    Fact::new(GROUP, "emulated device", State::Limited, "does not start").because(format!("{why:#}"))
}
