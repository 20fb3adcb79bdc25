//! A leased file of a user: its content now, and for each device the chunks of that content.
//!
//! ```text
//!   Entry ── LeasedFile, Content + what excludes writers        one for all devices: a chunk of one has the bytes of all
//!     ├─ device 0 ── chunks ── clients, and what each has mapped
//!     └─ device 1 ── chunks ── clients
//! ```
//!
//! The content is one for all devices, so that a chunk of one device is a copy of the same chunk of another.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use spinio_pagecache::leased_messages::{Content, ContentId, MAX_BYTES, PeerRefusal};
use spinio_sys::injection_point;

use super::exclusion::{Exclusion, LeasedFile};

/// A client's number.
pub(super) type ClientId = u64;

/// A device's UUID.
pub(super) type DeviceUuid = [u8; 16];

/// Descriptors to be closed without the lock.
pub(super) type Closed = Vec<Arc<OwnedFd>>;

#[derive(Debug)]
pub(super) enum Chunk {
    /// `earlier`: clients that took too long, and whose bytes are as good if they come first. `offered`: the device whose
    /// copy the client was told of.
    Filling {
        by: ClientId,
        since: Instant,
        earlier: Vec<ClientId>,
        offered: Option<DeviceUuid>,
    },
    Present {
        fd: Arc<OwnedFd>,
        used: u64,
        from_peer: bool,
    },
}

impl Chunk {
    /// A client does not fill it; false: then no client does.
    pub(super) fn leave(&mut self, client: ClientId) -> bool {
        let Chunk::Filling { by, earlier, .. } = self else { return true };
        earlier.retain(|other| *other != client);
        if *by == client {
            let Some(other) = earlier.pop() else { return false };
            *by = other;
        }
        true
    }

    pub(super) fn is_present(&self) -> bool {
        matches!(self, Chunk::Present { .. })
    }
}

/// What a client has.
#[derive(Debug, Default)]
pub(super) struct Member {
    /// The chunks that it has mapped.
    pub(super) mapped: BTreeSet<u64>,
    /// Devices whose copies it could not use.
    pub(super) refused: BTreeSet<DeviceUuid>,
}

/// The chunks of a file on a device.
#[derive(Debug, Default)]
pub(super) struct OnDevice {
    pub(super) chunks: BTreeMap<u64, Chunk>,
    pub(super) clients: HashMap<ClientId, Member>,
    /// Why a copy of another device could not be used, the last time.
    pub(super) refused: Option<PeerRefusal>,
}

impl OnDevice {
    /// A client that takes part.
    pub(super) fn member(&mut self, client: ClientId) -> &mut Member {
        self.clients.entry(client).or_default()
    }

    pub(super) fn leave(&mut self, client: ClientId) {
        self.clients.remove(&client);
        self.chunks.retain(|_, chunk| chunk.leave(client));
    }

    fn is_mapped(&self, chunk: u64) -> bool {
        self.clients.values().any(|member| member.mapped.contains(&chunk))
    }

    /// Chunks that no client has mapped, with the times of their last use.
    pub(super) fn unused(&self) -> impl Iterator<Item = (u64, u64)> {
        self.chunks.iter().filter_map(|(at, chunk)| match chunk {
            Chunk::Present { used, .. } if !self.is_mapped(*at) => Some((*used, *at)),
            _ => None,
        })
    }
}

/// A file of a user.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) file: LeasedFile,
    /// `None` while writers are not excluded.
    pub(super) content: Option<(Content, Exclusion)>,
    pub(super) devices: BTreeMap<DeviceUuid, OnDevice>,
}

impl Entry {
    pub(super) fn new(file: LeasedFile) -> Entry {
        Entry { file, content: None, devices: BTreeMap::new() }
    }

    /// Whether it is of use on some device.
    pub(super) fn is_of_use(&self) -> bool {
        let mut devices = self.devices.values();
        let (mut clients, mut chunks) = (false, false);
        devices
            .by_ref()
            .for_each(|on| (clients, chunks) = (clients | !on.clients.is_empty(), chunks | !on.chunks.is_empty()));
        clients || (chunks && !self.file.is_deleted())
    }

