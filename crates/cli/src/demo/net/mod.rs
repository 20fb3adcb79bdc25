//! `spinio demo net`: a web server that is one GPU kernel, asked with plain HTTP.
//!
//! ```text
//!   compile examples/net/http ──> start it ──> clients of this process: GET / , /mandelbrot.bmp and a file, over TCP
//!                                   │                  every answer is checked: status, length, picture, bytes
//!                                   └──> counters of the kernel and of the proxy ──> table
//! ```
//!
//! The kernel runs on the first CUDA GPU, if there are one and nvcc, else on the emulated GPU: the report says which. All
//! figures are measured: latencies by the clients, connections and requests by the kernel and the library's counters.
//!
//! Known flaw: clients and server share this machine's processors, so on a few of them latencies measure that.

mod client;
mod server;

use std::fmt::Write;

use anyhow::Context;
use clap::Args;

use self::client::{FILE, FILE_BYTES, Outcome, PICTURE_BYTES};
use self::server::{Counters, Server};
use crate::demo::cleanup;
use crate::exit::Exit;
use crate::{format, library, output};

/// What `spinio demo net` takes.
#[derive(Debug, Args)]
pub struct Net {
    /// Where to listen; port 0 is any free one
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    listen: std::net::SocketAddrV4,
    /// Clients at a time
    #[arg(long, value_name = "N", default_value = "4", value_parser = clap::value_parser!(u32).range(1..=64))]
    clients: u32,
    /// Pages, pictures and files that each client asks for
    #[arg(long, value_name = "N", default_value = "50", value_parser = clap::value_parser!(u32).range(1..))]
    requests: u32,
    /// Keep the server running until Ctrl-C
    #[arg(long)]
    serve: bool,
}

/// Runs it.
pub fn run(net: &Net) -> anyhow::Result<Exit> {
    let library = library::find()?;
    let work = tempfile::Builder::new().prefix("spinio-demo-net-").tempdir().context("Cannot make a directory")?;
    let _watch = cleanup::on_signal(vec![work.path().to_owned()]);
    let gpu = server::compile(work.path(), &library)?;
    let files = work.path().join("files");
    std::fs::create_dir(&files).and_then(|()| std::fs::write(files.join(FILE), client::file_content()))?;
    let server = Server::start(work.path(), &files, &net.listen.to_string(), 8)?;
    let address = server.address().to_owned();
    let clients: Vec<_> = (0..net.clients)
        .map(|_| {
            let (address, requests) = (address.clone(), net.requests);
            std::thread::spawn(move || client::run(&address, requests))
        })
        .collect();
    let mut all = Outcome::default();
    for client in clients {
        all.add(client.join().map_err(|_| anyhow::anyhow!("A client of the demo has panicked"))??);
    }
    let refused = client::refused_statuses(&address)?;
    let mut text = format!("A web server in one kernel, on {gpu}, at {address}\n\n") + &answers(&all, refused);
    if net.serve {
        let _ =
            write!(text, "\n  look at it: http://{address}/\n  ask it: curl -i http://{address}/\n  end it: Ctrl-C\n");
        output::print(&text)?;
        server.wait()?;
    } else {
        text += &counts(&server.stop()?);
        let again = format!("{} demo net --serve --listen 127.0.0.1:8080", output::command_name());
        let _ = write!(
            text,
            "\n  look at it: {again}\n  then: http://127.0.0.1:8080/, or curl -i http://127.0.0.1:8080/\n"
        );
        output::print(&text)?;
    }
    Ok(if all.wrong == 0 && refused == client::REFUSED { Exit::Ok } else { Exit::Different })
}

/// What the clients saw.
fn answers(all: &Outcome, refused: [u16; 4]) -> String {
    let mut text = String::new();
    let time = |nanos: u64| format::time(nanos as f64);
    let file = format!("GET /{FILE}");
    for (name, latencies) in
        [("GET /", &all.pages), ("GET /mandelbrot.bmp", &all.pictures), (file.as_str(), &all.files)]
    {
        let (p50, p99) = (time(latencies.percentile(50)), time(latencies.percentile(99)));
        let _ = writeln!(text, "  {name:<20} {:>6} answers   p50 {p50:>9}   p99 {p99:>9}", latencies.count());
    }
    let check = if all.wrong == 0 { "✓ every answer is right" } else { "✗ some answers are wrong" };
    let (size, file) = (format::bytes(PICTURE_BYTES as u64), format::bytes(FILE_BYTES as u64));
    let _ = writeln!(text, "  {check} ({} wrong); the kernel computes each picture, {size}", all.wrong);
    let _ = writeln!(text, "  the file, {file}, goes from the page cache to the socket by sendfile");
    let [malformed, unknown, long, outside] = refused;
    let _ = writeln!(
        text,
        "  malformed, unknown and too long requests got {malformed}, {unknown} and {long}, GET /.. {outside}"
    );
    text
}

/// What the kernel and the library counted.
fn counts(counters: &Counters) -> String {
    let of = |name| counters.get(name).copied().unwrap_or(0);
    let (requests, proxy_ns) = (of("requests"), of("proxy_us") * 1000);
    let time = |nanos: u64| format::time(nanos as f64);
    let each = time(proxy_ns.checked_div(requests).unwrap_or(0));
    format!(
        "  connections {}, requests {requests}, sent {}\n  processor time of the proxy {}, {each} a request\n",
        of("connections"),
        format::bytes(of("bytes_sent")),
        time(proxy_ns),
    )
}
