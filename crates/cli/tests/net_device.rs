//! Which device a net has for which a C program names none.

mod common;

use std::path::Path;
use std::process::Command;

const SOURCE: &str = r#"
    #include <errno.h>
    #include <stdio.h>
    #include <spinio.h>
    #include <spinio_net.h>
    int main(int argc, char **argv)
    {
        spinio_net *net = spinio_net_open(argc > 1 ? argv[1] : NULL, NULL);
        if (!net)
            return printf("%d %s\n", errno, spinio_last_error()), 0;
        puts("opened");
        return spinio_net_close(net);
    }
"#;

#[test]
fn program_with_a_gpu_and_no_context_gets_the_emulated_gpu_only_if_it_asks() {
    let dir = common::folder();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let libraries = Path::new(common::PROGRAM).parent().unwrap().join("deps");
    let driver = |name: &str, source: &str| {
        let folder = dir.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let flags = ["-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1"];
        common::compile(&folder, "libcuda.so.1", source, &flags)?;
        Some(folder)
    };
    let fake = std::fs::read_to_string(root.join("../sys/tests/fake/libcuda.c")).unwrap();
    let (Some(fake), Some(none)) = (driver("fake", &fake), driver("none", "int none;")) else { return };
    let headers = format!("-I{}", root.join("../capi/include").display());
    // Not RUNPATH, which LD_LIBRARY_PATH precedes.
    let rpath = format!("-Wl,--disable-new-dtags,-rpath,{}", libraries.display());
    let library = libraries.join("libspinio.so").display().to_string();
    let program = common::compile(dir.path(), "opens", SOURCE, &[&headers, &library, &rpath]).unwrap();
    let run = |driver: &Path, emulated: Option<&str>, arguments: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", "120"]).arg(&program).args(arguments).env("LD_LIBRARY_PATH", driver);
        match emulated {
            Some(text) => command.env("SPINIO_EMULATED", text),
            None => command.env_remove("SPINIO_EMULATED"),
        };
        let done = command.env_remove("LD_PRELOAD").output().unwrap();
        let text = [done.stdout, done.stderr].concat();
        assert!(done.status.success(), "{}: {}", done.status, String::from_utf8_lossy(&text));
        String::from_utf8(text).unwrap()
    };
    let refused = run(&fake, None, &[]);
    assert!(refused.starts_with("19 ") && refused.contains("no CUDA context is current"), "{refused}");
    assert_eq!(run(&fake, None, &["emulated"]), "opened\n");
    assert_eq!(run(&fake, Some("size=64M"), &[]), "opened\n");
    assert_eq!(run(&none, None, &[]), "opened\n");
}
