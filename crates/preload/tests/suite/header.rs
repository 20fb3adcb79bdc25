//! `spinio.h` against C, C++ and the library.

use std::collections::BTreeSet;

use crate::build::{assert_passes, build_dir, compile, headers, library, run_preloaded, source};

#[test]
fn headers_compile_as_c_and_cxx() {
    let user = build_dir().join("header.c");
    std::fs::write(
        &user,
        "#include <spinio.h>\n#include <nvmmu.h>\nint unused(void);\nint unused(void) { return SPINIO_ROUTES; }\n",
    )
    .expect("a file");
    let user = user.to_str().expect("a path in UTF-8");
    compile("cc", &build_dir().join("header-c.o"), &["-std=c99", "-pedantic", "-c", user]);
    if std::process::Command::new("c++").arg("--version").output().is_err() {
        eprintln!("skipped for C++: no c++ here");
        return;
    }
    compile("c++", &build_dir().join("header-cxx.o"), &["-x", "c++", "-std=c++11", "-pedantic", "-c", user]);
}

#[test]
fn declared_functions_are_exported() {
    let read = |name: &str| std::fs::read_to_string(headers().join(name)).expect("a header");
    let header = read("spinio.h") + &read("nvmmu.h");
    // A declaration starts its line with a type and has its name right before the parenthesis.
    let declared: BTreeSet<&str> = header
        .lines()
        .filter(|l| l.ends_with(");") && !l.starts_with([' ', '/', '*', '#']))
        .filter_map(|l| l.split('(').next()?.rsplit([' ', '*']).next())
        .collect();
    let list = std::fs::read_to_string(source("exports.txt")).expect("exports.txt");
    let exported: BTreeSet<&str> = list
        .lines()
        .filter(|l| l.starts_with("spinio_") || l.starts_with("nvmmu"))
        // For our own libraries, not for programs: crates/runtime has its form.
        .filter(|l| *l != "spinio_runtime_v1")
        .collect();
    assert_eq!(declared, exported);
}

#[test]
fn linked_program_works() {
    let out = build_dir().join("api");
    let (source, library) = (source("tests/c/api.c"), library());
    let rpath = format!("-Wl,-rpath,{}", library.parent().expect("a folder").display());
    compile("cc", &out, &[source.to_str().expect("UTF-8"), library.to_str().expect("UTF-8"), &rpath]);
    let mut linked = std::process::Command::new("timeout");
    // Not cargo's own search path: an older library may lie there.
    linked.args(["--signal=KILL", "900"]).arg(&out).current_dir(build_dir()).env_remove("LD_LIBRARY_PATH");
    assert_passes(linked);
    // And once more with the library both linked and preloaded, as `spinio run` on such a program does.
    assert_passes(run_preloaded(&out, &[]));
}
