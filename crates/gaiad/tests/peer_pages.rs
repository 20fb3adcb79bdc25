//! Maps of a mounted file on two devices of one process: the second one copies the pages that the first one has, and only
//! while they are the newest ones.

#![expect(unsafe_code, reason = "device memory")]

mod common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;

use spinio_device::emulated::{self, Config, Emulated};
use spinio_device::{Device, DeviceAddr, StreamId, WaitMode};
use spinio_gaia::{Access, Advice, Info, Map, PeerRefusal};
use spinio_pagecache::messages::{Fill, NO_PEERS, Peers, Request, Run, Source};

use crate::common::TestMount;
use crate::common::both::Random;
use crate::common::gpu::open;
use crate::common::raw::Raw;

const PAGE: usize = 4096;
const CHUNK: usize = 2 << 20;
const LEN: usize = 4 * CHUNK + 3 * PAGE;

#[test]
fn server_role() {
    common::server_role();
}

fn contents() -> Vec<u8> {
    (0..LEN).map(|n| (n * 7 % 251) as u8).collect()
}

fn mounted() -> Option<(TestMount, File)> {
    let fill = |dir: &Path| std::fs::write(dir.join("file"), contents()).unwrap();
    let mount = TestMount::with_supervisor(fill, |supervisor| {
        supervisor.env(common::MEMORY, (64 << 20).to_string());
    })?;
    let file = open(&mount.dir.join("file"));
    Some((mount, file))
}

/// A map on `emulated:0`, `emulated:1` or another device, of the file from this page on.
struct Gpu(&'static Emulated, Arc<Map>);

impl Gpu {
    fn from(file: &File, device: &'static Emulated, access: Access, first: usize) -> Gpu {
        let at = first * PAGE;
        Gpu(device, Arc::new(Map::new(file.as_raw_fd(), at as u64, (LEN - at) as u64, access, device).unwrap()))
    }

    fn new(file: &File, ordinal: u32, access: Access) -> Gpu {
        Gpu::from(file, device(ordinal), access, 0)
    }

    fn acquire(&self, access: Access) {
        self.1.acquire(0, self.1.len(), access).unwrap();
    }

    fn release(&self) {
        self.1.release(0, self.1.len()).unwrap();
    }

    fn load(&self) -> Vec<u8> {
        self.load_part(0, self.1.len() as usize)
    }

    fn load_part(&self, at: usize, len: usize) -> Vec<u8> {
        let (mut bytes, from) = (vec![0; len], DeviceAddr(self.1.address() + at as u64));
        // SAFETY: the bytes live until the device was synchronized.
        unsafe { self.0.copy_out(StreamId(0), bytes.as_mut_ptr(), from, len) }.unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
        bytes
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        // SAFETY: as above.
        unsafe { self.0.copy_in(StreamId(0), DeviceAddr(self.1.address() + at as u64), bytes.as_ptr(), bytes.len()) }
            .unwrap();
        self.0.synchronize(StreamId(0), WaitMode::Block).unwrap();
    }

    fn info(&self) -> Info {
        self.1.info()
    }

    /// Bytes from the file, from released pages, and from the other device.
    fn sources(&self) -> (u64, u64, u64) {
        let info = self.info();
        (info.bytes_from_file, info.bytes_from_snapshots, info.bytes_from_peer)
    }
}

fn device(ordinal: u32) -> &'static Emulated {
    emulated::configure("devices=3,size=64M").unwrap();
    emulated::device(ordinal).unwrap()
}

fn whole() -> u64 {
    LEN.next_multiple_of(PAGE) as u64
}

#[test]
fn maps_of_other_files_are_no_sources_and_take_no_place_of_one() {
    let Some((mount, file)) = mounted() else { return };
    let maps: Vec<Gpu> = (0..10)
        .map(|n| {
            let path = mount.dir.join(format!("other{n}"));
            std::fs::write(&path, vec![n; LEN]).unwrap();
            let map = Gpu::new(&open(&path), 0, Access::Read);
            map.1.acquire(0, 2 * CHUNK as u64, Access::Read).unwrap();
            map
        })
        .collect();
    let (first, second) = (Gpu::new(&file, 0, Access::Read), Gpu::new(&file, 1, Access::Read));
    first.acquire(Access::Read);
    second.acquire(Access::Read);
    assert!(second.load() == contents());
    assert_eq!(second.sources(), (0, 0, whole()));
    drop(maps);
}

