//! Compiled code for devices, cached in the user's cache directory.
//!
//! Shadow workers open the files, so that no descriptor of SPIN is ever in the program's table. Code runs with all
//! rights of the program on its device, so a file is loaded only if no other user can have written it, wherever the
//! directory is.

use std::ffi::CString;

use spinio_device::KernelStore;
use spinio_sys::linux;

use spinio_host::pool::Workers;

/// The most bytes of a file.
const MAX_FILE_BYTES: usize = 4 << 20;

/// The kernel cache of one runtime.
pub struct KernelCache<'a> {
    /// The pools whose shadow workers open the files.
    pub workers: &'a Workers,
    /// The directory; `None`: nothing is cached.
    pub directory: Option<&'a str>,
}

impl KernelCache<'_> {
    fn path(&self, name: &str) -> Option<CString> {
        CString::new(format!("{}/{name}", self.directory?)).ok()
    }
}

impl KernelStore for KernelCache<'_> {
    fn load(&self, name: &str) -> Option<Vec<u8>> {
        let path = self.path(name)?;
        self.workers.shadow()?.run_blocking(move || linux::read_trusted(&path, MAX_FILE_BYTES).ok())?
    }

    fn store(&self, name: &str, code: &[u8]) {
        if let Some(path) = self.path(name)
            && let Some(shadow) = self.workers.shadow()
        {
            let code = code.to_vec();
            shadow.run_blocking(move || linux::atomic_replace(&path, &code).ok());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spinio_host::Settings;
    use spinio_host::syscalls::LinuxSyscalls;

    #[test]
    fn cached_code_is_loaded_by_the_next_process() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("new").display().to_string();
        let workers = || Workers::new(&LinuxSyscalls, &Settings::default());
        let (one, next) = (workers(), workers());
        let cache = KernelCache { workers: &one, directory: Some(&directory) };
        assert_eq!(cache.load("one"), None);
        cache.store("one", b"code");
        assert_eq!(
            KernelCache { workers: &next, directory: Some(&directory) }.load("one").as_deref(),
            Some(&b"code"[..])
        );
        let nowhere = KernelCache { workers: &next, directory: None };
        nowhere.store("one", b"code");
        assert_eq!(nowhere.load("one"), None);
    }
}
