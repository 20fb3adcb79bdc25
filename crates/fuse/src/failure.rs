//! Why a mount was not made, or not ended.

use std::fmt;
use std::path::PathBuf;

use rustix::io::Errno;

/// Why a mount was not made, or not ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MountFailure {
    /// The Linux kernel's error.
    System(Errno),
    /// `fusermount3` is not installed.
    NoHelper,
    /// It is here, but does not run as root; why.
    HelperNotSetuid(PathBuf, &'static str),
    /// It refused; its own words.
    Refused(String),
}

impl fmt::Display for MountFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MountFailure::System(error) => write!(f, "{error}"),
            MountFailure::NoHelper => {
                f.write_str("there is no fusermount3, which users who are not root need: `apt install fuse3`")
            }
            MountFailure::HelperNotSetuid(path, why) => write!(f, "{} {why}", path.display()),
            MountFailure::Refused(words) => f.write_str(words),
        }
    }
}

impl std::error::Error for MountFailure {}

impl From<Errno> for MountFailure {
    fn from(error: Errno) -> MountFailure {
        MountFailure::System(error)
    }
}

impl MountFailure {
    /// Whether programs use the mount.
    pub fn is_busy(&self) -> bool {
        match self {
            MountFailure::System(error) => *error == Errno::BUSY,
            // The program ends with one status for all errors; its messages are not translated.
            MountFailure::Refused(words) => words.ends_with("Device or resource busy"),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_say_whether_the_mount_is_in_use() {
        let words = |words: &str| MountFailure::Refused(words.to_owned());
        assert!(words("fusermount3: failed to unmount /tmp/d: Device or resource busy").is_busy());
        assert!(!words("fusermount3: bad mount point /tmp/d: Not a directory").is_busy());
        assert!(MountFailure::from(Errno::BUSY).is_busy() && !MountFailure::from(Errno::PERM).is_busy());
    }
}
