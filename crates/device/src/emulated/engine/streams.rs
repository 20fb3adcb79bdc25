//! The streams, and the choice of the next command.
//!
//! A command waits for those before it on its stream, and for its fences: a stream of the program for work enqueued on
//! stream 0 before it, and the reverse; an internal one for the fences it follows. Of all runnable commands the oldest
//! runs.

use std::collections::VecDeque;
use std::time::Instant;

use super::{Kernel, Operation, Result};
use crate::{DeviceError, ErrorKind};

/// A position in a stream: reached once `seq` commands on it are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::emulated) struct Mark {
    pub(super) stream: usize,
    pub(super) seq: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Default,
    App,
    /// The program's, ordered with no other.
    AppUnordered,
    Internal,
    Idle,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) order: u64,
    pub(super) not_before: Instant,
    pub(super) after: Vec<Mark>,
    pub(super) copy: Option<Operation>,
}

#[derive(Debug)]
pub(super) struct StreamState {
    pub(super) role: Role,
    pub(super) pending: VecDeque<Command>,
    pub(super) queued: u64,
    pub(super) done: u64,
    /// The position in the global order of the running kernel or stop.
    pub(super) running: Option<u64>,
    /// It is a stop.
    pub(super) stopped: bool,
    pub(super) failed: Option<(u64, DeviceError)>,
}

impl StreamState {
    fn new(role: Role) -> StreamState {
        StreamState { role, pending: VecDeque::new(), queued: 0, done: 0, running: None, stopped: false, failed: None }
    }
}

#[derive(Debug)]
pub(super) struct EngineState {
    pub(super) streams: Vec<StreamState>,
    pub(super) fences: Vec<Option<Mark>>,
    pub(super) fences_in_use: usize,
    pub(super) order: u64,
    pub(super) pauses: u32,
    pub(super) busy: bool,
    /// Runnable GPU kernels, with their streams, and the threads that wait for one.
    pub(super) kernels: VecDeque<(usize, Kernel)>,
    pub(super) idle_kernel_threads: usize,
    pub(super) kernel_threads: usize,
    /// Runnable host functions.
    pub(super) host_functions: VecDeque<(usize, Kernel)>,
}

impl EngineState {
    pub(super) fn new() -> EngineState {
        EngineState {
            streams: vec![StreamState::new(Role::Default)],
            fences: Vec::new(),
            fences_in_use: 0,
            order: 0,
            pauses: 0,
            busy: false,
            kernels: VecDeque::new(),
            idle_kernel_threads: 0,
            kernel_threads: 0,
            host_functions: VecDeque::new(),
        }
    }

    /// An idle stream in a new role; one with unfinished work only if necessary.
    pub(super) fn open(&mut self, role: Role) -> usize {
        let idle = |q: &StreamState| q.role == Role::Idle && q.pending.is_empty() && q.done == q.queued;
        let at = self.streams.iter().position(idle).unwrap_or_else(|| {
            self.streams.push(StreamState::new(role));
            self.streams.len() - 1
        });
        self.streams[at].role = role;
        self.streams[at].failed = None;
        at
    }

    pub(super) fn streams_in_use(&self) -> usize {
        self.streams.iter().filter(|q| q.role == Role::Internal).count()
    }

    pub(super) fn index_of(&self, stream: u64) -> Result<usize> {
        let is_open = self.streams.get(stream as usize).is_some_and(|q| q.role != Role::Idle);
        if is_open { Ok(stream as usize) } else { Err(DeviceError::new(ErrorKind::BadAddress, "stream")) }
    }

    pub(super) fn reached(&self, mark: Mark) -> bool {
        self.streams[mark.stream].done >= mark.seq
    }

    /// Reports a failure at or before the mark, once.
    pub(super) fn take_error(&mut self, mark: Mark) -> Result<()> {
        let queue = &mut self.streams[mark.stream];
        match queue.failed {
            Some((seq, error)) if seq <= mark.seq => {
                queue.failed = None;
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// The stream whose first command may run and is the oldest.
    pub(super) fn next_ready(&self) -> Option<usize> {
        if self.pauses > 0 {
            return None;
        }
        let ready = |c: &Command| c.after.iter().all(|&mark| self.reached(mark));
        let idle = self.streams.iter().enumerate().filter(|(_, q)| q.running.is_none());
        let heads = idle.filter_map(|(at, q)| Some((at, q.pending.front()?)));
        heads.filter(|(_, c)| ready(c)).min_by_key(|(_, c)| c.order).map(|(at, _)| at)
    }
}
