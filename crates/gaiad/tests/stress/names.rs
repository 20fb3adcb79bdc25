//! Files that come and go: made, replaced, deleted while they are open. Their nodes and descriptors must not stay.

use std::collections::VecDeque;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::common::both::Random;
use crate::layout::PAGE;

/// Files without a name at a time.
const OPEN: usize = 4;

/// The name of a file that a GPU process makes; if it is killed, the name stays.
pub(crate) fn scratch(worker: usize, life: usize, round: u64) -> String {
    format!("scratch-{worker}-{life}-{round}")
}

/// Removes those names.
pub(crate) fn remove_scratch(directory: &Path) {
    for entry in std::fs::read_dir(directory).unwrap().flatten() {
        if entry.file_name().to_string_lossy().starts_with("scratch-") {
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}

pub(crate) struct Names {
    directory: PathBuf,
    /// Deleted files that are still open, and what each byte of them is.
    open: VecDeque<(File, u8)>,
    made: u64,
}

impl Names {
    pub(crate) fn new(directory: &Path) -> Names {
        Names { directory: directory.to_owned(), open: VecDeque::new(), made: 0 }
    }

    /// Makes files, deletes them all, and looks at those that it has open.
    pub(crate) fn change(&mut self, random: &mut Random) {
        for _ in 0..4 {
            self.made += 1;
            let byte = self.made as u8;
            let path = self.directory.join(scratch(9, 0, self.made % 3));
            let file = File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
            file.write_all_at(&vec![byte; random.range(1, 3 * PAGE as u64) as usize], 0).unwrap();
            let to = self.directory.join(scratch(9, 1, 0));
            std::fs::rename(&path, &to).unwrap();
            assert_eq!(std::fs::read(&to).unwrap()[0], byte);
            if random.range(0, 2) == 0 {
                std::fs::remove_file(&to).unwrap();
                self.open.push_back((file, byte));
            }
        }
        while self.open.len() > OPEN {
            let (file, byte) = self.open.pop_front().unwrap();
            let mut bytes = vec![0; 3 * PAGE];
            let len = file.read_at(&mut bytes, 0).unwrap();
            assert!(len > 0 && bytes[..len].iter().all(|b| *b == byte), "a file without a name has other bytes");
        }
    }
}
