//! `examples/net/stories`: a language model server in a kernel of the emulated GPU, asked with plain HTTP.
//!
//! `stories/expected.txt` has what `examples/net/stories/train/reference.py` makes of the same prompts with PyTorch.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::path::Path;

use common::folder;
use common::net_example::{Example, build};
use serde_json::{Value, json};

/// Of the 200 that are expected.
const TOKENS: usize = 120;

fn model() -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/net/stories/model");
    folder.to_str().unwrap().to_owned()
}

/// Starts the server with more options. `None`, with a message, without a compiler.
fn start(dir: &Path, options: &[&str]) -> Option<Example> {
    let program = build("stories", "-O2", dir)?;
    Some(Example::start(&program, &[&["tcp://127.0.0.1:0", "--model", &model()], options].concat()))
}

fn post(body: &str) -> String {
    format!("POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {}\r\n\r\n{body}", body.len())
}

/// Reads one answer; its status and its body.
fn answer(stream: &mut TcpStream) -> (u16, String) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(byte(stream));
    }
    let head = String::from_utf8(head).unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    let mut body = Vec::new();
    if let Some(length) = length {
        body = bytes(stream, length.parse().unwrap());
    } else {
        assert!(head.contains("Transfer-Encoding: chunked"), "{head}");
        loop {
            let mut line = String::new();
            while !line.ends_with("\r\n") {
                line.push(char::from(byte(stream)));
            }
            let size = usize::from_str_radix(line.trim_end(), 16).unwrap();
            body.extend(bytes(stream, size));
            assert_eq!(bytes(stream, 2), b"\r\n");
            if size == 0 {
                break;
            }
        }
    }
    (status, String::from_utf8(body).unwrap())
}

fn byte(stream: &mut TcpStream) -> u8 {
    bytes(stream, 1)[0]
}

