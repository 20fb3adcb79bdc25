//! A file server that does not answer occupies a bounded share of workers and bounce buffers, with either storage engine
//! and on each way of its bytes: reads of other file systems are not delayed.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use spinio_host::pool::SHADOW_WORKERS;
use spinio_host::settings::StorageEngine;
use spinio_io::{Runtime, Settings};
use spinio_plan::Route;
use spinio_sys::linux::O_DIRECT;
use spinio_testkit::buffer::emulated;
use spinio_testkit::hang::{HungServer, threads_in_pread};
use spinio_testkit::mount_fixture::MountFixture;
use spinio_testkit::{Buffer, eventually, file, mount_fixture, with_deadline};

const MIB: usize = 1 << 20;
const SIZE: usize = 6 * MIB;
const BUFFER: u64 = 2 << 20;
/// Each is a large read, which takes a bounce buffer or more.
const HUNG: usize = MIB;

/// How the bytes of the server would come.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// Around the page cache, by shadow workers.
    Direct,
    /// Through the page cache, by the callers and copy workers.
    PageCache,
    /// Through the program's own O_DIRECT descriptor, by the callers.
    AppDirect,
}

fn read(runtime: &Runtime, source: &File, buffer: &Buffer) {
    buffer.fill(0);
    assert_eq!(runtime.read(source.as_raw_fd(), Some(0), buffer.target(0), SIZE).unwrap(), SIZE);
    assert!(buffer.bytes() == file::bytes(0, SIZE, 0), "wrong bytes");
}

/// Reads an absent file until the ring has made a read, where it can.
fn read_by_ring(runtime: &Runtime, healthy: &MountFixture, buffer: &Buffer) {
    let Some(absent) = file::create_evicted(&healthy.file("ring"), SIZE as u64) else { return };
    let files = &runtime.reader().files;
    let state = files.get(absent.as_raw_fd(), files.sys().fstat(absent.as_raw_fd()).unwrap());
    let may_take_ring = || state.as_ref().is_ok_and(|state| files.ring_refusal(state).is_none());
    eventually("a read by the ring, or its refusal", || {
        file::evict(&absent);
        // Soon after each other, while the ring is awake, and not front to back.
        for from in [4, 1, 3, 0, 2, 5].map(|part| part * MIB) {
            let got = runtime.read(absent.as_raw_fd(), Some(from as u64), buffer.target(from), MIB);
            assert_eq!(got.unwrap(), MIB);
        }
        assert!(buffer.bytes() == file::bytes(0, SIZE, 0), "wrong bytes");
        runtime.ring_reads() > 0 || !may_take_ring()
    });
}

