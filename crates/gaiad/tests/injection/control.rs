//! The points, as the sources have them, and the memory by which one of them is armed (`spinio_sys::injection`).

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::SeqCst;

use rustix::process::Signal;
use spinio_sys::injection::{hash, word};
use spinio_sys::linux::SharedWords;

/// All points, by the hashes of their names, from the sources of the daemon and of the client.
pub(crate) fn points() -> BTreeMap<u64, String> {
    let mut points = BTreeMap::new();
    let daemon = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut todo = vec![daemon.join("src"), daemon.join("../gaia/src")];
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for part in text.split("injection_point!(\"").skip(1) {
            let name = part.split('"').next().unwrap();
            let twin = points.insert(hash(name), name.to_owned());
            assert_eq!(twin, None, "two points with this name, or this hash: {name}");
        }
    }
    assert!(points.len() < word::POINTS);
    points
}

/// What is armed.
pub(crate) struct Control {
    words: SharedWords,
    pub(crate) path: PathBuf,
    points: BTreeMap<u64, String>,
}

impl Control {
    pub(crate) fn new(path: &Path) -> Control {
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(path).unwrap();
        file.set_len(word::ALL as u64 * 8).unwrap();
        // SAFETY: it has this length, and no process cuts it.
        let words = unsafe { SharedWords::map(file.as_fd(), word::ALL) }.unwrap();
        Control { words, path: path.to_owned(), points: points() }
    }

    /// The next pass number `pass` of a point, counted from 1, sends this signal to its process.
    pub(crate) fn arm(&self, point: &str, pass: u64, signal: Signal) {
        assert!(self.points.contains_key(&hash(point)), "no such point: {point}");
        self.disarm();
        self.words[word::LEFT].store(pass, SeqCst);
        self.words[word::SIGNAL].store(signal.as_raw() as u64, SeqCst);
        self.words[word::ARMED].store(hash(point), SeqCst);
    }

    pub(crate) fn disarm(&self) {
        self.words[word::ARMED].store(0, SeqCst);
    }

    pub(crate) fn remove(&self) {
        std::fs::remove_dir_all(self.path.parent().unwrap()).unwrap();
    }

    /// Signals sent so far.
    pub(crate) fn fired(&self) -> u64 {
        self.words[word::FIRED].load(SeqCst)
    }

    pub(crate) fn clear_passes(&self) {
        for pair in 0..word::POINTS {
            self.words[word::COUNTS + 2 * pair + 1].store(0, SeqCst);
        }
    }

    /// Passes of a point since.
    pub(crate) fn passed(&self, point: &str) -> u64 {
        self.passes().iter().find(|(name, _)| name == point).map_or(0, |(_, count)| *count)
    }

    /// The points that were passed since, and how often.
    pub(crate) fn passes(&self) -> Vec<(String, u64)> {
        let pair = |at: usize| {
            let [point, count] = [0, 1].map(|i| self.words[word::COUNTS + 2 * at + i].load(SeqCst));
            (count > 0).then(|| (self.points[&point].clone(), count))
        };
        (0..word::POINTS).filter_map(pair).collect()
    }
}
