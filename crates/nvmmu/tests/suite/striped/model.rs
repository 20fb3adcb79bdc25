//! Random moves, in sessions and on a plain vector.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{assert_same_bytes, begin, folder, some_file};
use proptest::prelude::*;
use spinio_nvmmu::Direction::{Download, Upload};
use spinio_nvmmu::Report;

use crate::common::{Buffer, bytes};

#[derive(Clone, Debug)]
struct Step {
    offset: u64,
    len: u64,
    hinted: bool,
    end_action: u8,
}

fn step() -> impl Strategy<Value = Step> {
    let len = prop_oneof![1u64..200, 4096u64..20_000, 16_384u64..300_000];
    (0u64..600_000, len, any::<bool>(), 0u8..12).prop_map(|(offset, len, expected, then)| Step {
        offset,
        len,
        hinted: expected,
        end_action: then,
    })
}

/// Does the steps in sessions on one file, and on a plain vector.
fn run(path: &Path, mut model: Vec<u8>, steps: &[Step]) -> Report {
    let source = bytes(600_000, 77);
    let device = Buffer::with_bytes(&source);
    let back = Buffer::new(600_000);
    let mut session = begin(path);
    for (i, step) in steps.iter().enumerate() {
        let from = (i as u64 * 131) % (600_000 - step.len);
        if step.hinted {
            session.hint_range(step.offset, step.len);
        }
        session.move_range(path, device.at(from), step.offset, step.len, Download).unwrap();
        let end = (step.offset + step.len) as usize;
        model.resize(model.len().max(end), 0);
        model[step.offset as usize..end].copy_from_slice(&source[from as usize..(from + step.len) as usize]);
        match step.end_action {
            0 => {
                session.flush().unwrap();
                assert_same_bytes(path, &model, "after a flush");
            }
            1 => {
                let want = 100_000.min(model.len() as u64);
                assert_eq!(session.move_range(path, back.at(0), 0, want, Upload).unwrap(), want);
                assert!(back.bytes()[..want as usize] == model[..want as usize], "uploaded again");
            }
            2 => {
                session.end().unwrap();
                session = begin(path);
            }
            3 => {
                // Another descriptor of the file is opened and written concurrently: its bytes must never be lost.
                let other = fs::OpenOptions::new().write(true).open(path).unwrap();
                session.flush().unwrap();
                let at = (step.offset + 13).min(model.len() as u64 - 1);
                other.write_all_at(&[0xEE; 1], at).unwrap();
                model[at as usize] = 0xEE;
            }
            _ => {}
        }
    }
    let report = session.end().unwrap();
    assert_same_bytes(path, &model, "at the end");
    report
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn file_matches_move_model(len in 0usize..500_000, steps in proptest::collection::vec(step(), 1..9)) {
        let Some(folder) = folder() else { return Ok(()) };
        let (path, _) = some_file(folder.path().join("out"), len);
        run(&path, bytes(len, 1), &steps);
    }
}