#[test]
fn second_device_reads_nothing_of_the_file_and_then_what_was_changed() {
    let Some((_mount, file)) = mounted() else { return };
    let (first, second) = (Gpu::new(&file, 0, Access::Read), Gpu::new(&file, 1, Access::Write));
    first.acquire(Access::Read);
    second.acquire(Access::Write);
    assert!(second.load() == contents());
    assert_eq!((first.sources(), second.sources()), ((whole(), 0, 0), (0, 0, whole())));
    second.release();
    let mut wanted = contents();
    for page in [3, 700, 1500] {
        file.write_all_at(&[9; 10], (page * PAGE + 5) as u64).unwrap();
        wanted[page * PAGE + 5..][..10].fill(9);
    }
    second.acquire(Access::Read);
    assert!(second.load() == wanted);
    assert_eq!(second.sources(), (3 * PAGE as u64, 0, whole()));
    assert_eq!((second.info().peer_refused, second.info().peer_bytes_refused), (0, 0));
}

#[test]
fn maps_that_begin_elsewhere_and_have_other_chunks_get_the_right_pages() {
    let Some((_mount, file)) = mounted() else { return };
    let (apart, third) = (Emulated::start(Config::parse("size=64M").unwrap()).unwrap(), device(2));
    let first = Gpu::from(&file, apart, Access::Read, 301);
    let (second, third) = (Gpu::new(&file, 1, Access::Read), Gpu::from(&file, third, Access::Write, 777));
    first.acquire(Access::Read);
    second.acquire(Access::Read);
    let missing = 301 * PAGE as u64;
    assert_eq!(second.sources(), (missing, 0, whole() - missing));
    third.acquire(Access::Write);
    assert_eq!(third.sources(), (0, 0, whole() - 777 * PAGE as u64));
    assert!(second.load() == contents() && third.load() == contents()[777 * PAGE..]);
}

#[test]
fn released_pages_are_copied_and_merged_or_open_ones_are_not() {
    let Some((_mount, file)) = mounted() else { return };
    let (writer, reader) = (Gpu::new(&file, 0, Access::Write), Gpu::new(&file, 1, Access::Read));
    let mut wanted = contents();
    writer.acquire(Access::Write);
    writer.store(CHUNK - PAGE, &vec![77; CHUNK + 10]);
    wanted[CHUNK - PAGE..][..CHUNK + 10].fill(77);
    // A CPU program stores to one of these pages in the epoch: the release merges it.
    file.write_all_at(&[99], (CHUNK + 600 * PAGE) as u64 - 1).unwrap();
    file.write_all_at(&[98], 5).unwrap();
    (wanted[CHUNK + 600 * PAGE - 1], wanted[5]) = (99, 98);
    writer.release();
    reader.acquire(Access::Read);
    assert!(reader.load() == wanted);
    // Page 0 is old there, and a run of fewer than 256 pages is not worth a copy; nothing was refused.
    let (_, _, from_peer) = reader.sources();
    assert!(from_peer >= 2 * CHUNK as u64 && reader.info().peer_bytes_refused == 0, "{:?}", reader.info());
    // In an epoch for writing the writer's pages are not what others may see.
    writer.acquire(Access::Write);
    writer.store(0, &vec![55; 3 * CHUNK]);
    let other = Gpu::new(&file, 2, Access::Read);
    drop(reader);
    other.acquire(Access::Read);
    assert!(other.load() == wanted);
    assert_eq!(other.sources().2, 0);
    writer.release();
    wanted[..3 * CHUNK].fill(55);
    other.acquire(Access::Read);
    assert!(other.load() == wanted);
    assert_eq!(other.sources().2, 3 * CHUNK as u64);
}

#[test]
fn device_without_access_to_the_other_takes_the_file_and_asks_once() {
    let Some((_mount, file)) = mounted() else { return };
    let first = Gpu::new(&file, 0, Access::Read);
    first.acquire(Access::Read);
    let apart = Emulated::start(Config::parse("size=64M,peer=0").unwrap()).unwrap();
    let apart = Gpu::from(&file, apart, Access::Read, 0);
    for round in 1..3 {
        apart.acquire(Access::Read);
        assert!(apart.load() == contents());
        assert_eq!(apart.sources(), (round * whole(), 0, 0));
        let info = apart.info();
        assert_eq!(PeerRefusal::of_number(info.peer_refused), Some(PeerRefusal::NoAccess));
        assert_eq!(info.peer_bytes_refused, whole());
        apart.1.advise(0, apart.1.len(), Advice::DontNeed).unwrap();
    }
}

