//! Clients that the library would never be: what they ask for costs them, and no other client.

mod common;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::io::Errno;
use spinio_pagecache::messages::{self, Access, MapKind, NO_PEERS, Reply, Request, Run, STAGE};
use spinio_testkit::deadline::TIMEOUT;

use crate::common::TestMount;
use crate::common::raw::{self, Raw};

const PAGE: u64 = 4096;
/// A server may need this much memory, in KiB, whatever a client asks for.
const MODERATE: u64 = 256 << 10;
const GIB: u64 = 1 << 30;

#[test]
fn server_role() {
    common::server_role();
}

fn mount_with(len: u64) -> Option<(TestMount, File)> {
    let mount = TestMount::new(|dir| File::create(dir.join("file")).unwrap().set_len(len).unwrap())?;
    let file = open(&mount.dir.join("file"));
    Some((mount, file))
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

fn errno(error: Errno) -> u32 {
    error.raw_os_error() as u32
}

/// The most memory that the server had, in KiB.
fn peak_memory(mount: &TestMount) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", mount.server())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

fn run(first: u64, count: u64) -> Run {
    Run { first, count: count as u32 }
}

/// More single pages than one message lists, and one of the first is overwritten while it is fetched: it comes again at
/// the end, out of order, and counts only after it was confirmed once more.
#[test]
fn page_that_comes_again_out_of_order_is_confirmed_before_it_counts() {
    let pairs = messages::MAX_RUNS as u64 + 6;
    let Some((_mount, file)) = mount_with(pairs * 2 * PAGE) else { return };
    let mut client = Raw::map(&file, Access::Write, 0, pairs * 2).unwrap();
    (0..pairs).for_each(|pair| client.acquire(pair * 2 + 1, 1, Access::Write));
    let overwrite = |byte: u8| {
        file.write_all_at(&[byte], 10).unwrap();
        file.sync_data().unwrap();
    };
    let acquire = Request::Acquire { first: 0, pages: pairs * 2, access: Access::Write, fetch: true, peers: NO_PEERS };
    let mut seen = client.fills(acquire);
    assert_eq!(seen[0].run, run(0, 1));
    overwrite(1);
    let mut again = 0;
    loop {
        seen = client.fills(Request::Filled);
        if seen.is_empty() {
            break;
        }
        if seen.iter().any(|fill| fill.run.first == 0) {
            again += 1;
            if again == 1 {
                overwrite(2);
            }
        }
    }
    assert_eq!(again, 2, "page 0 was overwritten twice while it was fetched");
}

#[test]
fn release_of_more_than_fits_is_refused_and_copies_nothing() {
    let Some((mount, file)) = mount_with(GIB) else { return };
    let pages = GIB / PAGE;
    let mut client = Raw::map(&file, Access::Write, 0, pages).unwrap();
    client.acquire(0, pages, Access::Write);
    let first = [run(0, STAGE.into())];
    assert_eq!(client.part(1, run(0, pages), pages as u32, false, &first), Err(errno(Errno::NOSPC)));
    // The epoch goes on.
    client.stage(0, &[7; PAGE as usize]);
    assert_eq!(client.release(2, run(0, pages), &[run(5, 1)]), Ok(1));
    let mut byte = [0];
    file.read_exact_at(&mut byte, 5 * PAGE).unwrap();
    assert_eq!(byte, [7]);
    assert!(peak_memory(&mount) < MODERATE, "{} KiB", peak_memory(&mount));
}

/// A release takes the memory for all of its pages at its first part, so a client could keep it.
#[test]
fn client_that_stops_in_a_release_keeps_no_memory_from_others() {
    let Some((mount, file)) = mount_with(GIB) else { return };
    let slots = spinio_gaiad::status(&mount.dir).unwrap().server.limits.of_user.used as u32;
    let pages = GIB / PAGE;
    let mut stopped = Raw::map(&file, Access::Write, 0, pages).unwrap();
    let mut good = Raw::map(&file, Access::Write, 0, pages).unwrap();
    for client in [&mut stopped, &mut good] {
        client.acquire(0, pages, Access::Write);
        client.stage(0, &[7; PAGE as usize]);
    }
    assert_eq!(stopped.part(1, run(0, pages), slots - 10, false, &[run(0, 1)]), Ok(0));
    // A small one finds what the other has not taken yet.
    assert_eq!(good.release(2, run(0, 8), &[run(0, 1)]), Ok(1));
    // A large one waits for the other, which is forgotten.
    assert_eq!(good.part(3, run(8, pages - 8), slots / 2, false, &[run(8, 1)]), Ok(0));
    assert_eq!(good.release(3, run(8, pages - 8), &[run(9, 1)]), Ok(2));
    assert_eq!(stopped.release(1, run(0, pages), &[run(1, 1)]), Err(errno(Errno::TIMEDOUT)));
    let mut bytes = [0; 2];
    file.read_exact_at(&mut bytes[..1], 8 * PAGE).unwrap();
    file.read_exact_at(&mut bytes[1..], PAGE).unwrap();
    assert_eq!((bytes, mount.servers()), ([7, 0], 1));
}

#[test]
fn file_that_is_cut_between_the_parts_of_a_release_has_no_bytes_of_it() {
    let Some((mount, file)) = mount_with(16 * PAGE) else { return };
    let mut client = Raw::map(&file, Access::Write, 0, 16).unwrap();
    client.acquire(0, 16, Access::Write);
    client.stage(0, &[7; PAGE as usize]);
    assert_eq!(client.part(1, run(0, 16), 2, false, &[run(8, 1)]), Ok(0));
    file.set_len(0).unwrap();
    client.stage(0, &[7; PAGE as usize]);
    assert_eq!(client.release(1, run(0, 16), &[run(9, 1)]), Ok(0));
    assert_eq!((file.metadata().unwrap().len(), mount.servers()), (0, 1));
}

/// Messages that come in time, but do not end the release.
#[test]
fn client_that_drags_a_release_on_keeps_no_memory_from_others() {
    let Some((mount, file)) = mount_with(GIB) else { return };
    let slots = spinio_gaiad::status(&mount.dir).unwrap().server.limits.of_user.used as u32;
    let pages = GIB / PAGE;
    let mut slow = Raw::map(&file, Access::Write, 0, pages).unwrap();
    slow.acquire(0, pages, Access::Write);
    assert_eq!(slow.part(1, run(0, pages), slots, false, &[run(0, 1)]), Ok(0));
    // Another request ends it.
    assert!(matches!(slow.call(Request::Stats), Some(Reply::Stats(_))));
    let mut good = Raw::map(&file, Access::Write, 0, pages).unwrap();
    good.acquire(0, pages, Access::Write);
    assert_eq!(good.part(2, run(0, pages), slots / 2, false, &[]), Ok(0));
    assert_eq!(good.release(2, run(0, pages), &[]), Ok(0));
    // More than it has said.
    assert_eq!(slow.part(3, run(0, pages), 2, false, &[run(0, 3)]), Err(errno(Errno::INVAL)));
    // A part a second, and a page each.
    let mut parts = 0;
    let refused = loop {
        match slow.part(4, run(0, pages), slots, false, &[run(parts, 1)]) {
            Ok(_) => parts += 1,
            Err(error) => break error,
        }
        assert!(parts < 60, "it goes on");
        std::thread::sleep(std::time::Duration::from_secs(1));
    };
    assert_eq!((refused, mount.servers()), (errno(Errno::TIMEDOUT), 1));
    // The epoch goes on.
    slow.stage(0, &[7; PAGE as usize]);
    assert_eq!(slow.release(5, run(0, pages), &[run(0, 1)]), Ok(1));
}

#[test]
fn pages_past_the_end_are_released_without_a_copy() {
    let Some((mount, file)) = mount_with(PAGE + 10) else { return };
    let pages = GIB / PAGE;
    let mut client = Raw::map(&file, Access::Write, 0, pages).unwrap();
    client.acquire(0, pages, Access::Write);
    client.stage(0, &[7; 3 * PAGE as usize]);
    assert_eq!(client.part(1, run(0, pages), u32::MAX, false, &[run(0, 2000)]), Ok(0));
    assert_eq!(client.release(1, run(0, pages), &[run(2000, STAGE.into())]), Ok(2));
    assert_eq!(file.metadata().unwrap().len(), PAGE + 10);
    // What the client has there is not what the file has.
    let first =
        client.fills(Request::Acquire { first: 2, pages: 1, access: Access::Read, fetch: true, peers: NO_PEERS });
    assert_eq!(first.iter().map(|fill| fill.run).collect::<Vec<_>>(), [run(2, 1)]);
    assert!(peak_memory(&mount) < MODERATE, "{} KiB", peak_memory(&mount));
}

#[test]
fn truncation_below_a_large_epoch_needs_little_memory() {
    // Once of pages that the file has, as holes, and once of pages past its end.
    for len in [GIB, PAGE] {
        let Some((mount, file)) = mount_with(len) else { return };
        let pages = GIB / PAGE;
        let mut client = Raw::map(&file, Access::Write, 0, pages).unwrap();
        client.acquire(0, pages, Access::Write);
        file.set_len(10).unwrap();
        assert!(peak_memory(&mount) < MODERATE, "{len}: {} KiB", peak_memory(&mount));
        client.stage(0, &[7; PAGE as usize]);
        assert_eq!(client.release(1, run(0, pages), &[run(0, 1)]), Ok(1));
        let mut bytes = [0; 20];
        assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 10);
        assert_eq!(bytes[..10], [7; 10]);
    }
}

