//! Chunks of files, by file, user and device.
//!
//! ```text
//!   chunk:  absent ──first client that needs it──> filling ──Filled, no writer until then──> present
//!             ^             its client died, or took too long │                                 │ another client: map it
//!             └──────────────<────────────────────────────────┴──<── not mapped, room needed ───┤
//!             └──────────────<───── a writer opened the file: the content has ended ────────────┘
//! ```
//!
//! A client that is to fill a chunk which another device of the same user has gets the descriptor of that copy. It may
//! copy from there, or read the file: its bytes are those of the content either way.
//!
//! One lock for each user, under which clients wait only for chunks that others fill. Descriptors are closed after it was
//! released, since the last one of a chunk frees its memory, and that of a hostile client may not return. So may a query
//! of a file's size: a client that passes such a file stalls clients of the same user.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use spinio_pagecache::leased_messages::{Content, ContentId, FILLS, MAX_DESCRIPTORS, PeerRefusal, Source};
use spinio_sys::injection_point;
use spinio_sys::linux::FileKey;

use super::entry::{Chunk, ClientId, Closed, DeviceUuid, Entry};
use super::exclusion::LeasedFile;
use crate::quotas::{Limits, Quotas};

/// Chunks that a client is to copy from another device at a time, whose descriptors go along. It hands each over once that has
/// arrived, while later ones are copied.
const COPIES: u64 = 32;

/// Connections at most, half of them of one user.
const CONNECTIONS: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) user: u32,
    pub(super) device: DeviceUuid,
    file: FileKey,
}

#[derive(Debug, Default)]
struct State {
    entries: HashMap<FileKey, Entry>,
    last_client: ClientId,
    /// Counts uses, for the least recent one.
    clock: u64,
}

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
    FillFrom { content: Content, first: u64, peer: DeviceUuid, copies: Vec<Arc<OwnedFd>> },
    Ready { content: Content },
}

/// What chunks to be filled take.
#[derive(Clone, Copy, Debug, Default)]
struct Room {
    chunks: usize,
    bytes: u64,
}