#[test]
fn evicted_pages_are_not_copied() {
    let Some((_mount, file)) = mounted() else { return };
    let small = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
    spinio_gaia::limit_memory(small, Some(16 * CHUNK as u64));
    let first = Gpu::from(&file, small, Access::Read, 0);
    first.acquire(Access::Read);
    first.release();
    spinio_gaia::limit_memory(small, Some(5 * CHUNK as u64));
    let more = Gpu::from(&file, small, Access::Read, 0);
    // Two chunks of the other map of this device are evicted, and the server is not told yet.
    more.1.acquire(0, 2 * CHUNK as u64, Access::Read).unwrap();
    more.1.release(0, 2 * CHUNK as u64).unwrap();
    let evicted = first.info().chunks_evicted;
    assert!(evicted >= 2, "{evicted}");
    more.1.advise(0, more.1.len(), Advice::DontNeed).unwrap();
    let second = Gpu::new(&file, 1, Access::Read);
    second.acquire(Access::Read);
    assert!(second.load() == contents());
    let (from_file, _, from_peer) = second.sources();
    assert_eq!((from_file, from_peer), (evicted * CHUNK as u64, whole() - evicted * CHUNK as u64));
    assert_eq!(second.info().peer_bytes_refused, from_file);
    assert_eq!(PeerRefusal::of_number(second.info().peer_refused), Some(PeerRefusal::Unavailable));
}

/// Begins an acquire on a device that does not run, so that it stays in its copies.
fn begin_acquire(gpu: Gpu) -> JoinHandle<Gpu> {
    gpu.0.pause();
    let thread = std::thread::spawn(move || {
        gpu.acquire(Access::Write);
        gpu
    });
    // So that it is in the copy as a rule; the bytes are right also if it is not.
    std::thread::sleep(Duration::from_millis(100));
    thread
}

/// What happens to the first map while the second one copies from it; whether it may wait for the copy. The caller drops
/// the mount last.
fn in_the_middle(
    wait: bool,
    happens: impl FnOnce(&TestMount, Gpu) -> Option<Gpu> + Send,
) -> Option<(TestMount, File, Gpu)> {
    let (mount, file) = mounted()?;
    let first = Gpu::new(&file, 0, Access::Write);
    first.acquire(Access::Write);
    first.release();
    let apart = Emulated::start(Config::parse("size=64M").unwrap()).unwrap();
    let second = begin_acquire(Gpu::from(&file, apart, Access::Write, 0));
    let second = std::thread::scope(|scope| {
        let other = scope.spawn(|| happens(&mount, first));
        let first = match wait {
            true => {
                std::thread::sleep(Duration::from_millis(50));
                None
            }
            // Unmapping it would wait too.
            false => other.join().unwrap(),
        };
        apart.resume();
        let second = second.join().unwrap();
        drop(first);
        second
    });
    assert!(second.load() == contents());
    Some((mount, file, second))
}

#[test]
fn source_is_unmapped_in_the_middle() {
    let unmapped = in_the_middle(true, |_, _first| None);
    let Some((_mount, _file, _second)) = unmapped else { return };
}

#[test]
fn source_is_dropped_and_evicted_in_the_middle() {
    let dropped = in_the_middle(true, |_, first| {
        first.1.advise(0, first.1.len(), Advice::DontNeed).unwrap();
        Some(first)
    });
    let Some((_mount, _file, _second)) = dropped else { return };
}

#[test]
fn source_is_written_in_the_middle() {
    let Some((_mount, file, second)) = in_the_middle(true, |_, first| {
        first.acquire(Access::Write);
        first.store(0, &vec![0; 3 * CHUNK]);
        first.1.discard(0, first.1.len()).unwrap();
        Some(first)
    }) else {
        return;
    };
    second.release();
    let mut now = vec![0; LEN];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == contents());
}

#[test]
fn server_is_killed_in_the_middle() {
    let Some((_mount, _file, second)) = in_the_middle(false, |mount, first| {
        mount.kill_server();
        Some(first)
    }) else {
        return;
    };
    // The new server knows of no other map until that acquires again, and gets all of the file.
    assert_eq!(second.info().reattached, 1);
}

