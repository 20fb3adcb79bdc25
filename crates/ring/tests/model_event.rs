//! Event sets under random schedules: entries arrive in order and once; no byte of a watched socket stays unseen.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use spinio_ring::event::{Entry, IN, Producer, Taker, Watch};
use spinio_ring::layout::Descriptor;

const ENTRIES: usize = 4;

struct Memory {
    queue: Vec<AtomicU64>,
    copies: Vec<AtomicU64>,
    taken: AtomicU64,
    claims: [AtomicU64; 4],
}

impl Memory {
    fn new() -> Memory {
        let words = || (0..ENTRIES * 2).map(|_| AtomicU64::new(0)).collect();
        Memory { queue: words(), copies: words(), taken: AtomicU64::new(0), claims: Default::default() }
    }

    fn taker(&self) -> Taker<'_, AtomicU64> {
        Taker { queue: &self.queue, taken: &self.taken, claims: &self.claims, copies: &self.copies }
    }
}

fn event_of(index: u32) -> Entry {
    Entry { socket: Descriptor { index, epoch: 1 }, events: IN, listener: None }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn entries_come_out_in_order_and_once(steps in prop::collection::vec(0..4_u8, 1..300)) {
        let (memory, mut producer, mut model) = (Memory::new(), Producer::default(), VecDeque::new());
        let (mut next, taker) = (0, memory.taker());
        for step in steps {
            match step {
                0 | 1 => if producer.push(&memory.queue, &memory.taken, event_of(next)) {
                    model.push_back(next);
                    next += 1;
                }
                2 => drop(taker.gather()),
                _ => if let Some(entry) = taker.claim() {
                    prop_assert_eq!(Some(entry.socket.index), model.pop_front());
                }
            }
            // In the ring and among the copies.
            prop_assert!(model.len() <= ENTRIES * 2);
        }
        while taker.gather() || !model.is_empty() {
            while let Some(entry) = taker.claim() {
                prop_assert_eq!(Some(entry.socket.index), model.pop_front());
            }
        }
        prop_assert!(producer.push(&memory.queue, &memory.taken, event_of(0)), "an empty ring has room");
    }

    /// Eight sockets, a ring of four entries. A step is the arrival of a byte, a look of the proxy, or a group that waits
    /// for an event, takes all bytes of its socket, and arms it. Bytes may arrive between taking and arming.
    #[test]
    fn no_byte_stays_unseen(steps in prop::collection::vec((0..4_u8, 0..8_usize), 1..300)) {
        let (memory, mut producer) = (Memory::new(), Producer::default());
        let taker = memory.taker();
        let mut sockets = [(0_u32, Watch::new(1, IN)); 8];
        sockets.iter_mut().for_each(|socket| socket.1.arm());
        let mut served: VecDeque<usize> = VecDeque::new();
        let mut in_flight = [false; 8];
        let finish = (0..200).flat_map(|n| [(1, n % 8), (2, 0), (3, 0)]);
        for (step, which) in steps.into_iter().chain(finish) {
            match step {
                0 => sockets[which].0 += 1,
                1 => {
                    let (bytes, watch) = &mut sockets[which];
                    let level = if *bytes > 0 { IN } else { 0 };
                    if watch.due(level).is_some() && producer.push(&memory.queue, &memory.taken, event_of(which as u32)) {
                        watch.told();
                        prop_assert!(!std::mem::replace(&mut in_flight[which], true), "two events of one arming");
                    }
                }
                2 => {
                    taker.gather();
                    if let Some(entry) = taker.claim() {
                        let index = entry.socket.index as usize;
                        prop_assert!(sockets[index].0 > 0, "an event without a byte");
                        sockets[index].0 = 0;
                        served.push_back(index);
                    }
                }
                _ => if let Some(index) = served.pop_front() {
                    in_flight[index] = false;
                    sockets[index].1.arm();
                }
            }
        }
        prop_assert!(sockets.iter().all(|socket| socket.0 == 0), "bytes that no group was told of");
    }
}
