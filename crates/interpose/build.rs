//! Link options of libspinio.so.

fn main() {
    // Never unmapped: hooked calls of other libraries, queued copies and our threads outlive any dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // Who links the library asks the loader for it by this name, wherever it lay at link time.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libspinio.so");
    println!("cargo:rerun-if-changed=build.rs");
}
