//! A small server: one file, pages committed by the last writer, and faults on request.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::*;
use spinio_pagecache::messages::*;
use spinio_sys::Errno;
use spinio_sys::linux::packets::{self, Wait};

use crate::mounted_file::MountedFile;
use crate::{Error, Result};

pub(crate) const PAGE: usize = 4096;
const STAGE_BYTES: u64 = STAGE as u64 * PAGE as u64;

/// What the server does wrong, once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    CloseOnAcquire,
    CloseBeforeCommit,
    CloseOnDrop,
    CloseAfterCommit,
    PagesOutside,
    RefuseRelease,
    SmallWindow,
    UnknownTicket,
}

#[derive(Default)]
pub(crate) struct State {
    /// Released pages of the file.
    pub(crate) snapshots: HashMap<u64, Vec<u8>>,
    /// Pages of the map to be patched at the next acquire: base, head.
    pub(crate) patches: HashMap<u64, (Vec<u8>, Vec<u8>)>,
    pub(crate) committed: HashSet<ReleaseId>,
    pub(crate) released: Vec<Vec<Run>>,
    pub(crate) flushed: Vec<(u64, u64)>,
    /// Those that nothing waits for.
    pub(crate) flushes_started: Vec<(u64, u64)>,
    pub(crate) fault: Option<Fault>,
    pub(crate) hellos: u32,
    pub(crate) syncs: u32,
    /// Bytes by which the size that programs see is larger than the server's.
    pub(crate) unflushed: u64,
    /// What flushes fail with.
    pub(crate) flush_fails: Option<Errno>,
    /// No program has the file open for writing.
    pub(crate) no_writers: bool,
}

#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) socket: PathBuf,
    pub(crate) path: PathBuf,
    pub(crate) state: Arc<Mutex<State>>,
}

impl Server {
    pub(crate) fn start(dir: &Path, bytes: &[u8]) -> Server {
        let server = Server { socket: dir.join("socket"), path: dir.join("file"), state: Arc::default() };
        std::fs::write(&server.path, bytes).unwrap();
        let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        bind(&listener, &SocketAddrUnix::new(&server.socket).unwrap()).unwrap();
        listen(&listener, 8).unwrap();
        let me = server.clone();
        std::thread::spawn(move || {
            while let Ok(socket) = accept(&listener) {
                let me = me.clone();
                std::thread::spawn(move || me.serve(&socket));
            }
        });
        server
    }

    pub(crate) fn fail(&self, fault: Fault) {
        self.state.lock().unwrap().fault = Some(fault);
    }

    /// Another one in each test, since tests share the table of descriptors.
    pub(crate) fn window_name(&self) -> String {
        format!("window{}", self.path.display()).replace('/', "-")
    }

    fn take(&self, fault: Fault) -> bool {
        let mut state = self.state.lock().unwrap();
        let found = state.fault == Some(fault);
        if found {
            state.fault = None;
        }
        found
    }

