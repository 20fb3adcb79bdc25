//! `spinio gaia cache`: files into the memory of a GPU before the programs that will map them start.
//!
//! It maps each file as such a program does, and ends: the daemon of leased files keeps the chunks.

use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use spinio_device::Device;
use spinio_gaia::{Access, Info, leased};
use spinio_runtime::Routes;

use super::mounted_files;
use super::serve::sockets;
use crate::device::{self, DeviceName};
use crate::exit::{self, Exit};
use crate::progress::{Progress, Spinner};
use crate::{format, input, output};

/// Bytes of one acquire, so that the progress moves.
const STEP: u64 = 256 << 20;

#[derive(Debug, Args)]
pub struct Cache {
    /// Files that no program writes: programs of the same user then share these bytes. Or files below a mount
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// The device to put them on: cuda:0, emulated [default: a CUDA GPU if there is one]
    #[arg(long)]
    device: Option<DeviceName>,
    /// The daemon's socket [default: as for serve]
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
}

pub fn run(options: &Cache) -> anyhow::Result<Exit> {
    let name = options.device.unwrap_or_else(device::preferred);
    let mut opened = None;
    for path in &options.files {
        if let Ok((file, true)) = mounted_files::open(path) {
            mounted_files::cache(path, file)?;
            continue;
        }
        let device = match opened {
            Some(device) => device,
            None => {
                let _wait = Spinner::new("Opening the device");
                *opened.insert(device::open(name)?)
            }
        };
        let begun = Instant::now();
        let info = cache(path, device, sockets(options.socket.as_ref()))?;
        let took = begun.elapsed().as_nanos() as f64;
        let done = match info.bytes_from_file {
            0 => "was there already".to_owned(),
            read => format!("{} read in {}", format::bytes(read), format::time(took)),
        };
        output::print(&format!("{}: {} on {name}, {done}\n", path.display(), format::bytes(info.file_size)))?;
    }
    Ok(Exit::Ok)
}

fn cache(path: &Path, device: &'static dyn Device, sockets: Vec<PathBuf>) -> anyhow::Result<Info> {
    let name = path.display();
    let file = input::open(path)?;
    let metadata = file.metadata().with_context(|| format!("Cannot query {name}"))?;
    if !metadata.is_file() || metadata.len() == 0 {
        let what = if metadata.is_file() { "is empty" } else { "is not a file" };
        return Err(exit::error(Exit::Failed, format!("{name} {what}: there is nothing to cache")));
    }
    let failed = |e: spinio_gaia::Error| anyhow::Error::new(e).context(format!("Cannot cache {name}"));
    let len = metadata.len();
    let map = leased::Map::new(file.as_raw_fd(), 0, len, Access::Read, device, &Routes, sockets).map_err(failed)?;
    let mut progress = Progress::bytes(len, &format!("Caching {name}"));
    let mut done = 0;
    while done < len {
        let part = STEP.min(len - done);
        let inside = map.acquire(done, part, Access::Read).map_err(failed)?;
        done += part;
        progress.set(done);
        if inside < part {
            // The file is shorter now.
            break;
        }
    }
    Ok(map.info())
}