#[test]
fn maps_that_were_attached_to_another_server_are_not_confused() {
    let Some((mount, file)) = mounted() else { return };
    let first = Gpu::new(&file, 0, Access::Write);
    first.acquire(Access::Write);
    first.release();
    mount.kill_server();
    // Its owner has the number that the first map has at the old server.
    let mut other = Raw::map(&file, spinio_pagecache::messages::Access::Read, 0, 2000).unwrap();
    other.acquire(0, 2000, spinio_pagecache::messages::Access::Read);
    file.write_all_at(&vec![1; CHUNK], 0).unwrap();
    let second = Gpu::new(&file, 1, Access::Read);
    second.acquire(Access::Read);
    assert_eq!(second.load()[..CHUNK], vec![1; CHUNK]);
    assert_eq!(second.sources().2, 0);
    // Once it is attached again, it is a source again.
    first.acquire(Access::Write);
    first.release();
    second.1.advise(0, second.1.len(), Advice::DontNeed).unwrap();
    second.acquire(Access::Read);
    assert_eq!(second.sources().2, whole());
}

/// The server's part, with clients that say what they like.
#[test]
fn copy_counts_only_if_the_other_map_has_kept_the_pages() {
    use spinio_pagecache::messages::Access;
    const PAGES: u64 = 1024;
    let Some((_mount, file)) = mounted() else { return };
    let mut source = Raw::map(&file, Access::Write, 0, PAGES).unwrap();
    let mut client = Raw::map(&file, Access::Write, 0, PAGES).unwrap();
    let acquire = |access, peers| Request::Acquire { first: 0, pages: PAGES, access, fetch: true, peers };
    let peers = |owner| -> Peers { std::array::from_fn(|n| if n == 2 { owner } else { 0 }) };
    let from_peer = |client: &mut Raw, owner| client.fills(acquire(Access::Read, peers(owner)));
    let all = |source| [Fill { run: Run { first: 0, count: PAGES as u32 }, source }];
    // By its place in the list.
    let (file_pages, peer_pages) = (all(Source::File), all(Source::Peer(2)));
    // A map that has nothing, itself, and one that there is not.
    for owner in [source.owner, client.owner, u64::MAX] {
        assert_eq!(from_peer(&mut client, owner), file_pages);
    }
    source.acquire(0, PAGES, Access::Read);
    // Refused: all, a part with pages that were not asked for, and pages that nothing was said of.
    let run = |first, count| Run { first, count };
    assert_eq!(from_peer(&mut client, source.owner), peer_pages);
    assert_eq!(client.filled_but(&[run(0, PAGES as u32)]), file_pages);
    assert_eq!(client.filled_but(&[run(0, PAGES as u32)]), [], "pages of the file are there or not");
    let drop_all = |raw: &mut Raw, open| raw.call(Request::Drop { first: 0, pages: PAGES as u32, open }).map(drop);
    drop_all(&mut client, false).unwrap();
    assert_eq!(from_peer(&mut client, source.owner), peer_pages);
    assert_eq!(client.filled_but(&[run(100, 10), run(1000, 24)]).len(), 2);
    assert_eq!(client.fills(Request::Filled), []);
    // The source is in an epoch, has released, or has dropped pages and fetched them again.
    for what in 0..4 {
        drop_all(&mut client, false).unwrap();
        assert_eq!(from_peer(&mut client, source.owner), peer_pages, "{what}");
        match what {
            0 => source.acquire(7, 1, Access::Write),
            1 => {
                source.acquire(7, 1, Access::Write);
                source.stage(0, &[what; PAGE]);
                assert_eq!(source.release(5, run(7, 1), &[run(7, 1)]), Ok(1));
            }
            2 => {
                drop_all(&mut source, false).unwrap();
                source.acquire(0, PAGES, Access::Read);
            }
            _ => {}
        }
        let again = client.fills(Request::Filled);
        match what {
            0 => assert_eq!(again, [Fill { run: run(7, 1), source: Source::File }]),
            1 => assert_eq!(again, [Fill { run: run(7, 1), source: Source::Window }]),
            2 => assert_eq!(again.iter().map(|fill| fill.run.count).sum::<u32>(), PAGES as u32),
            _ => assert_eq!(again, []),
        }
        while !client.fills(Request::Filled).is_empty() {}
        if what == 0 {
            assert_eq!(source.release(4, run(7, 1), &[]), Ok(0));
        }
        // One version again.
        drop_all(&mut source, false).unwrap();
        source.acquire(0, PAGES, Access::Read);
    }
    assert_eq!(client.fills(acquire(Access::Read, NO_PEERS)), []);
}

