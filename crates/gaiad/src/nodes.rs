//! Nodes: what the kernel's node numbers mean.
//!
//! ```text
//!   record (256 bytes in state memory)                           index (ordinary memory, rebuilt at attach)
//!   state │ lookups │ device, inode │ type │ number │ refusals │ file handle │ lost      hash of inode and handle -> record
//! ```
//!
//! A node is an inode of the backing file system, named by its file handle: renames do not matter, and a new server
//! opens it as the old one did. Where handles cannot be opened, a descriptor is kept for each node (backing.rs), and the
//! handle only tells which inode it is. `lookups` counts the replies that gave the kernel this
//! number, less what FORGET took back; at zero the record is free. Its number contains a sequence number, so that a
//! late notification for the previous user of a record means no other file.
//!
//! Before it is free, what the server has of the inode is written out, which may take long. Meanwhile the record is
//! *going*: only look-ups of this inode wait, since another number would show what is below the mount before that. A
//! server that dies then leaves a used record without look-ups, which the next one frees. So does one with a FORGET that waits
//! (late.rs): it takes the look-ups back first.
//!
//! **The table has an end.** From half of it on the kernel is asked to forget nodes that no program uses (backing.rs), in
//! the order of their records; from three quarters on a program that lists a directory gets names only; and at the end a
//! look-up waits a little. Known flaw: where all are in use, or the kernel cannot be asked (before Linux 6.18), look-ups of
//! further inodes fail with ENFILE then.
//!
//! Order of stores: a record is complete before its state says "used"; `lookups` rises before the reply is sent. A
//! crash therefore leaves a count that is right or too high, never too low: at worst a record stays until unmount.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::fs::FileType;
use rustix::io::Errno;
use spinio_fuse::abi::ROOT_NODE;
use spinio_sys::linux::{FileHandle, HANDLE_BYTES};

use crate::lock::lock;
use crate::state::{NODE_WORDS, StateMemory};

/// Words of a record.
mod word {
    pub(super) const STATE: usize = 0;
    pub(super) const LOOKUPS: usize = 1;
    pub(super) const DEVICE: usize = 2;
    pub(super) const INODE: usize = 3;
    /// Type of the handle, and its length.
    pub(super) const HANDLE_KIND: usize = 4;
    /// `st_mode & S_IFMT`, which an inode never changes.
    pub(super) const FILE_TYPE: usize = 5;
    /// Sequence number; stays when the record is freed.
    pub(super) const SEQUENCE: usize = 6;
    /// Requests to write that were answered with an error.
    pub(super) const REFUSALS: usize = 7;
    pub(super) const HANDLE: usize = 8;
    /// How often released bytes were lost since an fsync has reported it; the last word.
    pub(super) const LOST: usize = super::NODE_WORDS - 1;
}

/// At the end of the table: threads that wait at a time, since others must hear what is forgotten, and how long.
const WAITING: usize = 2;
const WAIT: Duration = Duration::from_secs(1);
/// The longest wait for a program to be told of a loss.
const TELLING: Duration = Duration::from_secs(1);

const FREE: u64 = 0;
const USED: u64 = 1;

/// An inode of the backing file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Regular file, directory, ...
    pub file_type: FileType,
    /// Tells it from earlier inodes of this number.
    pub handle: FileHandle,
}

impl Identity {
    /// FNV-1a of the handle; two handles of one inode number that collide would share a node only until looked at:
    /// [`Nodes::look_up`] compares all of it.
    fn key(&self) -> Key {
        let seed = 0xcbf2_9ce4_8422_2325 ^ self.device ^ (self.handle.kind() as u64) << 40;
        let mix = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        (self.inode, self.handle.bytes().iter().fold(seed, mix))
    }
}

/// The table.
#[derive(Debug)]
pub struct Nodes {
    state: Arc<StateMemory>,
    index: Mutex<Index>,
    /// A record is going no longer.
    gone: Condvar,
    /// More than half of the records are used.
    many: Condvar,
    /// Nodes of which a program is being told that bytes were lost.
    telling: Mutex<HashSet<u64>>,
    /// There are fewer of these.
    told: Condvar,
    limit: usize,
}

