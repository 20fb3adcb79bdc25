//! Handlers: from a request to its reply.
//!
//! | file | operations |
//! |---|---|
//! | `lookup.rs` | lookup, forget; how an inode becomes an entry |
//! | `names.rs` | mknod mkdir symlink link create tmpfile unlink rmdir rename: in the journal |
//! | `attributes.rs` | getattr statx setattr readlink statfs |
//! | `modes.rs` | files that a program may use, but the server may not open |
//! | `xattrs.rs` | extended attributes |
//! | `data.rs` | open read write fsync fallocate; ioctl: tickets for clients |
//! | `directories.rs` | readdir readdirplus |
//!
//! A handler runs on any server thread, concurrently with others, waits for the backing file system only, and never for
//! an invalidation. File handles carry no state, so a new server knows all open files: it is the node that counts.

mod attributes;
mod data;
mod directories;
mod lookup;
mod modes;
mod names;
mod xattrs;

use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use spinio_fuse::abi;
use spinio_fuse::{MAX_WRITE, Operation, Request};
use spinio_sys::injection_point;
use zerocopy::{Immutable, IntoBytes};

use crate::backing::Backing;
use crate::buffer::resident_buffer;
use crate::clients::Clients;
use crate::content::Content;
use crate::files::Others;
use crate::journal::{Journal, Past};
use crate::nodes::Nodes;
use crate::seek::{self, Seek, Seeker};

pub(crate) use lookup::{identity, stat};

/// How long the kernel may use names and attributes without asking: no path bypasses the mount.
const VALID_SECONDS: u64 = 3600;
/// Locks of directory descriptors, which have a position.
const DIRECTORY_LOCKS: usize = 64;

type Result<T> = std::result::Result<T, Errno>;

/// What all handlers use.
#[derive(Debug)]
pub struct Handlers {
    nodes: Arc<Nodes>,
    backing: Arc<Backing>,
    content: Arc<Content>,
    journal: Journal,
    clients: Arc<Clients>,
    seeker: Seeker,
    directory_locks: Box<[Mutex<()>]>,
}

/// A reply under construction, of one thread.
#[derive(Debug)]
pub struct Reply {
    /// Structures and entries.
    head: Vec<u8>,
    /// Content of files; of fixed size, not cleared between requests.
    data: Box<[u8]>,
    data_len: usize,
    /// Losses of released bytes that the program is told of by it.
    lost: u64,
}

impl Default for Reply {
    fn default() -> Reply {
        Reply { head: Vec::new(), data: resident_buffer(MAX_WRITE as usize).into(), data_len: 0, lost: 0 }
    }
}

impl Reply {
    /// Its parts, in order.
    pub fn parts(&self) -> [&[u8]; 2] {
        [&self.head, &self.data[..self.data_len]]
    }

    fn clear(&mut self) {
        self.head.clear();
        (self.data_len, self.lost) = (0, 0);
    }

    fn push(&mut self, part: &(impl IntoBytes + Immutable)) {
        self.head.extend_from_slice(part.as_bytes());
    }

    /// Room for content; its length is set with `data_len`.
    fn space(&mut self, size: u32) -> &mut [u8] {
        let size = (size as usize).min(self.data.len());
        &mut self.data[..size]
    }
}

impl Handlers {
    /// Over these parts.
    pub fn new(
        nodes: Arc<Nodes>,
        backing: Arc<Backing>,
        content: Arc<Content>,
        journal: Journal,
        clients: Arc<Clients>,
        seeker: Seeker,
    ) -> Handlers {
        let directory_locks = (0..DIRECTORY_LOCKS).map(|_| Mutex::default()).collect();
        Handlers { nodes, backing, content, journal, clients, seeker, directory_locks }
    }

    /// The journal.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// The content.
    pub fn content(&self) -> &Content {
        &self.content
    }

    /// The nodes.
    pub(crate) fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// A request is answered with an error, or cannot be answered. Called before the Linux kernel is told, which makes it an
    /// error of the file if it was written back by this; a client asks which errors are (`spinio-gaia`).
    pub fn refused(&self, operation: Option<&Operation<'_>>, node: u64) {
        if matches!(operation, None | Some(Operation::Write { .. } | Operation::Fsync(_) | Operation::Setattr(_))) {
            self.nodes.count_refusal(node);
        }
    }

