//! The queues, and which command may run next.
//!
//! A command waits for those before it on its queue, and for the marks it was given: a queue of the program's for what
//! was queued on queue 0 before it, and the other way round; a leased one for what it was told to follow. Of all that may
//! run the oldest does.

use std::collections::VecDeque;
use std::time::Instant;

use super::{Copy, Kernel, Result};
use crate::{DeviceError, ErrorKind};

/// A place in a queue: reached once `seq` things on it are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::emulated) struct Mark {
    pub(super) queue: usize,
    pub(super) seq: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Default,
    Program,
    Leased,
    Idle,
}

#[derive(Debug)]
pub(super) struct Command {
    pub(super) order: u64,
    pub(super) not_before: Instant,
    pub(super) after: Vec<Mark>,
    pub(super) copy: Option<Copy>,
}

#[derive(Debug)]
pub(super) struct Queue {
    pub(super) role: Role,
    pub(super) pending: VecDeque<Command>,
    pub(super) queued: u64,
    pub(super) done: u64,
    /// The place in the order of all of the kernel that runs.
    pub(super) running: Option<u64>,
    pub(super) failed: Option<(u64, DeviceError)>,
}

impl Queue {
    fn new(role: Role) -> Queue {
        Queue { role, pending: VecDeque::new(), queued: 0, done: 0, running: None, failed: None }
    }
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) queues: Vec<Queue>,
    pub(super) fences: Vec<Option<Mark>>,
    pub(super) fences_lent: usize,
    pub(super) order: u64,
    pub(super) held: u32,
    pub(super) busy: bool,
    /// Kernels whose turn has come, with their queues.
    pub(super) kernels: VecDeque<(usize, Kernel)>,
}

impl State {
    pub(super) fn new() -> State {
        State {
            queues: vec![Queue::new(Role::Default)],
            fences: Vec::new(),
            fences_lent: 0,
            order: 0,
            held: 0,
            busy: false,
            kernels: VecDeque::new(),
        }
    }

    /// An idle queue in a new role; one with leftovers only if it must be.
    pub(super) fn open(&mut self, role: Role) -> usize {
        let idle = |q: &Queue| q.role == Role::Idle && q.pending.is_empty() && q.done == q.queued;
        let at = self.queues.iter().position(idle).unwrap_or_else(|| {
            self.queues.push(Queue::new(role));
            self.queues.len() - 1
        });
        self.queues[at].role = role;
        self.queues[at].failed = None;
        at
    }

    pub(super) fn leased(&self) -> usize {
        self.queues.iter().filter(|q| q.role == Role::Leased).count()
    }

    pub(super) fn checked(&self, queue: u64) -> Result<usize> {
        let known = self.queues.get(queue as usize).is_some_and(|q| q.role != Role::Idle);
        if known { Ok(queue as usize) } else { Err(DeviceError::new(ErrorKind::BadAddress, "queue")) }
    }

    pub(super) fn reached(&self, mark: Mark) -> bool {
        self.queues[mark.queue].done >= mark.seq
    }

    /// Tells of a failure at or before the mark, once.
    pub(super) fn outcome(&mut self, mark: Mark) -> Result<()> {
        let queue = &mut self.queues[mark.queue];
        match queue.failed {
            Some((seq, error)) if seq <= mark.seq => {
                queue.failed = None;
                Err(error)
            }
            _ => Ok(()),
        }
    }

    /// The queue whose first command may run and is the oldest.
    pub(super) fn next(&self) -> Option<usize> {
        if self.held > 0 {
            return None;
        }
        let ready = |c: &Command| c.after.iter().all(|&mark| self.reached(mark));
        let idle = self.queues.iter().enumerate().filter(|(_, q)| q.running.is_none());
        let heads = idle.filter_map(|(at, q)| Some((at, q.pending.front()?)));
        heads.filter(|(_, c)| ready(c)).min_by_key(|(_, c)| c.order).map(|(at, _)| at)
    }
}
