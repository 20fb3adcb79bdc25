//! Reading directories. A position is that of the backing file system, so it is valid for every descriptor of the
//! directory and for a later server.

use std::mem::MaybeUninit;
use std::sync::PoisonError;

use rustix::fs::{RawDir, SeekFrom, seek};
use rustix::io::Errno;
use spinio_fuse::DirectoryBuffer;
use spinio_fuse::abi::{EntryOut, ReadIn};

use super::{Handlers, Reply, Result};
use crate::backing::Access;

const BUFFER: usize = 32 << 10;

impl Handlers {
    /// READDIR, and READDIRPLUS (`plus`), which counts a look-up of each entry.
    pub(super) fn readdir(&self, node: u64, args: &ReadIn, plus: bool, reply: &mut Reply) -> Result<()> {
        let directory = self.backing.open(node, Access::Read)?;
        // The descriptor has one position for all threads.
        let lock = &self.directory_locks[node as usize % self.directory_locks.len()];
        let _one_at_a_time = lock.lock().unwrap_or_else(PoisonError::into_inner);
        seek(&directory, SeekFrom::Start(args.offset))?;
        let mut buffer = [const { MaybeUninit::<u8>::uninit() }; BUFFER];
        let mut entries = RawDir::new(&*directory, &mut buffer);
        let mut out = DirectoryBuffer::new(&mut reply.head, args.size as usize);
        let mut any = false;
        while let Some(entry) = entries.next() {
            let entry = match entry {
                Ok(entry) => entry,
                // The directory was removed.
                Err(Errno::NOENT) => break,
                Err(error) => return Err(error),
            };
            any = true;
            let name = entry.file_name().to_bytes();
            if !out.fits(name, plus) {
                break;
            }
            let itself = name == b"." || name == b"..";
            let full = plus.then(|| {
                // Without a node the kernel takes only the name: for these two, where the look-up fails, and where
                // nodes are short.
                let skip = itself || !self.backing.has_room();
                if skip { EntryOut::default() } else { self.entry(node, entry.file_name()).unwrap_or_default() }
            });
            let kind = entry.file_type().as_raw_mode() >> 12;
            out.push(entry.ino(), kind, entry.next_entry_cookie(), name, full.as_ref());
        }
        if !any {
            // A descriptor of ext4 (Linux 6.18) that was first read at the end of the directory, as by a new server,
            // finds nothing when it is read from the beginning after that.
            self.backing.close(node, Access::Read);
        }
        Ok(())
    }
}
