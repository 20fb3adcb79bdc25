//! The exchange of buffers: empty ones are passed to the readers, filled ones to the launcher.
//!
//! ```text
//!   launcher ── supply ──> empty ── acquire ──> reader
//!   launcher <── next ──── full  <── submit ─── reader
//! ```
//!
//! A reader waits for a buffer, and for nothing else. A launcher never waits for long, because buffers are also
//! released by the device. While there is a reader, a thread has to be launcher, so the last launcher closes the
//! exchange before it leaves. A reader that gets no more buffers ([`BufferExchange::close`]) leaves and reports what it
//! could not read.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::Duration;

use spinio_host::sync::{Condvar, Mutex, lock};

pub(crate) struct BufferExchange<Empty, Full> {
    state: Mutex<State<Empty, Full>>,
    /// For readers: an empty buffer, or closed.
    buffer_supplied: Condvar,
    /// For launchers: a full buffer, or a reader that needs one or has left.
    launcher_wake: Condvar,
}

struct State<Empty, Full> {
    empty: Vec<Empty>,
    full: VecDeque<Full>,
    readers: usize,
    waiting: usize,
    closed: bool,
}

impl<Empty, Full> State<Empty, Full> {
    /// One buffer for each reader is in reserve: a launcher may be busy for half a millisecond, registering memory.
    fn needs_buffers(&self) -> bool {
        !self.closed && self.readers > 0 && self.empty.len() < self.waiting + self.readers
    }
}

/// The next step of a launcher.
pub(crate) enum Next<Full> {
    Send(Full),
    /// Nothing at the moment.
    Wait,
    /// There is no reader, and everything was sent.
    NoReaders,
}

/// A reader, until it is dropped.
pub(crate) struct Reader<'a, Empty, Full>(&'a BufferExchange<Empty, Full>);

impl<Empty, Full> BufferExchange<Empty, Full> {
    pub(crate) fn new() -> Self {
        let state = State { empty: Vec::new(), full: VecDeque::new(), readers: 0, waiting: 0, closed: false };
        BufferExchange { state: Mutex::new(state), buffer_supplied: Condvar::new(), launcher_wake: Condvar::new() }
    }

    /// Adds a reader; `None`: the exchange is closed.
    pub(crate) fn enter(&self) -> Option<Reader<'_, Empty, Full>> {
        let mut state = lock(&self.state);
        if state.closed {
            return None;
        }
        state.readers += 1;
        Some(Reader(self))
    }

    /// Closes it to readers; false if there is a reader, or a full buffer that is not sent.
    pub(crate) fn try_close(&self) -> bool {
        let mut state = lock(&self.state);
        let no_readers = state.readers == 0 && state.full.is_empty();
        state.closed |= no_readers;
        no_readers
    }

    /// Whether another empty buffer would be taken soon.
    pub(crate) fn needs_buffers(&self) -> bool {
        lock(&self.state).needs_buffers()
    }

    pub(crate) fn supply(&self, buffer: Empty) {
        lock(&self.state).empty.push(buffer);
        self.buffer_supplied.notify_one();
    }

    /// Takes back an empty buffer that no reader has taken.
    pub(crate) fn reclaim(&self) -> Option<Empty> {
        lock(&self.state).empty.pop()
    }

    /// No further buffers are supplied: readers that wait for one leave.
    pub(crate) fn close(&self) {
        lock(&self.state).closed = true;
        self.buffer_supplied.notify_all();
        self.launcher_wake.notify_all();
    }

    /// A full buffer, if there is one.
    pub(crate) fn try_recv(&self) -> Option<Full> {
        lock(&self.state).full.pop_front()
    }

    /// The next step; waits briefly for it. `out_of_buffers`: the launcher has no buffer to supply.
    pub(crate) fn next(&self, out_of_buffers: bool) -> Next<Full> {
        let mut state = lock(&self.state);
        if state.full.is_empty() && state.readers > 0 && (out_of_buffers || !state.needs_buffers()) {
            let limit = if out_of_buffers { OUT_OF_BUFFERS_WAIT } else { IDLE_WAIT };
            state = self.launcher_wake.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.full.pop_front() {
            Some(full) => Next::Send(full),
            None if state.readers > 0 => Next::Wait,
            None => Next::NoReaders,
        }
    }
}

/// How long a launcher waits: buffers that the device releases are not signalled.
const OUT_OF_BUFFERS_WAIT: Duration = Duration::from_micros(50);
const IDLE_WAIT: Duration = Duration::from_millis(5);

impl<Empty, Full> Reader<'_, Empty, Full> {
    /// An empty buffer; `None`: there will be no more.
    pub(crate) fn acquire(&self) -> Option<Empty> {
        let exchange = self.0;
        let mut state = lock(&exchange.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(buffer) = state.empty.pop() {
                exchange.launcher_wake.notify_one();
                return Some(buffer);
            }
            state.waiting += 1;
            exchange.launcher_wake.notify_one();
            state = exchange.buffer_supplied.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Submits a full buffer to the launcher.
    pub(crate) fn submit(&self, buffer: Full) {
        lock(&self.0.state).full.push_back(buffer);
        self.0.launcher_wake.notify_one();
    }
}

impl<Empty, Full> Drop for Reader<'_, Empty, Full> {
    fn drop(&mut self) {
        lock(&self.0.state).readers -= 1;
        self.0.launcher_wake.notify_all();
    }
}

