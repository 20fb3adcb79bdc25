//! Link options of libspinio.so, and its second name.

use std::io;
use std::path::Path;

/// The name that the loader finds it by: of this form of the C API.
const SONAME: &str = "libspinio.so.0";

fn main() {
    // Never unmapped: hooked calls of other libraries, queued copies and the library's threads outlive any dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // A program linked with the library is loaded with the library of this name, wherever it was at link time.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,{SONAME}");
    println!("cargo:rerun-if-changed=build.rs");
    let out = std::env::var_os("OUT_DIR").expect("cargo names a directory");
    // <profile>/build/spinio-preload-<hash>/out
    if let Some(profile) = Path::new(&out).ancestors().nth(3) {
        name(profile).and_then(|()| name(&profile.join("deps"))).expect("a link to libspinio.so can be made");
    }
}

/// A program linked with cargo's `libspinio.so` finds it in cargo's directory, as an installed one finds an installed
/// library: by a link of that name beside it. Cargo itself makes none. It may point nowhere until the library is built.
fn name(folder: &Path) -> io::Result<()> {
    let link = folder.join(SONAME);
    if !folder.is_dir() || link.is_symlink() {
        return Ok(());
    }
    match std::os::unix::fs::symlink("libspinio.so", link) {
        // Another build script of the same directory was faster.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        done => done,
    }
}
