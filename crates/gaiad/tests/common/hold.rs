//! Holds one thread of a daemon at an injection point.

#![expect(unsafe_code, reason = "shared memory")]

use std::ffi::OsStr;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::SeqCst;

use spinio_sys::injection::{VARIABLE, hash, word};
use spinio_sys::linux::SharedWords;
use tempfile::NamedTempFile;

/// The first thread that passes the point once it is armed waits until this says that it may go on, or is dropped.
pub struct Hold {
    file: NamedTempFile,
    words: SharedWords,
}

impl Hold {
    /// For processes that have this in their environment.
    pub fn new() -> Hold {
        let file = NamedTempFile::new().unwrap();
        file.as_file().set_len(word::ALL as u64 * 8).unwrap();
        // SAFETY: it has this length, and no process cuts it.
        let words = unsafe { SharedWords::map(file.as_file().as_fd(), word::ALL) }.unwrap();
        Hold { file, words }
    }

    pub fn environment(&self) -> (&OsStr, &OsStr) {
        (OsStr::new(VARIABLE), self.file.path().as_os_str())
    }

    /// The next thread is held.
    pub fn arm(&self, point: &str) {
        self.words[word::LEFT].store(1, SeqCst);
        self.words[word::SIGNAL].store(word::HOLD, SeqCst);
        self.words[word::ARMED].store(hash(point), SeqCst);
    }

    /// Whether one is held.
    pub fn is_held(&self) -> bool {
        self.words[word::FIRED].load(SeqCst) > 0
    }

    pub fn let_go(&self) {
        self.words[word::LET_GO].store(1, SeqCst);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.let_go();
    }
}
