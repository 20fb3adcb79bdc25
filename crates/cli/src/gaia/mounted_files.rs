//! Files below a mount, for `spinio gaia cache`, `drop` and `sync`.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context;
use clap::Args;
use rustix::fs::Advice;

use crate::exit::{self, Exit};
use crate::progress::Progress;
use crate::{format, input, output};

/// Bytes of one read.
const STEP: usize = 4 << 20;

#[derive(Debug, Args)]
pub struct Sync {
    /// Files below a mount
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Opens a file that exists and is one; whether it is below a mount of GAIA.
pub(super) fn open(path: &Path) -> anyhow::Result<(File, bool)> {
    let name = path.display();
    let file = input::open(path)?;
    if !file.metadata().with_context(|| format!("Cannot query {name}"))?.is_file() {
        return Err(exit::error(Exit::Failed, format!("{name} is not a file")));
    }
    let mounted = spinio_gaiad::is_below_mount(&file).with_context(|| format!("Cannot ask the mount of {name}"))?;
    Ok((file, mounted))
}

/// Brings what was released of files, and what CPU programs wrote, to storage.
pub(super) fn sync(options: &Sync) -> anyhow::Result<Exit> {
    for path in &options.files {
        let name = path.display();
        let (file, mounted) = open(path)?;
        if !mounted {
            let words =
                format!("{name} is not below a mount of GAIA, where maps are for reading only: `sync` writes it");
            return Err(exit::error(Exit::Failed, words));
        }
        let begun = Instant::now();
        file.sync_all().with_context(|| format!("Cannot write {name} to storage"))?;
        let took = format::time(begun.elapsed().as_nanos() as f64);
        output::print(&format!("{name}: on storage after {took}\n"))?;
    }
    Ok(Exit::Ok)
}

/// Reads a file of a mount into the page cache.
pub(super) fn cache(path: &Path, mut file: File) -> anyhow::Result<Exit> {
    let name = path.display();
    let (begun, len) = (Instant::now(), file.metadata()?.len());
    let mut progress = Progress::bytes(len, &format!("Reading {name}"));
    let (mut buffer, mut done) = (vec![0; STEP], 0);
    loop {
        match file.read(&mut buffer).with_context(|| format!("Cannot read {name}"))? {
            0 => break,
            got => done += got as u64,
        }
        progress.set(done);
    }
    drop(progress);
    let (size, took) = (format::bytes(done), format::time(begun.elapsed().as_nanos() as f64));
    let note = "each map of a mounted file has device memory of its own, which its acquires fill from there";
    output::print(&format!("{name}: {size} in the page cache of the mount, read in {took}; {note}\n"))?;
    Ok(Exit::Ok)
}

/// Writes a file of a mount to storage, and drops it from the page cache.
pub(super) fn drop_pages(path: &Path, file: &File) -> anyhow::Result<()> {
    let name = path.display();
    // Only what is written can be dropped.
    file.sync_all().with_context(|| format!("Cannot write {name} to storage"))?;
    rustix::fs::fadvise(file, 0, None, Advice::DontNeed).with_context(|| format!("Cannot drop pages of {name}"))?;
    let note = "device memory is given back by the programs that have maps of it";
    output::print(&format!("{name}: written, and dropped from the page cache of the mount; {note}\n"))
}
