//! Connections inside a net under random schedules, against a queue of bytes: they come out as they went in, over many uses of
//! a pair, whose words are never cleared; no word of the other end gets a side outside its ring.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;

use proptest::prelude::*;
use spinio_ring::peer::{CLOSED, CONSUMED, Reader, TAIL, Writer, next_generation};
use spinio_ring::{Position, Word};

const SIZE: usize = 8;

#[derive(Clone, Debug)]
enum Step {
    Send(usize),
    Receive(usize),
    /// The connection ends, and the pair is used again.
    Again,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (1..=SIZE).prop_map(Step::Send),
        8 => (1..=SIZE).prop_map(Step::Receive),
        1 => Just(Step::Again),
    ];
    proptest::collection::vec(step, 1..200)
}

proptest! {
    #[test]
    fn bytes_come_out_as_they_went_in(steps in steps(), before in 0..40_u64) {
        let first = Position::of(u64::MAX - before);
        let words = [AtomicU64::new(0), AtomicU64::new(0)];
        let (mut ring, mut model, mut next) = ([0_u8; SIZE], VecDeque::new(), 0_u8);
        let mut generation = next_generation(0);
        let sides = |generation| (Writer::new(SIZE as u64, generation, first), Reader::new(SIZE as u64, generation, first));
        let (mut writer, mut reader) = sides(generation);
        for step in steps {
            match step {
                Step::Send(most) => {
                    let (at, room) = writer.room(words[CONSUMED].load_acquire()).unwrap();
                    prop_assert!(room > 0 || model.len() == SIZE);
                    for i in 0..room.min(most) {
                        next = next.wrapping_add(1);
                        ring[at + i] = next;
                        model.push_back(next);
                    }
                    if room > 0 {
                        words[TAIL].store_release(writer.advance(room.min(most)));
                    }
                }
                Step::Receive(most) => {
                    let (at, there, ended) = reader.look(words[TAIL].load_acquire()).unwrap();
                    prop_assert!(!ended && (there > 0 || model.is_empty()));
                    for byte in &ring[at..at + there.min(most)] {
                        prop_assert_eq!(Some(*byte), model.pop_front());
                    }
                    if there > 0 {
                        words[CONSUMED].store_release(reader.advance(there.min(most)));
                    }
                }
                Step::Again => {
                    words[TAIL].store_release(writer.end(CLOSED));
                    prop_assert!(reader.look(words[TAIL].load_acquire()).unwrap().2);
                    model.clear();
                    generation = next_generation(generation);
                    (writer, reader) = sides(generation);
                    prop_assert_eq!(reader.look(words[TAIL].load_acquire()), Ok((first.place(SIZE as u64).0, 0, false)));
                }
            }
        }
    }

    #[test]
    fn no_word_gets_a_side_outside_its_ring(words in proptest::collection::vec(any::<u64>(), 1..50), sent in 0..=SIZE) {
        let first = Position::of(77);
        let (mut writer, reader) = (Writer::new(SIZE as u64, 5, first), Reader::new(SIZE as u64, 5, first));
        writer.advance(sent);
        for word in words {
            // Of this use of the pair, or as it came.
            for word in [word, word & !(0x1fff << 48) | 5 << 48] {
                if let Ok((at, bytes, _)) = reader.look(word) {
                    prop_assert!(at + bytes <= SIZE);
                }
                if let Ok((at, bytes)) = writer.room(word) {
                    prop_assert!(at + bytes <= SIZE);
                }
            }
        }
    }
}