#[test]
fn map_whose_table_would_not_fit_is_refused() {
    let Some((_mount, file)) = mount_with(PAGE) else { return };
    assert_eq!(Raw::map(&file, Access::Read, 0, messages::MAX_PAGES).err(), Some(errno(Errno::NOMEM)));
    let mut client = Raw::map(&file, Access::Read, messages::MAX_PAGES - 2, 2).unwrap();
    client.acquire(0, 2, Access::Read);
}

/// Nothing that is no chunk is lent, and a READ is right whatever was tried.
#[test]
fn what_is_no_chunk_is_not_lent() {
    let Some((mount, file)) = mount_with(600 * PAGE) else { return };
    let mut client = Raw::map(&file, Access::Read, 0, 600).unwrap();
    client.acquire(0, 600, Access::Read);
    let lend = |first, pages, bytes| Request::Lend { first, pages, bytes, device: *b"spinio-emu\0\0\0\0\0\0" };
    let memory = |len: u64| {
        let file = rustix::fs::memfd_create("chunk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, len).unwrap();
        file
    };
    let refused = |reply: Option<Reply<'_>>| matches!(reply, Some(Reply::Failed { .. }));
    let whole = 512 * PAGE;
    // Without a descriptor, past the map, shorter than its pages, and a memory file that can shrink.
    assert!(refused(client.call(lend(0, 512, whole))));
    assert!(refused(client.call_with(lend(512, 512, whole), &[memory(whole)])));
    assert!(refused(client.call_with(lend(0, 512, PAGE), &[memory(whole)])));
    assert!(refused(client.call_with(lend(0, 512, whole), &[memory(whole)])));
    let unknown = Request::Lend { first: 0, pages: 512, bytes: whole, device: [7; 16] };
    assert!(refused(client.call_with(unknown, &[memory(whole)])));
    // Requests that need none: each is closed.
    let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", mount.server())).unwrap().count();
    let before = descriptors();
    for _ in 0..20 {
        let several = [memory(PAGE), memory(PAGE), memory(PAGE)];
        if client.call_with(Request::Stats, &several).is_none() {
            client = Raw::map(&file, Access::Read, 0, 600).unwrap();
        }
    }
    assert!(descriptors() < before + 20, "{before}, then {}", descriptors());
    let mut byte = [1];
    file.read_exact_at(&mut byte, 5 * PAGE).unwrap();
    assert_eq!((byte, mount.servers()), ([0], 1));
}

#[test]
fn tickets_are_used_once_and_not_guessed() {
    let Some((_mount, file)) = mount_with(PAGE) else { return };
    let ticket = raw::ticket(&file);
    let hello =
        Request::Hello { ticket: ticket.ticket, access: Access::Write, first: 0, pages: 1, kind: MapKind::Replica };
    let _client = Raw::hello(&ticket, hello).unwrap();
    assert_eq!(Raw::hello(&ticket, hello).err(), Some(errno(Errno::STALE)));
    let forged = Request::Hello { ticket: [1; 16], access: Access::Write, first: 0, pages: 1, kind: MapKind::Replica };
    assert_eq!(Raw::hello(&ticket, forged).err(), Some(errno(Errno::STALE)));
    // A ticket of a descriptor for reading makes no map for writing, and is gone then.
    let reader = File::open(file_path(&_mount)).unwrap();
    let ticket = raw::ticket(&reader);
    let hello =
        Request::Hello { ticket: ticket.ticket, access: Access::Write, first: 0, pages: 1, kind: MapKind::Replica };
    assert_eq!(Raw::hello(&ticket, hello).err(), Some(errno(Errno::ACCESS)));
    assert_eq!(Raw::hello(&ticket, hello).err(), Some(errno(Errno::STALE)));
}

fn file_path(mount: &TestMount) -> std::path::PathBuf {
    mount.dir.join("file")
}

#[test]
fn wrong_messages_end_or_fail_their_own_connection_only() {
    let Some((mount, file)) = mount_with(4 * PAGE) else { return };
    let mut good = Raw::map(&file, Access::Write, 0, 4).unwrap();
    good.acquire(0, 4, Access::Write);
    let path = raw::ticket(&file).path().to_vec();
    for bytes in [&[0u8; 1][..], &[0xff; 8], &[0; messages::MAX_MESSAGE + 1], &[1, 0, 1, 0, 0, 0, 0, 0]] {
        let socket = raw::dial(&path);
        raw::send(&socket, bytes);
        let mut reply = [0; messages::MAX_MESSAGE];
        let got = rustix::io::read(&socket, &mut reply).unwrap_or(0);
        let errno = match messages::parse_reply(&reply[..got]) {
            Ok(Reply::Failed { errno }) => Some(errno),
            other => (got > 0).then(|| panic!("{other:?}")),
        };
        // A client of another version learns ours.
        let is_message = bytes.len() <= messages::MAX_MESSAGE;
        assert_eq!(errno, is_message.then_some(Errno::PROTO.raw_os_error() as u32), "{:?}", &bytes[..1]);
        assert_eq!(rustix::io::read(&socket, &mut reply).unwrap_or(0), 0, "{:?}", &bytes[..1]);
    }
    let write = |client: &mut Raw, request| matches!(client.call(request), Some(Reply::Failed { .. }) | None);
    let mut client = Raw::map(&file, Access::Read, 1, 2).unwrap();
    assert!(write(
        &mut client,
        Request::Acquire { first: 0, pages: 3, access: Access::Read, fetch: true, peers: NO_PEERS }
    ));
    assert!(write(
        &mut client,
        Request::Acquire { first: 0, pages: 2, access: Access::Write, fetch: true, peers: NO_PEERS }
    ));
    assert!(client.release(1, run(0, 1), &[]).is_err());
    let mut client = Raw::map(&file, Access::Write, 1, 2).unwrap();
    assert!(client.release(1, run(0, 3), &[]).is_err(), "outside the map");
    let mut client = Raw::map(&file, Access::Write, 1, 2).unwrap();
    assert!(client.release(1, run(0, 1), &[run(0, 1)]).is_err(), "not acquired");
    let mut client = Raw::map(&file, Access::Write, 1, 2).unwrap();
    client.acquire(0, 1, Access::Write);
    assert!(client.release(1, run(0, 1), &[run(1, 1)]).is_err(), "outside the release");
    let mut client = Raw::map(&file, Access::Write, 1, 2).unwrap();
    assert!(!matches!(client.call(Request::Filled), Some(Reply::Failed { .. })), "nothing was asked for");
    // One that stops between the messages of a release, and one between those of an acquire.
    client.acquire(0, 2, Access::Write);
    assert_eq!(client.part(1, run(0, 2), 2, false, &[run(0, 1)]), Ok(0));
    let mut waits = Raw::map(&file, Access::Write, 0, 4).unwrap();
    waits.fills(Request::Acquire { first: 0, pages: 4, access: Access::Write, fetch: true, peers: NO_PEERS });
    good.stage(0, &[9; PAGE as usize]);
    assert_eq!(good.release(7, run(0, 4), &[run(1, 1)]), Ok(1));
    let mut byte = [0];
    file.read_exact_at(&mut byte, PAGE).unwrap();
    assert_eq!((byte, mount.servers()), ([9], 1));
}

/// A client may take a lease on the descriptor of the file below the mount, which it gets to read from. Who then opens
/// the file for writing waits for the client, for 45 s; a handler must not.
#[test]
fn leased_file_below_the_mount_stalls_no_handler() {
    // A busy machine may take so long for another file.
    assert!((0..3).any(|_| is_another_file_made_while_a_lease_holds()));
}

/// True too where that cannot be seen.
fn is_another_file_made_while_a_lease_holds() -> bool {
    // It must not be open for writing, and the server keeps descriptors.
    let fill = |dir: &Path| File::create(dir.join("file")).unwrap().set_len(PAGE).unwrap();
    let Some(mount) = TestMount::new(fill) else { return true };
    let path = file_path(&mount);
    let reader = File::open(&path).unwrap();
    let client = Raw::map(&reader, Access::Read, 0, 1).unwrap();
    // A lease belongs to the open file, so this process has it when the other one has ended.
    let text = "import fcntl; fcntl.fcntl(0, fcntl.F_SETLEASE, fcntl.F_RDLCK)";
    let mut lease = std::process::Command::new("python3");
    match lease.args(["-c", text]).stdin(client.backing.try_clone().unwrap()).status() {
        Ok(status) if status.success() => {}
        other => {
            eprintln!("skipped: no lease here: {other:?}");
            return true;
        }
    }
    let begun = std::time::Instant::now();
    let (sender, opened) = std::sync::mpsc::channel();
    for _ in 0..16 {
        let (path, sender) = (path.clone(), sender.clone());
        std::thread::spawn(move || {
            let opened = OpenOptions::new().write(true).open(&path).map(drop);
            let _ = sender.send(opened.map_err(|e| e.raw_os_error()));
        });
    }
    // Another file, by whatever handler is left.
    let (sender, made) = std::sync::mpsc::channel();
    let dir = mount.dir.clone();
    std::thread::spawn(move || sender.send(File::create(dir.join("other")).map(drop)));
    let other = made.recv_timeout(TIMEOUT);
    let is_made_in_time = begun.elapsed() < std::time::Duration::from_secs(40);
    drop(client);
    assert!(matches!(other, Ok(Ok(()))), "{other:?}");
    for _ in 0..16 {
        let opened = opened.recv_timeout(TIMEOUT).unwrap();
        assert!(matches!(opened, Ok(()) | Err(Some(11))), "{opened:?}");
    }
    is_made_in_time
}