type Key = (u64, u64);

#[derive(Debug, Default)]
struct Index {
    /// By inode and a hash of the handle: inode numbers are used again while the kernel still has the node of an
    /// earlier inode, so several nodes may have one.
    records: HashMap<Key, u32>,
    free: Vec<u32>,
    /// Those without look-ups that are not free yet.
    going: Vec<u32>,
    /// Look-ups that wait for one of them, or for a free record.
    waiting: usize,
    /// The latter.
    without_record: usize,
}

/// A record that is free once this is dropped, also by a panic: else look-ups would wait for ever.
struct Going<'a> {
    nodes: &'a Nodes,
    number: u32,
}

impl Drop for Going<'_> {
    fn drop(&mut self) {
        let mut index = self.nodes.lock();
        let record = self.nodes.record(self.number);
        if let Some(identity) = read(record)
            && index.records.get(&identity.key()) == Some(&self.number)
        {
            index.records.remove(&identity.key());
        }
        record[word::STATE].store(FREE, Release);
        record[word::SEQUENCE].fetch_add(1, Release);
        index.free.push(self.number);
        index.going.retain(|number| *number != self.number);
        if index.waiting > 0 {
            self.nodes.gone.notify_all();
        }
    }
}

impl Nodes {
    /// Uses the table of the state memory, in which an earlier server may have left nodes.
    pub fn attach(state: Arc<StateMemory>) -> Nodes {
        let mut index = Index::default();
        // Record 0 is not used; 1 is the root.
        let used = state.nodes_used().load(Acquire).max(2) as u32;
        state.nodes_used().store(used.into(), Release);
        let limit = state.node_limit();
        let nodes = Nodes {
            state,
            index: Mutex::default(),
            gone: Condvar::new(),
            many: Condvar::new(),
            telling: Mutex::default(),
            told: Condvar::new(),
            limit,
        };
        for number in 1..used {
            let record = nodes.record(number);
            if record[word::STATE].load(Acquire) == USED {
                index.records.extend(read(record).map(|identity| (identity.key(), number)));
            } else if u64::from(number) != ROOT_NODE {
                index.free.push(number);
            }
        }
        *nodes.lock() = index;
        nodes
    }

    /// Makes the root node, unless an earlier server did.
    pub fn set_root(&self, root: &Identity) {
        let mut index = self.lock();
        let record = self.record(ROOT_NODE as u32);
        if record[word::STATE].load(Acquire) != USED {
            fill(record, root, 1);
            index.records.insert(root.key(), ROOT_NODE as u32);
        }
    }

    /// The number of an inode, to be given to the kernel: counts one look-up. Waits while the inode is being forgotten, and a
    /// little where the table is full.
    ///
    /// # Errors
    /// ENFILE: the table is full.
    pub fn look_up(&self, identity: &Identity) -> Result<u64, Errno> {
        let mut index = self.lock();
        let number = loop {
            if self.is_going(&index, identity) {
                index.waiting += 1;
                index = self.gone.wait(index).unwrap_or_else(PoisonError::into_inner);
                index.waiting -= 1;
                continue;
            }
            if let Some(number) = self.find_in(&index, identity) {
                let record = self.record(number);
                record[word::LOOKUPS].fetch_add(1, AcqRel);
                return Ok(id(number, record));
            }
            if let Some(number) = index.free.pop().or_else(|| self.extend()) {
                break number;
            }
            index = self.wait_for_record(index)?;
        };
        if self.used_in(&index) > self.limit / 2 {
            self.many.notify_one();
        }
        index.records.insert(identity.key(), number);
        let record = self.record(number);
        fill(record, identity, 1);
        Ok(id(number, record))
    }

    /// The number of an inode that the kernel knows.
    pub fn find(&self, identity: &Identity) -> Option<u64> {
        let index = self.lock();
        if self.is_going(&index, identity) {
            return None;
        }
        self.find_in(&index, identity).map(|number| id(number, self.record(number)))
    }

    /// Which inode a number means.
    ///
    /// # Errors
    /// ESTALE: none.
    pub fn get(&self, node: u64) -> Result<Identity, Errno> {
        let record = self.used(node).ok_or(Errno::STALE)?;
        read(record).ok_or(Errno::STALE)
    }

