//! What processes have and are, from /proc, and what a mount may have left when its programs have ended: nothing.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::TestMount;

/// In uninterruptible sleep for longer than this, a process hangs.
const LONGEST_SLEEP: Duration = Duration::from_secs(200);
/// What is left for longer than this stays.
const PATIENCE: Duration = Duration::from_secs(300);

/// Descriptors of a supervisor at most that are not of deleted files: its own, and of files that were made without a name,
/// and then got one.
const OTHERS: usize = 40;

/// Waits until `problem` has none; fails with it otherwise.
fn until_none(mut problem: impl FnMut() -> Option<String>) {
    let begun = Instant::now();
    while let Some(problem) = problem() {
        assert!(begun.elapsed() < PATIENCE, "{problem}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Nothing of clients is left with the server, and no file with the supervisor. To be called when all programs have
/// closed their files and unmapped their maps, and what was released is written out. Of deleted files, `most_deleted` may
/// stay until unmount: a LOOKUP or CREATE that is sent again to the next server counts twice. Returns how many stay.
pub fn nothing_is_left(mount: &TestMount, most_deleted: usize) -> usize {
    until_none(|| {
        let left = accepted(&mount.socket);
        (left > 0).then(|| format!("{left} connections are left: {}", stacks(mount.server())))
    });
    let mut deleted = 0;
    until_none(|| {
        let [server, supervisor] = [mount.server(), mount.supervisor()].map(descriptors);
        let windows = server.iter().filter(|target| target.contains("spinio-gaia-window")).count();
        deleted = deleted_files(mount.supervisor());
        let others = supervisor.len() - deleted;
        // In a user's own mount a file stays that the Linux kernel knows.
        let is_root = rustix::process::geteuid().is_root();
        let stays = is_root && (others >= OTHERS || supervisor.iter().any(|target| target.ends_with("/file")));
        let wrong = windows > 0 || deleted > most_deleted || stays;
        wrong.then(|| {
            format!("descriptors are left, {deleted} of deleted files: {server:?}, supervisor: {supervisor:?}")
        })
    });
    let state = State::of(mount.supervisor());
    // The last requests of files that are gone come when the Linux kernel likes.
    until_none(|| {
        let slots = state.slots_in_use();
        (slots > 0).then(|| format!("{slots} slots are left"))
    });
    // A crash may leave the records of the nodes that were asked for at that moment, and the Linux kernel forgets when it
    // likes; a workload makes thousands of files.
    let (nodes, most) = (state.nodes(), 256 + 4 * u64::from(mount.servers()));
    assert!(nodes < most, "{nodes} node records were used at a time, after {} servers", mount.servers());
    let daemon = || [mount.supervisor(), mount.server()].into_iter().chain(children(mount.supervisor()));
    until_none(|| {
        let sleeper = daemon().find(|pid| !sleeping(*pid).is_empty())?;
        Some(format!("process {sleeper} is in state D:\n{}", stacks(sleeper)))
    });
    deleted
}

/// Unmounts, after which the daemon's processes, sockets and the mount itself are gone.
pub fn unmount_and_look(mount: TestMount) -> (PathBuf, tempfile::TempDir) {
    let processes: Vec<u32> = children(mount.supervisor());
    // Another mount may get their names at once.
    let file = |path: PathBuf| std::fs::metadata(&path).ok().map(|stat| (path, stat.ino(), stat.ctime_nsec()));
    let before = [mount.socket.clone(), mount.socket.with_extension("lock")].map(file);
    assert!(before.iter().all(Option::is_some));
    let (dir, root) = mount.unmount();
    for (path, inode, time) in before.into_iter().flatten() {
        assert_ne!(file(path.clone()), Some((path, inode, time)), "a file of the mount is left");
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(dir.to_str().unwrap()), "the mount is left");
    until_none(|| {
        let is_running = |pid: &&u32| {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
        };
        let left = processes.iter().find(is_running)?;
        Some(format!("process {left} of the daemon is left: {}", stacks(*left)))
    });
    (dir, root)
}

/// The process's children.
pub fn children(pid: u32) -> Vec<u32> {
    let parent = |pid: &u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    let all =
        std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    all.filter(|child| parent(child) == Some(pid)).collect()
}

/// What its descriptors refer to.
pub fn descriptors(pid: u32) -> Vec<String> {
    let Ok(folder) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let targets = folder.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
    targets.map(|target| target.display().to_string()).collect()
}

/// How many of its descriptors are of files without a name. Memory files have none from the beginning.
fn deleted_files(pid: u32) -> usize {
    let Ok(folder) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return 0 };
    let is_deleted = |path: &PathBuf| {
        let target = std::fs::read_link(path).unwrap_or_default().display().to_string();
        target.starts_with('/')
            && !target.starts_with("/memfd:")
            && std::fs::metadata(path).is_ok_and(|stat| stat.nlink() == 0)
    };
    folder.flatten().map(|entry| entry.path()).filter(is_deleted).count()
}

/// Connections that a server has accepted at a socket, and that still exist.
pub fn accepted(socket: &Path) -> usize {
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.to_str().unwrap();
    // Flags 00010000: it listens.
    let ours = table.lines().filter(|line| line.split_whitespace().last() == Some(path));
    ours.filter(|line| line.split_whitespace().nth(3) != Some("00010000")).count()
}

/// Resident memory, in KiB.
pub fn resident_kib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// The state memory of a mount, through its supervisor's descriptor. Its layout is in src/state.rs, slot_memory.rs and in
/// crates/pagecache/src/layout.rs.
pub struct State(File);

impl State {
    pub fn of(supervisor: u32) -> State {
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
    pub fn nodes(&self) -> u64 {
        self.words(3, 1)[0]
    }

    /// Slots that hold a released page or a twin.
    pub fn slots_in_use(&self) -> usize {
        const PAGES: u64 = 512 + 1024 * 64 + (4 << 20) * 32;
        let [magic, slots, records] = self.words(PAGES, 3)[..] else { unreachable!() };
        assert_eq!(magic.to_le_bytes(), *b"SPNpage2");
        // A header is that of a run of slots: how many, less one, is above the number of its page.
        let headers = self.words(PAGES + 8 + records * 4, slots as usize * 4);
        headers.chunks(4).filter(|header| header[0] != 0).map(|header| (header[2] >> 51) as usize + 1).sum()
    }
}

/// Threads that are in uninterruptible sleep, and since when.
#[derive(Default)]
pub struct Sleepers(HashMap<u32, Instant>);

impl Sleepers {
    /// Looks at the threads of some processes; fails if one of them sleeps for too long.
    pub fn look(&mut self, processes: impl Iterator<Item = u32>) {
        let mut now = HashMap::new();
        for pid in processes {
            for tid in sleeping(pid) {
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

/// The threads of a process that are in uninterruptible sleep now.
fn sleeping(pid: u32) -> Vec<u32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let is_asleep = |task: &std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('D'))
    };
    tasks.flatten().filter(is_asleep).filter_map(|task| task.file_name().to_str()?.parse().ok()).collect()
}

/// Where the threads of a process are in the Linux kernel.
pub fn stacks(pid: u32) -> String {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return "it has ended".to_owned() };
    let stack = |task: std::fs::DirEntry| {
        let read = |name| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        format!("{}{}\n", read("comm"), read("stack"))
    };
    tasks.flatten().map(stack).collect()
}

/// Ends a mount on which this process itself waits for too long, and prints where all its processes are.
pub struct Watchdog(Arc<AtomicU64>);

impl Watchdog {
    pub fn start(directory: &Path, supervisor: u32, patience: Duration) -> Watchdog {
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

    pub fn alive(&self) {
        self.0.fetch_add(1, SeqCst);
    }
}
