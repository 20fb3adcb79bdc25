//! Limits of bytes and of descriptors.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use spinio_sys::linux::packets;
use spinio_testkit::{eventually, file, wait_unwritten};

use super::bench::{Bench, CHUNK, FILL_WITHIN, role};

fn daemon_with_descriptors(bench: &Bench, descriptors: u32) -> Command {
    let daemon = role("daemon 0", &bench.socket());
    let mut limited = Command::new("prlimit");
    limited.arg(format!("--nofile={descriptors}:{descriptors}")).arg("--");
    limited.arg(std::env::current_exe().unwrap()).args(daemon.get_args());
    limited.envs(daemon.get_envs().filter_map(|(name, value)| Some((name, value?)))).stdout(Stdio::piped());
    limited
}

/// They cost a thread and a descriptor each, whether or not anything is said.
#[test]
fn connections_that_say_nothing_count_for_their_user() {
    let mut bench = Bench::new(0);
    bench.kill();
    // An eighth of the descriptors for connections, half of them for one user: 10.
    bench.start_with(daemon_with_descriptors(&bench, 160));
    let bytes = file::bytes(0, CHUNK as usize, 18);
    let path = bench.file("weights", &bytes);
    let mut silent: Vec<OwnedFd> = (0..10).map(|_| packets::connect(&bench.socket()).unwrap()).collect();
    let too_many = format!("error {} ", Errno::USERS.raw_os_error());
    // A thread for each connection counts it: a client that comes at once may be counted before the last of them.
    eventually("one more is refused", || {
        bench.client().ask(&format!("map {} 0 {CHUNK}", path.display())).starts_with(&too_many)
    });
    // The daemon's own user may still ask how things are.
    eventually("no client has a file", || bench.status().files.is_empty());
    silent.pop();
    eventually("the place is free", || bench.client().ask(&format!("map {} 0 {CHUNK}", path.display())) == "ok");
}

#[test]
fn user_with_too_many_chunks_leaves_descriptors_for_others() {
    let mut bench = Bench::new(0);
    bench.kill();
    bench.start_with(daemon_with_descriptors(&bench, 160));
    // A quarter of the descriptors: 40 chunks.
    let large = bench.file("large", &[]);
    File::options().write(true).open(&large).unwrap().set_len(60 * CHUNK).unwrap();
    wait_unwritten(&large);
    let mut greedy = bench.client();
    assert_eq!(greedy.ask(&format!("map {} 0 {}", large.display(), 60 * CHUNK)), "ok");
    let refused = greedy.ask("acquire");
    assert!(refused.starts_with(&format!("error {} ", Errno::NFILE.raw_os_error())), "{refused}");
    assert_eq!(bench.status().files[0].chunks, 40);
    greedy.kill();
    bench.wait_for_maps(0);
    let bytes = file::bytes(0, CHUNK as usize, 16);
    let small = bench.file("small", &bytes);
    let mut other = bench.client();
    other.map(&small, bytes.len());
    other.has(&bytes);
}

#[test]
fn limit_drops_what_no_client_has_mapped_first() {
    let bench = Bench::new(4 * CHUNK);
    let (a, b, c) = (
        file::bytes(0, 2 * CHUNK as usize, 1),
        file::bytes(0, 2 * CHUNK as usize, 2),
        file::bytes(0, 3 * CHUNK as usize, 3),
    );
    let paths = [bench.file("a", &a), bench.file("b", &b), bench.file("c", &c)];
    let (mut one, mut two) = (bench.client(), bench.client());
    one.map(&paths[0], a.len());
    two.map(&paths[1], b.len());
    let mut three = bench.client();
    assert_eq!(three.ask(&format!("map {} 0 {}", paths[2].display(), c.len())), "ok");
    let refused = three.ask("acquire");
    assert!(refused.starts_with(&format!("error {} ", Errno::NOMEM.raw_os_error())), "{refused}");
    assert!(refused.contains("limit"), "{refused}");
    assert_eq!(one.ask("unmap"), "ok");
    bench.wait_for_maps(2);
    assert_eq!(three.ask("acquire").split(' ').next(), Some("error"), "one chunk is missing");
    assert_eq!(two.ask("unmap"), "ok");
    bench.wait_for_maps(1);
    assert_eq!(three.ask("acquire"), c.len().to_string());
    three.has(&c);
    assert!(bench.status().bytes <= 4 * CHUNK);
    assert_eq!(three.ask("unmap"), "ok");
    bench.wait_for_maps(0);
    let held = bench.status().bytes;
    assert!(held > 0);
    assert_eq!(spinio_gaiad::drop_unused(&bench.socket(), None).unwrap(), Some(held));
    assert_eq!(bench.status().files.len(), 0);
}

/// It takes too long, and another client that would fill its chunk too has no room for the chunk before it.
#[test]
fn slow_client_keeps_its_chunk_if_no_other_can_fill_it() {
    let mut bench = Bench::new(0);
    bench.kill();
    let mut command = role(&format!("daemon {}", 2 * CHUNK), &bench.socket());
    command.env(FILL_WITHIN, "1");
    bench.start_with(command);
    let bytes = file::bytes(0, 3 * CHUNK as usize, 17);
    let (path, gate) = (bench.file("weights", &bytes), bench.gate());
    let map = |first: u64, chunks: u64| format!("map {} {} {}", path.display(), first * CHUNK, chunks * CHUNK);
    let (mut slow, mut full, mut greedy) = (bench.client(), bench.client(), bench.client());
    assert_eq!(full.ask(&map(2, 1)), "ok");
    assert_eq!(full.ask("acquire"), CHUNK.to_string());
    slow.hold(&gate, &path, CHUNK, CHUNK);
    // It takes too long now.
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(greedy.ask(&map(0, 2)), "ok");
    let refused = greedy.ask("acquire");
    assert!(refused.starts_with(&format!("error {} ", Errno::NOMEM.raw_os_error())), "{refused}");
    std::fs::remove_file(gate).unwrap();
    assert_eq!(slow.answer(), CHUNK.to_string());
    assert_eq!(slow.bytes().0, CHUNK, "read once");
    slow.has(&bytes[CHUNK as usize..2 * CHUNK as usize]);
}
