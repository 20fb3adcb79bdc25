//! The files of calibrations, and how they are read.

use std::ffi::{CStr, CString};
use std::path::PathBuf;

use spinio_plan::Calibration;
use spinio_sys::linux;

use super::ModelKey;

/// The file of a key in a directory.
pub fn file_path(dir: &str, key: &ModelKey) -> PathBuf {
    PathBuf::from(dir).join(key.file_name())
}

/// The calibration of a key, if there is a valid one of exactly this key. Called on a shadow worker.
pub(super) fn load(dir: &str, key: &ModelKey) -> Option<Calibration> {
    let path = CString::new(file_path(dir, key).into_os_string().into_encoded_bytes()).ok()?;
    let read = Calibration::parse(&read_small_file(&path)?).ok()?;
    let same = (&read.storage, &read.file_system, &read.device) == (&key.storage, &key.file_system, &key.device);
    same.then_some(read)
}

/// A file of less than 64 KiB as text, by direct system calls; a longer file is not a calibration.
fn read_small_file(path: &CStr) -> Option<String> {
    const MAX_LEN: usize = 64 << 10;
    let bytes = linux::read_file(path, MAX_LEN).ok().filter(|bytes| bytes.len() < MAX_LEN)?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_requires_matching_key() {
        let dir = tempfile::tempdir().expect("a directory");
        let key = ModelKey::new("disk".into(), 0xef53, "gpu".into());
        let at = dir.path().to_str().expect("text");
        assert_eq!(load(at, &key), None);
        let stored = Calibration {
            storage: "disk".into(),
            file_system: "ext4".into(),
            device: "gpu".into(),
            measured_at: 5,
            ..Calibration::default()
        };
        std::fs::write(file_path(at, &key), stored.to_text()).expect("written");
        assert_eq!(load(at, &key), Some(stored.clone()));
        let other = Calibration { device: "another".into(), ..stored };
        std::fs::write(file_path(at, &key), other.to_text()).expect("written");
        assert_eq!(load(at, &key), None);
        for text in [&b"spinio model 1\nroute warp\n"[..], b"\xff\xfe", &[b'x'; 70_000], b""] {
            std::fs::write(file_path(at, &key), text).expect("written");
            assert_eq!(load(at, &key), None);
        }
    }
}
