//! `spinio gaia mount` and `umount`.
//!
//! In the background: the command starts itself again with `--foreground`, in a session of its own, and waits for one
//! line: empty once the mount is served, else the error.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::Context;
use clap::Args;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use spinio_gaiad::{Ended, Supervisor};

use super::ready;
use crate::exit::{self, Exit};
use crate::format;

#[derive(Debug, Args)]
pub struct Mount {
    /// The directory: its files stay where they are, and are used through the mount
    directory: PathBuf,
    /// The most memory for released bytes that are not in their files yet, such as 4G: a release for which there is no room
    /// waits until earlier ones are written [default: an eighth of the machine's memory, 64M to 16G]
    #[arg(long, value_name = "BYTES", value_parser = parse_dirty)]
    dirty: Option<u64>,
    /// Stay in the foreground, until unmounted or interrupted
    #[arg(long)]
    foreground: bool,
    /// Set by the command that starts the background process
    #[arg(long, hide = true, requires = "foreground")]
    background: bool,
    /// Unmount when standard input ends: for a program that starts this one, and may die
    #[arg(long, hide = true, requires = "foreground")]
    until_stdin_ends: bool,
}

#[derive(Debug, Args)]
pub struct Umount {
    /// Where GAIA is mounted
    directory: PathBuf,
}

/// What one message of a release may have, twice: a user of a mount for all users gets a part only.
const LEAST_DIRTY: u64 = 16 << 20;

fn parse_dirty(text: &str) -> Result<u64, String> {
    let dirty = spinio_io::settings::parse_bytes(text).filter(|bytes| *bytes >= LEAST_DIRTY);
    let dirty = dirty.ok_or_else(|| "expected a number of bytes, at least 16M, such as 4G".to_owned())?;
    let memory = spinio_sys::linux::total_memory();
    match dirty <= memory {
        true => Ok(dirty),
        false => Err(format!("this machine has {} of memory", format::bytes(memory))),
    }
}

pub fn mount(options: &Mount) -> anyhow::Result<Exit> {
    if options.foreground { supervise(options) } else { start(options) }
}

pub fn umount(options: &Umount) -> anyhow::Result<Exit> {
    spinio_gaiad::unmount(&options.directory)?;
    Ok(Exit::Ok)
}

/// Starts the background process.
fn start(options: &Mount) -> anyhow::Result<Exit> {
    let mut command = this_program()?;
    command.args(["gaia", "mount", "--foreground", "--background"]).arg(std::path::absolute(&options.directory)?);
    if let Some(dirty) = options.dirty {
        command.args(["--dirty", &dirty.to_string()]);
    }
    let mut child = command
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start the supervisor")?;
    let mut line = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut line)?;
    }
    match line.trim_end() {
        "mounted" => Ok(Exit::Ok),
        "" => Err(exit::error(Exit::Failed, "the supervisor ended without a mount")),
        error => Err(exit::error(Exit::Failed, error)),
    }
}

/// Is the supervisor.
fn supervise(options: &Mount) -> anyhow::Result<Exit> {
    let (stop, signalled) = UnixStream::pair()?;
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::low_level::pipe::register(signal, signalled.try_clone()?)?;
    }
    if options.background {
        let _ = rustix::process::setsid();
    }
    let pages_bytes = options.dirty.map_or_else(spinio_gaiad::default_pages_bytes, spinio_gaiad::pages_bytes_for);
    let supervisor = match Supervisor::mount(&options.directory, pages_bytes) {
        Ok(supervisor) => supervisor,
        Err(error) if options.background => {
            println!("{error}");
            return Ok(Exit::Failed);
        }
        Err(error) => return Err(error.into()),
    };
    supervisor.drop_privileges()?;
    if options.until_stdin_ends {
        let ended = stop_writer(&signalled)?;
        std::thread::Builder::new().name("stdin".to_owned()).spawn(ended)?;
    }
    if options.background {
        println!("mounted");
        std::io::stdout().flush()?;
        // A reader of the command's output must not wait for the daemon.
        rustix::stdio::dup2_stdout(std::fs::File::create("/dev/null")?)?;
        let log = std::fs::File::create(supervisor.log()).or_else(|_| std::fs::File::create("/dev/null"))?;
        rustix::stdio::dup2_stderr(log)?;
    } else {
        println!("mounted on {}; interrupt to unmount", supervisor.point().display());
        ready::notify();
    }
    let server = || {
        let mut server = this_program()?;
        server.args(["gaia", "server"]).current_dir("/");
        Ok(server)
    };
    let announce = |pid| {
        if !options.background {
            // What reads this may have ended.
            let _ = writeln!(std::io::stdout(), "server {pid}");
        }
    };
    match supervisor.run(server, announce, &stop)? {
        Ended::Unmounted => Ok(Exit::Ok),
        Ended::GaveUp => Err(exit::error(Exit::Failed, "servers died one after the other; the mount is gone")),
    }
}

/// A thread that waits for the end of standard input, and then does what a signal does.
pub(super) fn stop_writer(signalled: &UnixStream) -> std::io::Result<impl FnOnce() + Send + 'static> {
    let mut signalled = signalled.try_clone()?;
    Ok(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        let _ = signalled.write_all(b"\0");
    })
}

/// The file that this process executes, even if its path has another one now.
pub(super) fn this_program() -> std::io::Result<Command> {
    Ok(Command::new("/proc/self/exe"))
}