    /// Counts a request to write that is answered with an error.
    pub fn count_refusal(&self, node: u64) {
        if let Some(record) = self.used(node) {
            record[word::REFUSALS].fetch_add(1, AcqRel);
        }
    }

    /// How many were, of this server and those before.
    pub fn refusals(&self, node: u64) -> u64 {
        self.used(node).map_or(0, |record| record[word::REFUSALS].load(Acquire))
    }

    /// Released bytes of the file are lost, and no fsync has reported it. It is kept here, since the server may be replaced
    /// before that.
    pub fn set_lost(&self, node: u64) {
        if let Some(record) = self.used(node) {
            record[word::LOST].fetch_add(1, AcqRel);
        }
    }

    /// How often bytes were lost since a program was told; 0: never. If it is not 0, the caller tells a program, and calls
    /// [`Nodes::lost_is_told`]; others wait for that here, so that one program is told.
    pub fn lost(&self, node: u64) -> u64 {
        let lost = || self.used(node).map_or(0, |record| record[word::LOST].load(Acquire));
        if lost() == 0 {
            return 0;
        }
        let telling = lock(&self.telling);
        // A thread that has panicked meanwhile says nothing any more.
        let waited = self.told.wait_timeout_while(telling, TELLING, |telling| telling.contains(&node));
        let (mut telling, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let lost = lost();
        if lost > 0 {
            telling.insert(node);
        }
        lost
    }

    /// Whether a program was told of so many. Not before it was: a server that dies between would leave none that tells it.
    pub fn lost_is_told(&self, node: u64, lost: u64, told: bool) {
        if let Some(record) = self.used(node).filter(|_| told) {
            // Of those that came meanwhile the next one is told.
            let _ = record[word::LOST].compare_exchange(lost, 0, AcqRel, Relaxed);
        }
        lock(&self.telling).remove(&node);
        self.told.notify_all();
    }

    /// Takes back look-ups; true if the node is free now. `last` is called before it becomes so: from then on the inode
    /// may get another number. It may take long, and only look-ups of this inode wait for it.
    pub fn forget(&self, node: u64, lookups: u64, last: impl FnOnce()) -> bool {
        let number = node as u32;
        let mut index = self.lock();
        let Some(record) = self.used(node).filter(|_| node != ROOT_NODE) else { return false };
        if index.going.contains(&number) {
            return false;
        }
        let left = record[word::LOOKUPS].load(Acquire).saturating_sub(lookups);
        record[word::LOOKUPS].store(left, Release);
        if left > 0 {
            return false;
        }
        index.going.push(number);
        drop(index);
        let _going = Going { nodes: self, number };
        last();
        true
    }

    /// Takes back look-ups of a node whose end waits; true if none is left: [`Nodes::forget`] of none is due, which finds out
    /// whether there are new ones by then.
    pub(crate) fn take_back(&self, node: u64, lookups: u64) -> bool {
        let _index = self.lock();
        let Some(record) = self.used(node).filter(|_| node != ROOT_NODE) else { return false };
        let left = record[word::LOOKUPS].load(Acquire).saturating_sub(lookups);
        record[word::LOOKUPS].store(left, Release);
        left == 0
    }

    /// Those that the Linux kernel has forgotten, left by an earlier server.
    pub(crate) fn without_lookups(&self) -> Vec<u64> {
        let _index = self.lock();
        let end = self.state.nodes_used().load(Acquire) as u32;
        let records = (ROOT_NODE as u32 + 1..end).map(|number| (number, self.record(number)));
        let left = records.filter(|(_, record)| {
            record[word::STATE].load(Acquire) == USED && record[word::LOOKUPS].load(Acquire) == 0
        });
        left.map(|(number, record)| id(number, record)).collect()
    }

    /// Whether the last FORGET of an inode is not over. A record that another one of the same key has replaced in the index
    /// counts too.
    fn is_going(&self, index: &Index, identity: &Identity) -> bool {
        index.going.iter().any(|number| read(self.record(*number)).as_ref() == Some(identity))
    }

    fn find_in(&self, index: &Index, identity: &Identity) -> Option<u32> {
        let number = *index.records.get(&identity.key())?;
        (read(self.record(number))? == *identity).then_some(number)
    }

    /// The next record that was never used.
    fn extend(&self) -> Option<u32> {
        let used = self.state.nodes_used();
        let next = used.load(Acquire);
        if next as usize >= self.limit {
            return None;
        }
        used.store(next + 1, Release);
        Some(next as u32)
    }

    /// Until a record has become free.
    fn wait_for_record<'a>(&'a self, mut index: MutexGuard<'a, Index>) -> Result<MutexGuard<'a, Index>, Errno> {
        self.many.notify_one();
        if index.without_record >= WAITING {
            return Err(Errno::NFILE);
        }
        (index.waiting, index.without_record) = (index.waiting + 1, index.without_record + 1);
        let full = |index: &mut Index| index.free.is_empty();
        let waited = self.gone.wait_timeout_while(index, WAIT, full).unwrap_or_else(PoisonError::into_inner);
        index = waited.0;
        (index.waiting, index.without_record) = (index.waiting - 1, index.without_record - 1);
        if waited.1.timed_out() { Err(Errno::NFILE) } else { Ok(index) }
    }

    /// Records that are not free.
    pub(crate) fn used_records(&self) -> usize {
        self.used_in(&self.lock())
    }

    fn used_in(&self, index: &Index) -> usize {
        (self.state.nodes_used().load(Acquire) as usize - 1).saturating_sub(index.free.len())
    }

    /// Whether nodes should be made that the kernel has not asked for.
    pub(crate) fn has_room(&self) -> bool {
        self.used_records() < self.limit / 4 * 3
    }

    /// Waits until more than half of the records are used; how many are.
    pub(crate) fn wait_for_many(&self) -> usize {
        let few = |index: &mut Index| self.used_in(index) <= self.limit / 2;
        let index = self.many.wait_while(self.lock(), few).unwrap_or_else(PoisonError::into_inner);
        self.used_in(&index)
    }

    /// The next nodes in the order of their records, from this one on, which becomes the one after them.
    pub(crate) fn next_nodes(&self, from: &mut u32, most: usize) -> Vec<u64> {
        let mut nodes = Vec::new();
        let end = self.state.nodes_used().load(Acquire) as u32;
        for _ in 0..end {
            *from = if *from < end { *from } else { ROOT_NODE as u32 + 1 };
            if *from < end {
                let record = self.record(*from);
                if record[word::STATE].load(Acquire) == USED {
                    nodes.push(id(*from, record));
                }
            }
            *from += 1;
            if nodes.len() == most {
                break;
            }
        }
        nodes
    }

    fn record(&self, number: u32) -> &[AtomicU64] {
        &self.state.nodes()[number as usize * NODE_WORDS..][..NODE_WORDS]
    }

    fn used(&self, node: u64) -> Option<&[AtomicU64]> {
        let number = node as u32;
        if number == 0 || number as usize >= self.state.nodes().len() / NODE_WORDS {
            return None;
        }
        let record = self.record(number);
        (record[word::STATE].load(Acquire) == USED && id(number, record) == node).then_some(record)
    }

    fn lock(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn id(number: u32, record: &[AtomicU64]) -> u64 {
    // The root is 1 for ever: its record is never freed.
    u64::from(number) | (record[word::SEQUENCE].load(Acquire) & 0x7fff_ffff) << 32
}

fn fill(record: &[AtomicU64], identity: &Identity, lookups: u64) {
    let bytes = identity.handle.bytes();
    for (i, part) in bytes.chunks(8).enumerate() {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        record[word::HANDLE + i].store(u64::from_ne_bytes(word), Relaxed);
    }
    let kind = u64::from(identity.handle.kind() as u32) << 32 | bytes.len() as u64;
    record[word::HANDLE_KIND].store(kind, Relaxed);
    record[word::DEVICE].store(identity.device, Relaxed);
    record[word::INODE].store(identity.inode, Relaxed);
    record[word::FILE_TYPE].store(identity.file_type.as_raw_mode().into(), Relaxed);
    record[word::REFUSALS].store(0, Relaxed);
    record[word::LOST].store(0, Relaxed);
    record[word::LOOKUPS].store(lookups, Relaxed);
    record[word::STATE].store(USED, Release);
}

fn read(record: &[AtomicU64]) -> Option<Identity> {
    let kind = record[word::HANDLE_KIND].load(Relaxed);
    let len = (kind as u32 as usize).min(HANDLE_BYTES);
    let mut bytes = [0; HANDLE_BYTES];
    for (i, part) in bytes.chunks_mut(8).enumerate().take(len.div_ceil(8)) {
        part.copy_from_slice(&record[word::HANDLE + i].load(Relaxed).to_ne_bytes());
    }
    Some(Identity {
        device: record[word::DEVICE].load(Relaxed),
        inode: record[word::INODE].load(Relaxed),
        file_type: FileType::from_raw_mode(record[word::FILE_TYPE].load(Relaxed) as u32),
        handle: FileHandle::new((kind >> 32) as i32, &bytes[..len])?,
    })
}

const _: () = assert!(word::HANDLE + HANDLE_BYTES.div_ceil(8) <= word::LOST, "the handle ends before it");

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use spinio_testkit::eventually;

    use super::*;

    fn identity(inode: u64) -> Identity {
        let handle = FileHandle::new(1, &inode.to_ne_bytes()).unwrap();
        Identity { device: 1, inode, file_type: FileType::RegularFile, handle }
    }

    #[test]
    fn only_look_ups_of_the_same_inode_wait_while_it_is_forgotten() {
        let nodes = Nodes::attach(Arc::new(StateMemory::small()));
        let node = nodes.look_up(&identity(7)).unwrap();
        thread::scope(|scope| {
            let nodes = &nodes;
            // Dropped before the threads are joined: a failure lets them end.
            let (go_on, may_go_on) = mpsc::channel();
            let (begun, is_begun) = mpsc::channel();
            let (found, is_found) = mpsc::channel();
            scope.spawn(move || {
                let last = || {
                    begun.send(()).unwrap();
                    may_go_on.recv().unwrap();
                };
                assert!(nodes.forget(node, 1, last));
            });
            is_begun.recv().unwrap();
            // What writes it out opens it by its number.
            assert_eq!(nodes.get(node), Ok(identity(7)));
            let other = scope.spawn(move || {
                let other = nodes.look_up(&identity(8)).unwrap();
                assert_eq!(nodes.find(&identity(8)), Some(other));
                assert!(nodes.forget(other, 1, || ()));
            });
            eventually("a look-up of another inode", || other.is_finished());
            // The kernel does not know it, and one more FORGET of it has no effect.
            assert_eq!(nodes.find(&identity(7)), None);
            assert!(!nodes.forget(node, 1, || unreachable!()));
            scope.spawn(move || found.send(nodes.look_up(&identity(7)).unwrap()).unwrap());
            eventually("a look-up waits", || nodes.lock().waiting == 1);
            assert!(is_found.try_recv().is_err());
            go_on.send(()).unwrap();
            let again = is_found.recv().unwrap();
            assert_ne!(again, node);
            assert_eq!((nodes.get(node), nodes.get(again)), (Err(Errno::STALE), Ok(identity(7))));
        });
        assert!(nodes.lock().going.is_empty());
    }

    #[test]
    fn full_table_is_waited_for_and_its_nodes_are_named_in_turn() {
        let state = Arc::new(StateMemory::small());
        state.limit_nodes(6);
        let nodes = Nodes::attach(state);
        // Record 0 is not used, and 1 is the root's.
        let all: Vec<u64> = (2..6).map(|inode| nodes.look_up(&identity(inode)).unwrap()).collect();
        assert_eq!((nodes.used_records(), nodes.has_room(), nodes.wait_for_many()), (5, false, 5));
        let mut from = 0;
        assert_eq!(nodes.next_nodes(&mut from, 3), all[..3]);
        assert_eq!(nodes.next_nodes(&mut from, 3), [all[3], all[0], all[1]]);
        assert_eq!(nodes.look_up(&identity(9)), Err(Errno::NFILE));
        assert_eq!(nodes.look_up(&identity(5)), Ok(all[3]), "one that is there");
        thread::scope(|scope| {
            let later = scope.spawn(|| nodes.look_up(&identity(9)));
            eventually("a look-up waits", || nodes.lock().without_record == 1);
            assert!(nodes.forget(all[0], 1, || ()));
            assert!(later.join().unwrap().is_ok());
        });
        assert_eq!((nodes.get(all[0]), nodes.used_records()), (Err(Errno::STALE), 5));
    }

    #[test]
    fn loss_stays_until_a_program_was_told_also_with_the_next_server_and_is_not_of_another_inode() {
        let state = Arc::new(StateMemory::small());
        let first = Nodes::attach(state.clone());
        let [node, other] = [7, 8].map(|inode| first.look_up(&identity(inode)).unwrap());
        first.set_lost(node);
        first.set_lost(other);
        assert_eq!(first.lost(node), 1);
        first.lost_is_told(node, 1, false);
        assert_eq!(first.lost(node), 1, "the program was not told");
        assert!(first.forget(other, 1, || ()));
        drop(first);
        let next = Nodes::attach(state);
        assert_eq!(next.lost(node), 1);
        next.set_lost(node);
        next.lost_is_told(node, 1, true);
        assert_eq!(next.lost(node), 2, "of one that the program was not told of");
        next.lost_is_told(node, 2, true);
        assert_eq!(next.lost(node), 0);
        // In the record that is free.
        let later = next.look_up(&identity(9)).unwrap();
        assert_eq!(later as u32, other as u32);
        assert_eq!((next.lost(later), next.lost(other)), (0, 0));
    }

    #[test]
    fn loss_is_told_once_also_to_programs_that_ask_meanwhile() {
        let nodes = Nodes::attach(Arc::new(StateMemory::small()));
        let node = nodes.look_up(&identity(7)).unwrap();
        nodes.set_lost(node);
        assert_eq!(nodes.lost(node), 1);
        std::thread::scope(|scope| {
            let asks = [(); 2].map(|()| {
                scope.spawn(|| {
                    let lost = nodes.lost(node);
                    if lost > 0 {
                        nodes.lost_is_told(node, lost, true);
                    }
                    lost
                })
            });
            // Long enough for both to ask; if they do later, the test sees less, and passes.
            std::thread::sleep(Duration::from_millis(50));
            nodes.lost_is_told(node, 1, false);
            let told: u64 = asks.into_iter().map(|ask| ask.join().unwrap()).sum();
            assert_eq!(told, 1, "the first one was not told, so one of the others is");
        });
    }

    #[test]
    fn next_server_finds_the_nodes_whose_end_has_waited() {
        let state = Arc::new(StateMemory::small());
        let first = Nodes::attach(state.clone());
        let [waits, again, used] = [7, 8, 9].map(|inode| first.look_up(&identity(inode)).unwrap());
        first.look_up(&identity(7)).unwrap();
        assert!(!first.take_back(waits, 1) && first.take_back(waits, 1) && first.take_back(again, 1));
        assert!(!first.take_back(ROOT_NODE, 1));
        drop(first);
        let next = Nodes::attach(state);
        assert_eq!(next.without_lookups(), [waits, again]);
        // A program has opened it meanwhile.
        assert_eq!(next.look_up(&identity(8)), Ok(again));
        assert!(next.forget(waits, 0, || ()) && !next.forget(again, 0, || unreachable!()));
        assert_eq!((next.get(waits), next.get(again)), (Err(Errno::STALE), Ok(identity(8))));
        assert!(next.get(used).is_ok() && next.without_lookups().is_empty());
    }

    #[test]
    fn node_whose_last_call_panics_is_free() {
        let nodes = Nodes::attach(Arc::new(StateMemory::small()));
        let node = nodes.look_up(&identity(7)).unwrap();
        let forget = || nodes.forget(node, 1, || panic!("as a defect would"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(forget)).is_err());
        assert!(nodes.look_up(&identity(7)).is_ok_and(|again| again != node));
    }
}
