//! `GET /metrics`, and nothing else.
//!
//! A loop on a listening socket, one request at a time: a scraper connects every few seconds and requests one page. The
//! small HTTP libraries that would fit are no longer maintained, the others need a runtime. All that is needed of
//! HTTP/1.1 is a request line, an answer with its length, and `Connection: close`.
//!
//! A client that connects and sends nothing is disconnected after two seconds, a request is truncated at 8 KiB. There
//! is no encryption and no password: listen on 127.0.0.1, or use a reverse proxy that has both.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::output;

/// How long one client may take.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The most bytes of a request that are read.
const MAX_REQUEST: usize = 8 << 10;

/// Answers until the process is stopped.
pub fn serve(address: SocketAddr, page: &dyn Fn() -> anyhow::Result<String>) -> io::Result<()> {
    let listener = TcpListener::bind(address)?;
    output::note(&format!("spinio: http://{}/metrics\n", listener.local_addr()?));
    for client in listener.incoming().flatten() {
        // An error of a client is ignored.
        let _ = answer(client, page);
    }
    Ok(())
}

fn answer(mut client: TcpStream, page: &dyn Fn() -> anyhow::Result<String>) -> io::Result<()> {
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let request = read_head(&mut client)?;
    let line = request.split(|b| *b == b'\r' || *b == b'\n').next().unwrap_or_default();
    let mut words = line.split(|b| *b == b' ').filter(|w| !w.is_empty());
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let path = path.split(|b| *b == b'?').next().unwrap_or_default();
    let (status, body) = match (method, path) {
        (b"GET" | b"HEAD", b"/metrics" | b"/") => match page() {
            Ok(page) => ("200 OK", page),
            Err(e) => ("500 Internal Server Error", format!("{e:#}\n")),
        },
        (b"GET" | b"HEAD", _) => ("404 Not Found", "the page is /metrics\n".to_owned()),
        _ => ("405 Method Not Allowed", "GET /metrics\n".to_owned()),
    };
    let kind = if status.starts_with("200") {
        "text/plain; version=0.0.4; charset=utf-8"
    } else {
        "text/plain; charset=utf-8"
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    client.write_all(head.as_bytes())?;
    if method != b"HEAD" {
        client.write_all(body.as_bytes())?;
    }
    client.flush()
}

/// Up to the empty line.
fn read_head(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let begun = Instant::now();
    let mut head = Vec::new();
    let mut part = [0u8; 1024];
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        let left = CLIENT_TIMEOUT.saturating_sub(begun.elapsed());
        if left.is_zero() || head.len() > MAX_REQUEST {
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.set_read_timeout(Some(left))?;
        match client.read(&mut part)? {
            0 => break,
            n => head.extend_from_slice(&part[..n]),
        }
    }
    Ok(head)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(request: &[u8]) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || answer(listener.accept().unwrap().0, &|| Ok("the page\n".to_owned())));
        let mut client = TcpStream::connect(address).unwrap();
        let _ = client.write_all(request);
        let _ = client.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = client.read_to_string(&mut answer);
        let _ = server.join().unwrap();
        answer
    }

    #[test]
    fn only_metrics_page_is_served() {
        let page = ask(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(page.starts_with("HTTP/1.1 200 OK\r\n") && page.ends_with("\r\n\r\nthe page\n"), "{page}");
        assert!(page.contains("Content-Length: 9\r\n"), "{page}");
        assert!(ask(b"HEAD /metrics?x=1 HTTP/1.1\r\n\r\n").ends_with("\r\n\r\n"));
        assert!(ask(b"GET /etc/passwd HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404"));
        assert!(ask(b"POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405"));
    }

    #[test]
    fn invalid_request_is_answered_or_closed() {
        assert!(ask(b"").starts_with("HTTP/1.1 405"));
        assert!(ask(b"\xff\xfe\0\0").starts_with("HTTP/1.1 405"));
        assert_eq!(ask(&vec![b'x'; 64 << 10]), "");
    }
}
