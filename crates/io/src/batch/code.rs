//! Compiled code for devices, kept in the user's cache folder.
//!
//! Files are opened by keepers, so that no descriptor of ours is ever in the program's table. Code runs with all rights of the
//! program on its device, so only a file is loaded that no other user can have written, wherever the folder is.

use std::ffi::CString;
use std::sync::Arc;

use spinio_device::CodeStore;
use spinio_sys::linux;

use crate::core::Core;

/// Bytes of a file at most.
const MOST: usize = 4 << 20;

/// The code of one runtime.
pub(crate) struct Kept<'a>(pub(crate) &'a Arc<Core>);

impl Kept<'_> {
    fn path(&self, name: &str) -> Option<CString> {
        CString::new(format!("{}/{name}", self.0.settings.kernels.as_ref()?)).ok()
    }
}

impl CodeStore for Kept<'_> {
    fn load(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.path(name)?;
        self.0.keepers()?.call(move || linux::read_whole(&path, MOST).ok())?
    }

    fn keep(&self, name: &str, code: &[u8]) {
        if let Some(path) = self.path(name)
            && let Some(crew) = self.0.keepers()
        {
            let code = code.to_vec();
            crew.call(move || linux::replace(&path, &code).ok());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use spinio_host::syscalls::Linux;

    #[test]
    fn what_is_kept_is_loaded_by_the_next_process() {
        let place = tempfile::tempdir().unwrap();
        let kernels = Some(place.path().join("new").display().to_string());
        let settings = Settings { kernels, ..Settings::default() };
        let core = Core::new(settings.clone(), &Linux);
        assert_eq!(Kept(&core).load("one"), None);
        Kept(&core).keep("one", b"code");
        assert_eq!(Kept(&Core::new(settings, &Linux)).load("one").as_deref(), Some(&b"code"[..]));
        let nowhere = Core::new(Settings { kernels: None, ..Settings::default() }, &Linux);
        Kept(&nowhere).keep("one", b"code");
        assert_eq!(Kept(&nowhere).load("one"), None);
    }
}
