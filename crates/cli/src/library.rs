//! The path of libspinio.so, and the value of LD_PRELOAD that loads it.
//!
//! ```text
//!   $SPINIO_LIBRARY                      set by the user: nothing else is tried
//!   <bin>/libspinio.so                   one directory with everything   } the newer one: cargo leaves an older build in
//!   <bin>/deps/libspinio.so              target/release/deps, from cargo } the first if another command made it
//!   <bin>/../lib/libspinio.so.0          installed under a prefix: `cargo x stage`, the wheel
//!   <bin>/../lib/libspinio.so            the same, copied there by hand
//!   <bin>/../lib/spinio/libspinio.so     the same, in its own directory
//! ```
//!
//! Cargo builds the library because this package depends on it, and leaves it in
//! `deps` since it is not a final product. No code here may mention that crate:
//! a mention would link it, and its symbols would hook this very command.
//!
//! Known flaw: LD_PRELOAD separates its entries by colons and spaces and has no way
//! to quote one. A library under such a path cannot be preloaded; the error says so.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::exit::{self, Exit};

const NAME: &str = "libspinio.so";

/// The name of an installed library: its SONAME, so that the loader identifies it with the one that programs were
/// linked with. Next to it `libspinio.so` may be a linker script, hence the order below.
const INSTALLED: &str = "libspinio.so.0";

/// The library, or an error that lists every path tried.
pub fn find() -> anyhow::Result<PathBuf> {
    let bin = env::current_exe().ok().and_then(|p| p.parent().map(Path::to_owned));
    find_in(env::var_os("SPINIO_LIBRARY").map(PathBuf::from), bin.as_deref())
}

fn find_in(setting: Option<PathBuf>, bin: Option<&Path>) -> anyhow::Result<PathBuf> {
    let looked = match (setting, bin) {
        (Some(path), _) => vec![path],
        (None, Some(bin)) => vec![
            bin.join(NAME),
            bin.join("deps").join(NAME),
            bin.join("../lib").join(INSTALLED),
            bin.join("../lib").join(NAME),
            bin.join("../lib/spinio").join(NAME),
        ],
        (None, None) => vec![],
    };
    // The loader resolves a relative path against the current directory of the program, and ignores one that does not
    // exist there: always pass an absolute path.
    let mut there = looked.iter().filter(|p| p.is_file());
    if let Some(found) = there.next() {
        let next = there.next().filter(|p| p.parent().is_some_and(|dir| dir.ends_with("deps")));
        let built = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
        let newest = next.filter(|next| built(next) > built(found)).unwrap_or(found);
        if let Ok(newest) = newest.canonicalize() {
            return Ok(newest);
        }
    }
    let places: Vec<String> = looked.iter().map(|p| format!("\n  {}", p.display())).collect();
    Err(exit::error(
        Exit::Missing,
        format!(
            "Cannot find {NAME}. Looked at:{}\nBuild it with `cargo build --release -p spinio-preload`, or set \
             SPINIO_LIBRARY to its path",
            places.concat()
        ),
    ))
}

/// Whether LD_PRELOAD can name this path.
pub fn can_be_preloaded(path: &Path) -> bool {
    !path.as_os_str().as_bytes().iter().any(|b| matches!(b, b':' | b' ' | b'\t' | b'\n'))
}

/// The value of LD_PRELOAD: this library before the existing entries, so that no other library is passed a device
/// pointer it does not know; but after a sanitizer's runtime, which must be first.
pub fn preload(path: &Path, present: Option<&OsStr>) -> anyhow::Result<OsString> {
    if !can_be_preloaded(path) {
        return Err(exit::error(
            Exit::Refused,
            format!(
                "Cannot preload {}: LD_PRELOAD cannot name a path with a space or a colon. Copy the library \
                 elsewhere and set SPINIO_LIBRARY",
                path.display()
            ),
        ));
    }
    let present = present.unwrap_or_default().as_bytes();
    let (mut sanitizers, mut others): (Vec<&[u8]>, Vec<&[u8]>) = present
        .split(|b| matches!(b, b':' | b' ' | b'\t' | b'\n'))
        .filter(|entry| !entry.is_empty() && *entry != path.as_os_str().as_bytes())
        .partition(|entry| is_sanitizer(entry));
    let mut all = Vec::new();
    all.append(&mut sanitizers);
    all.push(path.as_os_str().as_bytes());
    all.append(&mut others);
    Ok(OsStr::from_bytes(&all.join(&b':')).to_owned())
}

