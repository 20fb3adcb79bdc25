//! The content of files, through content.rs.

use std::os::fd::AsFd;

use rustix::fs::{FallocateFlags, FileType, OFlags};
use rustix::io::Errno;
use spinio_fuse::abi::{
    FSYNC_DATA_ONLY, FallocateIn, FsyncIn, IoctlIn, IoctlOut, OpenIn, OpenOut, ReadIn, WRITE_CACHE, WRITE_KILL_SUIDGID,
    WriteIn, WriteOut, open,
};

use spinio_pagecache::messages::{self, REFUSALS_IOCTL, REFUSALS_REPLY, TICKET_IOCTL, TICKET_REPLY};
use spinio_sys::injection_point;

use super::{Handlers, Reply, Result};
use crate::backing::Access;
use crate::files::Others;
use crate::late;
use crate::report::report;

const ACCESS_MODE: u32 = 0o3;
const READ_ONLY: u32 = 0;
const READ_WRITE: u32 = 2;

/// Whether a file that is opened with these flags can be written.
pub(super) fn may_write(flags: u32) -> bool {
    flags & ACCESS_MODE != READ_ONLY
}

impl Handlers {
    /// The end of a reply that opens a file. The file handle is the access mode; the kernel keeps cached pages, which are
    /// coherent.
    pub(super) fn opened(&self, node: u64, flags: u32, reply: &mut Reply) {
        if may_write(flags) {
            self.clients.writers.add(node);
            self.tell_writers(node);
        }
        let (fh, open_flags) = ((flags & ACCESS_MODE).into(), open::KEEP_CACHE);
        reply.push(&OpenOut { fh, open_flags, ..OpenOut::default() });
    }

    /// Before the program that has opened or closed the file goes on.
    pub(super) fn tell_writers(&self, node: u64) {
        if let Some(file) = self.content.files().hold_now(node).file() {
            self.clients.writers.tell(file);
        }
    }

    /// OPEN.
    pub(super) fn open(&self, node: u64, args: &OpenIn, reply: &mut Reply) -> Result<()> {
        let mode = args.flags & ACCESS_MODE;
        // Now, so that what the backing file system refuses (read-only, immutable) is refused here, not at write-back.
        self.backing.open(node, if mode == READ_ONLY { Access::Read } else { Access::Write })?;
        self.opened(node, args.flags, reply);
        injection_point!("server: file opened");
        Ok(())
    }

    pub(super) fn read(&self, node: u64, args: &ReadIn, reply: &mut Reply) -> Result<()> {
        let file = self.backing.open(node, Access::Read)?;
        let space = reply.space(args.size);
        let direct = args.flags & OFlags::DIRECT.bits() != 0;
        reply.data_len = self.content.read(node, file.as_fd(), args.offset, space, direct)?;
        injection_point!("server: read executed");
        Ok(())
    }

    pub(super) fn write(&self, node: u64, args: &WriteIn, data: &[u8], reply: &mut Reply) -> Result<()> {
        let cached = args.write_flags & WRITE_CACHE != 0;
        // A write of the page cache that may succeed later waits (late.rs): the program that wrote is not there any more to be
        // told.
        let file = self.backing.open(node, Access::Write)?;
        if args.write_flags & WRITE_KILL_SUIDGID != 0 {
            self.drop_suidgid(node, &file)?;
        }
        injection_point!("server: write begun");
        let written = self.content.write(node, file.as_fd(), args.offset, data, cached);
        injection_point!("server: write executed");
        if let Err(error) = written
            && cached
            && !late::may_pass(error)
        {
            // The Linux kernel tells programs of it only at their next fsync, and drops the bytes.
            report!("cannot write {} bytes at {} of node {node}: {error}", data.len(), args.offset);
        }
        let size = written? as u32;
        reply.push(&WriteOut { size, padding: 0 });
        Ok(())
    }

    pub(super) fn fsync(&self, node: u64, args: &FsyncIn, others: Others, reply: &mut Reply) -> Result<()> {
        // Any descriptor of the file will do; one for writing if it is kept.
        let file = self.backing.open(node, Access::Read)?;
        self.content.fsync(node, file.as_fd(), args.flags & FSYNC_DATA_ONLY != 0, others)?;
        reply.lost = self.content.lost(node);
        if reply.lost > 0 {
            injection_point!("server: loss found");
            return Err(Errno::IO);
        }
        injection_point!("server: fsync executed");
        Ok(())
    }

    /// The ticket of a client, or whether a write has failed; all other calls are unknown.
    pub(super) fn ioctl(&self, node: u64, user: u32, args: &IoctlIn, reply: &mut Reply) -> Result<()> {
        if args.command == REFUSALS_IOCTL && args.out_size as usize >= REFUSALS_REPLY {
            reply.push(&IoctlOut::default());
            reply.head.extend_from_slice(&self.nodes.refusals(node).to_ne_bytes());
            return Ok(());
        }
        if args.command != TICKET_IOCTL || (args.out_size as usize) < TICKET_REPLY {
            return Err(Errno::NOTTY);
        }
        let access = match args.fh as u32 & ACCESS_MODE {
            READ_ONLY => messages::Access::Read,
            READ_WRITE => messages::Access::Write,
            _ => return Err(Errno::ACCESS),
        };
        // A descriptor of a directory would lead out of the mount.
        if self.nodes.get(node)?.file_type != FileType::RegularFile {
            return Err(Errno::NOTTY);
        }
        let ticket = self.clients.ticket(node, access, user)?;
        injection_point!("server: ticket made");
        reply.push(&IoctlOut::default());
        reply.head.extend_from_slice(&ticket.to_bytes());
        Ok(())
    }

    pub(super) fn fsyncdir(&self, node: u64, args: &FsyncIn) -> Result<()> {
        let directory = self.backing.open(node, Access::Read)?;
        if args.flags & FSYNC_DATA_ONLY != 0 {
            rustix::fs::fdatasync(&directory)
        } else {
            rustix::fs::fsync(&directory)
        }
    }

    pub(super) fn fallocate(&self, node: u64, args: &FallocateIn) -> Result<()> {
        let file = self.backing.open(node, Access::Write)?;
        let mode = FallocateFlags::from_bits(args.mode).ok_or(Errno::OPNOTSUPP)?;
        self.content.allocate(node, file.as_fd(), mode, args.offset, args.length)?;
        injection_point!("server: fallocate executed");
        Ok(())
    }
}
