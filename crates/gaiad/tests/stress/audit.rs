//! What processes have and are, from /proc.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

/// In uninterruptible sleep for longer than this, a process hangs.
const LONGEST_SLEEP: Duration = Duration::from_secs(20);

/// The process's children.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let parent = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let all =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    all.filter(|child| parent(child) == Some(pid)).collect()
}

/// What its descriptors refer to.
pub(crate) fn descriptors(pid: u32) -> Vec<String> {
    let Ok(folder) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let targets = folder.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.map(|target| target.display().to_string()).collect()
}

/// Connections that a server has accepted at a socket, and that still exist.
pub(crate) fn accepted(socket: &Path) -> usize {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.to_str().unwrap();
    // Flags 00010000: it listens.
    let ours = table.lines().filter(|line| line.split_whitespace().last() == Some(path));
    ours.filter(|line| line.split_whitespace().nth(3) != Some("00010000")).count()
}

/// Resident memory, in KiB.
pub(crate) fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// The state memory of a mount, through its supervisor's descriptor. Its layout is in src/state.rs, slot_memory.rs and in
/// crates/pagecache/src/layout.rs.
pub(crate) struct State(File);

impl State {
    pub(crate) fn of(supervisor: u32) -> State {
        let folder = std::fs::read_dir(format!("/proc/{supervisor}/fd")).unwrap().flatten();
        let is_state = |path: &PathBuf| {
            std::fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains("spinio-gaia-state"))
        };
        State(File::open(folder.map(|entry| entry.path()).find(is_state).unwrap()).unwrap())
    }

    fn words(&self, first: u64, count: usize) -> Vec<u64> {
        let mut bytes = vec![0; count * 8];
        self.0.read_exact_at(&mut bytes, first * 8).unwrap();
        bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect()
    }

    /// Node records that were ever used.
    pub(crate) fn nodes(&self) -> u64 {
        self.words(3, 1)[0]
    }

    /// Slots that hold a released page or a twin.
    pub(crate) fn slots_in_use(&self) -> usize {
        const PAGES: u64 = 512 + 1024 * 64 + (4 << 20) * 32;
        let [magic, slots, records] = self.words(PAGES, 3)[..] else { unreachable!() };
        assert_eq!(magic.to_le_bytes(), *b"SPNpage1");
        self.words(PAGES + 8 + records * 4, slots as usize * 4).chunks(4).filter(|header| header[0] != 0).count()
    }
}

/// Threads that are in uninterruptible sleep, and since when.
#[derive(Default)]
pub(crate) struct Sleepers(HashMap<u32, Instant>);

impl Sleepers {
    /// Looks at the threads of some processes; fails if one of them sleeps for too long.
    pub(crate) fn look(&mut self, processes: impl Iterator<Item = u32>) {
        let mut now = HashMap::new();
        for pid in processes {
            let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { continue };
            for task in tasks.flatten() {
                let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
                let sleeps = stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'));
                let Some(tid) = task.file_name().to_str().and_then(|t| t.parse().ok()).filter(|_| sleeps) else {
                    continue;
                };
                let since = self.0.get(&tid).copied().unwrap_or_else(Instant::now);
                if since.elapsed() > LONGEST_SLEEP {
                    panic!("thread {tid} of process {pid} is in state D:\n{}", stacks(pid));
                }
                now.insert(tid, since);
            }
        }
        self.0 = now;
    }
}

/// Where the threads of a process are in the Linux kernel.
pub(crate) fn stacks(pid: u32) -> String {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return "it has ended".to_owned() };
    let stack = |task: std::fs::DirEntry| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        format!("{}{}\n", read("comm"), read("stack"))
    };
    tasks.flatten().map(stack).collect()
}

/// Ends a mount on which this process itself waits for too long, and prints where all its processes are.
pub(crate) struct Watchdog(Arc<AtomicU64>);

impl Watchdog {
    pub(crate) fn start(directory: &Path, supervisor: u32, patience: Duration) -> Watchdog {
        let beats = Arc::new(AtomicU64::new(0));
        let (seen, directory) = (Arc::downgrade(&beats), directory.to_owned());
        std::thread::spawn(move || {
            let (mut last, mut since) = (0, Instant::now());
            while let Some(beats) = seen.upgrade() {
                let now = beats.load(SeqCst);
                drop(beats);
                if now != last {
                    (last, since) = (now, Instant::now());
                }
                if since.elapsed() > patience {
                    let mut all = vec![std::process::id(), supervisor];
                    all.extend(children(supervisor).into_iter().chain(children(std::process::id())));
                    all.iter().for_each(|pid| eprintln!("process {pid}:\n{}", stacks(*pid)));
                    let _ = spinio_fuse::mount::abort(&directory);
                    return;
                }
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        Watchdog(beats)
    }

    pub(crate) fn alive(&self) {
        self.0.fetch_add(1, SeqCst);
    }
}