fn is_sanitizer(entry: &[u8]) -> bool {
    let name = entry.rsplit(|b| *b == b'/').next().unwrap_or(entry);
    [&b"libasan."[..], b"libtsan.", b"liblsan.", b"libubsan.", b"libhwasan.", b"libclang_rt."]
        .iter()
        .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(present: Option<&str>) -> String {
        preload(Path::new("/x/libspinio.so"), present.map(OsStr::new)).unwrap().into_string().unwrap()
    }

    #[test]
    fn library_precedes_others_except_sanitizers() {
        assert_eq!(value(None), "/x/libspinio.so");
        assert_eq!(value(Some("")), "/x/libspinio.so");
        assert_eq!(value(Some("/a.so /b.so")), "/x/libspinio.so:/a.so:/b.so");
        assert_eq!(value(Some("/a.so:/usr/lib/libasan.so.8")), "/usr/lib/libasan.so.8:/x/libspinio.so:/a.so");
    }

    #[test]
    fn nested_runs_preload_once() {
        assert_eq!(value(Some("/x/libspinio.so")), "/x/libspinio.so");
    }

    #[test]
    fn path_with_separator_is_refused() {
        let error = preload(Path::new("/my files/libspinio.so"), None).unwrap_err();
        assert_eq!(exit::code(&error), Exit::Refused);
        assert!(error.to_string().contains("/my files/libspinio.so"));
    }

    #[test]
    fn missing_library_lists_every_path_tried() {
        let bin = Path::new("/nowhere/bin");
        let error = find_in(None, Some(bin)).unwrap_err();
        assert_eq!(exit::code(&error), Exit::Missing);
        for place in ["/nowhere/bin/libspinio.so", "/nowhere/bin/deps/libspinio.so", "/nowhere/bin/../lib/libspinio.so"]
        {
            assert!(error.to_string().contains(place), "{error}");
        }
        let error = find_in(Some("/set/lib.so".into()), Some(bin)).unwrap_err().to_string();
        assert!(error.contains("/set/lib.so") && !error.contains("/nowhere"));
    }

    #[test]
    fn installed_library_is_found_before_the_linker_script() {
        let prefix = tempfile::tempdir().unwrap();
        for name in ["bin", "lib"] {
            std::fs::create_dir(prefix.path().join(name)).unwrap();
        }
        std::fs::write(prefix.path().join("lib/libspinio.so"), "INPUT(libspinio.so.0)").unwrap();
        std::fs::write(prefix.path().join("lib/libspinio.so.0"), "").unwrap();
        let found = find_in(None, Some(&prefix.path().join("bin"))).unwrap();
        assert_eq!(found.file_name(), Some(OsStr::new("libspinio.so.0")));
    }

    #[test]
    fn newer_build_of_cargo_wins() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("deps")).unwrap();
        let paths = [dir.path().join(NAME), dir.path().join("deps").join(NAME)];
        for (newer, older) in [(0, 1), (1, 0)] {
            std::fs::File::create(&paths[older]).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
            std::fs::File::create(&paths[newer]).unwrap().set_modified(std::time::SystemTime::now()).unwrap();
            let found = find_in(None, Some(dir.path())).unwrap();
            assert_eq!(found, paths[newer].canonicalize().unwrap());
        }
    }

    #[test]
    fn first_existing_path_wins() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("deps")).unwrap();
        std::fs::write(dir.path().join("deps").join(NAME), "").unwrap();
        let found = find_in(None, Some(dir.path())).unwrap();
        assert!(found.ends_with("deps/libspinio.so"), "{}", found.display());
        assert!(found.is_absolute());
    }
}
