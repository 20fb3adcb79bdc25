//! `examples/net`: kernels of the emulated GPU, against this process's own sockets.
//!
//! `demo.rs` has the test of `http`, `net_stories.rs` that of `stories`.

mod common;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::Command;

use common::folder;
use common::net_example::{Example, PATIENCE, build, compile};

#[test]
fn echo_sends_back_what_it_receives() {
    let dir = folder();
    let Some(program) = build("echo", "-O1", dir.path()) else { return };
    let echo = Example::start(&program, &["tcp://127.0.0.1:0", "2"]);
    let (mut one, mut two) = (echo.connect_tcp(), echo.connect_tcp());
    for (peer, text) in [(&mut one, "small"), (&mut two, "hello\n")] {
        peer.write_all(text.as_bytes()).unwrap();
        let mut back = vec![0; text.len()];
        peer.read_exact(&mut back).unwrap();
        assert_eq!(back, text.as_bytes());
    }
    // A kernel waits in recv of the second connection.
    drop(one);
    assert_eq!(echo.interrupt(), "2 connections, 11 bytes through Linux\n");
}

#[test]
fn figure_5_adds_one_to_each_character() {
    let dir = folder();
    let Some(program) = build("figure5", "-O1", dir.path()) else { return };
    let server = Example::start(&program, &["tcp://127.0.0.1:0", "2"]);
    for _ in 0..3 {
        let mut peer = server.connect_tcp();
        peer.write_all(b"HAL\x1fhr\x1fG@K+\x1fd`bg\x1faxsd\x1foktr\x1fnmd-\t").unwrap();
        let mut back = String::new();
        peer.read_to_string(&mut back).unwrap();
        assert_eq!(back, "IBM is HAL, each byte plus one.\n");
    }
    assert_eq!(server.interrupt(), "3 connections, 96 bytes through Linux\n");
}

#[test]
fn client_talks_to_echo_through_memory_and_through_linux() {
    let dir = folder();
    let Some(program) = build("echo", "-O1", dir.path()) else { return };
    let Some(client) = compile("cc", &["-O1"], "client/client.c", &dir.path().join("client")) else { return };
    let echo = Example::start(&program, &["tcp://127.0.0.1:0", "2"]);
    for (upgrade, transport) in [("on", "shared: "), ("off", "kernel: ")] {
        let mut command = Command::new("timeout");
        command.arg(PATIENCE.as_secs().to_string()).arg(&client).args([&echo.address, "hello"]);
        let done = command.env_remove("LD_PRELOAD").env("SPINIO_NET_UPGRADE", upgrade).output().unwrap();
        let text = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "{}: {text}{}", done.status, String::from_utf8_lossy(&done.stderr));
        assert!(
            text.starts_with(transport) && text.contains("hello, 1000 times") && text.contains("in place"),
            "{text}"
        );
    }
    // Those of the connection that shares memory are seen by the kernel only.
    assert_eq!(echo.interrupt(), format!("2 connections, {} bytes through Linux\n", 5000 + (1 << 20)));
}

/// Block and round of a line of `log`, if it is whole.
fn parse(line: &str) -> Option<(u32, u64)> {
    let (block, rest) = line.strip_prefix("block ")?.split_once(", round ")?;
    let (round, rest) = rest.split_once(": ")?;
    let (inside, rest) = rest.split_once(" of ")?;
    let (all, pi) = rest.split_once(" points are in the circle, pi is about ")?;
    let (round, inside, all): (u64, u64, u64) = (round.parse().ok()?, inside.parse().ok()?, all.parse().ok()?);
    let right = all == round * 128 * 1024 && format!("{}.{:04}", inside * 4 / all, inside * 40000 / all % 10000) == pi;
    right.then_some((block.parse().ok()?, round))
}

#[test]
fn log_prints_whole_lines_of_all_blocks() {
    let dir = folder();
    let Some(program) = build("log", "-O1", dir.path()) else { return };
    let blocks = 6;
    let address = format!("unix:@spinio-net-log-{}", std::process::id());
    // No pause: all blocks send at once.
    let log = Example::start(&program, &[&address, &blocks.to_string(), "0"]);
    let look = || {
        let mut rounds = HashMap::<u32, Vec<u64>>::new();
        // The connection is closed while the kernel sends.
        for (count, line) in BufReader::new(log.connect_unix()).lines().enumerate() {
            let line = line.unwrap();
            let (block, round) = parse(&line).unwrap_or_else(|| panic!("torn: {line:?}"));
            rounds.entry(block).or_default().push(round);
            if count >= 1000 && rounds.len() == blocks && rounds.values().all(|of| of.len() >= 5) {
                break;
            }
        }
        rounds
    };
    let (first, second) = (look(), look());
    for rounds in [&first, &second] {
        assert_eq!(rounds.len(), blocks, "the stream ended early");
        let gap = rounds.values().find(|of| of.windows(2).any(|pair| pair[1] != pair[0] + 1));
        assert_eq!(gap, None, "a block's line is missing, or comes twice");
    }
    // The kernel went on computing between the two.
    assert!(second.iter().all(|(block, of)| of[0] > *first[block].last().unwrap()));
    // The third looks on until the net is stopped.
    let mut last = BufReader::new(log.connect_unix());
    let mut line = String::new();
    last.read_line(&mut line).unwrap();
    assert!(parse(line.trim_end()).is_some(), "{line:?}");
    let reader = std::thread::spawn(move || {
        let mut rest = Vec::new();
        last.read_to_end(&mut rest).unwrap();
    });
    let said = log.interrupt();
    assert!(said.starts_with("3 viewers, ") && said.ends_with(" bytes printed\n"), "{said}");
    reader.join().unwrap();
}
