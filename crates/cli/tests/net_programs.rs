//! Kernels of the emulated GPU and programs that know nothing of them: curl, nc, socat and wrk as clients, memcached as a server.
//!
//! A program that is missing is a test that is skipped, and says so. All traffic is on loopback.

mod common;

use std::io::Write;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::folder;
use common::net_example::{Example, PATIENCE, build, compile};

/// Whether a program can be started; says so if not.
fn has(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).stdout(Stdio::null()).status();
    let has = found.is_ok_and(|status| status.success());
    if !has {
        eprintln!("skipped: {program} is not installed");
    }
    has
}

/// What a program says, given some bytes; it ends with success, and in time.
fn say(program: &str, arguments: &[&str], input: &[u8]) -> Vec<u8> {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE.as_secs().to_string()).arg(program).args(arguments).env_remove("LD_PRELOAD");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    // Its end is that of the standard input.
    let writer = std::thread::spawn(move || stdin.write_all(&input));
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&done.stderr));
    writer.join().unwrap().unwrap();
    done.stdout
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes).unwrap()
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// The server of pages, with a file.
fn http(dir: &Path) -> Option<(Example, String)> {
    let program = build("http", "-O1", dir)?;
    std::fs::write(dir.join("numbers"), content(3 << 20)).unwrap();
    let server = Example::start(&program, &["tcp://127.0.0.1:0", "4", "--files", dir.to_str().unwrap()]);
    let url = server.address.replace("tcp://", "http://");
    Some((server, url))
}

#[test]
fn curl_gets_pages_pictures_and_files() {
    let dir = folder();
    if !has("curl") {
        return;
    }
    let Some((server, url)) = http(dir.path()) else { return };
    let curl = |arguments: &[&str]| say("curl", &[&["-sS", "--noproxy", "*"], arguments].concat(), b"");
    let [page, picture, file] = ["/", "/mandelbrot.bmp", "/numbers"].map(|path| format!("{url}{path}"));
    assert!(text(curl(&[&page])).contains("sent by a GPU kernel"));
    assert!(curl(&[&picture]).starts_with(b"BM"));
    assert!(curl(&[&file]) == content(3 << 20));
    // Two requests of a connection, the head alone, and what is refused.
    let write = ["-o", "/dev/null", "-w", "%{http_code} %{num_connects} %{size_download}\n"];
    let twice = text(curl(&[&write[..], &[&file], &write[..2], &[&page]].concat()));
    assert_eq!(twice.lines().next(), Some("200 1 3145728"), "{twice}");
    assert!(twice.lines().nth(1).is_some_and(|line| line.starts_with("200 0 ")), "{twice}");
    assert!(text(curl(&["-I", &file])).contains("Content-Length: 3145728\r\n"));
    assert_eq!(text(curl(&[&write[..], &[&format!("{url}/none")]].concat())), "404 1 10\n");
    assert_eq!(text(curl(&[&write[..], &["-X", "DELETE", &page]].concat())).split(' ').next(), Some("405"));
    // Slower than the file comes.
    let slow = curl(&["--limit-rate", "1M", &file]);
    assert!(slow == content(3 << 20));
    assert!(server.interrupt().contains("requests 9\n"));
}

#[test]
fn wrk_keeps_many_connections_busy() {
    let dir = folder();
    if !has("wrk") {
        return;
    }
    let Some((server, url)) = http(dir.path()) else { return };
    // For longer, where the machine is so busy that it answers no request in two seconds.
    let requests = |duration| {
        let said = text(say("wrk", &["-t1", "-c16", duration, "--timeout", "60s", &url], b""));
        assert!(!said.contains("Non-2xx") && !said.contains("Socket errors"), "{said}");
        let requests = said.lines().find_map(|line| line.trim().split_once(" requests in ")).unwrap().0;
        requests.parse::<u64>().unwrap()
    };
    assert!(["-d2s", "-d20s", "-d60s"].into_iter().any(|duration| requests(duration) > 0));
    drop(server);
}

#[test]
fn nc_and_socat_get_back_what_they_send() {
    let dir = folder();
    let Some(program) = build("echo", "-O1", dir.path()) else { return };
    let bytes = content(300_000);
    let path = dir.path().join("echo.sock");
    let path = path.to_str().unwrap();
    let name = format!("spinio-programs-{}", std::process::id());
    let unix = if path.len() < 100 { Some(format!("unix://{path}")) } else { None };
    let addresses = [Some("tcp://127.0.0.1:0".to_owned()), unix, Some(format!("unix:@{name}"))];
    for address in addresses.into_iter().flatten() {
        let echo = Example::start(&program, &[&address, "2"]);
        let mut rounds = 0;
        if let Some(place) = echo.address.strip_prefix("tcp://") {
            let (host, port) = place.split_once(':').unwrap();
            if has("nc") {
                // The end of the input ends the stream.
                assert!(say("nc", &["-N", host, port], &bytes) == bytes);
                rounds += 1;
            }
            if has("socat") {
                assert!(say("socat", &["-t60", "-", &format!("TCP:{place}")], &bytes) == bytes);
                rounds += 1;
            }
        } else if let Some(place) = echo.address.strip_prefix("unix://") {
            if has("nc") {
                assert!(say("nc", &["-N", "-U", place], &bytes) == bytes);
                rounds += 1;
            }
        } else if has("socat") {
            assert!(say("socat", &["-t60", "-", &format!("ABSTRACT-CONNECT:{name}")], &bytes) == bytes);
            rounds += 1;
        }
        let said = echo.interrupt();
        assert_eq!(said, format!("{rounds} connections, {} bytes through Linux\n", rounds * bytes.len()));
    }
}

/// A server that is killed at the end.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn kernel_stores_and_loads_in_memcached() {
    let dir = folder();
    if !has("memcached") {
        return;
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let headers = root.join("device/include");
    let options = ["-std=c++17", "-O1", "-I", headers.to_str().unwrap()];
    let client = dir.path().join("net_memcached");
    let Some(client) = compile("c++", &options, "../../device/tests/net_memcached.cpp", &client) else { return };
    // Any free port, of which it tells.
    let ports = dir.path().join("ports");
    let mut command = Command::new("memcached");
    command.args(["-l", "127.0.0.1", "-p", "-1", "-U", "0", "-m", "64", "-t", "1"]).env_remove("LD_PRELOAD");
    if rustix::process::geteuid().is_root() {
        command.args(["-u", "root"]);
    }
    let mut server = Server(command.env("MEMCACHED_PORT_FILENAME", &ports).stdin(Stdio::null()).spawn().unwrap());
    let port = loop {
        let text = std::fs::read_to_string(&ports).unwrap_or_default();
        if let Some(port) = text.lines().find_map(|line| line.strip_prefix("TCP INET: ")) {
            break port.to_owned();
        }
        assert_eq!(server.0.try_wait().unwrap(), None, "memcached has ended");
        std::thread::sleep(Duration::from_millis(10));
    };
    let said = text(say(client.to_str().unwrap(), &[&format!("tcp://127.0.0.1:{port}")], b""));
    assert!(said.ends_with("200 values, 0 failures\n"), "{said}");
}
