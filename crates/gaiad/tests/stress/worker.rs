//! Worker processes: this test again, in another role.

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

use crate::board::{Board, Counter, WORKERS};
use crate::common::both::Random;
use crate::layout::GPUS;
use crate::{cpu, gpu};

/// Set in the environment of a worker: worker, life, seed, file, board.
const ROLE: &str = "SPINIO_GAIAD_STRESS_WORKER";

pub(crate) const NAMES: [&str; WORKERS] = ["GPU 0", "GPU 1", "mapping", "write", "truncater", "puncher"];

/// One life of a worker.
pub(crate) struct Life {
    pub(crate) worker: usize,
    pub(crate) number: usize,
}

impl Life {
    pub(crate) fn counter<'a>(&self, board: &'a Board, counter: Counter) -> &'a AtomicU64 {
        board.counter(self.worker, self.number, counter)
    }

    pub(crate) fn count(&self, board: &Board, counter: Counter, more: u64) {
        self.counter(board, counter).fetch_add(more, SeqCst);
    }
}

/// Starts a life.
pub(crate) fn spawn(worker: usize, seed: u64, file: &Path, board_at: &Path, board: &Board) -> Child {
    let number = board.begin_life(worker);
    let text = format!("{worker} {number} {seed} {} {}", file.display(), board_at.display());
    let mut command = Command::new("/proc/self/exe");
    command.args(["--exact", "worker_role", "--nocapture", "-q"]).env(ROLE, text);
    command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap()
}

/// The process in that role.
pub(crate) fn role() {
    let Ok(text) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = text.split(' ').collect();
    let [worker, number, seed, at, board] = words[..] else { panic!("{text}") };
    let life = Life { worker: worker.parse().unwrap(), number: number.parse().unwrap() };
    let random = Random::new(seed.parse::<u64>().unwrap() * 1000 + (life.worker * 128 + life.number) as u64);
    let board = Board::open(Path::new(board));
    let file = OpenOptions::new().read(true).write(true).open(at).unwrap();
    match life.worker {
        worker if worker < GPUS => gpu::run(&life, &board, &file, Path::new(at), random),
        2 => cpu::mapping(&life, &board, &file, random),
        3 => cpu::writing(&life, &board, &file, random),
        4 => cpu::truncater(&life, &board, &file, random),
        _ => cpu::puncher(&life, &board, &file, random),
    }
    std::process::exit(0);
}
