//! The stress test of GAIA: two GPU processes, a program with a mapping, one that calls `write`, a truncater and a hole
//! puncher on the pages of one file, while servers and these processes are killed.
//!
//! ```text
//!   test ──> supervisor ──> server, server, ...   killed at random, also the invalidator
//!     ├────> GPU 0, GPU 1, mapping, write         killed at random, and started again with cells of their own
//!     ├────> truncater, puncher                   not killed: a call of a dead process may take effect later
//!     └ reads the file all the time; at the end compares it with the directory, and looks for what is left over
//! ```
//!
//! What is right is in layout.rs: no byte of a completed round is missing, for any reader, at any time; a round in which
//! a process was killed is there as a whole or not at all; nothing that was cut or punched comes back.
//!
//! By default it takes a few seconds. SPINIO_SOAK_SECONDS makes it longer, SPINIO_SOAK_SEED another one.
//!
//! Known limits: the emulated device only; one file that all write; no O_DIRECT, for which home cannot tell what a READ is for.

#![expect(unsafe_code, reason = "mappings and device memory")]

mod board;
#[path = "../common/mod.rs"]
mod common;
mod cpu;
mod gpu;
mod layout;
mod names;
mod worker;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Child;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use spinio_pagecache::messages::{self, Reply, Request};

use crate::board::{Board, Counter, LIVES, WORKERS};
use crate::common::both::Random;
use crate::common::raw::Raw;
use crate::common::{TestMount, audit};
use crate::layout::{GPUS, LEN, WRITERS};

/// One mount lasts this long at most.
const CHAPTER: Duration = Duration::from_secs(60);
/// A worker that makes no progress for so long hangs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Resident memory of supervisor and server, in KiB: the state memory that they use is in it.
const SUPERVISOR_KIB: u64 = 32 << 10;
const SERVER_KIB: u64 = 64 << 10;

#[test]
fn server_role() {
    common::server_role();
}

#[test]
fn worker_role() {
    worker::role();
}

#[derive(Default)]
struct Totals {
    servers: u32,
    killed: u64,
    invalidators: u64,
    gpu: u64,
    cpu: u64,
    cuts_and_holes: u64,
    stale: u64,
    recovered: u64,
    after_death: u64,
    merged: u64,
    patched: u64,
    compared: u64,
    server_kib: u64,
    supervisor_kib: u64,
    deleted: usize,
}

#[test]
fn nothing_is_lost_and_nothing_is_left_while_all_are_killed() {
    let number = |name, otherwise| std::env::var(name).map_or(otherwise, |text| text.parse::<u64>().unwrap());
    let (seconds, seed) = (number("SPINIO_SOAK_SECONDS", 4), number("SPINIO_SOAK_SEED", 1));
    // Whatever the mount leaves behind becomes a child of this process.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let begun = Instant::now();
    let end = begun + Duration::from_secs(seconds);
    let (mut totals, mut chapters) = (Totals::default(), 0);
    while chapters == 0 || Instant::now() + Duration::from_secs(2) < end {
        let left = end.saturating_duration_since(Instant::now()).min(CHAPTER);
        if !Chapter::run(seed * 1000 + chapters, left, &mut totals) {
            return;
        }
        chapters += 1;
    }
    let Totals { servers, killed, gpu, cpu, stale, recovered, merged, patched, compared, .. } = totals;
    println!(
        "GAIA: {chapters} mounts, {servers} servers, {} invalidators and {killed} programs killed; {gpu} releases ({stale} \
         epochs stale, {recovered} found committed, {} of dead processes), {merged} pages merged, {patched} patched; {cpu} \
         CPU stores, {} cuts and holes, {compared} cells compared; at most {} MiB in a server, {} MiB in a supervisor; \
         {} deleted files open until unmount; nothing wrong, nothing left over",
        totals.invalidators,
        totals.after_death,
        totals.cuts_and_holes,
        totals.server_kib >> 10,
        totals.supervisor_kib >> 10,
        totals.deleted,
    );
}

/// One mount, from its beginning to its end.
struct Chapter<'a> {
    mount: &'a TestMount,
    board: Board,
    workers: Vec<Child>,
    /// Of each worker: the counter, and when it last changed.
    progress: Vec<(u64, Instant)>,
    sleepers: audit::Sleepers,
    random: Random,
    seed: u64,
}

impl Drop for Chapter<'_> {
    /// After a failure, none of the processes may stay.
    fn drop(&mut self) {
        for worker in &mut self.workers {
            let _ = worker.kill();
        }
    }
}

