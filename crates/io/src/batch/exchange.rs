//! Pages that go from hand to hand: empty ones to those who read, full ones back to those who send.
//!
//! ```text
//!   host ── lend ──> empty ── page ──────> reader
//!   host <── next ── full  <── hand_in ──── reader
//! ```
//!
//! A reader waits for a page, and only for that; a host never waits for long, because pages also come back from the
//! device. While a reader is inside, somebody has to be host. Who gets no page any more ([`Exchange::starve`]) leaves with
//! what he could not read.

use std::collections::VecDeque;
use std::sync::PoisonError;
use std::time::Duration;

use crate::sync::{Condvar, Mutex, lock};

pub(crate) struct Exchange<Empty, Full> {
    state: Mutex<State<Empty, Full>>,
    /// For readers: an empty page, or none for ever.
    lent: Condvar,
    /// For hosts: a full page, or a reader who wants one or has left.
    news: Condvar,
}

struct State<Empty, Full> {
    empty: Vec<Empty>,
    full: VecDeque<Full>,
    readers: usize,
    waiting: usize,
    starved: bool,
}

impl<Empty, Full> State<Empty, Full> {
    /// One page for each reader lies ready: a host may stand still in the driver while somebody registers memory.
    fn wants(&self) -> bool {
        !self.starved && self.readers > 0 && self.empty.len() < self.waiting + self.readers
    }
}

/// What there is to do for a host.
pub(crate) enum Next<Full> {
    Send(Full),
    /// Nothing for now.
    Wait,
    /// Nobody reads, and everything was sent.
    Alone,
}

/// A reader, until it is dropped.
pub(crate) struct Reader<'a, Empty, Full>(&'a Exchange<Empty, Full>);

impl<Empty, Full> Exchange<Empty, Full> {
    pub(crate) fn new() -> Self {
        let state = State { empty: Vec::new(), full: VecDeque::new(), readers: 0, waiting: 0, starved: false };
        Exchange { state: Mutex::new(state), lent: Condvar::new(), news: Condvar::new() }
    }

    pub(crate) fn enter(&self) -> Reader<'_, Empty, Full> {
        lock(&self.state).readers += 1;
        Reader(self)
    }

    /// Whether another empty page would be taken soon.
    pub(crate) fn wants(&self) -> bool {
        lock(&self.state).wants()
    }

    pub(crate) fn lend(&self, page: Empty) {
        lock(&self.state).empty.push(page);
        self.lent.notify_one();
    }

    /// An empty page back that no reader has taken.
    pub(crate) fn take_back(&self) -> Option<Empty> {
        lock(&self.state).empty.pop()
    }

    /// No further pages come: whoever waits for one leaves.
    pub(crate) fn starve(&self) {
        lock(&self.state).starved = true;
        self.lent.notify_all();
        self.news.notify_all();
    }

    /// What to do next; waits a little for it. `dry`: the host has no page to lend.
    pub(crate) fn next(&self, dry: bool) -> Next<Full> {
        let mut state = lock(&self.state);
        if state.full.is_empty() && state.readers > 0 && (dry || !state.wants()) {
            let limit = if dry { DRY } else { IDLE };
            state = self.news.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0;
        }
        match state.full.pop_front() {
            Some(full) => Next::Send(full),
            None if state.readers > 0 => Next::Wait,
            None => Next::Alone,
        }
    }
}

/// How long a host waits for news: what the device gives back, nobody tells.
const DRY: Duration = Duration::from_micros(50);
const IDLE: Duration = Duration::from_millis(5);

impl<Empty, Full> Reader<'_, Empty, Full> {
    /// An empty page; `None`: there will be none.
    pub(crate) fn page(&self) -> Option<Empty> {
        let exchange = self.0;
        let mut state = lock(&exchange.state);
        loop {
            if state.starved {
                return None;
            }
            if let Some(page) = state.empty.pop() {
                exchange.news.notify_one();
                return Some(page);
            }
            state.waiting += 1;
            exchange.news.notify_one();
            state = exchange.lent.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Gives a full page to whoever is host.
    pub(crate) fn hand_in(&self, page: Full) {
        lock(&self.0.state).full.push_back(page);
        self.0.news.notify_one();
    }
}

impl<Empty, Full> Drop for Reader<'_, Empty, Full> {
    fn drop(&mut self) {
        lock(&self.0.state).readers -= 1;
        self.0.news.notify_all();
    }
}

/// Under a model checker: every page that was lent comes back, full or empty, and nobody waits for ever.
#[cfg(all(test, loom))]
mod interleavings {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use loom::thread;

    use super::*;

    /// Reads `items` by numbers taken from `next`, one a page.
    fn read(exchange: &Exchange<usize, usize>, next: &AtomicUsize, items: usize) -> usize {
        let reader = exchange.enter();
        let mut left = 0;
        while next.fetch_add(1, Relaxed) < items {
            match reader.page() {
                Some(page) => reader.hand_in(page),
                None => left += 1,
            }
        }
        left
    }

    /// Lends up to `pages`; those sent come back at once.
    fn host(exchange: &Exchange<usize, usize>, pages: &mut Vec<usize>, sent: &mut usize) -> bool {
        while exchange.wants() {
            match pages.pop() {
                Some(page) => exchange.lend(page),
                None => {
                    exchange.starve();
                    break;
                }
            }
        }
        match exchange.next(false) {
            Next::Send(page) => {
                *sent += 1;
                pages.push(page);
                true
            }
            Next::Wait => true,
            Next::Alone => false,
        }
    }

    fn check(pages: usize, readers: usize, items: usize) {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(3);
        model.check(move || {
            let exchange = Arc::new(Exchange::new());
            let next = Arc::new(AtomicUsize::new(0));
            let all: Vec<_> = (0..readers)
                .map(|_| {
                    let (exchange, next) = (Arc::clone(&exchange), Arc::clone(&next));
                    thread::spawn(move || read(&exchange, &next, items))
                })
                .collect();
            let (mut mine, mut sent) = ((0..pages).collect::<Vec<_>>(), 0);
            while host(&exchange, &mut mine, &mut sent) {}
            // Who comes now finds nobody to lend him a page.
            exchange.starve();
            let left: usize = all.into_iter().map(|reader| reader.join().unwrap()).sum();
            while host(&exchange, &mut mine, &mut sent) {}
            while let Some(page) = exchange.take_back() {
                mine.push(page);
            }
            assert_eq!(sent + left, items);
            mine.sort_unstable();
            assert_eq!(mine, (0..pages).collect::<Vec<_>>());
        });
    }

    #[test]
    fn one_reader_gets_and_returns_every_page() {
        check(2, 1, 2);
    }

    #[test]
    fn readers_that_get_no_page_leave() {
        check(1, 2, 2);
    }
}
