//! SPIN itself: the library, whether a program loads it, the settings, the emulated device.

use std::path::Path;
use std::process::{Command, Stdio};

use spinio_device::{Device, DeviceId, DeviceKind, registry};
use spinio_io::Settings;

use super::{Fact, State};
use crate::device::{Buffer, Name};
use crate::library;

const GROUP: &str = "SPIN";

/// Asks.
pub fn ask(facts: &mut Vec<Fact>) {
    facts.push(match library::find() {
        Ok(path) => load(&path),
        Err(e) => Fact::new(GROUP, "libspinio.so", State::Broken, "not found")
            .because(format!("{e}").replace("\n ", "").replace('\n', ". "))
            .cure("build it, or set SPINIO_LIBRARY to its path"),
    });
    for complaint in Settings::from_env().1 {
        let fact = Fact::new(GROUP, "settings", State::Limited, complaint);
        facts.push(fact.cure("see docs/settings.md, or unset the variable"));
    }
    facts.push(emulated());
}

/// Whether a program really comes up with the library in it.
fn load(path: &Path) -> Fact {
    let fact = |state, detail: String| Fact::new(GROUP, "libspinio.so", state, detail);
    let value = match library::preload(path, None) {
        Ok(value) => value,
        Err(e) => return fact(State::Broken, path.display().to_string()).because(e.to_string()),
    };
    // This very command: it is dynamically linked, it is here, and `--version` does nothing.
    let Ok(me) = std::env::current_exe() else { return fact(State::Found, path.display().to_string()) };
    match Command::new(me).arg("--version").env("LD_PRELOAD", value).stdin(Stdio::null()).output() {
        Ok(out) if out.status.success() && out.stderr.is_empty() => fact(State::Found, path.display().to_string()),
        Ok(out) => fact(State::Broken, format!("{} does not load", path.display()))
            .because(String::from_utf8_lossy(&out.stderr).trim().to_owned())
            .cure("build it on this machine, for this C library"),
        Err(e) => fact(State::Broken, path.display().to_string()).because(e.to_string()),
    }
}

fn emulated() -> Fact {
    let name = Name(DeviceId { kind: DeviceKind::Emulated, ordinal: 0 });
    match Buffer::new(name, 4096) {
        Ok(_) => {
            let what = registry::emulated().map_or_else(|_| String::new(), |d| d.describe());
            Fact::new(GROUP, "emulated device", State::Found, what)
        }
        Err(e) => Fact::new(GROUP, "emulated device", State::Limited, "does not start").because(format!("{e:#}")),
    }
}