/// What is held of a file, for people.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) key: Key,
    pub(super) maps: u32,
    pub(super) chunks: u32,
    pub(super) bytes: u64,
    pub(super) peer_bytes: u64,
    pub(super) refused: Option<PeerRefusal>,
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
        let entry = match state.entries.entry(key.file) {
            MapEntry::Occupied(entry) => entry.into_mut(),
            MapEntry::Vacant(entry) => entry.insert(Entry::new(file.take().ok_or(Errno::INVAL)?)),
        };
        entry.devices.entry(device).or_default().member(id);
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
        let users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let wanted = users.iter().filter(|(of, _)| user.is_none_or(|user| user == **of));
        let files: Vec<_> = wanted.map(|(of, files)| (*of, Arc::clone(files))).collect();
        drop(users);
        files.iter().flat_map(|(user, files)| files.held(*user)).collect()
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
        let mut state = self.lock();
        let useless: Vec<_> = state.entries.extract_if(|_, entry| !entry.is_of_use()).collect();
        for entry in state.entries.values_mut() {
            entry.devices.retain(|_, on| !(on.clients.is_empty() && on.chunks.is_empty()));
        }
        drop(state);
        drop(useless);
    }

    fn drop_unused(&self, file: Option<FileKey>) -> u64 {
        let mut closed = Closed::new();
        let mut state = self.lock();
        let freed = state.evict(|key, _| file.is_none_or(|file| *key == file), u64::MAX, &mut closed);
        drop(state);
        drop(closed);
        self.sweep();
        freed
    }

    fn held(&self, user: u32) -> Vec<Held> {
        self.sweep();
        let state = self.lock();
        let mut held = Vec::new();
        for (file, entry) in &state.entries {
            let path = rustix::fs::readlink(crate::backing::proc_path(entry.file.fd()), Vec::new());
            let path = path.map_or_else(|_| b"(unknown)".to_vec(), std::ffi::CString::into_bytes);
            let size = entry.content.as_ref().map_or(0, |(content, _)| content.size);
            for (device, on) in &entry.devices {
                let (mut chunks, mut bytes, mut peer_bytes) = (0, 0, 0);
                for (at, chunk) in &on.chunks {
                    let Chunk::Present { from_peer, .. } = chunk else { continue };
                    let len = entry.len_of(*at);
                    (chunks, bytes) = (chunks + 1, bytes + len);
                    peer_bytes += if *from_peer { len } else { 0 };
                }
                let key = Key { user, device: *device, file: *file };
                let (maps, refused, path) = (on.clients.len() as u32, on.refused, path.clone());
                held.push(Held { key, maps, chunks, bytes, peer_bytes, refused, size, path });
            }
        }
        held
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
            let entry = state.entries.get_mut(&self.key.file).ok_or(Errno::STALE)?;
            let content = entry.content(self.store.watcher, &mut closed)?;
            let needed = entry.needed(self.key.device, self.id, content, offset, len);
            if let Some(next) = self.map_next(&mut state, content, &needed) {
                return Ok(next);
            }
            if let Some(next) = self.fill_next(&mut state, content, &needed, &mut closed)? {
                return Ok(next);
            }
            let on = state.entries.get(&self.key.file).and_then(|entry| entry.devices.get(&self.key.device));
            let on = on.ok_or(Errno::STALE)?;
            let began = needed.iter().filter_map(|chunk| match on.chunks.get(chunk) {
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
        let on = state.entries.get_mut(&self.key.file)?.devices.get_mut(&self.key.device)?;
        let mut first = None;
        let mut chunks = Vec::new();
        for at in needed {
            match on.chunks.get_mut(at) {
                Some(Chunk::Present { fd, used, .. })
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
        on.member(self.id).mapped.extend(first..first + chunks.len() as u64);
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
        let entry = state.entries.get_mut(&self.key.file).ok_or(Errno::STALE)?;
        let device = self.key.device;
        let on = entry.devices.entry(device).or_default();
        // What this client was to fill, and asks for again, it has given up.
        on.chunks.retain(|_, chunk| chunk.leave(self.id));
        let is_late = |chunk: &Chunk| match chunk {
            Chunk::Filling { since, .. } => since.elapsed() >= self.store.fill_within,
            Chunk::Present { .. } => false,
        };
        let mut absent = needed.iter().copied().filter(|at| on.chunks.get(at).is_none_or(is_late));
        let Some(first) = absent.next() else { return Ok(None) };
        let more = absent.zip(first + 1..).take_while(|(at, next)| at == next).count() as u64;
        // All from one place: the file, or the same other device.
        let peer = entry.peer_with(device, self.id, first);
        let most = if peer.is_some() { COPIES } else { content.fills() };
        // What clients that take too long have begun counts already. They lose only what this one gets.
        let begun = |at| entry.devices.get(&device).is_some_and(|on| on.chunks.contains_key(&at));
        let wanted: Vec<_> = (first..first + (1 + more).min(most))
            .take_while(|at| entry.peer_with(device, self.id, *at) == peer)
            .map(|at| if begun(at) { Room::default() } else { Room { chunks: 1, bytes: content.len_of(at) } })
            .collect();
        let mut count = self.make_room(state, &wanted, closed)?;
        let clock = state.clock;
        let entry = state.entries.get_mut(&self.key.file).ok_or(Errno::STALE)?;
        // Room may have been made by dropping them.
        let copies = peer.and_then(|peer| Some((peer, entry.copies(peer, first..first + count as u64, clock)?)));
        if copies.is_none() {
            count = count.min(content.fills() as usize);
        }
        let chunks = first..first + count as u64;
        let (since, offered) = (Instant::now(), copies.as_ref().map(|(peer, _)| *peer));
        let on = entry.devices.entry(device).or_default();
        for at in chunks {
            let mut earlier = Vec::new();
            if let Some(Chunk::Filling { by, earlier: before, .. }) = on.chunks.remove(&at) {
                earlier = before;
                earlier.push(by);
            }
            on.chunks.insert(at, Chunk::Filling { by: self.id, since, earlier, offered });
        }
        Ok(Some(match copies {
            Some((peer, copies)) => Next::FillFrom { content, first, peer, copies },
            None => Next::Fill { content, first, count: count as u32 },
        }))
    }

    /// Makes room for chunks, one after the other: for how many of them there is, at least one.
    fn make_room(&self, state: &mut State, wanted: &[Room], closed: &mut Closed) -> Result<usize, Errno> {
        let device = self.key.device;
        let add = |all: Room, room: &Room| Room { chunks: all.chunks + room.chunks, bytes: all.bytes + room.bytes };
        let total = |count: usize| wanted[..count].iter().fold(Room::default(), add);
        let all = total(wanted.len());
        if state.chunks() + all.chunks > self.store.most_chunks {
            state.evict(|_, _| true, u64::MAX, closed);
        }
        let room = self.store.most_chunks.saturating_sub(state.chunks());
        let fits = |count: &usize| total(*count).chunks <= room;
        let count = (1..=wanted.len()).rev().find(fits).ok_or(Errno::NFILE)?;
        let Some(limit) = self.store.limit else { return Ok(count) };
        let used = state.used(device);
        let excess = (used + all.bytes).saturating_sub(limit);
        let room = limit.saturating_sub(used) + state.evict(|_, of| *of == device, excess, closed);
        (1..=count).rev().find(|count| total(*count).bytes <= room).ok_or(Errno::NOMEM)
    }

    /// The client has filled a chunk; false: of no use, because the file was written meanwhile, or another client
    /// filled it.
    pub(super) fn filled(&self, content: ContentId, chunk: u64, source: Source, fd: OwnedFd) -> bool {
        // Before the lock: what is not kept is closed after it.
        let (mut closed, mut fd) = (Closed::new(), Some(fd));
        let mut state = self.files.lock();
        state.clock += 1;
        let clock = state.clock;
        let kept = state.entries.get_mut(&self.key.file).is_some_and(|entry| {
            entry.end_if_written(&mut closed);
            if !entry.is_filling(self.key.device, self.id, content, chunk) {
                return false;
            }
            let Some(fd) = fd.take() else { return false };
            let on = entry.devices.entry(self.key.device).or_default();
            let (fd, from_peer) = (Arc::new(fd), source == Source::Peer);
            let before = on.chunks.insert(chunk, Chunk::Present { fd, used: clock, from_peer });
            if let Source::Refused(refusal) = source {
                on.refused = Some(refusal);
                if let Some(Chunk::Filling { offered: Some(peer), .. }) = before {
                    on.member(self.id).refused.insert(peer);
                }
            }
            on.member(self.id).mapped.insert(chunk);
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
        let device = self.key.device;
        if let Some(entry) = state.entries.get_mut(&self.key.file)
            && entry.is_filling(device, self.id, content, chunk)
        {
            let len = entry.len_of(chunk);
            let chunks = &mut entry.devices.entry(device).or_default().chunks;
            if chunks.get_mut(&chunk).is_some_and(|filling| !filling.leave(self.id)) {
                chunks.remove(&chunk);
            }
            if no_memory {
                freed = state.evict(|_, of| *of == device, len, &mut closed);
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
        let entry = state.entries.get_mut(&self.key.file);
        if let Some(on) = entry.and_then(|entry| entry.devices.get_mut(&self.key.device)) {
            on.leave(self.id);
        }
        drop(state);
        injection_point!("serve: client gone");
        self.files.changed.notify_all();
        self.files.sweep();
    }
}

impl State {
    /// Chunks of all files.
    fn chunks(&self) -> usize {
        self.entries.values().flat_map(|entry| entry.devices.values()).map(|on| on.chunks.len()).sum()
    }

    /// Bytes of the chunks of a device, those that are being filled too.
    fn used(&self, device: DeviceUuid) -> u64 {
        let on = |entry: &Entry| entry.devices.get(&device).map_or(0, |on| entry.used(on));
        self.entries.values().map(on).sum()
    }

    /// Drops the least recently used chunks that no client has mapped, `bytes` of them at least; how many it were.
    fn evict(&mut self, of: impl Fn(&FileKey, &DeviceUuid) -> bool, bytes: u64, closed: &mut Closed) -> u64 {
        let mut unused = Vec::new();
        if bytes > 0 {
            for (file, entry) in &self.entries {
                for (device, on) in entry.devices.iter().filter(|(device, _)| of(file, device)) {
                    unused.extend(on.unused().map(|(used, at)| (used, *file, *device, at)));
                }
            }
        }
        unused.sort_unstable_by_key(|(used, ..)| *used);
        let mut freed = 0;
        for (_, file, device, at) in unused {
            if freed >= bytes {
                break;
            }
            let Some(entry) = self.entries.get_mut(&file) else { continue };
            freed += entry.len_of(at);
            let removed = entry.devices.get_mut(&device).and_then(|on| on.chunks.remove(&at));
            if let Some(Chunk::Present { fd, .. }) = removed {
                closed.push(fd);
                injection_point!("serve: chunk evicted");
            }
        }
        freed
    }
}
