//! Where calibrations are kept, and reading one.

use std::ffi::{CStr, CString};
use std::path::PathBuf;

use spinio_plan::Calibration;
use spinio_sys::linux;

use super::Place;

/// The file of a place in a folder.
pub fn path(folder: &str, place: &Place) -> PathBuf {
    PathBuf::from(folder).join(place.file_name())
}

/// The calibration of a place, if there is one that can be understood and is of this very place. On a keeper.
pub(super) fn load(folder: &str, place: &Place) -> Option<Calibration> {
    let path = CString::new(path(folder, place).into_os_string().into_encoded_bytes()).ok()?;
    let read = Calibration::parse(&read_short(&path)?).ok()?;
    let same = (&read.storage, &read.file_system, &read.device) == (&place.storage, &place.file_system, &place.device);
    same.then_some(read)
}

/// A file of less than 64 KiB as text, by system calls of our own; a longer one is none of ours.
fn read_short(path: &CStr) -> Option<String> {
    const MOST: usize = 64 << 10;
    let bytes = linux::read_file(path, MOST).ok().filter(|bytes| bytes.len() < MOST)?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_calibration_of_this_very_place_is_taken() {
        let dir = tempfile::tempdir().expect("a folder");
        let place = Place::new("disk".into(), 0xef53, "gpu".into());
        let at = dir.path().to_str().expect("text");
        assert_eq!(load(at, &place), None);
        let kept = Calibration {
            storage: "disk".into(),
            file_system: "ext4".into(),
            device: "gpu".into(),
            measured: 5,
            ..Calibration::default()
        };
        std::fs::write(path(at, &place), kept.to_text()).expect("written");
        assert_eq!(load(at, &place), Some(kept.clone()));
        let other = Calibration { device: "another".into(), ..kept };
        std::fs::write(path(at, &place), other.to_text()).expect("written");
        assert_eq!(load(at, &place), None);
        for text in [&b"spinio model 1\nroute warp\n"[..], b"\xff\xfe", &[b'x'; 70_000], b""] {
            std::fs::write(path(at, &place), text).expect("written");
            assert_eq!(load(at, &place), None);
        }
    }
}
