//! Both directions of a stream under random schedules, compared with a plain queue of bytes. Positions begin near 2^48.

use std::collections::VecDeque;

use proptest::prelude::*;
use spinio_ring::Position;
use spinio_ring::line::EOF;
use spinio_ring::stream::{Look, ReceiveRing, Receiver, SendRing, Sender};

const SIZE: usize = 64;

fn steps() -> impl Strategy<Value = Vec<(u8, usize)>> {
    prop::collection::vec((0..4_u8, 1..100_usize), 1..400)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn sent_bytes_come_out_as_they_went_in(back in 0..200_u64, steps in steps()) {
        let first = Position::of(0_u64.wrapping_sub(back));
        let (mut kernel, mut proxy) = (Sender::new(SIZE as u64, first), SendRing::new(SIZE as u64, first));
        let (mut ring, mut model) = ([0_u8; SIZE], VecDeque::new());
        let (mut line, mut doorbell, mut next) = (proxy.line(0).word(), first, 0_u8);
        for (step, count) in steps {
            match step {
                0 => {
                    let (at, room) = kernel.room();
                    let count = count.min(room);
                    prop_assert!(model.len() + count <= SIZE);
                    for byte in &mut ring[at..at + count] {
                        *byte = next;
                        model.push_back(next);
                        next = next.wrapping_add(1);
                    }
                    doorbell = kernel.advance(count);
                }
                1 => prop_assert_eq!(kernel.look(line), 0),
                2 => prop_assert_eq!(proxy.extend(doorbell), Ok(())),
                _ => {
                    let (at, pending) = proxy.next();
                    let count = count.min(pending);
                    for byte in &ring[at..at + count] {
                        prop_assert_eq!(Some(*byte), model.pop_front());
                    }
                    proxy.advance(count);
                    line = proxy.line(0).word();
                }
            }
        }
    }

    #[test]
    fn received_bytes_come_out_as_they_went_in(back in 0..200_u64, steps in steps()) {
        let first = Position::of(0_u64.wrapping_sub(back));
        let mut proxy = ReceiveRing::new(SIZE as u64, first, 5);
        let mut kernel = Receiver::new(SIZE as u64, first, 5);
        let (mut ring, mut model) = ([0_u8; SIZE], VecDeque::new());
        let (mut line, mut host_line, mut next) = (proxy.line(0).word(), 0, 0_u8);
        for (step, count) in steps {
            match step {
                0 => {
                    let (at, room) = proxy.room();
                    let count = count.min(room);
                    prop_assert!(model.len() + count <= SIZE);
                    for byte in &mut ring[at..at + count] {
                        *byte = next;
                        model.push_back(next);
                        next = next.wrapping_add(1);
                    }
                    proxy.advance(count);
                }
                1 => line = proxy.line(0).word(),
                2 => prop_assert_eq!(proxy.credit(host_line), Ok(())),
                _ => if let Look::Bytes(at, there) = kernel.look(line) {
                    let count = count.min(there);
                    for byte in &ring[at..at + count] {
                        prop_assert_eq!(Some(*byte), model.pop_front());
                    }
                    host_line = kernel.advance(count).0;
                }
            }
        }
        // What is left arrives before the end.
        let line = proxy.line(EOF).word();
        while let Look::Bytes(at, there) = kernel.look(line) {
            for byte in &ring[at..at + there] {
                prop_assert_eq!(Some(*byte), model.pop_front());
            }
            kernel.advance(there);
        }
        prop_assert_eq!(kernel.look(line), Look::End);
        prop_assert!(model.is_empty());
    }

    #[test]
    fn no_word_of_a_kernel_gets_the_proxy_outside_a_ring(words in prop::collection::vec(any::<u64>(), 1..100)) {
        let mut send_ring = SendRing::new(SIZE as u64, Position::of(0));
        let mut receive_ring = ReceiveRing::new(SIZE as u64, Position::of(0), 5);
        for word in words {
            let near = Position::of(word % 200);
            let _ = send_ring.extend(near);
            let _ = receive_ring.credit(word);
            let _ = receive_ring.credit(near.bits() | 5 << 48);
            let ((at, len), (to, room)) = (send_ring.next(), receive_ring.room());
            prop_assert!(at + len <= SIZE && to + room <= SIZE);
            send_ring.advance(len.min(word as usize % 5));
            receive_ring.advance(room.min(word as usize % 7));
        }
    }
}
