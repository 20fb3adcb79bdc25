//! Chunks of files, by file, user and device.
//!
//! ```text
//!   chunk:  absent ──first client that needs it──> filling ──Filled, no writer until then──> present
//!             ^             its client died, or took too long │                                 │ another client: map it
//!             └──────────────<────────────────────────────────┴──<── not mapped, room needed ───┤
//!             └──────────────<───── a writer opened the file: the content has ended ────────────┘
//! ```
//!
//! One lock for each user, under which clients wait only for chunks that others fill. Descriptors are closed after it was
//! released, since the last one of a chunk frees its memory, and that of a hostile client may not return. So may a query
//! of a file's size: a client that passes such a file stalls clients of the same user.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use spinio_pagecache::leased_messages::{Content, ContentId, MAX_BYTES, MAX_DESCRIPTORS};

use super::exclusion::{Exclusion, FileKey, LeasedFile};
use crate::quotas::{Limits, Quotas};

/// Chunks that a client is to fill at a time: in one large read.
const FILLS: u64 = 4;

/// Connections at most, half of them of one user.
const CONNECTIONS: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) user: u32,
    pub(super) device: [u8; 16],
    file: FileKey,
}

/// A client's number.
type ClientId = u64;

#[derive(Debug)]
enum Chunk {
    /// `earlier`: clients that took too long, and whose bytes are as good if they come first.
    Filling {
        by: ClientId,
        since: Instant,
        earlier: Vec<ClientId>,
    },
    Present {
        fd: Arc<OwnedFd>,
        used: u64,
    },
}

impl Chunk {
    /// A client does not fill it; false: then no client does.
    fn leave(&mut self, client: ClientId) -> bool {
        let Chunk::Filling { by, earlier, .. } = self else { return true };
        earlier.retain(|other| *other != client);
        if *by == client {
            let Some(other) = earlier.pop() else { return false };
            *by = other;
        }
        true
    }
}

/// A file of a user on a device.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) file: LeasedFile,
    /// `None` while writers are not excluded.
    content: Option<(Content, Exclusion)>,
    chunks: BTreeMap<u64, Chunk>,
    /// The chunks that each client has mapped.
    clients: HashMap<ClientId, BTreeSet<u64>>,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<Key, Entry>,
    last_client: ClientId,
    /// Counts uses, for the least recent one.
    clock: u64,
}

/// Descriptors to be closed without the lock.
type Closed = Vec<Arc<OwnedFd>>;

/// The files of one user.
#[derive(Debug, Default)]
struct UserFiles {
    state: Mutex<State>,
    changed: Condvar,
    /// A thread ends contents of this user, and whether it is to look again.
    ending: AtomicBool,
    again: AtomicBool,
}

#[derive(Debug)]
pub(super) struct Store {
    users: Mutex<HashMap<u32, Arc<UserFiles>>>,
    /// Chunks of a user at most: each has a descriptor here.
    most_chunks: usize,
    pub(super) limit: Option<u64>,
    /// A client that does not fill its chunk within this time loses it to one that waits.
    fill_within: Duration,
    /// The thread that lease breaks are signalled to.
    watcher: u32,
    pub(super) quotas: Quotas,
    pub(super) since: Instant,
    end: OwnedFd,
}

/// What a client does next.
#[derive(Debug)]
pub(super) enum Next {
    Map { content: Content, first: u64, chunks: Vec<Arc<OwnedFd>> },
    Fill { content: Content, first: u64, count: u32 },
    Ready { content: Content },
}

/// What is held of a file, for people.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) key: Key,
    pub(super) maps: u32,
    pub(super) chunks: u32,
    pub(super) bytes: u64,
    pub(super) size: u64,
    pub(super) path: Vec<u8>,
}

/// A connected map; it leaves when this is dropped.
#[derive(Debug)]
pub(super) struct Client<'a> {
    store: &'a Store,
    files: Arc<UserFiles>,
    id: ClientId,
    key: Key,
}