fn bytes(stream: &mut TcpStream, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// The texts of the events of a body, joined, and why it ended.
fn streamed(body: &str) -> (String, String) {
    let mut text = String::new();
    let mut reason = String::new();
    let events: Vec<_> = body.split_terminator("\n\n").collect();
    assert_eq!(events.last(), Some(&"data: [DONE]"), "{body}");
    for event in &events[..events.len() - 1] {
        let event: Value = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
        let choice = &event["choices"][0];
        text += choice["text"].as_str().unwrap();
        assert_eq!(reason, "", "an event after the last one");
        reason = choice["finish_reason"].as_str().unwrap_or_default().to_owned();
    }
    (text, reason)
}

/// Prompts, and what follows.
fn expected() -> Vec<(String, String)> {
    let text =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/stories/expected.txt")).unwrap();
    let pair = |line: &str| {
        let (prompt, rest) = line.split_once('|').unwrap();
        (prompt.to_owned(), rest.replace("\\n", "\n"))
    };
    text.lines().map(pair).collect()
}

#[test]
fn all_clients_get_the_tokens_that_pytorch_makes() {
    let dir = folder();
    // A block for itself, and two blocks that share the work; more clients than a tile has.
    for options in [["--blocks", "1", "--team", "1"], ["--blocks", "2", "--team", "2"]] {
        let Some(server) = start(dir.path(), &options) else { return };
        let expected = expected();
        let mut clients: Vec<_> = expected.iter().map(|_| server.connect_tcp()).collect();
        for (stream, (prompt, _)) in clients.iter_mut().zip(&expected) {
            let body = json!({"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": true});
            stream.write_all(post(&body.to_string()).as_bytes()).unwrap();
        }
        for (stream, (prompt, wanted)) in clients.iter_mut().zip(&expected) {
            let (status, body) = answer(stream);
            assert_eq!((status, streamed(&body).0.as_str()), (200, &wanted[..TOKENS]), "{prompt}");
        }
        let said = server.interrupt();
        assert!(said.contains(&format!("completions {}\n", expected.len())), "{said}");
    }
}

#[test]
fn answers_in_one_piece_are_those_in_events_and_connections_stay_open() {
    let dir = folder();
    let Some(server) = start(dir.path(), &[]) else { return };
    let mut stream = server.connect_tcp();
    let mut texts = Vec::new();
    let ask = |stream: bool, seed: u64| {
        post(
            &json!({"prompt": "Once upon a time", "max_tokens": 60, "temperature": 1, "seed": seed, "stream": stream})
                .to_string(),
        )
    };
    // All at once: each waits for the answer before it.
    stream.write_all((ask(true, 5) + &ask(false, 5) + &ask(false, 6)).as_bytes()).unwrap();
    let (text, reason) = streamed(&answer(&mut stream).1);
    let whole: [Value; 2] = [(); 2].map(|()| serde_json::from_str(&answer(&mut stream).1).unwrap());
    assert_eq!(whole[0]["choices"][0]["text"], text);
    assert_ne!(whole[1]["choices"][0]["text"], text, "another seed");
    assert_eq!(reason, "length");
    assert_eq!(whole[0]["usage"], json!({"prompt_tokens": 17, "completion_tokens": 60, "total_tokens": 77}));
    stream.write_all(b"GET / HTTP/1.1\r\nHost: test\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n").unwrap();
    let page = answer(&mut stream);
    assert!(page.0 == 200 && page.1.starts_with("<!doctype html>") && page.1.ends_with("</html>\n"), "{page:?}");
    let models: Value = serde_json::from_str(&answer(&mut stream).1).unwrap();
    assert_eq!(models["data"][0]["id"], "stories");
    // As it is, and in escapes: 2, 3 and 4 bytes of UTF-8, after the token that begins a story.
    for prompt in [r#""é€😀""#, r#""\u00e9\u20ac\ud83d\ude00""#] {
        stream
            .write_all(post(&format!(r#"{{"prompt": {prompt}, "max_tokens": 20, "temperature": 0}}"#)).as_bytes())
            .unwrap();
        let answer: Value = serde_json::from_str(&answer(&mut stream).1).unwrap();
        assert_eq!(answer["usage"]["prompt_tokens"], 10);
        texts.push(answer["choices"][0]["text"].clone());
    }
    assert_eq!(texts[0], texts[1]);
    // More requests than are answered between two steps.
    stream.write_all("GET /v1/models HTTP/1.1\r\nHost: test\r\n\r\n".repeat(30).as_bytes()).unwrap();
    for _ in 0..30 {
        assert_eq!(answer(&mut stream).0, 200);
    }
    // Token ids, of the same bytes.
    let ids: Vec<u8> = b"Once upon a time".to_vec();
    let by_ids = post(&json!({"prompt": ids, "max_tokens": 60, "temperature": 1, "seed": 5}).to_string());
    stream.write_all(by_ids.as_bytes()).unwrap();
    let by_ids: Value = serde_json::from_str(&answer(&mut stream).1).unwrap();
    assert_eq!(by_ids["choices"][0]["text"], text);
}

#[test]
fn requests_that_are_refused_get_a_sentence() {
    let dir = folder();
    let Some(server) = start(dir.path(), &[]) else { return };
    let long = "x".repeat(600);
    let cases = [
        (post("{"), 400, "JSON"),
        (post(r#"{"prompt": "a"} x"#), 400, "JSON"),
        (post(r#"{"prompt": "\ud800"}"#), 400, "JSON"),
        (post(r#"{"max_tokens": 5}"#), 200, ""),
        (post(r#"{"prompt": 5}"#), 400, "JSON"),
        (post(r#"{"prompt": [256]}"#), 400, "vocabulary"),
        (post(r#"{"prompt": "a", "max_tokens": 0}"#), 400, "max_tokens"),
        (post(r#"{"prompt": "a", "temperature": 3}"#), 400, "temperature"),
        (post(r#"{"prompt": "a", "n": 2}"#), 400, "n, best_of"),
        (post(r#"{"prompt": "a", "stop": "."}"#), 400, "stop"),
        (post(r#"{"prompt": "a", "echo": true}"#), 400, "echo"),
        (post(r#"{"prompt": "a", "echo": false, "stop": null, "top_p": 1, "max_tokens": 3}"#), 200, ""),
        (post(r#"{"prompt": ["a", "b"]}"#), 400, "two prompts"),
        (post(r#"{"prompt": "a", "prompt": "b"}"#), 400, "two prompts"),
        (post(r#"{"prompt": "a", "seed": 1e19}"#), 400, "seed"),
        (post(&json!({"prompt": long}).to_string()), 400, "longer"),
        ("GET /v1/completions HTTP/1.1\r\nHost: test\r\n\r\n".to_owned(), 405, "POST"),
        ("GET /other HTTP/1.1\r\nHost: test\r\n\r\n".to_owned(), 404, "/v1/completions"),
        ("POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: 99999\r\n\r\n".to_owned(), 413, "Large"),
        (format!("GET / HTTP/1.1\r\nHost: test\r\nLong: {}", "x".repeat(20000)), 431, "Large"),
        ("nonsense\r\n\r\n".to_owned(), 400, "Bad Request"),
    ];
    for (request, status, sentence) in cases {
        let mut stream = server.connect_tcp();
        // The server may have answered, and closed, before it has read all.
        let _ = stream.write_all(request.as_bytes());
        let (got, body) = answer(&mut stream);
        assert_eq!(got, status, "{request}: {body}");
        assert!(body.contains(sentence), "{request}: {body}");
    }
}

#[test]
fn clients_that_do_not_read_or_leave_do_not_hold_up_others() {
    let dir = folder();
    let Some(server) = start(dir.path(), &["--blocks", "1"]) else { return };
    let long = post(&json!({"prompt": "Once", "max_tokens": 60, "temperature": 1, "stream": true}).to_string());
    // More than there are slots: those that leave must give theirs back.
    for round in 0..24 {
        let mut stream = server.connect_tcp();
        stream.write_all(long.as_bytes()).unwrap();
        if round % 2 == 0 {
            byte(&mut stream);
        }
    }
    // Twenty answers of one connection that reads none.
    let mut silent = server.connect_tcp();
    silent.write_all(long.repeat(20).as_bytes()).unwrap();
    let mut stream = server.connect_tcp();
    stream.write_all(post(r#"{"prompt": "Once", "max_tokens": 20}"#).as_bytes()).unwrap();
    assert_eq!(answer(&mut stream).0, 200);
    // Half a request is no request, and no block waits for its rest.
    let mut half = server.connect_tcp();
    half.write_all(&long.as_bytes()[..long.len() - 5]).unwrap();
    stream.write_all(post(r#"{"prompt": "Once", "max_tokens": 20}"#).as_bytes()).unwrap();
    assert_eq!(answer(&mut stream).0, 200);
    half.write_all(&long.as_bytes()[long.len() - 5..]).unwrap();
    assert_eq!(answer(&mut half).0, 200);
    half.set_nonblocking(true).unwrap();
    assert_eq!(half.read(&mut [0]).map_err(|e| e.kind()), Err(ErrorKind::WouldBlock), "the connection stays open");
}
