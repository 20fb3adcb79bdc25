//! Files of a session, opened once and cached.
//!
//! Before each use the path is looked up: a file that was replaced since is opened again.

use std::collections::HashMap;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use spinio_io::{Runtime, ShadowFile};
use spinio_sys::Errno;
use spinio_sys::linux::{self, FileKey};

/// What a file is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Purpose {
    Upload,
    Download,
}

struct OpenFile {
    file: Arc<ShadowFile>,
    identity: FileKey,
}

/// The most files open at once: enough for those that a program uses in turns, not for all that it ever used.
const MAX_OPEN_FILES: usize = 64;

/// The files that are open now.
pub(crate) struct Files {
    runtime: &'static Runtime,
    open_files: HashMap<(PathBuf, Purpose), OpenFile>,
}

/// A path as the kernel takes it.
pub(crate) fn c_path(path: &Path) -> Result<CString, Errno> {
    if path.as_os_str().is_empty() {
        return Err(Errno::NOENT);
    }
    CString::new(path.as_os_str().as_bytes()).map_err(|_| Errno::INVAL)
}

/// Opens a file for downloads; it is created if it does not exist. Readable too if permitted, for the filler.
pub(crate) fn open_output(runtime: &Runtime, path: &Path) -> Result<ShadowFile, Errno> {
    let name = c_path(path)?;
    match runtime.open(&name, linux::O_RDWR | linux::O_CREAT, 0o666) {
        Err(Errno::ACCESS) => runtime.open(&name, linux::O_WRONLY | linux::O_CREAT, 0o666),
        other => other,
    }
}

impl Files {
    pub(crate) fn new(runtime: &'static Runtime) -> Files {
        Files { runtime, open_files: HashMap::new() }
    }

    /// The file that a path names now.
    pub(crate) fn get(&mut self, path: &Path, purpose: Purpose) -> Result<Arc<ShadowFile>, Errno> {
        let name = c_path(path)?;
        let key = (path.to_owned(), purpose);
        if let Some(kept) = self.open_files.get(&key)
            && linux::key_of_path(&name) == Ok(kept.identity)
        {
            return Ok(Arc::clone(&kept.file));
        }
        let file = match purpose {
            Purpose::Upload => self.runtime.open(&name, linux::O_RDONLY, 0)?,
            Purpose::Download => open_output(self.runtime, path)?,
        };
        let file = Arc::new(file);
        let identity = file.run_blocking(|fd| linux::fstat(fd).map(|s| s.key()))?;
        if self.open_files.len() >= MAX_OPEN_FILES {
            self.open_files.clear();
        }
        self.open_files.insert(key, OpenFile { file: Arc::clone(&file), identity });
        Ok(file)
    }
}