impl Store {
    /// `descriptors`: how many this process may have.
    pub(super) fn new(
        limit: Option<u64>,
        descriptors: usize,
        fill_within: Duration,
        watcher: u32,
        end: OwnedFd,
    ) -> Store {
        let connections = CONNECTIONS.min(descriptors / 8).max(2);
        let quotas = Quotas::new(Limits { connections, pages: 0 });
        let most_chunks = (descriptors / 4).max(FILLS as usize);
        let users = Mutex::default();
        Store { users, most_chunks, limit, fill_within, watcher, quotas, since: Instant::now(), end }
    }

    /// A client with a map of a file.
    pub(super) fn join(&self, user: u32, device: [u8; 16], file: LeasedFile) -> Result<Client<'_>, Errno> {
        let key = Key { user, device, file: file.key()? };
        let files = {
            let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(users.entry(user).or_default())
        };
        files.sweep();
        // Declared before the lock: one that is not needed is closed after it.
        let mut file = Some(file);
        let mut state = files.lock();
        state.last_client += 1;
        let id = state.last_client;
        match state.entries.entry(key) {
            MapEntry::Occupied(mut entry) => drop(entry.get_mut().clients.insert(id, BTreeSet::new())),
            MapEntry::Vacant(entry) => {
                let file = file.take().ok_or(Errno::INVAL)?;
                let clients = HashMap::from([(id, BTreeSet::new())]);
                entry.insert(Entry { file, content: None, chunks: BTreeMap::new(), clients });
            }
        }
        drop(state);
        drop(file);
        Ok(Client { store: self, files, id, key })
    }

    /// Ends contents whose file a process wants to write. A user whose files do not answer stalls no other.
    pub(super) fn end_written(&self) {
        for files in self.files(None) {
            files.again.store(true, SeqCst);
            if files.ending.swap(true, SeqCst) {
                continue;
            }
            let ended = Arc::clone(&files);
            let spawned = std::thread::Builder::new().name("gaia-end".into()).spawn(move || ended.end_written());
            if spawned.is_err() {
                files.end_written();
            }
        }
    }

    /// The files of a user, or of all.
    fn files(&self, user: Option<u32>) -> Vec<Arc<UserFiles>> {
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = users.iter().filter(|(of, _)| user.is_none_or(|user| user == **of));
        wanted.map(|(_, files)| Arc::clone(files)).collect()
    }

    /// Drops chunks that no client has mapped; their bytes.
    pub(super) fn drop_unused(&self, user: Option<u32>, file: Option<FileKey>) -> u64 {
        self.files(user).iter().map(|files| files.drop_unused(file)).sum()
    }

    /// What is held, for root's question or for a user's.
    pub(super) fn held(&self, user: Option<u32>) -> Vec<Held> {
        self.files(user).iter().flat_map(|files| files.held()).collect()
    }

    /// Makes the daemon end.
    pub(super) fn end(&self) {
        let _ = rustix::io::write(&self.end, &[0]);
    }
}

impl UserFiles {
    fn end_written(&self) {
        while self.again.swap(false, SeqCst) {
            let mut closed = Closed::new();
            let mut state = self.lock();
            state.entries.values_mut().for_each(|entry| entry.end_if_written(&mut closed));
            drop(state);
            self.changed.notify_all();
        }
        self.ending.store(false, SeqCst);
        // One that came between the two lines above.
        if self.again.load(SeqCst) && !self.ending.swap(true, SeqCst) {
            self.end_written();
        }
    }

    /// Forgets files that no client has and that are of no use: without chunks, or deleted.
    fn sweep(&self) {
        let of_use = |entry: &Entry| !entry.clients.is_empty() || !(entry.chunks.is_empty() || entry.file.is_deleted());
        let mut state = self.lock();
        let useless: Vec<_> = state.entries.extract_if(|_, entry| !of_use(entry)).collect();
        drop(state);
        drop(useless);
    }

    fn drop_unused(&self, file: Option<FileKey>) -> u64 {
        let mut closed = Closed::new();
        let mut state = self.lock();
        let freed = state.evict(|key| file.is_none_or(|file| key.file == file), u64::MAX, &mut closed);
        drop(state);
        drop(closed);
        self.sweep();
        freed
    }

