//! `spinio gaia serve`: the daemon of leased files. And `spinio gaia drop`.
//!
//! In the background as `spinio gaia mount`: the command starts itself again, and waits for one line.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Stdio;

use anyhow::Context;
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use spinio_gaiad::Daemon;

use super::mount::{stop_writer, this_program};
use super::{mounted_files, ready};
use crate::exit::{self, Exit};
use crate::{format, output};

#[derive(Debug, Args)]
pub struct Serve {
    /// Stay in the foreground, until interrupted
    #[arg(long)]
    foreground: bool,
    /// The most memory of each GPU for each user, such as 40G: beyond it the least recently used chunks that no program
    /// has mapped are dropped [default: as much as the GPU has]
    #[arg(long, value_name = "BYTES", value_parser = parse_limit)]
    limit: Option<u64>,
    /// The socket [default: SPINIO_GAIA_SOCKET, else in /run/spinio/gaia for root, in $XDG_RUNTIME_DIR for others]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// End the daemon that serves; maps that programs have stay
    #[arg(long, conflicts_with_all = ["foreground", "limit"])]
    stop: bool,
    /// Set by the command that starts the background process
    #[arg(long, hide = true, requires = "foreground")]
    background: bool,
    /// End with standard input: for a program that starts this one, and may die
    #[arg(long, hide = true, requires = "foreground")]
    until_stdin_ends: bool,
}

#[derive(Debug, Args)]
pub struct Drop {
    /// Only these; files below a mount are written, and dropped from the page cache
    #[arg(value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The daemon's socket [default: as for serve]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

fn parse_limit(text: &str) -> Result<u64, String> {
    let limit = spinio_io::settings::parse_bytes(text).filter(|bytes| *bytes >= 2 << 20);
    limit.ok_or_else(|| "expected a number of bytes, at least 2M, such as 40G".into())
}

/// Where a daemon may be: the one that is named, or those that programs ask.
pub(super) fn sockets(named: Option<&PathBuf>) -> Vec<PathBuf> {
    if let Some(path) = named {
        return vec![path.clone()];
    }
    let settings = spinio_io::Settings::of_process();
    let (setting, runtime_dir) = (settings.gaia_socket.as_deref(), settings.runtime_dir.as_deref());
    let paths = spinio_gaiad::sockets(setting, rustix::process::geteuid().is_root(), runtime_dir);
    paths.into_iter().map(PathBuf::from).collect()
}

/// Where this user's daemon is.
fn own_socket(named: Option<&PathBuf>) -> anyhow::Result<PathBuf> {
    let first = sockets(named).into_iter().next().context("there is no socket")?;
    let of_root = first.as_os_str() == spinio_gaiad::ROOT_SOCKET;
    if named.is_none() && of_root && !rustix::process::geteuid().is_root() {
        let words = "XDG_RUNTIME_DIR is not set, so the daemon of this user has no place: --socket PATH names one, and \
                     SPINIO_GAIA_SOCKET names it to programs";
        return Err(exit::error(Exit::Usage, words));
    }
    Ok(std::path::absolute(first)?)
}

pub fn run(options: &Serve) -> anyhow::Result<Exit> {
    let socket = own_socket(options.socket.as_ref())?;
    if options.stop {
        return match spinio_gaiad::stop_daemon(&socket)? {
            true => Ok(Exit::Ok),
            false => Err(exit::error(Exit::Failed, format!("{}: no daemon serves here", socket.display()))),
        };
    }
    if options.foreground { serve(options, socket) } else { start(options, &socket) }
}

pub fn drop_unused(options: &Drop) -> anyhow::Result<Exit> {
    for path in &options.files {
        let (file, below_mount) = mounted_files::open(path)?;
        if below_mount {
            mounted_files::drop_pages(path, &file)?;
        } else {
            let bytes = format::bytes(drop_at(options, Some(&file))?);
            output::print(&format!("{}: dropped {bytes} that no program has mapped\n", path.display()))?;
        }
    }
    if options.files.is_empty() {
        let bytes = format::bytes(drop_at(options, None)?);
        output::print(&format!("dropped {bytes} of files that no program has mapped\n"))?;
    }
    Ok(Exit::Ok)
}

/// Asks the first daemon that there is.
fn drop_at(options: &Drop, file: Option<&File>) -> anyhow::Result<u64> {
    for socket in sockets(options.socket.as_ref()) {
        if let Some(bytes) = spinio_gaiad::drop_unused(&socket, file)? {
            return Ok(bytes);
        }
    }
    Err(exit::error(Exit::Failed, "no daemon for leased files is running: `spinio gaia serve` starts one"))
}

/// Starts the background process.
fn start(options: &Serve, socket: &PathBuf) -> anyhow::Result<Exit> {
    let mut command = this_program()?;
    command.args(["gaia", "serve", "--foreground", "--background", "--socket"]).arg(socket);
    if let Some(limit) = options.limit {
        command.args(["--limit", &limit.to_string()]);
    }
    let child = command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = child.context("cannot start the daemon")?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    match line.trim_end() {
        "serving" => Ok(Exit::Ok),
        "" => Err(exit::error(Exit::Failed, "the daemon ended at once")),
        error => Err(exit::error(Exit::Failed, error)),
    }
}

/// Is the daemon.
fn serve(options: &Serve, socket: PathBuf) -> anyhow::Result<Exit> {
    let (stop, signalled) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::low_level::pipe::register(signal, signalled.try_clone()?)?;
    }
    if options.background {
        let _ = rustix::process::setsid();
    }
    let daemon = match Daemon::bind(&socket, options.limit) {
        Ok(daemon) => daemon,
        Err(error) if options.background => {
            println!("{error}");
            return Ok(Exit::Failed);
        }
        Err(error) => return Err(error.into()),
    };
    daemon.drop_privileges()?;
    if options.until_stdin_ends {
        std::thread::Builder::new().name("stdin".to_owned()).spawn(stop_writer(&signalled)?)?;
    }
    if options.background {
        println!("serving");
        std::io::stdout().flush()?;
        // A reader of the command's output must not wait for the daemon.
        rustix::stdio::dup2_stdout(std::fs::File::create("/dev/null")?)?;
        rustix::stdio::dup2_stderr(std::fs::File::create("/dev/null")?)?;
    } else {
        println!("serving at {}; interrupt to end", socket.display());
        std::io::stdout().flush()?;
        ready::notify();
    }
    daemon.run(&stop)?;
    Ok(Exit::Ok)
}