/// A device waits for its copies before each question to the server, and the other map waits meanwhile.
#[test]
fn pages_of_another_device_come_in_replies_of_16_gib() {
    use spinio_pagecache::messages::Access;
    const PAGES: u64 = 17 << 18;
    let sparse = |dir: &Path| File::create(dir.join("file")).unwrap().set_len(PAGES * PAGE as u64).unwrap();
    let Some(mount) = TestMount::new(sparse) else { return };
    let file = open(&mount.dir.join("file"));
    let [mut source, mut client] = [(), ()].map(|()| Raw::map(&file, Access::Read, 0, PAGES).unwrap());
    source.acquire(0, PAGES, Access::Read);
    let mut peers = NO_PEERS;
    peers[0] = source.owner;
    let fills = client.fills(Request::Acquire { first: 0, pages: PAGES, access: Access::Read, fetch: true, peers });
    let run = |first, count| [Fill { run: Run { first, count }, source: Source::Peer(0) }];
    assert_eq!(fills, run(0, 16 << 18));
    assert_eq!(client.fills(Request::Filled), run(16 << 18, 1 << 18));
    assert_eq!(client.fills(Request::Filled), []);
}

/// Pages of an epoch, and its stores.
struct Epoch {
    from: usize,
    len: usize,
    writing: bool,
    stores: Vec<(usize, u8)>,
}

/// Random epochs of two devices and writes of a CPU program, one after another, against one image of the file. Each stores
/// to bytes of its own, so that the order of releases does not matter.
#[test]
fn random_epochs_on_two_devices_agree_with_the_oracle() {
    const STEPS: usize = 250;
    let Some((mount, file)) = mounted() else { return };
    let gpus = [0, 1].map(|ordinal| Gpu::new(&file, ordinal, Access::Write));
    let (mut random, mut wanted, pages) = (Random::new(11), contents(), LEN / PAGE);
    let mut epochs: [Option<Epoch>; 2] = [None, None];
    for step in 0..STEPS {
        let (n, from) = (random.range(0, 2) as usize, random.range(0, pages as u64 - 300) as usize);
        let len = random.range(1, (pages - from) as u64) as usize;
        let gpu = &gpus[n];
        match random.range(0, 8) {
            0..=2 if epochs[n].is_none() => {
                let access = random.pick(&[Access::Read, Access::Write, Access::Write]);
                let (at, bytes) = (from * PAGE, len * PAGE);
                gpu.1.acquire(at as u64, bytes as u64, access).unwrap();
                assert!(gpu.load_part(at, bytes) == wanted[at..][..bytes], "step {step}, device {n}");
                let mut stores = Vec::new();
                for _ in 0..if access == Access::Write { random.range(0, 40) } else { 0 } {
                    let byte = at + random.range(0, bytes as u64 / 4) as usize * 4 + n;
                    stores.push((byte, random.next() as u8));
                    gpu.store(byte, &[stores[stores.len() - 1].1]);
                }
                epochs[n] = Some(Epoch { from, len, writing: access == Access::Write, stores });
            }
            3..=5 => {
                if let Some(Epoch { from, len, writing, stores }) = epochs[n].take() {
                    let (at, bytes) = ((from * PAGE) as u64, (len * PAGE) as u64);
                    match random.range(0, 5) {
                        0 => gpu.1.discard(at, bytes).unwrap(),
                        _ => {
                            // Those that were only read may have been dropped.
                            let released = gpu.1.release(at, bytes);
                            assert!(released.is_ok() || !writing, "{released:?}");
                            stores.into_iter().for_each(|(byte, value)| wanted[byte] = value);
                        }
                    }
                }
            }
            6 => {
                for _ in 0..random.range(1, 10) {
                    let byte = random.range(0, LEN as u64 / 4) as usize * 4 + 2;
                    wanted[byte] = random.next() as u8;
                    file.write_all_at(&wanted[byte..=byte], byte as u64).unwrap();
                }
            }
            _ if epochs.iter().all(Option::is_none) && random.range(0, 6) == 0 => mount.kill_server(),
            _ => gpu.1.advise((from * PAGE) as u64, (len * PAGE) as u64, Advice::DontNeed).unwrap(),
        }
    }
    let mut now = vec![0; LEN];
    file.read_exact_at(&mut now, 0).unwrap();
    assert!(now == wanted);
    let from_peer = gpus.each_ref().map(|gpu| gpu.sources().2);
    assert!(from_peer.iter().all(|bytes| *bytes > CHUNK as u64), "{from_peer:?}");
}

/// Counters in the file: of each page one for each writer, started and visible to all.
struct Board([Vec<[AtomicU64; 2]>; 3]);

impl Board {
    const PAGES: usize = 1024;

    fn started(&self, writer: usize, page: usize) -> &AtomicU64 {
        &self.0[writer][page][0]
    }

