//! Subcommands that have moved to the laboratory name it, for one release.

mod common;

use common::{folder, spinio, stderr, stdout};

#[test]
fn moved_commands_name_the_laboratory() {
    for args in [
        &["bench", "fig1", "--runs", "3"][..],
        &["bench", "--list"],
        &["bench"],
        &["bench", "--help"],
        &["simulate", "--vectors", "5", "--json"],
        &["simulate", "-h"],
    ] {
        let assert = spinio().args(args).assert().code(2);
        let wanted = format!("spinio: `spinio {0}` has moved: run `spinio-lab {0}` (docs/lab.md)\n", args[0]);
        assert_eq!((stdout(&assert), stderr(&assert)), (String::new(), wanted), "{args:?}");
    }
    let help = stdout(&spinio().arg("--help").assert().success());
    assert!(help.contains("calibrate") && !help.contains("simulate") && !help.contains("bench"), "{help}");
}

#[test]
fn calibrate_svg_names_the_laboratory() {
    let dir = folder();
    let svg = dir.path().join("chart.svg");
    let assert =
        spinio().args(["calibrate", "--device", "emulated", "--svg"]).arg(&svg).arg(dir.path()).assert().code(2);
    assert!(stderr(&assert).contains("`spinio-lab chart`"), "{}", stderr(&assert));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing was measured");
}
