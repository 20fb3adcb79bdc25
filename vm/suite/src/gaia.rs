//! Mounts of GAIA over directories of the guest's file systems.
//!
//! | Linux | CPU programs | maps of the emulated device | a server that is killed |
//! |---|---|---|---|
//! | 6.16 and later | work | work | is replaced |
//! | 6.1 (Debian 12) | work | are refused: FUSE would lose stores of CPU programs | callers would wait for ever: not tested |

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use spinio_gaia::Access;
use spinio_sys::Errno;
use spinio_testkit::{continue_process, stop_process};

use crate::case::{Case, CaseError, Outcome, expect, expect_bytes, fail};
use crate::memory::{MapMemory, store_through_mapping};
use crate::place::{Guest, Place, pattern};

const PAGE: usize = 4096;
const LEN: usize = 40 * PAGE + 100;
/// Where the socket of a mount is.
const SOCKETS: &str = "/run/spinio/gaia";
/// How long a server is stopped.
const STOPPED: Duration = Duration::from_millis(500);

pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    for place in [Place::Ext4, Place::Xfs] {
        let what = if has_maps() { "CPU programs and a map" } else { "CPU programs work, a map is refused" };
        all.push(Case::new(format!("gaia: {what}, {}", place.name()), move |g| mounted(g, place)));
    }
    if has_maps() {
        all.push(Case::new("gaia: a server is stopped, and killed in an epoch", server_dies));
        all.push(Case::new("gaia: the demo, a server killed", demo));
    } else {
        all.push(Case::new("gaia: the demo is refused", demo_is_refused));
    }
    all
}

