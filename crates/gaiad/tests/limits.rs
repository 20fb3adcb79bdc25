//! Limits of what clients have, in all and for each user: released bytes that are not in their files yet, maps, connections.
//! One user who takes all there is leaves another's calls working.

mod common;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use rustix::io::Errno;
use rustix::process::{Pid, Resource, Rlimit, Uid, prlimit};
use spinio_gaiad::MountStatus;
use spinio_pagecache::messages::{Access, MapKind, NO_PEERS, Request, Run, STAGE};
use spinio_testkit::deadline::{eventually, with_deadline};

use crate::common::gpu::open;
use crate::common::raw::{self, Raw};
use crate::common::{MEMORY, TestMount, is_root};

const PAGE: u64 = 4096;
const ONE: u32 = 1001;
const TWO: u32 = 1002;

#[test]
fn server_role() {
    common::server_role();
}

/// Two sparse files of 1 GiB, and a mount with memory for two thousand released pages and more.
fn mounted() -> Option<(TestMount, [File; 2])> {
    let fill = |dir: &std::path::Path| {
        for name in ["one", "two"] {
            File::create(dir.join(name)).unwrap().set_len(1 << 30).unwrap();
        }
    };
    let mount = TestMount::with_supervisor(fill, |command| {
        command.env(MEMORY, (12 << 20).to_string());
        common::survive_file_limit(command);
    })?;
    let files = ["one", "two"].map(|name| open(&mount.dir.join(name)));
    Some((mount, files))
}

fn status(mount: &TestMount) -> MountStatus {
    spinio_gaiad::status(&mount.dir).unwrap()
}

/// Runs a function as a user.
fn as_user<T: Send>(user: u32, run: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            rustix::thread::set_thread_uid(Uid::from_raw(user)).unwrap();
            run()
        });
        thread.join().unwrap()
    })
}

fn errno(error: Errno) -> u32 {
    error.raw_os_error() as u32
}

fn run(first: u64, pages: u64) -> Run {
    Run { first, count: pages as u32 }
}

/// Acquires pages of a map, and releases all of them; as many as are published.
fn publish(client: &mut Raw, id: u64, first: u64, pages: u64) -> Result<u64, u32> {
    client.acquire(first, pages, Access::Write);
    client.stage(0, &vec![7; (u64::from(STAGE).min(pages) * PAGE) as usize]);
    for at in (first..first + pages).step_by(STAGE as usize) {
        let part = run(at, u64::from(STAGE).min(first + pages - at));
        client.part(id, run(first, pages), pages as u32, false, &[part])?;
    }
    client.release(id, run(first, pages), &[])
}

/// Bytes that are not zero in the file below the mount, one for each page.
fn written(client: &Raw, pages: std::ops::Range<u64>) -> u64 {
    let byte = |page: u64| {
        let mut byte = [0];
        client.backing.read_exact_at(&mut byte, page * PAGE).unwrap();
        u64::from(byte != [0])
    };
    pages.map(byte).sum()
}

#[test]
fn release_without_room_waits_until_earlier_bytes_are_written() {
    let Some((mount, [file, _])) = mounted() else { return };
    let slots = status(&mount).server.slots;
    let each = slots / 4 * 3;
    let mut client = Raw::map(&file, Access::Write, 0, 4 * each).unwrap();
    for number in 0..4 {
        assert_eq!(publish(&mut client, number + 1, number * each, each), Ok(each));
        // What was released is in the file or in memory, and memory has not more than its limit.
        let used = status(&mount).server.used;
        let all = (number + 1) * each;
        assert!(used <= slots && written(&client, 0..all) >= all.saturating_sub(slots), "{used} of {slots}");
    }
    // More than there ever is.
    client.acquire(0, slots + 1, Access::Write);
    let refused = client.part(9, run(0, slots + 1), slots as u32 + 1, false, &[run(0, 1)]);
    assert_eq!((refused, mount.servers()), (Err(errno(Errno::NOSPC)), 1));
}

/// Bytes of the first user cannot be written, so they stay in memory.
#[test]
fn user_at_its_share_of_released_bytes_leaves_room_for_another() {
    if !is_root() {
        return;
    }
    let Some((mount, files)) = mounted() else { return };
    let before = status(&mount).server;
    let (slots, most) = (before.slots, before.limits.of_user.used);
    assert!(most < slots && most > slots / 2, "{most} of {slots}");
    let mut one = as_user(ONE, || Raw::map(&files[0], Access::Write, slots, slots + 1)).unwrap();
    let mut two = as_user(TWO, || Raw::map(&files[1], Access::Write, 0, slots)).unwrap();
    let server = Pid::from_raw(mount.server() as i32);
    let limited = Rlimit { current: Some(slots * PAGE), maximum: None };
    let unlimited = prlimit(server, Resource::Fsize, limited).unwrap();
    // Not at once more than its share, although there is as much.
    one.acquire(0, most + 1, Access::Write);
    assert_eq!(one.part(1, run(0, most + 1), most as u32 + 1, false, &[run(0, 1)]), Err(errno(Errno::NOSPC)));
    assert_eq!(publish(&mut one, 2, 0, most), Ok(most));
    let has =
        |user: u32| status(&mount).users.iter().find(|status| status.user == u64::from(user)).map(|it| it.has.used);
    assert_eq!((has(ONE), has(TWO)), (Some(most), Some(0)));
    assert_eq!(publish(&mut one, 3, most, 1), Err(errno(Errno::NOSPC)), "the user is at its share");
    for id in 0..3 {
        assert_eq!(publish(&mut two, 10 + id, id * 100, 100), Ok(100));
    }
    assert!(has(ONE) == Some(most) && status(&mount).server.used >= most);
    prlimit(server, Resource::Fsize, unlimited).unwrap();
    assert_eq!(publish(&mut one, 4, most, 1), Ok(1), "what the user has is written first");
    files[0].sync_all().unwrap();
    assert_eq!((has(ONE), written(&one, slots..slots + most + 1)), (Some(0), most + 1));
    drop((one, files));
    eventually("a user without maps has nothing", || has(ONE).is_none());
    assert_eq!(mount.servers(), 1);
}

