//! Where experiments run: compiled programs, a mount, a directory beside it, and the files of both.
//!
//! ```text
//!   work/  worker, kmeans, ...            compiled from the sources that this command contains
//!          mount/   GAIA is mounted here: methods with maps
//!          plain/   the same file system without GAIA: peers
//! ```

use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use spinio_cli::compiler::Gpu;
use spinio_cli::gaia::mounted::Mounted;
use spinio_sys::linux::{self, Advice};

use super::deadline::Deadline;
use super::{programs, worker};
use crate::cleanup::{self, Cleanup};
use crate::exit::{self, Exit};

const PAGE: u64 = 4096;

/// Everything that cells use.
pub struct Stage {
    /// Where kernels run.
    pub gpu: Gpu,
    /// GPUs that processes can use.
    pub devices: u32,
    /// The name of the first one.
    pub device: String,
    /// When the present cell must have ended.
    pub deadline: Deadline,
    mounted: Mounted,
    /// The directory below the mount, opened before.
    below: File,
    _cleanup: Cleanup,
    work: tempfile::TempDir,
}

impl Stage {
    /// Compiles and mounts, in a temporary directory of `directory`.
    pub fn set_up(directory: &Path, deadline: Deadline) -> anyhow::Result<Stage> {
        let work = tempfile::Builder::new()
            .prefix("spinio-lab-gaia-")
            .tempdir_in(directory)
            .with_context(|| format!("Cannot make a temporary directory in {}", directory.display()))?;
        let (mount, plain) = (work.path().join("mount"), work.path().join("plain"));
        // Before the minutes of compiling.
        let cleanup = cleanup::on_signal_after(vec![work.path().to_owned()], {
            let mount = mount.clone();
            move || {
                worker::kill_all();
                // This process may have files of the mount open. Then it is only detached; the daemon ends with this process.
                let detach: &[&str] = match rustix::process::geteuid().is_root() {
                    true => &["umount", "-l"],
                    false => &["fusermount3", "-uzq"],
                };
                let _ = Command::new(detach[0]).args(&detach[1..]).arg(&mount).output();
            }
        });
        for made in [&mount, &plain] {
            std::fs::create_dir(made).with_context(|| format!("Cannot make {}", made.display()))?;
        }
        if !Path::new("/dev/fuse").exists() {
            return Err(exit::error(Exit::Missing, "These experiments need a GAIA mount, and there is no /dev/fuse"));
        }
        let library = spinio_cli::library::find()?;
        let below = File::open(&mount)?;
        let mounted = Mounted::new(&mount)?;
        let gpu = programs::compile(work.path(), &library)?;
        let listed = Command::new(work.path().join(programs::WORKER)).arg("devices").output()?;
        let text = String::from_utf8_lossy(&listed.stdout).trim().to_owned();
        let (devices, device) = text.split_once(' ').with_context(|| {
            format!("The experiments' program finds no device: {}", String::from_utf8_lossy(&listed.stderr).trim())
        })?;
        let (devices, device) = (devices.parse()?, device.to_owned());
        Ok(Stage { gpu, devices, device, deadline, mounted, below, _cleanup: cleanup, work })
    }

    /// Whether kernels run on a GPU.
    pub fn is_cuda(&self) -> bool {
        self.gpu == Gpu::Cuda
    }

    /// The daemon's processes.
    pub fn daemon(&self) -> Vec<u32> {
        self.mounted.processes()
    }

