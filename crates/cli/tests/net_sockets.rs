//! `spinio net` beside a kernel of the emulated GPU that serves a program with an ordinary socket.

mod common;

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use common::net_example::{Example, PATIENCE, build};
use common::{folder, spinio, stdout};
use serde_json::Value;

#[test]
fn sockets_are_shown_with_the_reason_of_their_transport_and_with_the_block_that_waits() {
    let dir = folder();
    let Some(program) = build("echo", "-O1", dir.path()) else { return };
    let server = Example::start(&program, &["tcp://127.0.0.1:0", "2"]);
    let mut client = server.connect_tcp();
    client.write_all(b"x").unwrap();
    client.read_exact(&mut [0]).unwrap();
    let (name, begun) = (client.local_addr().unwrap().to_string(), Instant::now());
    let (net, socket) = loop {
        let nets: Value = serde_json::from_str(&stdout(&spinio().args(["net", "--json"]).assert().success())).unwrap();
        let sockets = |net: &Value| net["sockets"].as_array().cloned().unwrap_or_default();
        let of_it = |net: &Value| sockets(net).into_iter().find(|socket| socket["peer"] == *name);
        let found = nets.as_array().into_iter().flatten().find_map(|net| Some((net.clone(), of_it(net)?)));
        // The block that has echoed waits for more.
        if let Some((net, socket)) = found
            && socket["waits"][0]["for"] == "recv"
            && socket["waits"][0]["seconds"].as_f64().unwrap() > 1.0
        {
            break (net, socket);
        }
        assert!(begun.elapsed() < PATIENCE, "no socket of {name} with a block that waits: {nets:#}");
        std::thread::sleep(Duration::from_millis(50));
    };
    assert_eq!([&socket["transport"], &socket["why"]], ["kernel", "plain"]);
    assert_eq!(net["connections"]["shared"], 0);
    let text = stdout(&spinio().args(["net", &net["process"].to_string()]).assert().success());
    let row = text.lines().find(|line| line.contains(&name)).unwrap_or_else(|| panic!("{name} is not in\n{text}"));
    assert!(row.contains(" plain "), "{text}");
    assert!(text.contains("\n  plain: the other end has a plain socket"), "{text}");
    assert!(text.contains(" in recv of socket "), "{text}");
    drop(client);
    assert!(server.interrupt().contains("1 connections"));
}
