//! Where calibrations are kept, and reading one.

use std::ffi::{CStr, CString};
use std::path::PathBuf;

use spinio_plan::Calibration;
use spinio_sys::{Errno, linux};

use super::Place;

/// The folder that holds without a setting: `$XDG_STATE_HOME/spinio/models`, or below `$HOME/.local/state`.
pub fn folder(get: impl Fn(&str) -> Option<String>) -> Option<String> {
    let absolute = |name: &str| get(name).filter(|path| path.starts_with('/'));
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(format!("{}/.local/state", absolute("HOME")?)))?;
    Some(format!("{state}/spinio/models"))
}

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

/// A file of at most 64 KiB as text, by system calls of our own.
pub(super) fn read_short(path: &CStr) -> Option<String> {
    let flags = linux::O_RDONLY | linux::O_NONBLOCK;
    let fd = linux::open(path, flags as i32, 0).ok()?;
    let mut bytes = vec![0u8; 64 << 10];
    let mut got = 0;
    while got < bytes.len() {
        // SAFETY: the bytes from `got` on are ours.
        match unsafe { linux::read(fd, bytes[got..].as_mut_ptr(), bytes.len() - got) } {
            Ok(0) => break,
            Ok(n) => got += n,
            Err(Errno::INTR) => {}
            Err(_) => {
                got = bytes.len();
            }
        }
    }
    let _ = linux::close(fd);
    // A longer file is none of ours.
    if got == bytes.len() {
        return None;
    }
    bytes.truncate(got);
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder_with(pairs: &[(&str, &str)]) -> Option<String> {
        folder(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn the_folder_follows_the_environment() {
        assert_eq!(folder_with(&[]), None);
        assert_eq!(folder_with(&[("HOME", "/home/a")]).as_deref(), Some("/home/a/.local/state/spinio/models"));
        let both = [("HOME", "/home/a"), ("XDG_STATE_HOME", "/state")];
        assert_eq!(folder_with(&both).as_deref(), Some("/state/spinio/models"));
        let relative = [("HOME", "/home/a"), ("XDG_STATE_HOME", "state")];
        assert_eq!(folder_with(&relative).as_deref(), Some("/home/a/.local/state/spinio/models"));
    }

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