/// Whether FUSE of this Linux kernel waits for write-back, which maps need.
pub(crate) fn has_maps() -> bool {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split('.').map_while(|word| word.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (6, 16)
}

/// CPU programs and a map change a file; then the file below the mount has all changes.
fn mounted(guest: &Guest, place: Place) -> Outcome {
    let (dir, mut wanted) = directory(guest, place)?;
    let mount = Mount::new(&dir)?;
    let path = dir.join("file");
    let file = open(&path)?;
    expect_bytes("read through the mount", &fs::read(&path)?, &wanted)?;
    file.write_all_at(b"written", 10)?;
    store_through_mapping(&file, 3, b"mapped")?;
    wanted[10..17].copy_from_slice(b"written");
    wanted[3 * PAGE..3 * PAGE + 6].copy_from_slice(b"mapped");
    if has_maps() {
        let map = map(&file)?;
        acquire(&map)?;
        expect_bytes("loaded by the device", &map.bytes(LEN), &wanted)?;
        // Into a page of a CPU program that stores there meanwhile, into one that nobody has, and past the end.
        map.put(3 * PAGE + 100, b"stored");
        map.put(30 * PAGE, b"alone");
        map.put(LEN - 3, b"end past the end");
        store_through_mapping(&file, 3, b"shared")?;
        release(&map)?;
        wanted[3 * PAGE + 100..3 * PAGE + 106].copy_from_slice(b"stored");
        wanted[3 * PAGE..3 * PAGE + 6].copy_from_slice(b"shared");
        wanted[30 * PAGE..30 * PAGE + 5].copy_from_slice(b"alone");
        wanted[LEN - 3..].copy_from_slice(b"end");
    } else {
        match MapMemory::of(&file, LEN) {
            Ok(_) => return fail("a file is mapped, although FUSE may lose stores here"),
            Err(error) => {
                expect("the error of a map", error.errno, Errno::NOTSUP)?;
                if !error.to_string().contains("Linux 6.16 or later") {
                    return fail(format!("the error does not name the reason: {error}"));
                }
            }
        }
        let said = mount.said()?;
        if !said.contains("this takes Linux 6.16 or later") || !said.contains("before Linux 6.9") {
            return fail(format!("the mount does not name what is missing: {said}"));
        }
    }
    expect_bytes("read through the mount afterwards", &fs::read(&path)?, &wanted)?;
    file.sync_all()?;
    fs::create_dir(dir.join("sub"))?;
    fs::rename(&path, dir.join("sub/renamed"))?;
    drop(file);
    mount.unmount()?;
    expect_bytes("read below the mount", &fs::read(dir.join("sub/renamed"))?, &wanted)?;
    Ok(fs::remove_dir_all(dir)?)
}

/// While the server is stopped, programs wait; when it is killed in an epoch, that is redone, and nothing else is lost.
fn server_dies(guest: &Guest) -> Outcome {
    let (dir, mut wanted) = directory(guest, Place::Ext4)?;
    let mut mount = Mount::new(&dir)?;
    let path = dir.join("file");
    let file = open(&path)?;
    let map = map(&file)?;
    acquire(&map)?;
    map.put(5 * PAGE, b"released");
    release(&map)?;

    stop_process(mount.server.as_raw_pid() as u32);
    let (sender, answered) = mpsc::channel();
    let asked = dir.clone();
    // The Linux kernel answers this call from no cache.
    std::thread::spawn(move || sender.send(rustix::fs::statvfs(&asked).map(drop)));
    let early = answered.recv_timeout(STOPPED);
    continue_process(mount.server.as_raw_pid() as u32);
    expect("the answer of a stopped server", early, Err(mpsc::RecvTimeoutError::Timeout))?;
    expect("the answer after it went on", answered.recv_timeout(Duration::from_secs(20)), Ok(Ok(())))?;

    acquire(&map)?;
    map.put(7 * PAGE, b"lost");
    // Dirty in the Linux kernel only.
    store_through_mapping(&file, 5, b"changed")?;
    mount.kill_server()?;
    match map.map.release(0, LEN as u64) {
        Err(error) => expect("the error of a release after the server died", error.errno, Errno::STALE)?,
        Ok(_) => return fail("a release succeeded although the server that knew its bases has died"),
    }
    acquire(&map)?;
    wanted[5 * PAGE..5 * PAGE + 8].copy_from_slice(b"changedd");
    expect_bytes("loaded by the device from the next server", &map.bytes(LEN), &wanted)?;
    map.put(7 * PAGE, b"kept");
    release(&map)?;
    wanted[7 * PAGE..7 * PAGE + 4].copy_from_slice(b"kept");
    expect_bytes("read through the mount", &fs::read(&path)?, &wanted)?;
    drop((map, file));
    mount.unmount()?;
    expect_bytes("read below the mount", &fs::read(&path)?, &wanted)?;
    Ok(fs::remove_dir_all(dir)?)
}

fn demo(guest: &Guest) -> Outcome {
    let at = guest.mount(Place::Ext4)?;
    let ran = spinio()?.args(DEMO).arg(&at).envs(demo_programs()?).output()?;
    let (said, complaint) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    if !ran.status.success() || said.matches("every byte is right").count() != 4 || !said.contains("killed (SIGKILL)") {
        return fail(format!("{}, output: {} {}", ran.status, said.trim(), complaint.trim()));
    }
    nothing_left(&at)
}

fn demo_is_refused(guest: &Guest) -> Outcome {
    let at = guest.mount(Place::Ext4)?;
    let ran = spinio()?.args(DEMO).arg(&at).envs(demo_programs()?).output()?;
    let complaint = String::from_utf8_lossy(&ran.stderr);
    if ran.status.success() || !complaint.contains("Linux 6.16 or later") {
        return fail(format!("{}, and the reason is not in: {}", ran.status, complaint.trim()));
    }
    nothing_left(&at)
}

const DEMO: [&str; 7] = ["gaia", "demo", "--size", "64K", "--rounds", "4", "--path"];

fn spinio() -> Result<Command, CaseError> {
    let path =
        std::env::var_os("SPINIO").ok_or_else(|| CaseError::Skipped("SPINIO does not name the command".into()))?;
    Ok(Command::new(path))
}

/// The demo's programs and library, as they were built on the host.
fn demo_programs() -> Result<[(&'static str, PathBuf); 3], CaseError> {
    let named = |name: &str| {
        std::env::var_os(name).map(PathBuf::from).ok_or_else(|| CaseError::Skipped(format!("{name} is not set")))
    };
    let compiler = named("VM_HERE")?.join("suite/gaia/compiler");
    Ok([("CC", compiler.clone()), ("CXX", compiler), ("SPINIO_LIBRARY", named("VM_PROGRAMS")?.join("libspinio.so"))])
}

/// A directory to mount over, with one file.
fn directory(guest: &Guest, place: Place) -> Result<(PathBuf, Vec<u8>), CaseError> {
    let dir = guest.mount(place)?.join("gaia");
    fs::create_dir(&dir)?;
    let bytes = pattern(LEN, 11);
    fs::write(dir.join("file"), &bytes)?;
    Ok((dir, bytes))
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

fn map(file: &File) -> Result<MapMemory, CaseError> {
    MapMemory::of(file, LEN).map_err(|e| CaseError::Failed(format!("map: {e}")))
}

fn acquire(map: &MapMemory) -> Outcome {
    // The first attempt after a server died may be the one that learns of it.
    let mut got = map.map.acquire(0, LEN as u64, Access::Write);
    if got.as_ref().is_err_and(|error| error.errno == Errno::STALE) {
        got = map.map.acquire(0, LEN as u64, Access::Write);
    }
    match got {
        Ok(len) => expect("bytes acquired", len, LEN as u64),
        Err(error) => fail(format!("acquire: {error}")),
    }
}

fn release(map: &MapMemory) -> Outcome {
    map.map.release(0, LEN as u64).map(drop).map_err(|e| CaseError::Failed(format!("release: {e}")))
}

/// No mount of GAIA, no socket of one, and no directory of one at `at`.
fn nothing_left(at: &Path) -> Outcome {
    let mounts = fs::read_to_string("/proc/self/mounts")?;
    let left: Vec<&str> = mounts.lines().filter(|line| line.contains("spinio-gaia")).collect();
    expect("mounts that are left", left, Vec::new())?;
    let files = fs::read_dir(SOCKETS).map_or(0, Iterator::count);
    expect("files of mounts that are left", files, 0)?;
    let names = fs::read_dir(at)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names: Vec<String> = names.collect::<std::io::Result<_>>()?;
    expect(
        "directories of demos",
        names.into_iter().filter(|name| name.contains("gaia-demo")).collect(),
        Vec::<String>::new(),
    )
}

/// A mount whose supervisor ends with this.
struct Mount {
    dir: PathBuf,
    supervisor: Child,
    /// The supervisor unmounts when this is closed.
    stdin: Option<ChildStdin>,
    lines: Lines<BufReader<ChildStdout>>,
    server: Pid,
    /// What it reports.
    log: PathBuf,
}

impl Mount {
    fn new(dir: &Path) -> Result<Mount, CaseError> {
        let log = PathBuf::from("/dev/shm/gaia-log");
        let mut supervisor = spinio()?
            .args(["gaia", "mount", "--foreground", "--until-stdin-ends"])
            .arg(dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()?;
        let stdin = supervisor.stdin.take();
        let Some(stdout) = supervisor.stdout.take() else { return fail("no output of the supervisor") };
        let mut mount = Mount {
            dir: dir.to_owned(),
            supervisor,
            stdin,
            lines: BufReader::new(stdout).lines(),
            server: rustix::process::getpid(),
            log,
        };
        let first = mount.lines.next().transpose()?.unwrap_or_default();
        if !first.starts_with("mounted on ") {
            return fail(format!("cannot mount: {first} {}", mount.said()?));
        }
        mount.server = mount.next_server()?;
        Ok(mount)
    }

    /// What the supervisor has reported.
    fn said(&self) -> Result<String, CaseError> {
        Ok(fs::read_to_string(&self.log)?)
    }

    fn next_server(&mut self) -> Result<Pid, CaseError> {
        let line = self.lines.next().transpose()?.unwrap_or_default();
        let pid = line.strip_prefix("server ").and_then(|pid| pid.parse().ok()).and_then(Pid::from_raw);
        pid.ok_or_else(|| CaseError::Failed(format!("not the number of a server: `{line}`")))
    }

    fn kill_server(&mut self) -> Outcome {
        kill_process(self.server, Signal::KILL)?;
        self.server = self.next_server()?;
        Ok(())
    }

    /// Unmounts; all is written then, and nothing is left.
    fn unmount(mut self) -> Outcome {
        self.stdin = None;
        let status = self.supervisor.wait()?;
        if !status.success() {
            return fail(format!("the supervisor ended with {status}: {}", self.said()?));
        }
        nothing_left(&self.dir)
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.stdin = None;
        let _ = self.supervisor.wait();
    }
}
