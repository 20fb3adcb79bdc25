//! Copies from chunks of another device into those of a map. Both become accessible on the way.
//!
//! ```text
//!   driver   access 1 │ access 2 │ access 3 │ ...            wait
//!   engine            │ copy 1     │ copy 2     │ copy 3     │ ...
//! ```
//!
//! To make 1 GiB accessible takes the driver 0.5 ms on each side in chunks of 64 MiB, and 2 ms where it has to clear memory that
//! was freed just before (benches/gaia/chunks.cu); to copy it from one H100 to another takes 2.7 ms. So access to the chunks of a
//! group is granted while the group before is copied. Of 8 GiB that leaves 28 to 30 ms instead of 33 to 38, of which the copies
//! alone take 22 (two H100, the calls of the driver alone, benches/gaia/overlapped_access.cu). This relies on calls of the driver that do not wait for all copies.
//!
//! Chunks of leased files are copied by the same loop (leased/fill.rs).

use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use spinio_device::{DeviceAddr, DeviceId, PeerError, PeerMemory, PeerPiece};
use spinio_pagecache::leased_messages::PeerRefusal;

use crate::chunks::Chunks;

/// Bytes of a group. The first copy waits 0.5 ms, of the 22 ms that those of 8 GiB take. A smaller group would make that less,
/// but each call of the driver takes some 0.03 ms besides, and maps up to this size still need one only.
const GROUP: usize = 256 << 20;

/// Where pages are copied to.
pub(crate) struct Destination<'a> {
    pub(crate) memory: &'a dyn PeerMemory,
    pub(crate) device: DeviceId,
    /// Those of the map. `None`: all of its memory is accessible.
    pub(crate) chunks: Option<&'a Arc<Chunks>>,
    /// The first page, in the file.
    pub(crate) first: u64,
    /// The address of that.
    pub(crate) start: DeviceAddr,
}

/// A part of a chunk of the other map.
#[derive(Clone, Copy)]
pub(crate) struct ChunkPiece {
    pub(crate) chunk: usize,
    pub(crate) piece: PeerPiece,
}

/// Copies pieces, and waits until they have arrived; what they use is held. After an error nothing is under way, and
/// access that was granted stays so.
pub(crate) fn copy(from: &Chunks, to: &Destination<'_>, pieces: &[ChunkPiece]) -> Result<(), PeerError> {
    copy_in_groups(from, to, pieces, GROUP)
}

fn copy_in_groups(
    from: &Chunks,
    to: &Destination<'_>,
    pieces: &[ChunkPiece],
    group_bytes: usize,
) -> Result<(), PeerError> {
    let uuid = from.device_uuid().map_err(|_| PeerError::NoDevice)?;
    let grant_access = |group: &[ChunkPiece]| {
        if let Some(chunks) = to.chunks {
            let its: Vec<usize> =
                group.iter().flat_map(|copy| chunks.covering(copy.piece.to, copy.piece.len)).collect();
            chunks.grant_access(&its).map_err(PeerError::Copy)?;
        }
        let theirs: Vec<usize> = group.iter().map(|copy| copy.chunk).collect();
        from.grant(to.device, &theirs, |at, len| to.memory.allow_loads(uuid, at, len))
    };
    let all: Vec<PeerPiece> = pieces.iter().map(|copy| copy.piece).collect();
    copy_prepared(to.memory, &all, group_bytes..=group_bytes, |group| {
        grant_access(&pieces[group.clone()]).map(|()| group.len())
    })
}

/// Copies pieces by groups, and waits until they have arrived. The first group has the least of these bytes, each other one twice as
/// many as the one before, up to the most. `prepare` makes those of a group accessible while the groups before are copied; for how
/// many of them it could: if not for all, they are the last ones.
pub(crate) fn copy_prepared(
    memory: &dyn PeerMemory,
    pieces: &[PeerPiece],
    group_bytes: RangeInclusive<usize>,
    mut prepare: impl FnMut(Range<usize>) -> Result<usize, PeerError>,
) -> Result<(), PeerError> {
    let (mut left, mut bytes) = (0..pieces.len(), *group_bytes.start());
    let mut groups = std::iter::from_fn(|| {
        let group = left.start..left.start + group_len(&pieces[left.clone()], bytes);
        bytes = (2 * bytes).min(*group_bytes.end());
        if group.is_empty() {
            return None;
        }
        Some(prepare(group.clone()).map(|count| {
            left.start = if count < group.len() { left.end } else { group.end };
            &pieces[group][..count]
        }))
    });
    memory.copy_from_chunks(&mut groups)
}

/// What the user is told.
pub(crate) fn refusal(why: PeerError) -> PeerRefusal {
    match why {
        PeerError::NoDevice => PeerRefusal::NoDevice,
        PeerError::NoAccess => PeerRefusal::NoAccess,
        PeerError::Import(_) => PeerRefusal::Import,
        PeerError::Copy(_) => PeerRefusal::Copy,
    }
}