    /// Executes a request. The reply is sent by `send`, which is given the reply or an error, says whether the Linux kernel has
    /// got it, and is not called for requests without a reply. `others`: whether a request that writes all of a file waits for clients and devices.
    pub(crate) fn handle(
        &self,
        request: &Request<'_>,
        reply: &mut Reply,
        others: Others,
        send: impl FnOnce(Result<&Reply>) -> bool,
    ) {
        reply.clear();
        if !names::is_journaled(&request.operation) {
            let result = match request.operation {
                // What is being written back would look like a hole; without an answer, all is data.
                Operation::Lseek(_) if !self.clients.waits_for_writeback => Err(Errno::NOSYS),
                Operation::Lseek(args) if self.clients.writers.may_write(request.header.node) => {
                    let (unique, node) = (request.header.unique, request.header.node);
                    match self.seeker.answer(Seek { unique, node, args }) {
                        Ok(()) => return,
                        Err(error) => Err(error),
                    }
                }
                _ => self.execute(request, reply, others),
            };
            let lost = reply.lost;
            let told = !request.operation.has_no_reply() && send(result.map(|()| &*reply));
            self.content.lost_is_told(request.header.node, lost, told);
            return;
        }
        let (entry, past) = match self.journal.claim(request.id()) {
            Ok(claimed) => claimed,
            Err(error) => {
                send(Err(error));
                return;
            }
        };
        injection_point!("server: name change claimed");
        let result = match past {
            Past::Done(result) => result.map(|bytes| reply.head.extend_from_slice(&bytes)),
            Past::None | Past::Begun(_) => {
                let again = matches!(past, Past::Begun(_));
                let note = match past {
                    Past::Begun(note) => note,
                    _ => match self.note(request) {
                        Ok(note) => note,
                        Err(error) => {
                            send(Err(error));
                            return;
                        }
                    },
                };
                entry.begin(note);
                injection_point!("server: name change begun");
                let result = self.change_names(request, reply, again.then_some(note));
                injection_point!("server: name change executed");
                entry.finish(result.as_ref().map(|()| &reply.head[..]).map_err(|e| *e));
                injection_point!("server: name change recorded");
                result
            }
        };
        send(result.map(|()| &*reply));
        injection_point!("server: name change answered");
        drop(entry);
    }

    fn execute(&self, request: &Request<'_>, reply: &mut Reply, others: Others) -> Result<()> {
        let node = request.header.node;
        match request.operation {
            Operation::Lookup { name } => self.lookup(node, name, reply),
            Operation::Forget { lookups } => {
                self.forget(node, lookups);
                Ok(())
            }
            Operation::BatchForget(nodes) => {
                nodes.for_each(|one| self.forget(one.node, one.lookups));
                Ok(())
            }
            Operation::Getattr(_) => self.getattr(node, reply),
            Operation::Statx(_) => self.statx(node, reply),
            Operation::Setattr(args) => self.setattr(node, &args, reply),
            Operation::Readlink => self.readlink(node, reply),
            Operation::Statfs => self.statfs(reply),
            Operation::Open(args) => self.open(node, &args, reply),
            Operation::Read(args) => self.read(node, &args, reply),
            Operation::Write { args, data } => self.write(node, &args, data, reply),
            Operation::Fsync(args) => self.fsync(node, &args, others, reply),
            Operation::Fallocate(args) => self.fallocate(node, &args),
            Operation::Opendir(_) => {
                reply.push(&abi::OpenOut::default());
                Ok(())
            }
            Operation::Readdir(args) => self.readdir(node, &args, false, reply),
            Operation::Readdirplus(args) => self.readdir(node, &args, true, reply),
            Operation::Fsyncdir(args) => self.fsyncdir(node, &args),
            Operation::Getxattr { size, name } => self.getxattr(node, name, size, reply),
            Operation::Listxattr { size } => self.listxattr(node, request.header.uid, size, reply),
            Operation::Lseek(args) => {
                reply.push(&abi::LseekOut { offset: seek::seek(&self.clients, node, &args, others)? });
                Ok(())
            }
            Operation::Release(args) => {
                // One that is sent again was perhaps counted. A count may be too high, not too low.
                if data::may_write(args.flags) && !request.is_resent() {
                    let others = self.clients.writers.remove(node);
                    self.tell_writers(node);
                    self.writer_closed(node, others);
                }
                Ok(())
            }
            // No state to release.
            Operation::Releasedir(_) | Operation::Destroy => Ok(()),
            Operation::Ioctl { args, .. } => self.ioctl(node, request.header.uid, &args, reply),
            // ENOSYS, with the meaning 'do not ask again':
            // - FLUSH: nothing to do at close; the kernel has written back before it.
            // - INTERRUPT: ignored.
            // - ACCESS: not sent with default_permissions.
            // - COPY_FILE_RANGE: the kernel copies through its pages, which are coherent with released ones.
            _ => Err(Errno::NOSYS),
        }
    }
}
