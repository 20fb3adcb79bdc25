//! Real programs under the library.

use std::process::Command;

use crate::build::{library, must_pass};

#[test]
fn a_program_without_devices_sees_no_difference() {
    // The library itself is the input: large enough for several reads.
    let input = library();
    for args in [vec!["sha256sum"], vec!["wc", "-c"], vec!["od", "-A", "d"], vec!["sort", "-z"]] {
        let mut plain = Command::new(args[0]);
        plain.args(&args[1..]).arg(&input);
        let mut hooked = plain_copy(&plain);
        hooked.env("LD_PRELOAD", library());
        let (plain, hooked) = (plain.output().expect("it runs"), must_pass(hooked));
        assert!(plain.stdout == hooked.stdout, "{args:?} says something else under the library");
    }
}

fn plain_copy(command: &Command) -> Command {
    let mut copy = Command::new(command.get_program());
    copy.args(command.get_args());
    copy
}