/// How many pieces have so many bytes, or more by a part of the last one; all, if there are fewer.
fn group_len(pieces: &[PeerPiece], bytes: usize) -> usize {
    let mut sum = 0;
    let before_last = pieces.iter().take_while(|piece| {
        sum += piece.len;
        sum < bytes
    });
    (before_last.count() + 1).min(pieces.len())
}

#[cfg(test)]
#[expect(unsafe_code, reason = "copies to and from device memory")]
mod tests {
    use std::sync::Mutex;
    use std::time::{Duration, Instant};

    use spinio_device::emulated::{Config, Emulated};
    use spinio_device::{Device, PAGE_BYTES, StreamId, WaitMode};
    use spinio_host::lock;

    use super::*;

    const CHUNK: usize = 2 << 20;
    const CHUNKS: usize = 6;

    /// The two devices, for one test at a time: they are paused.
    static DEVICES: Mutex<Option<[&'static Emulated; 2]>> = Mutex::new(None);

    fn devices(slot: &mut Option<[&'static Emulated; 2]>) -> [&'static Emulated; 2] {
        *slot.get_or_insert_with(|| [(); 2].map(|()| Emulated::start(Config::parse("size=16M").unwrap()).unwrap()))
    }

    /// A map's memory on one of them, all of it mapped, without access.
    struct Side(&'static Emulated, Arc<Chunks>);

    impl Side {
        fn new(device: &'static Emulated) -> Side {
            let pages = CHUNKS * CHUNK / PAGE_BYTES;
            let chunks = Chunks::reserve(device.shared_memory().unwrap(), pages, None).unwrap().unwrap();
            assert_eq!(chunks.map(0..CHUNKS), Ok(CHUNKS));
            Side(device, Arc::new(chunks))
        }

        /// With these bytes.
        fn source(device: &'static Emulated) -> (Side, Vec<u8>) {
            let side = Side::new(device);
            side.1.grant_access(&[0, 1, 2, 3, 4, 5]).unwrap();
            let bytes: Vec<u8> = (0..CHUNKS * CHUNK).map(|n| (n * 7 % 251) as u8).collect();
            side.store(&bytes);
            (side, bytes)
        }

        fn store(&self, bytes: &[u8]) {
            // SAFETY: the bytes live until the device was synchronized.
            unsafe { self.0.copy_in(StreamId(0), self.1.start(), bytes.as_ptr(), bytes.len()) }.unwrap();
            self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
        }

        fn load(&self, at: usize, len: usize) -> Vec<u8> {
            let mut bytes = vec![0; len];
            // SAFETY: as above.
            unsafe { self.0.copy_out(StreamId(0), bytes.as_mut_ptr(), self.1.start().offset(at as u64), len) }.unwrap();
            self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
            bytes
        }

        fn destination(&self) -> Destination<'_> {
            let (memory, start) = (self.0.peer_memory().unwrap(), self.1.start());
            Destination { memory, device: self.0.id(), chunks: Some(&self.1), first: 0, start }
        }

        /// Unmaps a chunk, to which no access can be granted then.
        fn take(&self, chunk: usize) {
            assert!(self.1.take(chunk) && self.1.unmap(chunk, false) == CHUNK as u64);
        }

        fn end(self) {
            let mapped = self.1.usage().0;
            assert_eq!(self.1.free(), mapped);
            assert_eq!(self.0.resources_in_use(), Default::default());
        }
    }

    /// Chunk by chunk of the source, to `shift` bytes later, but for the end of the last one.
    fn pieces(from: &Side, to: &Side, shift: usize) -> Vec<ChunkPiece> {
        let piece = |chunk: usize| PeerPiece {
            from: from.1.address(chunk),
            to: to.1.address(chunk).offset(shift as u64),
            len: if chunk + 1 == CHUNKS { CHUNK - shift } else { CHUNK },
        };
        (0..CHUNKS).map(|chunk| ChunkPiece { chunk, piece: piece(chunk) }).collect()
    }

    /// Copies while the device does not run, until `holds` or for some time; returns whether it came to hold and the call had not
    /// ended. Then the device runs again.
    fn copy_paused(
        from: &Side,
        to: &Side,
        pieces: &[ChunkPiece],
        holds: impl Fn() -> bool,
    ) -> (bool, Result<(), PeerError>) {
        to.0.pause();
        std::thread::scope(|scope| {
            let copying = scope.spawn(|| copy_in_groups(&from.1, &to.destination(), pieces, 2 * CHUNK));
            let begun = Instant::now();
            while !holds() && begun.elapsed() < Duration::from_secs(300) {
                std::thread::sleep(Duration::from_millis(1));
            }
            // So that a call that does not wait for its copies has ended.
            std::thread::sleep(Duration::from_millis(30));
            let as_wanted = holds() && !copying.is_finished();
            to.0.resume();
            (as_wanted, copying.join().unwrap())
        })
    }

    #[test]
    fn later_chunks_become_accessible_while_earlier_ones_are_copied() {
        let mut slot = lock(&DEVICES);
        let [one, other] = devices(&mut slot);
        let ((from, bytes), to) = (Side::source(one), Side::new(other));
        let pieces = pieces(&from, &to, 3 * PAGE_BYTES);
        let has_access = || to.1.without_access(0..CHUNKS).is_empty();
        assert_eq!(copy_paused(&from, &to, &pieces, has_access), (true, Ok(())));
        let shift = 3 * PAGE_BYTES;
        assert!(to.load(shift, CHUNKS * CHUNK - shift) == bytes[..CHUNKS * CHUNK - shift]);
        // Once more, with access to all.
        assert_eq!(copy(&from.1, &to.destination(), &pieces), Ok(()));
        from.end();
        to.end();
    }

    #[test]
    fn group_is_queued_before_the_next_gets_access_and_waited_for_if_that_fails() {
        let mut slot = lock(&DEVICES);
        let [one, other] = devices(&mut slot);
        for source_fails in [false, true] {
            let ((from, bytes), to) = (Side::source(one), Side::new(other));
            let pieces = pieces(&from, &to, 0);
            if source_fails { &from } else { &to }.take(3);
            // The second group fails at once, and the first one is still to be copied.
            let (waited, failed) = copy_paused(&from, &to, &pieces, || to.1.without_access(0..2).is_empty());
            let is_right = match failed {
                Err(PeerError::Import(_)) => source_fails,
                Err(PeerError::Copy(_)) => !source_fails,
                _ => false,
            };
            assert!(waited && is_right, "{failed:?}");
            assert!(to.load(0, 2 * CHUNK) == bytes[..2 * CHUNK], "the first group has arrived");
            let without = to.1.without_access(0..CHUNKS);
            assert!(without.ends_with(&[4, 5]) && !without.contains(&1), "not the groups after it: {without:?}");
            // Once the chunk is there, all of it can be copied.
            let lacking = if source_fails { &from } else { &to };
            assert_eq!(lacking.1.map(3..4), Ok(1));
            lacking.1.grant_access(&[3]).unwrap();
            assert_eq!(copy_in_groups(&from.1, &to.destination(), &pieces, 2 * CHUNK), Ok(()));
            assert!(to.load(4 * CHUNK, 2 * CHUNK) == bytes[4 * CHUNK..]);
            from.end();
            to.end();
        }
    }

    #[test]
    fn groups_grow_and_the_first_one_that_is_prepared_in_part_is_the_last() {
        let mut slot = lock(&DEVICES);
        let [one, other] = devices(&mut slot);
        let ((from, bytes), to) = (Side::source(one), Side::new(other));
        to.1.grant_access(&[0, 1, 2, 3, 4, 5]).unwrap();
        let uuid = from.1.device_uuid().unwrap();
        other.allow_loads(uuid, from.1.address(0), (CHUNKS * CHUNK) as u64).unwrap();
        let pieces: Vec<PeerPiece> = pieces(&from, &to, 0).iter().map(|copy| copy.piece).collect();
        // Six chunks, in groups of at least one and at most two or four.
        let cases: [(_, _, &[usize]); 4] = [(2, 9, &[0, 1, 3, 5]), (4, 9, &[0, 1, 3]), (4, 1, &[0, 1]), (4, 0, &[0])];
        for (most, part, wanted) in cases {
            to.store(&vec![0; CHUNKS * CHUNK]);
            let mut groups = Vec::new();
            let copied = copy_prepared(other, &pieces, CHUNK..=most * CHUNK, |group| {
                let count = group.len().min(part);
                groups.push(group.start);
                Ok(count)
            });
            assert_eq!((copied, &groups[..]), (Ok(()), wanted));
            let arrived = if part == 9 { CHUNKS } else { 2 * part } * CHUNK;
            let now = to.load(0, CHUNKS * CHUNK);
            assert!(now[..arrived] == bytes[..arrived] && now[arrived..].iter().all(|byte| *byte == 0));
        }
        from.end();
        to.end();
    }

    #[test]
    fn groups_have_so_many_bytes_and_at_least_a_piece() {
        let pieces = |lens: &[usize]| {
            lens.iter().map(|len| PeerPiece { from: DeviceAddr(0), to: DeviceAddr(0), len: *len }).collect::<Vec<_>>()
        };
        for (lens, count) in
            [(&[][..], 0), (&[10], 1), (&[1, 2, 3], 3), (&[4, 6, 1], 2), (&[4, 5, 6, 1], 3), (&[20, 1], 1)]
        {
            assert_eq!(group_len(&pieces(lens), 10), count, "{lens:?}");
        }
    }
}