/// Under a model checker: every supplied buffer is released, each filled one is sent, and no thread waits forever.
#[cfg(all(test, loom))]
mod interleavings {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
    use loom::thread;

    use super::*;

    struct Model {
        exchange: BufferExchange<usize, usize>,
        /// Fragments are taken by number.
        next: AtomicUsize,
        items: usize,
        /// The pool; a buffer that is sent is free again at once.
        buffers: Mutex<Vec<usize>>,
        sent: AtomicUsize,
        left: AtomicUsize,
        done: AtomicBool,
    }

    impl Model {
        fn take(&self) -> bool {
            self.next.fetch_add(1, Relaxed) < self.items
        }

        /// A reader: one buffer for each fragment.
        fn read(&self) {
            let Some(reader) = self.exchange.enter() else { return };
            while self.take() {
                match reader.acquire() {
                    Some(buffer) => reader.submit(buffer),
                    None => drop(self.left.fetch_add(1, Relaxed)),
                }
            }
        }

        fn send(&self, buffer: usize) {
            self.sent.fetch_add(1, Relaxed);
            lock(&self.buffers).push(buffer);
        }

        /// Supplies readers as far as the pool has buffers.
        fn supply(&self) {
            while self.exchange.needs_buffers() {
                let buffer = lock(&self.buffers).pop();
                let Some(buffer) = buffer else { break };
                self.exchange.supply(buffer);
            }
        }

        fn launch_step(&self) -> bool {
            self.supply();
            if self.exchange.needs_buffers() {
                self.exchange.close();
            }
            match self.exchange.next(false) {
                Next::Send(buffer) => {
                    self.send(buffer);
                    true
                }
                Next::Wait => true,
                Next::NoReaders => false,
            }
        }

        fn release_unused(&self) {
            while let Some(buffer) = self.exchange.reclaim() {
                lock(&self.buffers).push(buffer);
            }
        }

        /// The caller: launcher while there are readers, then it reads.
        fn finish(&self) {
            loop {
                if self.launch_step() {
                    continue;
                }
                self.release_unused();
                if self.take() {
                    self.sent.fetch_add(1, Relaxed);
                } else if self.exchange.try_close() {
                    break;
                }
            }
            self.done.store(true, Relaxed);
        }

        /// The caller, before that: it registers `parts` parts, and needs a buffer for each.
        fn register(&self, parts: usize) {
            for _ in 0..parts {
                self.supply();
                while let Some(buffer) = self.exchange.try_recv() {
                    self.send(buffer);
                }
                let buffer = loop {
                    let free = lock(&self.buffers).pop();
                    if let Some(buffer) = free.or_else(|| self.exchange.reclaim()) {
                        break buffer;
                    }
                    if let Next::Send(buffer) = self.exchange.next(true) {
                        self.send(buffer);
                    }
                };
                lock(&self.buffers).push(buffer);
            }
        }

        /// A second launcher, concurrent with the caller.
        fn launcher(&self) {
            while !self.done.load(Relaxed) {
                if !self.launch_step() {
                    self.release_unused();
                    thread::yield_now();
                }
            }
        }
    }

    fn check(buffers: usize, readers: usize, parts: usize, launcher: bool, items: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(if launcher { 2 } else { 3 });
        model.check(move || {
            let model = Arc::new(Model {
                exchange: BufferExchange::new(),
                next: AtomicUsize::new(0),
                items,
                buffers: Mutex::new((0..buffers).collect()),
                sent: AtomicUsize::new(0),
                left: AtomicUsize::new(0),
                done: AtomicBool::new(false),
            });
            let mut others: Vec<_> = (0..readers)
                .map(|_| {
                    let model = Arc::clone(&model);
                    thread::spawn(move || model.read())
                })
                .collect();
            if launcher {
                let model = Arc::clone(&model);
                others.push(thread::spawn(move || model.launcher()));
            }
            model.register(parts);
            model.finish();
            others.into_iter().for_each(|other| other.join().unwrap());
            model.release_unused();
            assert!(matches!(model.exchange.next(true), Next::NoReaders), "a filled buffer was never sent");
            assert_eq!(model.sent.load(Relaxed) + model.left.load(Relaxed), items);
            let mut back = lock(&model.buffers).clone();
            back.sort_unstable();
            assert_eq!(back, (0..buffers).collect::<Vec<_>>());
        });
    }

    #[test]
    fn one_reader_returns_every_buffer() {
        check(2, 1, 0, false, 2);
    }

    #[test]
    fn readers_without_buffers_leave() {
        check(1, 2, 0, false, 2);
    }

    #[test]
    fn launcher_waits_for_late_reader() {
        check(2, 1, 0, true, 1);
    }

    #[test]
    fn registering_caller_gets_buffer_and_pumps() {
        check(1, 1, 2, false, 2);
        check(2, 2, 1, false, 2);
    }
}