/// Reads files of another file system while `readers` threads wait for a server that does not answer.
fn read_next_to_hung_server(readers: usize, bounce_limit: u64, engine: StorageEngine, way: Way) {
    let mut server = match HungServer::start(readers, HUNG as u64) {
        Ok(server) => server,
        Err(why) => return println!("skipped: {why}"),
    };
    if way == Way::AppDirect {
        for hung in &mut server.files {
            let path = format!("/proc/self/fd/{}", hung.as_raw_fd());
            *hung = File::options().read(true).custom_flags(O_DIRECT as i32).open(path).unwrap();
        }
    }
    let healthy = mount_fixture::create("tree").unwrap();
    let cached = file::create_filled(&healthy.file("cached"), SIZE as u64);
    let device = emulated("size=512M");
    let mut settings = Settings { bounce_limit, storage_engine: engine, ..Settings::default() };
    if way == Way::PageCache {
        settings.routes.retain(|route| *route == Route::Copy);
    }
    let runtime = Runtime::new(settings);
    let pool = runtime.reader().bounce.sync(device);
    let (hung_storage, all_buffers) = (server.files[0].metadata().unwrap().dev(), (bounce_limit / BUFFER) as usize);
    with_deadline("reads next to a hung server", || {
        std::thread::scope(|scope| {
            let hung_reads: Vec<_> = server
                .files
                .iter()
                .map(|hung| {
                    let runtime = &runtime;
                    scope.spawn(move || {
                        let buffer = Buffer::new(device, HUNG);
                        runtime.read(hung.as_raw_fd(), Some(0), buffer.target(0), HUNG)
                    })
                })
                .collect();
            // Other readers wait for one of the workers that it has.
            let waiting = if way == Way::Direct { readers.min(SHADOW_WORKERS) } else { readers };
            eventually("reads wait for the server, or for its share", || {
                threads_in_pread() >= waiting || !pool.can_lend(hung_storage)
            });
            let buffer = Buffer::new(device, SIZE);
            for turn in 0..3 {
                read(&runtime, &cached, &buffer);
                // A file that is opened for the first time, and uncached.
                let absent = file::create_filled(&healthy.file(&format!("absent{turn}")), SIZE as u64);
                file::evict(&absent);
                read(&runtime, &absent, &buffer);
                file::evict(&cached);
                read(&runtime, &cached, &buffer);
            }
            if engine == StorageEngine::Ring && way != Way::PageCache {
                read_by_ring(&runtime, &healthy, &buffer);
            }
            assert!(pool.total_bytes() <= bounce_limit);
            assert!(pool.available() >= all_buffers / 2, "the server has more than its share");
            // Of a host read after the end of the connection, and of one that waited.
            let host = [server.end(), Some(libc::ECONNABORTED)];
            for hung in hung_reads {
                let error = hung.join().unwrap().expect_err("the server has answered");
                assert!(host.contains(&Some(error.kind.errno().raw_os_error())), "{error}, of host reads {host:?}");
            }
        });
    });
    assert!(pool.can_lend(hung_storage));
    eventually("the buffers can be used again", || pool.available() == all_buffers);
}

fn with_both_engines(readers: usize, bounce_limit: u64, way: Way) {
    for engine in [StorageEngine::Ring, StorageEngine::Workers] {
        read_next_to_hung_server(readers, bounce_limit, engine, way);
    }
}

#[test]
fn one_hung_read_leaves_workers_to_other_file_systems() {
    with_both_engines(1, 128 << 20, Way::Direct);
}

/// Eight for each of the eight workers that one file system has.
#[test]
fn hung_reads_leave_workers_and_buffers_to_other_file_systems() {
    with_both_engines(64, 128 << 20, Way::Direct);
}

/// As many as the pool has buffers.
#[test]
fn hung_reads_through_the_page_cache_leave_buffers_to_other_file_systems() {
    with_both_engines(64, 128 << 20, Way::PageCache);
}

#[test]
fn hung_reads_of_the_programs_descriptor_leave_buffers_to_other_file_systems() {
    with_both_engines(64, 128 << 20, Way::AppDirect);
}

#[test]
fn hung_reads_leave_buffers_of_small_pool_to_other_file_systems() {
    for way in [Way::Direct, Way::PageCache, Way::AppDirect] {
        with_both_engines(9, 16 << 20, way);
    }
}

/// Files in memory wait for no server, so their reads need no share.
#[test]
fn reads_of_tmpfs_take_no_share() {
    let place = match mount_fixture::create("tmpfs") {
        Ok(place) => place,
        Err(why) => return println!("skipped: {why}"),
    };
    let subject = file::create_filled(&place.file("subject"), SIZE as u64);
    // Before Linux 6.6 tmpfs has no O_DIRECT.
    let direct = File::options().read(true).custom_flags(O_DIRECT as i32).open(place.file("subject"));
    let (device, runtime) = (emulated("size=64M"), Runtime::new(Settings::default()));
    let (pool, storage) = (runtime.reader().bounce.sync(device), subject.metadata().unwrap().dev());
    let mut lent = 0;
    while pool.begin_lending(storage, false) {
        lent += 1;
    }
    assert!(lent > 0);
    let buffer = Buffer::new(device, SIZE);
    with_deadline("reads of tmpfs", || {
        [Some(&subject), direct.as_ref().ok()].into_iter().flatten().for_each(|file| {
            read(&runtime, file, &buffer);
        })
    });
    pool.end_lending(storage, lent);
    // Has the number of tmpfs on devtmpfs.
    assert!(!runtime.reader().files.is_descriptor_local(File::open("/dev/zero").unwrap().as_raw_fd()));
}
