//! The file of a map, and the server of its mount.

use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, FileKind, fs_magic};

use crate::attach::{patiently, say_hello};
use crate::connection::Connection;
use crate::link::Spec;
use crate::mounted_file::{FuseFile, MountedFile};
use crate::{Access, Error, Result};

/// What the map's thread owns.
pub(super) struct Source {
    file: FuseFile,
    spec: Spec,
    /// `None`: the file is below no mount.
    server: Option<Server>,
}

/// The server knows of the map as long as it is connected. It is asked nothing.
struct Server(Connection);

/// What an acquire finds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    /// Bytes of the file.
    pub(super) size: u64,
    /// It is another server than before.
    pub(super) new_server: bool,
}

impl Source {
    /// Duplicates descriptor `fd` of thread `tid` into this thread's table.
    pub(super) fn open(tid: u32, fd: Fd, spec: Spec) -> Result<Source> {
        let file = FuseFile::dup(tid, fd)?;
        let query = |e| Error::of(e, "query the descriptor");
        let magic = linux::file_system_magic(file.descriptor()).map_err(query)?;
        if magic == fs_magic::FUSE {
            let server = Some(Server::connect(&file, &spec)?);
            return Ok(Source { file, spec, server });
        }
        if spec.access == Access::Write {
            let sentence = "A file that is not below a GAIA mount can be mapped for reading only";
            return Err(Error::new(Errno::NOTSUP, sentence));
        }
        if fs_magic::LEASES_NOT_BINDING.contains(&magic) || fs_magic::READ_ONLY_NOT_BINDING.contains(&magic) {
            let sentence = "Other machines may change files of this file system, which a mapping does not show";
            return Err(Error::new(Errno::NOTSUP, sentence));
        }
        if linux::fstat(file.descriptor()).map_err(query)?.kind != FileKind::Regular {
            return Err(Error::new(Errno::NOTSUP, "Only regular files are mapped"));
        }
        Ok(Source { file, spec, server: None })
    }

    /// The size of the file as CPU programs see it, and a server that knows of the map.
    pub(super) fn visit(&mut self) -> Result<Found> {
        let mut new_server = false;
        if let Some(server) = self.server.as_mut().filter(|server| !server.0.is_open()) {
            *server = Server::connect(&self.file, &self.spec)?;
            new_server = true;
        }
        Ok(Found { size: self.file.size()?, new_server })
    }

    /// Returns when all bytes of the file are on storage.
    pub(super) fn sync(&mut self) -> Result<()> {
        self.file.sync()
    }

    pub(super) fn descriptor(&self) -> Fd {
        self.file.descriptor()
    }
}

impl Server {
    fn connect(file: &FuseFile, spec: &Spec) -> Result<Server> {
        patiently(|| say_hello(file, spec)).map(|hello| Server(hello.connection))
    }
}
