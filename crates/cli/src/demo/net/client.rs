//! Plain HTTP clients: they ask, check the answer, and take the time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

/// Bytes of the picture; http.cu has the same.
pub(super) const PICTURE_BYTES: usize = 54 + 320 * 3 * 240;
/// Name and bytes of the file.
pub(super) const FILE: &str = "numbers.bin";
pub(super) const FILE_BYTES: usize = 1 << 20;
/// The statuses of a malformed request, of one for an unknown path, of one with a head that is too long, and of a file outside
/// the directory.
pub(super) const REFUSED: [u16; 4] = [400, 404, 431, 404];
/// A deadline, so that a server which hangs is an error.
const DEADLINE: Duration = Duration::from_secs(60);

/// Durations in nanoseconds.
#[derive(Debug, Default)]
pub(super) struct Latencies(Vec<u64>);

impl Latencies {
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// The value that this percentage does not exceed.
    pub(super) fn percentile(&self, percent: usize) -> u64 {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        sorted.get((sorted.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0)
    }
}

/// What clients saw.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    pub(super) pages: Latencies,
    pub(super) pictures: Latencies,
    pub(super) files: Latencies,
    pub(super) wrong: usize,
}

impl Outcome {
    pub(super) fn add(&mut self, other: Outcome) {
        self.pages.0.extend(other.pages.0);
        self.pictures.0.extend(other.pictures.0);
        self.files.0.extend(other.files.0);
        self.wrong += other.wrong;
    }
}

struct Answer {
    status: u16,
    body: Vec<u8>,
}

fn connect(address: &str) -> anyhow::Result<TcpStream> {
    let stream = TcpStream::connect(address).with_context(|| format!("Cannot connect to {address}"))?;
    stream.set_read_timeout(Some(DEADLINE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Sends a request and reads the answer.
fn ask(stream: &mut TcpStream, request: &[u8]) -> anyhow::Result<Answer> {
    stream.write_all(request)?;
    let mut bytes = Vec::new();
    let mut part = [0; 65536];
    let end = loop {
        let got = stream.read(&mut part).context("The server did not answer")?;
        ensure!(got > 0, "The server closed the connection before its answer was complete");
        bytes.extend_from_slice(&part[..got]);
        if let Some(end) = bytes.windows(4).position(|w| w == b"\r\n\r\n") {
            break end + 4;
        }
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let status = head.split(' ').nth(1).and_then(|s| s.parse().ok()).context("The answer has no status")?;
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: ")).and_then(|n| n.parse().ok());
    let length: usize = length.context("The answer has no length")?;
    while bytes.len() < end + length {
        let got = stream.read(&mut part)?;
        ensure!(got > 0, "The server closed the connection within an answer");
        bytes.extend_from_slice(&part[..got]);
    }
    Ok(Answer { status, body: bytes.split_off(end) })
}

/// The bytes of the file.
pub(super) fn file_content() -> Vec<u8> {
    (0..FILE_BYTES as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

/// Asks for pages, pictures and the file, on one connection.
pub(super) fn run(address: &str, requests: u32) -> anyhow::Result<Outcome> {
    let mut stream = connect(address)?;
    let mut outcome = Outcome::default();
    let wanted = file_content();
    for _ in 0..requests {
        let begun = Instant::now();
        let page = ask(&mut stream, b"GET / HTTP/1.1\r\nHost: demo\r\n\r\n")?;
        outcome.pages.0.push(begun.elapsed().as_nanos() as u64);
        let text = String::from_utf8_lossy(&page.body);
        outcome.wrong += usize::from(page.status != 200 || !text.contains("sent by a GPU kernel"));
        let begun = Instant::now();
        let picture = ask(&mut stream, b"GET /mandelbrot.bmp HTTP/1.1\r\nHost: demo\r\n\r\n")?;
        outcome.pictures.0.push(begun.elapsed().as_nanos() as u64);
        // Not all of one colour: the middle of the picture is at the border of the set.
        let has_content = picture.body.get(54..).is_some_and(|pixels| pixels.iter().any(|b| *b != pixels[0]));
        let right = picture.status == 200 && picture.body.len() == PICTURE_BYTES && picture.body.starts_with(b"BM");
        outcome.wrong += usize::from(!right || !has_content);
        let begun = Instant::now();
        let file = ask(&mut stream, format!("GET /{FILE} HTTP/1.1\r\nHost: demo\r\n\r\n").as_bytes())?;
        outcome.files.0.push(begun.elapsed().as_nanos() as u64);
        outcome.wrong += usize::from(file.status != 200 || file.body != wanted);
    }
    Ok(outcome)
}

/// The statuses of requests that are to be refused.
pub(super) fn refused_statuses(address: &str) -> anyhow::Result<[u16; 4]> {
    let long = format!("GET / HTTP/1.1\r\nHost: demo\r\nLong: {}", "x".repeat(4096));
    let requests: [&[u8]; 4] = [
        b"GET no-slash HTTP/1.1\r\n\r\n",
        b"GET /unknown HTTP/1.1\r\nHost: demo\r\n\r\n",
        long.as_bytes(),
        b"GET /../http HTTP/1.1\r\nHost: demo\r\n\r\n",
    ];
    let mut statuses = [0; 4];
    for (status, request) in statuses.iter_mut().zip(requests) {
        *status = ask(&mut connect(address)?, request)?.status;
    }
    Ok(statuses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let latencies = Latencies((1..=200).rev().collect());
        assert_eq!((latencies.percentile(50), latencies.percentile(99)), (100, 198));
        assert_eq!(Latencies::default().percentile(99), 0);
    }
}
