//! The load generator of benches/gpunet/stories, with answers that a test writes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use crate::build::{build_dir, compile};
use crate::device::{has_cxx, workspace_path};

const EVENT: &str =
    "data: {\"id\":\"cmpl-0\",\"choices\":[{\"index\":0,\"text\":\"TEXT\",\"finish_reason\":REASON}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

fn event(text: &str, reason: &str) -> String {
    EVENT.replace("TEXT", text).replace("REASON", reason)
}

/// Three tokens, of which two look like other things.
fn tokens() -> String {
    [event("a", "null"), event("\\\"", "null"), event("data:", "null")].concat()
}

fn stream() -> String {
    tokens() + &event("", "\"length\"") + DONE
}

fn chunked(body: &str, size: usize) -> String {
    let chunks: String = body
        .as_bytes()
        .chunks(size)
        .map(|c| format!("{:x}\r\n{}\r\n", c.len(), str::from_utf8(c).expect("ASCII")))
        .collect();
    format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n")
}

/// Reads a request; false at the end of the connection.
fn request(from: &mut BufReader<TcpStream>) -> bool {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if from.read_line(&mut line).is_ok_and(|count| count > 0) {
            if let Some(count) = line.strip_prefix("Content-Length: ") {
                length = count.trim().parse().expect("a length");
            }
            if line == "\r\n" {
                return from.read_exact(&mut vec![0; length]).is_ok();
            }
        } else {
            return false;
        }
    }
}

/// Answers each request with these bytes, some at a time.
fn serve(listener: &TcpListener, answer: &str, piece: usize, closes: bool) {
    while let Ok((connection, _)) = listener.accept() {
        connection.set_nodelay(true).expect("TCP_NODELAY");
        let mut requests = BufReader::new(connection);
        while request(&mut requests) {
            for part in answer.as_bytes().chunks(piece) {
                // The client may have found an error, or be at its end.
                if requests.get_mut().write_all(part).is_err() {
                    break;
                }
            }
            if closes {
                break;
            }
        }
    }
}

fn program() -> &'static Path {
    static PROGRAM: OnceLock<()> = OnceLock::new();
    let out = Box::leak(build_dir().join("stories-load").into_boxed_path());
    PROGRAM.get_or_init(|| {
        let source = workspace_path("benches/gpunet/stories/load.cpp").display().to_string();
        compile("c++", out, &["-std=c++17", &source]);
    });
    out
}

/// What the load generator prints about such a server, and whether it was content. On a busy machine half a second may be too short
/// for an answer: then it has longer.
fn measured(answer: &str, piece: usize, closes: bool, is_enough: impl Fn(&str) -> bool) -> (String, bool) {
    let mut seen = (String::new(), false);
    for seconds in ["0.5", "5", "60"] {
        seen = measured_for(seconds, answer.to_owned(), piece, closes);
        if is_enough(&seen.0) {
            break;
        }
    }
    seen
}

fn measured_for(seconds: &str, answer: String, piece: usize, closes: bool) -> (String, bool) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("tcp://{}", listener.local_addr().expect("an address"));
    std::thread::spawn(move || serve(&listener, &answer, piece, closes));
    let mut run = Command::new("timeout");
    run.args(["--signal=KILL", "300"]).arg(program()).arg(&address);
    run.args("--clients 1 --threads 1 --warm-up 0 --max-tokens 3 --seconds".split(' ')).arg(seconds);
    let done = run.output().expect("timeout runs");
    (String::from_utf8(done.stdout).expect("ASCII"), done.status.success())
}

fn number(line: &str, name: &str) -> u64 {
    let after = line.split_once(&format!("\"{name}\": ")).unwrap_or_else(|| panic!("no {name} in {line}")).1;
    let digits = after.split([',', '}']).next().expect("a value");
    format!("{:.0}", digits.parse::<f64>().expect("a number")).parse().expect("not negative")
}

#[test]
fn load_generator_counts_tokens_of_every_kind_of_answer_and_piece() {
    if !has_cxx() {
        return;
    }
    let body = stream();
    let sized = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let unsized_answer = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}");
    for (answer, closes) in
        [(chunked(&body, 1000), false), (chunked(&body, 7), false), (sized, false), (unsized_answer, true)]
    {
        for piece in [1, 13, 10000] {
            let has_tokens = |line: &str| line.contains("\"tokens\"") && number(line, "tokens") > 0;
            let (line, content) = measured(&answer, piece, closes, has_tokens);
            assert!(content, "pieces of {piece} of {answer}: {line}");
            let (streams, tokens) = (number(&line, "streams"), number(&line, "tokens"));
            // The last stream may be cut off by the end of the measurement.
            assert!(
                tokens > 0 && (3 * streams..=3 * streams + 3).contains(&tokens),
                "pieces of {piece} of {answer}: {line}"
            );
        }
    }
}

#[test]
fn load_generator_reports_answers_that_are_wrong() {
    if !has_cxx() {
        return;
    }
    let without_done = tokens() + &event("", "\"length\"");
    for (answer, closes, error) in [
        ("HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n".to_string(), false, "a status that is not 200"),
        (chunked(&without_done, 99), false, "an answer without [DONE]"),
        (chunked(&(tokens() + DONE), 99), false, "a completion without finish_reason"),
        (
            chunked(&(event("", "\"length\"") + DONE), 99),
            false,
            "fewer tokens than max_tokens with finish_reason length",
        ),
        (chunked(&(event("a", "null") + &stream()), 99), false, "more tokens than max_tokens"),
        (chunked(&stream(), 99).replace("\r\n0\r\n\r\n", "\r\n"), true, "the connection ended within an answer"),
        (chunked(&stream(), 99).replace("63\r\n", "62\r\n"), true, "a chunk that is longer than its size"),
    ] {
        let expected = format!("\"first_error\": \"{error}\"");
        let (line, content) = measured(&answer, 10000, closes, |line| line.contains(&expected));
        assert!(!content && line.contains(&expected), "{answer}: {line}");
    }
}
