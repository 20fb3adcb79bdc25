//! What `spinio net` reads: each socket has its transport, and the reason why it has that one.

use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{IntoRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::Value;
use spinio_device::registry;
use spinio_host::Settings;
use spinio_net::{Net, NetAddress, Options, Socket, SocketOptions};
use spinio_stats::{PublishedText, default_dirs, pid_of, published_text};
use spinio_sys::linux;

/// A text is written four times a second.
const PATIENCE: Duration = Duration::from_secs(120);
const IN: u16 = 1;

fn options() -> Options {
    Options { sockets: 64, connections: 16, ring_bytes: 4096, idle_us: 500, ..Options::default() }
}

fn open(options: Options) -> Net {
    Net::open(registry::emulated().unwrap(), options).unwrap()
}

/// A listening socket whose connections the proxy accepts, as a kernel would that waits for its event set.
fn listen(net: &Net, address: &str) -> NetAddress {
    let listener = net.listen(&NetAddress::parse(address).unwrap(), 8).unwrap();
    net.add(net.set().unwrap(), listener, IN).unwrap();
    net.address(listener).unwrap()
}

fn name(of: &str) -> String {
    format!("unix:@spinio-published-{of}-{}", std::process::id())
}

/// The texts of all nets of this process.
fn texts() -> Vec<Value> {
    let dirs = default_dirs(Settings::of_process().runtime_dir.as_deref(), linux::geteuid());
    let entries = dirs.iter().filter_map(|dir| std::fs::read_dir(dir).ok()).flatten().flatten();
    let own = entries.filter(|entry| pid_of(&entry.file_name().to_string_lossy(), "net") == Some(std::process::id()));
    own.filter_map(|entry| serde_json::from_str(published_text(&std::fs::read(entry.path()).ok()?)?).ok()).collect()
}

/// Waits until a socket with this local name, or for none with this number, says how its bytes go and why.
fn becomes(local: &str, number: Option<i32>, wanted: [&str; 2]) -> Value {
    let begun = Instant::now();
    loop {
        let texts = texts();
        let sockets = texts.iter().filter_map(|text| text["sockets"].as_array()).flatten();
        let of_it = |it: &&Value| match number {
            Some(number) => it["socket"] == number,
            None => it["local"] == local && it["state"] == "ESTAB",
        };
        let mut found = sockets.filter(of_it);
        if let Some(socket) = found.find(|it| it["transport"] == wanted[0] && it["why"] == wanted[1]) {
            assert!(socket["reason"].as_str().unwrap().len() > 10, "no sentence: {socket}");
            return socket.clone();
        }
        assert!(begun.elapsed() < PATIENCE, "{wanted:?} of {local} {number:?}: {texts:#?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Waits until some net has counted so many connections.
fn counts(name: &str, wanted: u64) {
    let begun = Instant::now();
    while !texts().iter().any(|text| text["connections"][name] == wanted) {
        assert!(begun.elapsed() < PATIENCE, "{name} is not {wanted}: {:#?}", texts());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Whether the texts are there; says if not.
fn publishes() -> bool {
    let settings = Settings::of_process();
    let dirs = default_dirs(settings.runtime_dir.as_deref(), linux::geteuid());
    let publishes = settings.stats.is_none() && PublishedText::create(&dirs, "published").is_some();
    if !publishes {
        println!("skipped: SPINIO_STATS is set, or no directory is private, so nothing is published");
    }
    publishes
}

#[test]
fn plain_sockets_keep_a_connection_with_linux_on_either_side() {
    if !publishes() {
        return;
    }
    let net = open(options());
    let address = listen(&net, "tcp://127.0.0.1:0");
    let place = address.to_string().strip_prefix("tcp://").unwrap().to_owned();
    let client = TcpStream::connect(&place).unwrap();
    let accepted = becomes(&place, None, ["kernel", "plain"]);
    assert_eq!(
        (&accepted["peer"], &accepted["peer_process"]),
        (&client.local_addr().unwrap().to_string().into(), &0.into())
    );
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = NetAddress::parse(&format!("tcp://{}", server.local_addr().unwrap())).unwrap();
    let connected = net.connect(&to).unwrap();
    becomes("", Some(connected), ["kernel", "plain"]);
    net.close().unwrap();
}

#[test]
fn connections_of_one_net_are_inside_until_its_rings_are_in_use() {
    if !publishes() {
        return;
    }
    // Half as many pairs of rings.
    let net = open(Options { connections: 8, ..options() });
    let address = listen(&net, &name("inside"));
    let clients: Vec<_> = (0..5).map(|_| net.connect(&address).unwrap()).collect();
    for client in &clients[..4] {
        becomes("", Some(*client), ["loopback", "inside"]);
    }
    becomes("", Some(clients[4]), ["kernel", "memory"]);
    counts("kept_by_memory", 1);
    net.close().unwrap();
}

#[test]
fn net_without_upgrades_says_so_on_both_sides() {
    if !publishes() {
        return;
    }
    let net = open(Options { no_upgrade: true, ..options() });
    let address = listen(&net, &name("off"));
    let client = net.connect(&address).unwrap();
    becomes("", Some(client), ["kernel", "setting"]);
    becomes(address.to_string().strip_prefix("unix:").unwrap(), None, ["kernel", "setting"]);
    net.close().unwrap();
}

#[test]
fn programs_and_other_nets_share_memory_until_none_is_left() {
    if !publishes() {
        return;
    }
    let net = open(Options { shared_connections: 1, ..options() });
    let address = listen(&net, &name("shared"));
    let local = address.to_string().strip_prefix("unix:").unwrap().to_owned();
    let program = Socket::connect(&address, SocketOptions::default()).unwrap();
    assert_eq!(program.transport().0, "shared");
    let accepted = becomes(&local, None, ["shared", "program"]);
    assert_eq!(accepted["peer_process"], std::process::id());
    let other = open(options());
    let kept = other.connect(&address).unwrap();
    becomes("", Some(kept), ["kernel", "granules"]);
    // The other side knows only that it asks for nothing any more.
    becomes(&local, None, ["kernel", "plain"]);
    other.close().unwrap();
    drop(program);
    net.close().unwrap();
}

#[test]
fn kernels_of_two_nets_name_the_process_of_the_other() {
    if !publishes() {
        return;
    }
    let (net, other) = (open(options()), open(options()));
    let address = listen(&net, &name("two"));
    let client = other.connect(&address).unwrap();
    let local = address.to_string().strip_prefix("unix:").unwrap().to_owned();
    // Where the emulated devices map each other's memory.
    for (local, number) in [("", Some(client)), (&local, None)] {
        assert_eq!(becomes(local, number, ["peer", "net"])["peer_process"], std::process::id());
    }
    other.close().unwrap();
    net.close().unwrap();
}

#[test]
fn sockets_of_the_program_stay_with_linux() {
    if !publishes() {
        return;
    }
    let net = open(options());
    let (stream, _peer) = UnixStream::pair().unwrap();
    let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
    for (fd, why) in [(OwnedFd::from(stream), "adopted"), (OwnedFd::from(datagrams), "type")] {
        match net.adopt(fd.into_raw_fd()) {
            Ok(number) => becomes("", Some(number), ["kernel", why]),
            Err(error) => return println!("skipped: this sandbox refuses pidfd_getfd ({error})"),
        };
    }
    net.close().unwrap();
}