    /// The content now; a new one if the last has ended and no process has the file open for writing.
    pub(super) fn content(&mut self, watcher: u32, closed: &mut Closed) -> Result<Content, Errno> {
        self.end_if_written(closed);
        if let Some((content, _)) = self.content {
            return Ok(content);
        }
        let (exclusion, size) = self.file.exclude_writers(watcher)?;
        injection_point!("serve: writers excluded");
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

    pub(super) fn end_if_written(&mut self, closed: &mut Closed) {
        if self.content.is_some_and(|(_, exclusion)| !self.file.is_excluded(exclusion)) {
            self.end(closed);
        }
    }

    /// Ends the content: writers go on, and the chunks of all devices are dropped.
    fn end(&mut self, closed: &mut Closed) {
        for on in self.devices.values_mut() {
            on.clients.values_mut().for_each(|member| member.mapped.clear());
            on.refused = None;
            closed.extend(core::mem::take(&mut on.chunks).into_values().filter_map(|chunk| match chunk {
                Chunk::Present { fd, .. } => Some(fd),
                Chunk::Filling { .. } => None,
            }));
        }
        injection_point!("serve: content ended");
        if let Some((_, exclusion)) = self.content.take() {
            self.file.admit_writers(exclusion);
            injection_point!("serve: writers admitted");
        }
    }

    pub(super) fn len_of(&self, chunk: u64) -> u64 {
        self.content.as_ref().map_or(0, |(content, _)| content.len_of(chunk))
    }

    /// Bytes of the chunks of a device, those that are being filled too.
    pub(super) fn used(&self, on: &OnDevice) -> u64 {
        on.chunks.keys().map(|at| self.len_of(*at)).sum()
    }

    /// Chunks of a range of bytes that the client has not mapped.
    pub(super) fn needed(
        &self,
        device: DeviceUuid,
        client: ClientId,
        content: Content,
        offset: u64,
        len: u64,
    ) -> Vec<u64> {
        let bytes = content.chunk_bytes();
        let (first, end) = (offset / bytes, (offset + len).div_ceil(bytes).min(content.chunks()));
        let member = self.devices.get(&device).and_then(|on| on.clients.get(&client));
        (first..end).filter(|at| member.is_none_or(|member| !member.mapped.contains(at))).collect()
    }

    pub(super) fn is_filling(&self, device: DeviceUuid, client: ClientId, content: ContentId, chunk: u64) -> bool {
        let chunk = self.devices.get(&device).and_then(|on| on.chunks.get(&chunk));
        self.content.as_ref().is_some_and(|(now, _)| now.id == content)
            && matches!(chunk, Some(Chunk::Filling { by, earlier, .. }) if *by == client || earlier.contains(&client))
    }

    /// Another device that has a chunk, of those whose copies the client has not refused.
    pub(super) fn peer_with(&self, device: DeviceUuid, client: ClientId, chunk: u64) -> Option<DeviceUuid> {
        let member = self.devices.get(&device).and_then(|on| on.clients.get(&client));
        let usable = |peer: &DeviceUuid| *peer != device && member.is_none_or(|member| !member.refused.contains(peer));
        let mut peers = self.devices.iter().filter(|(peer, _)| usable(peer));
        peers.find(|(_, on)| on.chunks.get(&chunk).is_some_and(Chunk::is_present)).map(|(peer, _)| *peer)
    }

    /// The descriptors of chunks of a device, which are used now; `None` if it does not have all.
    pub(super) fn copies(
        &mut self,
        peer: DeviceUuid,
        chunks: core::ops::Range<u64>,
        now: u64,
    ) -> Option<Vec<Arc<OwnedFd>>> {
        let on = self.devices.get_mut(&peer)?;
        let copy = |at| match on.chunks.get_mut(&at) {
            Some(Chunk::Present { fd, used, .. }) => {
                *used = now;
                Some(Arc::clone(fd))
            }
            _ => None,
        };
        chunks.map(copy).collect()
    }
}