    /// A compiled program.
    pub fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.work.path().join(name));
        // A kernel that is loaded while another one waits for the CPU would wait for it.
        command.env("CUDA_MODULE_LOADING", "EAGER");
        command
    }

    /// A path in the temporary directory, neither in the mount nor beside it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.work.path().join(name)
    }

    /// The path of a file in the mount, or beside it.
    pub fn place(&self, mounted: bool, name: &str) -> PathBuf {
        self.work.path().join(if mounted { "mount" } else { "plain" }).join(name)
    }

    /// A file of words, each mixed from its place: made if it is not there.
    pub fn words(&self, mounted: bool, name: &str, size: u64) -> anyhow::Result<PathBuf> {
        self.made(mounted, name, |out| {
            (0..size / 8).try_for_each(|i| out.write_all(&mix(i).to_le_bytes())).map_err(Into::into)
        })
    }

    /// The same, of a file that is never changed: the one in the mount and the one beside it are links to one file, so that
    /// it is made once, by several threads.
    pub fn constant_words(&self, mounted: bool, name: &str, size: u64) -> anyhow::Result<PathBuf> {
        let (plain, name) = (self.place(false, name), format!("{name}-{size}"));
        let plain = plain.with_file_name(&name);
        if !plain.exists() {
            let cannot = || format!("Cannot write {}", plain.display());
            let file = File::create_new(&plain).with_context(cannot)?;
            let write = || write_words(&file, size).and_then(|()| file.sync_all());
            self.deadline.not_counting(write).with_context(cannot)?;
            // Before the mount is asked for it, so that it finds it there.
            let below = PathBuf::from(format!("/proc/self/fd/{}", self.below.as_raw_fd())).join(&name);
            std::fs::hard_link(&plain, &below).with_context(|| format!("Cannot link {}", plain.display()))?;
        }
        Ok(self.place(mounted, &name))
    }

    /// A file that `make` writes if it is not there.
    pub fn made(
        &self,
        mounted: bool,
        name: &str,
        make: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<()>,
    ) -> anyhow::Result<PathBuf> {
        let path = self.place(mounted, name);
        if !path.exists() {
            let cannot = || format!("Cannot write {}", path.display());
            let mut out = BufWriter::with_capacity(1 << 20, File::create_new(&path).with_context(cannot)?);
            self.deadline.not_counting(|| {
                make(&mut out).with_context(cannot)?;
                out.into_inner().map_err(std::io::IntoInnerError::into_error)?.sync_all().with_context(cannot)
            })?;
        }
        Ok(path)
    }

    /// A file, and if it is in the mount, also the one below.
    pub fn opened(&self, path: &Path) -> anyhow::Result<Vec<File>> {
        let mut paths = vec![path.to_owned()];
        if path.starts_with(self.place(true, "")) {
            let name = path.file_name().context("a file")?;
            paths.push(PathBuf::from(format!("/proc/self/fd/{}", self.below.as_raw_fd())).join(name));
        }
        let open = |path: &PathBuf| File::open(path).with_context(|| format!("Cannot open {}", path.display()));
        paths.iter().map(open).collect()
    }

    /// Removes the files of an experiment.
    pub fn clear(&self) -> anyhow::Result<()> {
        for mounted in [true, false] {
            for entry in std::fs::read_dir(self.place(mounted, ""))? {
                std::fs::remove_file(entry?.path())?;
            }
        }
        Ok(())
    }

    /// Unmounts, and removes all.
    pub fn close(self) -> anyhow::Result<()> {
        self.clear()?;
        self.mounted.unmount()
    }
}

/// Drops the cached pages of these files.
pub fn evict(files: &[File]) -> anyhow::Result<()> {
    for file in files {
        file.sync_all()?;
        linux::fadvise(file.as_raw_fd(), 0, file.metadata()?.len(), Advice::DontNeed)?;
    }
    Ok(())
}

/// Has all pages of these files cached: reads the first one, which is in front of the others, unless they are.
pub fn cache(files: &[File]) -> anyhow::Result<()> {
    let is_cached = |file: &File| -> anyhow::Result<bool> {
        let len = file.metadata()?.len();
        // Older kernels do not say.
        Ok(linux::cachestat(file.as_raw_fd(), 0, len).is_ok_and(|pages| pages.cached >= len.div_ceil(PAGE)))
    };
    let are_cached = files.iter().map(is_cached).collect::<anyhow::Result<Vec<_>>>()?;
    let (Some(first), true) = (files.first(), are_cached.contains(&false)) else { return Ok(()) };
    let (mut buffer, mut at) = (vec![0; 1 << 20], 0);
    loop {
        match first.read_at(&mut buffer, at)? {
            0 => return Ok(()),
            got => at += got as u64,
        }
    }
}

/// The words of a constant file, by as many threads as help.
fn write_words(file: &File, size: u64) -> std::io::Result<()> {
    const PIECE: u64 = 4 << 20;
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8) as u64;
    let write = |thread: u64| -> std::io::Result<()> {
        let mut bytes = Vec::with_capacity(PIECE as usize);
        for at in (thread * PIECE..size).step_by((threads * PIECE) as usize) {
            bytes.clear();
            (at / 8..(at + PIECE).min(size) / 8).for_each(|i| bytes.extend_from_slice(&mix(i).to_le_bytes()));
            file.write_all_at(&bytes, at)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || write(thread))).collect();
        let lost = |_| Err(std::io::Error::other("a thread has panicked"));
        running.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(lost))
    })
}

/// A number that depends on all bits of another one (splitmix64). The programs have the same.
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

/// How many bytes of two files differ; files of different lengths differ in all.
pub fn differing_bytes(a: &Path, b: &Path) -> anyhow::Result<u64> {
    let read = |path: &Path| std::fs::read(path).with_context(|| format!("Cannot read {}", path.display()));
    let (a, b) = (read(a)?, read(b)?);
    ensure!(!a.is_empty(), "an empty file");
    Ok(if a.len() == b.len() { a.iter().zip(&b).filter(|(a, b)| a != b).count() as u64 } else { a.len() as u64 })
}
