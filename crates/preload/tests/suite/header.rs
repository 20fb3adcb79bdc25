//! `spinio.h` against C, C++ and the library.

use std::collections::BTreeSet;

use crate::build::{assert_passes, build_dir, compile, compiler_output, headers, library, run_preloaded, source};
use crate::device::{run_with_timeout, workspace_path};

#[test]
fn headers_compile_as_c_and_cxx() {
    let user = build_dir().join("header.c");
    std::fs::write(
        &user,
        "#include <spinio.h>\n#include <spinio_gaia.h>\n#include <spinio_net.h>\n#include <nvmmu.h>\nint unused(void);\nint unused(void) { return SPINIO_ROUTES; }\n",
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
    let header = read("spinio.h") + &read("spinio_gaia.h") + &read("spinio_net.h") + &read("nvmmu.h");
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
        // For SPIN's own libraries, not for programs: crates/runtime defines it.
        .filter(|l| *l != "spinio_runtime_v3")
        .collect();
    assert_eq!(declared, exported);
}

#[test]
fn linked_program_works() {
    let out = build_dir().join("api");
    let (source, library) = (source("tests/c/api.c"), library());
    let rpath = format!("-Wl,-rpath,{}", library.parent().expect("a directory").display());
    compile("cc", &out, &[source.to_str().expect("UTF-8"), library.to_str().expect("UTF-8"), &rpath]);
    let mut linked = std::process::Command::new("timeout");
    // Without cargo's search path: an older library may be there.
    linked.args(["--signal=KILL", "900"]).arg(&out).current_dir(build_dir()).env_remove("LD_LIBRARY_PATH");
    assert_passes(linked);
    // And again with the library both linked and preloaded, as `spinio run` on such a program does.
    assert_passes(run_preloaded(&out, &[]));
}

/// The rows of the C table in docs/deprecated.md: old name, new name, kind.
fn deprecated_c_names() -> Vec<[String; 3]> {
    let text = std::fs::read_to_string(workspace_path("docs/deprecated.md")).expect("docs/deprecated.md");
    let (_, table) = text.split_once("\n## C\n").expect("the section about C");
    let table = table.split_once("\n## ").map_or(table, |(table, _)| table);
    let rows = table.lines().filter(|l| l.starts_with("| `")).map(|l| {
        let mut cells = l.split('|').skip(1).map(|cell| cell.trim().trim_matches('`').to_owned());
        std::array::from_fn(|_| cells.next().expect("a cell"))
    });
    rows.collect()
}

#[test]
fn deprecated_names_do_what_new_names_do() {
    let (code, library) = (source("tests/c/deprecated.c"), library());
    let (code, rpath) =
        (code.to_str().expect("UTF-8"), format!("-Wl,-rpath,{}", library.parent().expect("a directory").display()));
    let arguments = [code, library.to_str().expect("UTF-8"), rpath.as_str()];
    let silenced = ["-DOLD", "-Wno-deprecated-declarations"];
    for (name, options) in [("new-names", &[][..]), ("old-names", &silenced)] {
        let out = build_dir().join(name);
        compile("cc", &out, &[&arguments, options].concat());
        assert_passes(run_with_timeout(&out));
    }
    // Without the option the compiler names everything that a program has to change.
    let out = build_dir().join("warned");
    let refused = compiler_output("cc", &out, &[&arguments[..], &["-DOLD"]].concat());
    assert!(!refused.status.success());
    let warnings = String::from_utf8_lossy(&refused.stderr).replace(['‘', '’'], "'");
    for [old, new, kind] in deprecated_c_names() {
        let warning = format!("'{old}' is deprecated: use {new}");
        let has_warning = kind == "function" || kind.starts_with("field");
        assert_eq!(warnings.contains(&warning), has_warning, "{warning}: {kind}\n{warnings}");
    }
}

#[test]
fn deprecation_table_lists_names_of_headers_and_program() {
    let table = deprecated_c_names();
    let program = std::fs::read_to_string(source("tests/c/deprecated.c")).expect("the program");
    let pairs: BTreeSet<&str> =
        program.split("NAME(").skip(2).filter_map(|rest| rest.split_once(')')).map(|(pair, _)| pair).collect();
    let listed: Vec<String> = table.iter().map(|[old, new, _]| format!("{old}, {new}")).collect();
    let listed: BTreeSet<&str> = listed.iter().map(String::as_str).filter(|pair| *pair != "old, new").collect();
    assert_eq!(pairs.into_iter().filter(|pair| *pair != "old, new").collect::<BTreeSet<_>>(), listed);
    // Each name that a header marks or maps to another one.
    let read = |name: &str| std::fs::read_to_string(headers().join(name)).expect("a header");
    let mut marked: BTreeSet<String> = BTreeSet::new();
    for line in (read("spinio.h") + &read("nvmmu.h")).lines() {
        if let Some((declared, _)) = line.split_once(" SPINIO_DEPRECATED(\"")
            && !line.starts_with('#')
        {
            marked.extend(declared.split('(').next().and_then(|d| d.rsplit(' ').next()).map(str::to_owned));
        } else if let Some((_, arguments)) = line.split_once("    NVMMU_RENAMED(") {
            marked.extend(arguments.split([',', ')']).nth(1).map(|old| old.trim().to_owned()));
        } else if let Some(defined) = line.strip_prefix("#define ")
            && let [old, new] = defined.split(' ').collect::<Vec<_>>()[..]
            && ["spinio_", "NVMMU_"].iter().any(|prefix| old.starts_with(prefix) && new.starts_with(prefix))
        {
            marked.insert(old.to_owned());
        }
    }
    assert_eq!(marked, table.iter().map(|[old, ..]| old.clone()).collect());
}