    fn held(&self) -> Vec<Held> {
        self.sweep();
        let state = self.lock();
        let held = state.entries.iter().map(|(key, entry)| {
            let present = entry.chunks.iter().filter(|(_, chunk)| matches!(chunk, Chunk::Present { .. }));
            let (mut chunks, mut bytes) = (0, 0);
            present.for_each(|(at, _)| (chunks, bytes) = (chunks + 1, bytes + entry.len_of(*at)));
            let path = rustix::fs::readlink(crate::backing::proc_path(entry.file.fd()), Vec::new());
            let path = path.map_or_else(|_| b"(unknown)".to_vec(), std::ffi::CString::into_bytes);
            let size = entry.content.as_ref().map_or(0, |(content, _)| content.size);
            Held { key: *key, maps: entry.clients.len() as u32, chunks, bytes, size, path }
        });
        held.collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Client<'_> {
    /// What the client does next for a range of bytes. Waits while others fill all that it needs.
    ///
    /// # Errors
    /// ETXTBSY: a process has the file open for writing. ENOMEM: the limit. ENOTSUP, EPERM: nothing excludes writers.
    pub(super) fn next(&self, offset: u64, len: u64) -> Result<Next, Errno> {
        let mut closed = Closed::new();
        let mut state = self.files.lock();
        loop {
            let entry = state.entries.get_mut(&self.key).ok_or(Errno::STALE)?;
            let content = entry.content(self.store.watcher, &mut closed)?;
            let needed = entry.needed(self.id, content, offset, len);
            if let Some(next) = self.map_next(&mut state, content, &needed) {
                return Ok(next);
            }
            if let Some(next) = self.fill_next(&mut state, content, &needed, &mut closed)? {
                return Ok(next);
            }
            let entry = state.entries.get(&self.key).ok_or(Errno::STALE)?;
            let began = needed.iter().filter_map(|chunk| match entry.chunks.get(chunk) {
                Some(Chunk::Filling { since, .. }) => Some(*since),
                _ => None,
            });
            let Some(began) = began.min() else { return Ok(Next::Ready { content }) };
            let left = self.store.fill_within.saturating_sub(began.elapsed());
            let waited = self.files.changed.wait_timeout(state, left.max(Duration::from_millis(1)));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Chunks that are present, one after the other.
    fn map_next(&self, state: &mut State, content: Content, needed: &[u64]) -> Option<Next> {
        state.clock += 1;
        let clock = state.clock;
        let entry = state.entries.get_mut(&self.key)?;
        let mut first = None;
        let mut chunks = Vec::new();
        for at in needed {
            match entry.chunks.get_mut(at) {
                Some(Chunk::Present { fd, used })
                    if first.is_none_or(|first| *at == first + chunks.len() as u64)
                        && chunks.len() < MAX_DESCRIPTORS =>
                {
                    first.get_or_insert(*at);
                    *used = clock;
                    chunks.push(Arc::clone(fd));
                }
                _ if chunks.is_empty() => {}
                _ => break,
            }
        }
        let first = first?;
        let mapped = entry.clients.entry(self.id).or_default();
        mapped.extend(first..first + chunks.len() as u64);
        Some(Next::Map { content, first, chunks })
    }

    /// Chunks that no client fills: this one does.
    fn fill_next(
        &self,
        state: &mut State,
        content: Content,
        needed: &[u64],
        closed: &mut Closed,
    ) -> Result<Option<Next>, Errno> {
        let entry = state.entries.get_mut(&self.key).ok_or(Errno::STALE)?;
        // What this client was to fill, and asks for again, it has given up.
        entry.chunks.retain(|_, chunk| chunk.leave(self.id));
        let is_late = |chunk: &Chunk| match chunk {
            Chunk::Filling { since, .. } => since.elapsed() >= self.store.fill_within,
            Chunk::Present { .. } => false,
        };
        let mut absent = needed.iter().copied().filter(|at| entry.chunks.get(at).is_none_or(is_late));
        let Some(first) = absent.next() else { return Ok(None) };
        let more = absent.zip(first + 1..).take_while(|(at, next)| at == next).count() as u64;
        let wanted = (first..first + (1 + more).min(FILLS)).map(|at| content.len_of(at)).collect::<Vec<_>>();
        let mut count = wanted.len();
        // Of clients that take too long: their memory counts as that of this one.
        let mut earlier: BTreeMap<u64, Vec<ClientId>> = BTreeMap::new();
        for at in first..first + count as u64 {
            if let Some(Chunk::Filling { by, earlier: mut before, .. }) = entry.chunks.remove(&at) {
                before.push(by);
                earlier.insert(at, before);
            }
        }
        let all = |state: &State| state.entries.values().map(|entry| entry.chunks.len()).sum::<usize>();
        if all(state) + count > self.store.most_chunks {
            state.evict(|_| true, u64::MAX, closed);
            count = count.min(self.store.most_chunks.saturating_sub(all(state)));
            if count == 0 {
                return Err(Errno::NFILE);
            }
        }
        if let Some(limit) = self.store.limit {
            let of_same = |key: &Key| (key.user, key.device) == (self.key.user, self.key.device);
            let used = state.used(of_same);
            let excess = (used + wanted.iter().sum::<u64>()).saturating_sub(limit);
            let room = limit.saturating_sub(used) + state.evict(of_same, excess, closed);
            let fits = |count: usize| wanted[..count].iter().sum::<u64>() <= room;
            count = (1..=count).rev().find(|count| fits(*count)).ok_or(Errno::NOMEM)?;
        }
        let entry = state.entries.get_mut(&self.key).ok_or(Errno::STALE)?;
        let since = Instant::now();
        for at in first..first + count as u64 {
            let earlier = earlier.remove(&at).unwrap_or_default();
            entry.chunks.insert(at, Chunk::Filling { by: self.id, since, earlier });
        }
        Ok(Some(Next::Fill { content, first, count: count as u32 }))
    }

    /// The client has filled a chunk; false: of no use, because the file was written meanwhile, or another client
    /// filled it.
    pub(super) fn filled(&self, content: ContentId, chunk: u64, fd: OwnedFd) -> bool {
        // Before the lock: what is not kept is closed after it.
        let (mut closed, mut fd) = (Closed::new(), Some(fd));
        let mut state = self.files.lock();
        state.clock += 1;
        let clock = state.clock;
        let kept = state.entries.get_mut(&self.key).is_some_and(|entry| {
            entry.end_if_written(&mut closed);
            if !entry.is_filling(self.id, content, chunk) {
                return false;
            }
            let Some(fd) = fd.take() else { return false };
            entry.chunks.insert(chunk, Chunk::Present { fd: Arc::new(fd), used: clock });
            entry.clients.entry(self.id).or_default().insert(chunk);
            true
        });
        drop(state);
        self.files.changed.notify_all();
        kept
    }

    /// The client does not fill a chunk. If the device has no memory for it, chunks that no client has mapped make
    /// room: their bytes.
    pub(super) fn abandon(&self, content: ContentId, chunk: u64, no_memory: bool) -> u64 {
        let mut closed = Closed::new();
        let mut state = self.files.lock();
        let mut freed = 0;
        if let Some(entry) = state.entries.get_mut(&self.key)
            && entry.is_filling(self.id, content, chunk)
        {
            let len = entry.len_of(chunk);
            if entry.chunks.get_mut(&chunk).is_some_and(|filling| !filling.leave(self.id)) {
                entry.chunks.remove(&chunk);
            }
            if no_memory {
                let of_same = |key: &Key| (key.user, key.device) == (self.key.user, self.key.device);
                freed = state.evict(of_same, len, &mut closed);
            }
        }
        drop(state);
        self.files.changed.notify_all();
        freed
    }
}

impl Drop for Client<'_> {
    fn drop(&mut self) {
        let mut state = self.files.lock();
        if let MapEntry::Occupied(mut entry) = state.entries.entry(self.key) {
            let entry = entry.get_mut();
            entry.clients.remove(&self.id);
            entry.chunks.retain(|_, chunk| chunk.leave(self.id));
        }
        drop(state);
        self.files.changed.notify_all();
        self.files.sweep();
    }
}

impl State {
    /// Bytes of chunks of some files, those that are being filled too.
    fn used(&self, of: impl Fn(&Key) -> bool) -> u64 {
        let entries = self.entries.iter().filter(|(key, _)| of(key)).map(|(_, entry)| entry);
        entries.map(|entry| entry.chunks.keys().map(|at| entry.len_of(*at)).sum::<u64>()).sum()
    }

    /// Drops the least recently used chunks that no client has mapped, `bytes` of them at least; how many it were.
    fn evict(&mut self, of: impl Fn(&Key) -> bool, bytes: u64, closed: &mut Closed) -> u64 {
        let mut unused = Vec::new();
        for (key, entry) in self.entries.iter().filter(|(key, _)| of(key)) {
            let mapped = |at: &u64| entry.clients.values().any(|mapped| mapped.contains(at));
            for (at, chunk) in &entry.chunks {
                match chunk {
                    Chunk::Present { used, .. } if bytes > 0 && !mapped(at) => unused.push((*used, *key, *at)),
                    _ => {}
                }
            }
        }
        unused.sort_unstable_by_key(|(used, ..)| *used);
        let mut freed = 0;
        for (_, key, at) in unused {
            if freed >= bytes {
                break;
            }
            let Some(entry) = self.entries.get_mut(&key) else { continue };
            freed += entry.len_of(at);
            if let Some(Chunk::Present { fd, .. }) = entry.chunks.remove(&at) {
                closed.push(fd);
            }
        }
        freed
    }
}

impl Entry {
    /// The content now; a new one if the last has ended and no process has the file open for writing.
    fn content(&mut self, watcher: u32, closed: &mut Closed) -> Result<Content, Errno> {
        self.end_if_written(closed);
        if let Some((content, _)) = self.content {
            return Ok(content);
        }
        let (exclusion, size) = self.file.exclude_writers(watcher)?;
        if size > MAX_BYTES {
            self.file.admit_writers(exclusion);
            return Err(Errno::FBIG);
        }
        let mut id = [0; 8];
        getrandom(&mut id, GetRandomFlags::empty())?;
        let content = Content { id: u64::from_le_bytes(id) | 1, size };
        self.content = Some((content, exclusion));
        Ok(content)
    }

    fn end_if_written(&mut self, closed: &mut Closed) {
        if self.content.is_some_and(|(_, exclusion)| !self.file.is_excluded(exclusion)) {
            closed.append(&mut self.end());
        }
    }

    /// Ends the content: writers go on, and the chunks are dropped.
    fn end(&mut self) -> Closed {
        let chunks = core::mem::take(&mut self.chunks);
        self.clients.values_mut().for_each(BTreeSet::clear);
        if let Some((_, exclusion)) = self.content.take() {
            self.file.admit_writers(exclusion);
        }
        let present = chunks.into_values().filter_map(|chunk| match chunk {
            Chunk::Present { fd, .. } => Some(fd),
            Chunk::Filling { .. } => None,
        });
        present.collect()
    }

    fn len_of(&self, chunk: u64) -> u64 {
        self.content.as_ref().map_or(0, |(content, _)| content.len_of(chunk))
    }

    /// Chunks of a range of bytes that the client has not mapped.
    fn needed(&self, client: ClientId, content: Content, offset: u64, len: u64) -> Vec<u64> {
        let bytes = content.chunk_bytes();
        let (first, end) = (offset / bytes, (offset + len).div_ceil(bytes).min(content.chunks()));
        let mapped = self.clients.get(&client);
        (first..end).filter(|at| mapped.is_none_or(|mapped| !mapped.contains(at))).collect()
    }

    fn is_filling(&self, client: ClientId, content: ContentId, chunk: u64) -> bool {
        self.content.as_ref().is_some_and(|(now, _)| now.id == content)
            && matches!(self.chunks.get(&chunk), Some(Chunk::Filling { by, earlier, .. }) if *by == client || earlier.contains(&client))
    }
}