    fn ended(&self, writer: usize, page: usize) -> &AtomicU64 {
        &self.0[writer][page][1]
    }

    /// Epochs of one device: loads see at least what had ended before the acquire, and at most what has been started.
    fn run(&self, gpu: &Gpu, writer: usize) {
        let (mut random, pages) = (Random::new(5 + writer as u64), Board::PAGES as u64);
        for round in 1..120 {
            let from = random.range(0, pages - 256) as usize;
            let len = random.range(256, pages - from as u64 + 1) as usize;
            let (at, bytes) = ((from * PAGE) as u64, (len * PAGE) as u64);
            let ended = |page: usize| [0, 1, 2].map(|writer| self.ended(writer, page).load(SeqCst));
            let before: Vec<[u64; 3]> = (from..from + len).map(ended).collect();
            let access = if random.range(0, 3) == 0 { Access::Write } else { Access::Read };
            gpu.1.acquire(at, bytes, access).unwrap();
            let seen = gpu.load_part(at as usize, bytes as usize);
            for (page, before) in (from..).zip(before) {
                for writer in 0..3 {
                    let word = (page - from) * PAGE + 16 * writer;
                    let value = u64::from_le_bytes(seen[word..word + 8].try_into().unwrap());
                    let after = self.started(writer, page).load(SeqCst);
                    assert!((before[writer]..=after).contains(&value), "page {page}: {value}, {before:?} to {after}");
                }
            }
            let stores = if access == Access::Write { 3 } else { 0 };
            let mut stored: Vec<usize> = (0..stores).map(|_| from + random.range(0, len as u64) as usize).collect();
            stored.dedup();
            for page in &stored {
                self.started(writer, *page).store(round, SeqCst);
                gpu.store(page * PAGE + 16 * writer, &round.to_le_bytes());
            }
            gpu.1.release(at, bytes).unwrap();
            stored.iter().for_each(|page| self.ended(writer, *page).store(round, SeqCst));
            if round % 3 == 0 {
                gpu.1.advise(0, gpu.1.len(), Advice::DontNeed).unwrap();
            }
        }
    }

    /// Writes of a CPU program, until both devices have ended.
    fn write(&self, file: &File, go_on: impl Fn() -> bool) {
        let mut random = Random::new(3);
        for value in 1_u64.. {
            let page = random.range(0, Board::PAGES as u64) as usize;
            self.started(2, page).store(value, SeqCst);
            file.write_all_at(&value.to_le_bytes(), (page * PAGE + 32) as u64).unwrap();
            self.ended(2, page).store(value, SeqCst);
            if !go_on() {
                return;
            }
            std::thread::sleep(Duration::from_millis(3));
        }
    }
}

#[test]
fn copies_beside_epochs_of_the_other_device_and_a_cpu_writer_have_the_newest_bytes() {
    let fill = |dir: &Path| std::fs::write(dir.join("file"), vec![0; Board::PAGES * PAGE]).unwrap();
    let Some(mount) = TestMount::with_supervisor(fill, |supervisor| {
        supervisor.env(common::MEMORY, (64 << 20).to_string());
    }) else {
        return;
    };
    let file = open(&mount.dir.join("file"));
    let len = (Board::PAGES * PAGE) as u64;
    let map = |ordinal| Map::new(file.as_raw_fd(), 0, len, Access::Write, device(ordinal)).unwrap();
    let gpus = [0, 1].map(|ordinal| Gpu(device(ordinal), Arc::new(map(ordinal))));
    let board = Board(std::array::from_fn(|_| (0..Board::PAGES).map(|_| Default::default()).collect()));
    std::thread::scope(|scope| {
        let run = |n: usize| board.run(&gpus[n], n);
        let threads = [0, 1].map(|n| scope.spawn(move || run(n)));
        board.write(&file, || threads.iter().any(|thread| !thread.is_finished()));
    });
    for page in 0..Board::PAGES {
        let mut words = [0; 48];
        file.read_exact_at(&mut words, (page * PAGE) as u64).unwrap();
        for writer in 0..3 {
            let value = u64::from_le_bytes(words[16 * writer..][..8].try_into().unwrap());
            assert_eq!(value, board.ended(writer, page).load(SeqCst), "page {page}, writer {writer}");
        }
    }
    let infos = gpus.each_ref().map(Gpu::info);
    println!("{:?}", infos.map(|info| (info.bytes_from_peer, info.peer_bytes_refused, info.peer_refused)));
}