#[test]
fn maps_of_one_user_leave_room_for_another() {
    if !is_root() {
        return;
    }
    let Some((mount, files)) = mounted() else { return };
    // Connections are a sixteenth of these.
    mount.limit_descriptors(640);
    let limits = status(&mount).server.limits;
    assert_eq!((limits.connections, limits.of_user.connections), (40, 20));
    let map = |user, pages| as_user(user, || Raw::map(&files[0], Access::Read, 0, pages));
    let table = limits.of_user.mapped;
    assert_eq!(map(ONE, table + 1).err(), Some(errno(Errno::NOMEM)));
    let mut maps = vec![map(ONE, table).unwrap()];
    assert_eq!(map(ONE, 1).err(), Some(errno(Errno::NOMEM)));
    map(TWO, table).unwrap().acquire(0, 8, Access::Read);
    maps.clear();
    // Those that have just ended may be counted still.
    eventually("a user has half of the connections", || {
        maps.extend(map(ONE, 1));
        maps.len() == 20
    });
    assert_eq!(map(ONE, 1).err(), Some(errno(Errno::USERS)));
    let has_room = || map(TWO, 8).map(|mut map| map.acquire(0, 8, Access::Read));
    eventually("another user finds room", || has_room().is_ok());
    eventually("status has what the user has", || {
        let users = status(&mount).users;
        let of_one = users.iter().find(|status| status.user == u64::from(ONE)).unwrap();
        (of_one.has.connections, of_one.has.mapped) == (20, 20)
    });
}

/// Ends the flood, also if an assertion fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(false, SeqCst);
    }
}

/// Connections, maps, requests and garbage of one user, as fast as its threads can.
#[test]
fn flood_of_one_user_delays_no_other_for_ever_and_takes_few_descriptors() {
    const THREADS: usize = 4;
    const EPOCHS: u64 = 200;
    if !is_root() {
        return;
    }
    let Some((mount, files)) = mounted() else { return };
    mount.limit_descriptors(1600);
    let user_connections = status(&mount).server.limits.of_user.connections as usize;
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", mount.server())).map_or(0, Iterator::count);
    let mut two = as_user(TWO, || Raw::map(&files[1], Access::Write, 0, EPOCHS)).unwrap();
    let (before, go_on, maps) = (descriptors(), AtomicBool::new(true), AtomicUsize::new(0));
    let flood = |number: usize| {
        rustix::thread::set_thread_uid(Uid::from_raw(ONE)).unwrap();
        let path = raw::ticket(&files[0]).path().to_vec();
        let (mut kept, mut silent) = (Vec::new(), Vec::new());
        while go_on.load(SeqCst) {
            let ticket = raw::ticket(&files[0]);
            let (access, kind) = (Access::Write, MapKind::Replica);
            let hello = Request::Hello { ticket: ticket.ticket, access, first: 0, pages: 1 << 18, kind };
            if let Ok(map) = Raw::hello(&ticket, hello) {
                maps.fetch_add(1, SeqCst);
                kept.push(map);
            }
            for map in &mut kept {
                let all = Request::Acquire { first: 0, pages: 1 << 18, access, fetch: true, peers: NO_PEERS };
                // Answered or not, and then what no client sends: the connection ends.
                for request in [Request::Stats, all, Request::Filled] {
                    let _ = map.call(request);
                }
            }
            if kept.len() > 5 {
                kept.drain(..).for_each(|map| _ = map.send(&[0xff; 9]));
            }
            silent.push(raw::dial(&path));
            silent.drain(..silent.len().saturating_sub(10 + number));
        }
    };
    let flood = &flood;
    let most = with_deadline("releases beside a flood", || {
        std::thread::scope(|scope| {
            (0..THREADS).for_each(|number| drop(scope.spawn(move || flood(number))));
            let stop = Stop(&go_on);
            let mut most = 0;
            for page in 0..EPOCHS {
                assert_eq!(publish(&mut two, page + 1, page, 1), Ok(1));
                most = most.max(descriptors());
            }
            eventually("the flood makes more maps than it may have", || maps.load(SeqCst) > user_connections);
            drop(stop);
            most
        })
    });
    // Five of a map, two more during a release; and those that are refused at the moment.
    let allowed = before + user_connections * 7 + 100;
    assert!(most <= allowed, "{most} descriptors, {before} before");
    files[1].sync_all().unwrap();
    assert_eq!((written(&two, 0..EPOCHS), mount.servers()), (EPOCHS, 2));
}