impl Chapter<'_> {
    /// False: it cannot run here.
    fn run(seed: u64, duration: Duration, totals: &mut Totals) -> bool {
        let Some(mount) = TestMount::new(|dir| std::fs::write(dir.join("file"), vec![0; LEN]).unwrap()) else {
            return false;
        };
        let seconds = duration.as_secs();
        eprintln!("seed {seed}, {seconds} s");
        let board = Board::create(&mount.reference.join("board"));
        let now = Instant::now();
        let mut chapter = Chapter {
            mount: &mount,
            board,
            workers: Vec::new(),
            progress: vec![(0, now); WORKERS],
            sleepers: Default::default(),
            random: Random::new(seed),
            seed,
        };
        for worker in 0..WORKERS {
            let child = chapter.spawn(worker);
            chapter.workers.push(child);
        }
        chapter.disturb(now + duration, totals);
        chapter.end_workers();
        let bytes = chapter.verify(totals);
        chapter.verify_server(totals);
        drop(chapter);
        totals.servers += mount.servers();
        let (dir, _root) = audit::unmount_and_look(mount);
        let names: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["file"]);
        assert!(std::fs::read(dir.join("file")).unwrap() == bytes, "the directory is not what the mount was");
        no_process_is_left();
        true
    }

    fn spawn(&self, worker: usize) -> Child {
        worker::spawn(worker, self.seed, &self.mount.dir.join("file"), &self.mount.reference.join("board"), &self.board)
    }

    /// Kills at random, reads the file, and watches that all go on.
    fn disturb(&mut self, end: Instant, totals: &mut Totals) {
        let file = open(&self.mount.dir.join("file"));
        let mapping = cpu::Mapping::new(&file);
        let mut names = names::Names::new(&self.mount.dir);
        let watchdog = audit::Watchdog::start(&self.mount.dir, self.mount.supervisor(), PATIENCE);
        while Instant::now() < end {
            std::thread::sleep(Duration::from_millis(self.random.range(20, 250)));
            match self.random.range(0, 20) {
                0..8 => self.mount.kill_server(),
                8..13 => self.kill_worker(totals),
                13 => self.kill_invalidator(totals),
                14 => self.stall_worker(),
                _ => {}
            }
            watchdog.alive();
            names.change(&mut self.random);
            totals.compared += cpu::read_and_compare(&self.board, &file);
            let done = self.board.rounds(Counter::Done);
            totals.compared += layout::compare(&|at| mapping.get(at), &done, &self.board, None);
            self.watch();
            totals.server_kib = totals.server_kib.max(audit::resident_kib(self.mount.server()));
            totals.supervisor_kib = totals.supervisor_kib.max(audit::resident_kib(self.mount.supervisor()));
        }
    }

    fn kill_worker(&mut self, totals: &mut Totals) {
        let worker = self.random.range(0, WRITERS as u64) as usize;
        if self.board.lives(worker) < LIVES {
            self.workers[worker].kill().unwrap();
            self.wait(worker);
            totals.killed += 1;
            self.workers[worker] = self.spawn(worker);
            self.progress[worker] = (0, Instant::now());
        }
    }

    fn kill_invalidator(&mut self, totals: &mut Totals) {
        let server = self.mount.server();
        for child in audit::children(self.mount.supervisor()).into_iter().filter(|child| *child != server) {
            totals.invalidators += u64::from(send(child, Signal::KILL));
        }
    }

    /// A client that does not go on in the middle of anything keeps no other program from it.
    fn stall_worker(&mut self) {
        let pid = self.workers[self.random.range(0, WRITERS as u64) as usize].id();
        send(pid, Signal::STOP);
        std::thread::sleep(Duration::from_millis(self.random.range(50, 400)));
        send(pid, Signal::CONT);
    }

    fn watch(&mut self) {
        for worker in 0..WORKERS {
            if let Some(status) = self.workers[worker].try_wait().unwrap() {
                panic!("{} ended: {status} (seed {})", worker::NAMES[worker], self.seed);
            }
            let life = self.board.lives(worker) - 1;
            let alive = self.board.counter(worker, life, Counter::Alive).load(SeqCst);
            if alive != self.progress[worker].0 {
                self.progress[worker] = (alive, Instant::now());
            }
            assert!(self.progress[worker].1.elapsed() < PATIENCE, "{}", self.hang(worker));
        }
        let daemon = [self.mount.supervisor(), self.mount.server()];
        self.sleepers.look(self.workers.iter().map(Child::id).chain(daemon));
    }

    fn hang(&self, worker: usize) -> String {
        let [worker_at, server_at] = [self.workers[worker].id(), self.mount.server()].map(audit::stacks);
        let name = worker::NAMES[worker];
        format!("{name} hangs (seed {}):\n{worker_at}\nserver:\n{server_at}", self.seed)
    }

    /// Waits for a process that was killed, or told to end.
    fn wait(&mut self, worker: usize) -> std::process::ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.workers[worker].try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < PATIENCE, "{}", self.hang(worker));
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn end_workers(&mut self) {
        self.board.stop();
        for (worker, name) in worker::NAMES.iter().enumerate() {
            let status = self.wait(worker);
            assert!(status.success(), "{name} failed: {status} (seed {})", self.seed);
        }
    }

    /// The content of the file, after all have ended: as its last users left it, then cut and punched once more.
    fn verify(&mut self, totals: &mut Totals) -> Vec<u8> {
        // What a killed process had sent may still be committed.
        let begun = Instant::now();
        while audit::accepted(&self.mount.socket) > 0 {
            assert!(begun.elapsed() < PATIENCE, "connections are left: {}", audit::stacks(self.mount.server()));
            std::thread::sleep(Duration::from_millis(5));
        }
        let file = open(&self.mount.dir.join("file"));
        // What an earlier server had committed may still have to reach the Linux kernel: until then a read may show the
        // bytes from before, and a later read does not. A server answers this after it has.
        let mut client = Raw::map(&file, messages::Access::Read, 0, 1).unwrap();
        let asked = client.call(Request::Was { id: 0 });
        assert!(matches!(asked, Some(Reply::Was { .. })), "{asked:?}");
        drop(client);
        let bytes = std::fs::read(self.mount.dir.join("file")).unwrap();
        totals.after_death += layout::final_state(&bytes, &self.board);
        layout::compare_wild(&bytes, 0);
        let board = &self.board;
        totals.gpu += board.sum(0..GPUS, Counter::Done);
        totals.cpu += board.sum(GPUS..WRITERS, Counter::Done);
        totals.cuts_and_holes += board.sum(WRITERS..WORKERS, Counter::Compared);
        totals.stale += board.sum(0..GPUS, Counter::Stale);
        totals.recovered += board.sum(0..GPUS, Counter::Recovered);
        totals.merged += board.sum(0..GPUS, Counter::Merged);
        totals.patched += board.sum(0..GPUS, Counter::Patched);
        totals.compared += board.sum(0..WRITERS, Counter::Compared);
        let (cut, hole) = (layout::CUT_FROM + 5000, layout::KEPT_FROM + 100);
        let mode = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        file.set_len(cut as u64).unwrap();
        file.set_len(LEN as u64).unwrap();
        rustix::fs::fallocate(&file, mode, hole as u64, 9000).unwrap();
        let mut wanted = bytes;
        wanted.resize(LEN, 0);
        wanted[cut..].fill(0);
        wanted[hole..hole + 9000].fill(0);
        let mut again = vec![0; LEN];
        file.read_exact_at(&mut again, 0).unwrap();
        let wrong = layout::first_difference(&again, &wanted);
        assert_eq!(wrong, None, "after the last cut and hole (seed {})", self.seed);
        names::remove_scratch(&self.mount.dir);
        file.sync_all().unwrap();
        again
    }

    /// Nothing is left, but for what a crash may leave.
    fn verify_server(&self, totals: &mut Totals) {
        totals.deleted += audit::nothing_is_left(self.mount, self.mount.servers() as usize / 4);
        let (server, supervisor) = (totals.server_kib, totals.supervisor_kib);
        assert!(server < SERVER_KIB && supervisor < SUPERVISOR_KIB, "{server} KiB, {supervisor} KiB resident");
    }
}

fn send(pid: u32, signal: Signal) -> bool {
    Pid::from_raw(pid as i32).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

/// The supervisor has ended, and so have all that it and its servers have started.
fn no_process_is_left() {
    let begun = Instant::now();
    loop {
        let children = audit::children(std::process::id());
        if children.is_empty() {
            return;
        }
        // Those that were orphaned are this process's to collect.
        let _ = rustix::process::wait(rustix::process::WaitOptions::NOHANG);
        let names = || children.iter().map(|pid| std::fs::read_to_string(format!("/proc/{pid}/cmdline")));
        assert!(begun.elapsed() < PATIENCE, "processes are left: {children:?} {:?}", names().collect::<Vec<_>>());
        std::thread::sleep(Duration::from_millis(5));
    }
}
