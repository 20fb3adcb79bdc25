//! `spinio gaia`: one page cache over CPU and GPU memory, as a mount over a directory.
//!
//! ```text
//!   spinio gaia demo      ──> a mount, CPU programs and GPU kernels that write one file, a killed server
//!   spinio gaia mount DIR ──> supervisor (checks, mount) ──> spinio gaia server, replaced when it dies
//!   spinio gaia serve     ──> the daemon of leased files: no mount  <── spinio gaia cache FILE
//! ```
//!
//! The daemon (crates/gaiad) has no program of its own: supervisor and server are this program, started again.

mod cache;
mod demo;
mod explain;
mod held;
mod mount;
pub mod mounted;
mod mounted_files;
mod ready;
mod serve;
mod status;
mod top;

use clap::{Args, Subcommand};

use crate::exit::{self, Exit};

/// The subcommands.
#[derive(Debug, Args)]
pub struct Gaia {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show the purpose: CPU programs and GPU kernels of several processes update the same pages of a file
    #[command(after_help = exit::CODES)]
    Demo(demo::Demo),
    /// Mount GAIA over a directory: as root for all users, else for programs of this user
    #[command(after_help = exit::CODES)]
    Mount(mount::Mount),
    /// Unmount it, after all is written
    #[command(after_help = exit::CODES)]
    Umount(mount::Umount),
    /// Share local files in GPU memory between processes, read-only, without a mount
    #[command(after_help = exit::CODES)]
    Serve(serve::Serve),
    /// Put files into GPU memory, for programs that will map them without a mount; those of a mount into the page cache
    #[command(after_help = exit::CODES)]
    Cache(cache::Cache),
    /// Drop what the daemon of leased files holds and no program has mapped, of files or of all
    #[command(after_help = exit::CODES)]
    Drop(serve::Drop),
    /// Bring files of a mount to storage, with what GPU programs have released
    #[command(after_help = exit::CODES)]
    Sync(mounted_files::Sync),
    /// Show what mounts and the daemon of leased files hold: maps, released bytes, merges, shared chunks
    #[command(after_help = exit::CODES)]
    Status(status::Status),
    /// The same live: released bytes, merges, invalidations
    #[command(after_help = exit::CODES)]
    Top(top::Top),
    /// Show where the pages of a file of a mount are, and which programs have copies
    #[command(after_help = exit::CODES)]
    Explain(explain::Explain),
    /// The server process; only its supervisor can start it
    #[command(hide = true)]
    Server,
}

/// Runs the subcommand.
pub fn run(gaia: &Gaia) -> anyhow::Result<u8> {
    match &gaia.command {
        Command::Demo(demo) => demo::run(demo).map(|exit| exit as u8),
        Command::Mount(mount) => mount::mount(mount).map(|exit| exit as u8),
        Command::Umount(umount) => mount::umount(umount).map(|exit| exit as u8),
        Command::Serve(serve) => serve::run(serve).map(|exit| exit as u8),
        Command::Cache(cache) => cache::run(cache).map(|exit| exit as u8),
        Command::Drop(drop) => serve::drop_unused(drop).map(|exit| exit as u8),
        Command::Sync(sync) => mounted_files::sync(sync).map(|exit| exit as u8),
        Command::Status(status) => status::run(status).map(|exit| exit as u8),
        Command::Top(top) => top::run(top).map(|exit| exit as u8),
        Command::Explain(explain) => explain::run(explain).map(|exit| exit as u8),
        Command::Server => {
            let served = spinio_gaiad::server_role();
            Ok(if served == std::process::ExitCode::SUCCESS { Exit::Ok } else { Exit::Failed } as u8)
        }
    }
}