    /// Until the client closes the connection, or a fault does; `None` in both cases.
    fn serve(&self, socket: &OwnedFd) -> Option<()> {
        let mut buffer = vec![0; MAX_MESSAGE];
        let mut window = None;
        let mut base = 0;
        let mut valid: HashSet<u64> = HashSet::new();
        let mut open: HashSet<u64> = HashSet::new();
        let mut pending: Vec<Run> = Vec::new();
        let mut staged: Vec<(u64, Vec<u8>)> = Vec::new();
        loop {
            let n = rustix::io::read(socket, &mut buffer).ok().filter(|n| *n > 0)?;
            let mut out = Vec::new();
            match parse_request(&buffer[..n]).unwrap() {
                // Not asked by a map.
                Request::Status | Request::WriteOut | Request::Explain { .. } => return None,
                Request::Hello { first, pages, .. } => {
                    self.state.lock().unwrap().hellos += 1;
                    if self.take(Fault::UnknownTicket) {
                        Reply::Failed { errno: libc_stale() }.encode(&mut out);
                        rustix::io::write(socket, &out).ok()?;
                        return None;
                    }
                    base = first;
                    let len =
                        if self.take(Fault::SmallWindow) { PAGE as u64 } else { pages * 2 * PAGE as u64 + STAGE_BYTES };
                    let memory = memory_file(&self.window_name(), len);
                    let file = OwnedFd::from(File::open(&self.path).unwrap());
                    Reply::Mapped { owner: 1, size: file_len(&self.path), file: 1 }.encode(&mut out);
                    let counters = memory_file(&self.window_name(), PAGE as u64);
                    // The second word: a program may have it open for writing.
                    let writers = u64::from(!self.state.lock().unwrap().no_writers);
                    rustix::io::pwrite(&counters, &writers.to_ne_bytes(), 8).unwrap();
                    let descriptors = [memory.as_fd(), file.as_fd(), counters.as_fd(), counters.as_fd()];
                    send_descriptors(socket, &out, &descriptors);
                    window = Some(File::from(memory));
                    continue;
                }
                Request::Acquire { first, pages, access, .. } => {
                    if self.take(Fault::CloseOnAcquire) {
                        return None;
                    }
                    if access == Access::Write {
                        open.extend(first..first + pages);
                    }
                    let mut list = Vec::new();
                    let mut state = self.state.lock().unwrap();
                    for page in first..first + pages {
                        let run = Run { first: page, count: 1 };
                        let at = page * PAGE as u64;
                        let half = (file_len_of(window.as_ref()?) - STAGE_BYTES) / 2;
                        if let Some((old, new)) = state.patches.remove(&page) {
                            window.as_ref()?.write_all_at(&new, at).unwrap();
                            window.as_ref()?.write_all_at(&old, half + at).unwrap();
                            list.push(Fill { run, source: Source::Patch });
                        } else if valid.insert(page) {
                            match state.snapshots.get(&(base + page)) {
                                Some(bytes) => {
                                    window.as_ref()?.write_all_at(bytes, at).unwrap();
                                    list.push(Fill { run, source: Source::Window });
                                }
                                None => list.push(Fill { run, source: Source::File }),
                            }
                        }
                    }
                    drop(state);
                    if self.take(Fault::PagesOutside) {
                        list = vec![Fill { run: Run { first: 1 << 20, count: 1 }, source: Source::File }];
                    }
                    fills(&mut out, file_len(&self.path), &list);
                }
                Request::Filled | Request::FilledBut { .. } => fills(&mut out, file_len(&self.path), &[]),
                Request::Release { id, last, runs, first, pages: count, at, .. } => {
                    let mut from = file_len_of(window.as_ref()?) - STAGE_BYTES + u64::from(at) * PAGE as u64;
                    for page in runs.iter().flat_map(|run| run.first..run.first + u64::from(run.count)) {
                        let mut bytes = vec![0; PAGE];
                        window.as_ref()?.read_exact_at(&mut bytes, from).unwrap();
                        staged.push((page, bytes));
                        from += PAGE as u64;
                    }
                    pending.extend(runs.iter());
                    if !last {
                        Reply::Staged.encode(&mut out);
                        rustix::io::write(socket, &out).ok()?;
                        continue;
                    }
                    let (runs, staged) = (std::mem::take(&mut pending), std::mem::take(&mut staged));
                    if self.take(Fault::CloseBeforeCommit) {
                        return None;
                    }
                    if self.take(Fault::RefuseRelease) {
                        Reply::Failed { errno: 28 }.encode(&mut out);
                    } else {
                        open.retain(|page| !(first..first + u64::from(count)).contains(page));
                        let mut state = self.state.lock().unwrap();
                        let pages = staged.len() as u64;
                        state.snapshots.extend(staged.into_iter().map(|(page, bytes)| (base + page, bytes)));
                        state.committed.insert(id);
                        state.released.push(runs);
                        drop(state);
                        if self.take(Fault::CloseAfterCommit) {
                            return None;
                        }
                        Reply::Committed { pages, merged: 0, bytes: pages * PAGE as u64 }.encode(&mut out);
                    }
                }
                Request::Drop { first, pages, open: of_epochs } => {
                    if self.take(Fault::CloseOnDrop) {
                        return None;
                    }
                    for page in first..first + u64::from(pages) {
                        if open.contains(&page) == of_epochs {
                            open.remove(&page);
                            valid.remove(&page);
                        }
                    }
                    Reply::Dropped.encode(&mut out);
                }
                // As one without a device process.
                Request::HandOver { .. } => Reply::Failed { errno: 95 }.encode(&mut out),
                // It has no use for the descriptor.
                Request::Lend { .. } => Reply::Lent.encode(&mut out),
                Request::Was { id } => {
                    let committed = self.state.lock().unwrap().committed.contains(&id);
                    Reply::Was { committed }.encode(&mut out);
                }
                Request::Stats => Reply::Stats(Stats { commits: 7, ..Stats::default() }).encode(&mut out),
            }
            rustix::io::write(socket, &out).ok()?;
        }
    }
}

fn libc_stale() -> u32 {
    rustix::io::Errno::STALE.raw_os_error() as u32
}

fn file_len(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().len()
}

fn file_len_of(file: &File) -> u64 {
    file.metadata().unwrap().len()
}

fn memory_file(name: &str, len: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&file, len).unwrap();
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).unwrap();
    file
}

fn send_descriptors(socket: &OwnedFd, bytes: &[u8], descriptors: &[std::os::fd::BorrowedFd<'_>]) {
    packets::send(socket, bytes, descriptors, Wait::Yes).unwrap();
}

/// The file without a mount.
pub(crate) struct PlainFile(pub(crate) Server);

impl MountedFile for PlainFile {
    fn ticket(&self) -> Result<TicketReply> {
        let path = self.0.socket.to_str().unwrap().as_bytes();
        TicketReply::new([3; 16], path).ok_or_else(Error::disconnected)
    }

    fn flush(&self, offset: u64, len: u64) -> Result<()> {
        let mut state = self.0.state.lock().unwrap();
        state.flushed.push((offset, len));
        state.flush_fails.map_or(Ok(()), |errno| Err(Error::of(errno, "flush the file")))
    }

    fn start_flush(&self, offset: u64, len: u64) {
        self.0.state.lock().unwrap().flushes_started.push((offset, len));
    }

    fn sync(&self) -> Result<()> {
        self.0.state.lock().unwrap().syncs += 1;
        Ok(())
    }

    fn size(&self) -> Result<u64> {
        Ok(file_len(&self.0.path) + self.0.state.lock().unwrap().unflushed)
    }

    fn touch(&self) -> Result<()> {
        Ok(())
    }

    fn descriptor(&self) -> spinio_sys::linux::Fd {
        unreachable!("no test maps it in place")
    }
}
