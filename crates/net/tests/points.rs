//! Each injection point of this crate is a step at which device/tests/net_handshake.cpp kills and stops a process.

use std::path::Path;

#[test]
fn each_point_is_a_step_of_the_test_and_each_step_a_point() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let steps = std::fs::read_to_string(root.join("../../device/tests/net_handshake.h")).unwrap();
    let mut points = 0;
    for folder in ["src", "src/proxy"] {
        for file in std::fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path()) {
            let text = if file.is_file() { std::fs::read_to_string(&file).unwrap() } else { continue };
            for part in text.split("injection_point!(\"").skip(1) {
                let name = part.split('"').next().unwrap();
                assert!(steps.contains(&format!("{{\"{name}\"")), "no step: {name}");
                points += 1;
            }
        }
    }
    let known = ["{\"accepting net: ", "{\"connecting net: ", "{\"program: "].map(|start| steps.matches(start).count());
    assert_eq!(points, known.iter().sum::<usize>());
}
