//! Sockets for which there is something to do: each is in a queue once, after those that were put there before it.

use std::collections::VecDeque;

/// A queue of socket indices, and a bit for each index that is in it.
#[derive(Debug, Default)]
pub(super) struct IndexQueue {
    order: VecDeque<u32>,
    /// As long as the largest index so far needs.
    bits: Vec<u64>,
}

impl IndexQueue {
    /// Puts an index at the end, unless it is in the queue.
    pub(super) fn push(&mut self, index: u32) {
        let (word, bit) = place(index);
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        if self.bits[word] & bit == 0 {
            self.bits[word] |= bit;
            self.order.push_back(index);
        }
    }

    /// Takes the first index out: it can be put into the queue again.
    pub(super) fn pop(&mut self) -> Option<u32> {
        let index = self.order.pop_front()?;
        clear(&mut self.bits, index);
        Some(index)
    }

    /// Takes all out, in order. What is put into the queue while the caller goes through them comes with the next call.
    pub(super) fn take_all(&mut self) -> VecDeque<u32> {
        let all = std::mem::take(&mut self.order);
        all.iter().for_each(|index| clear(&mut self.bits, *index));
        all
    }

    /// Takes out those that `stays` refuses.
    pub(super) fn retain(&mut self, mut stays: impl FnMut(u32) -> bool) {
        let bits = &mut self.bits;
        self.order.retain(|index| {
            let stays = stays(*index);
            if !stays {
                clear(bits, *index);
            }
            stays
        });
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = u32> {
        self.order.iter().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

/// The word of an index, and its bit there.
const fn place(index: u32) -> (usize, u64) {
    (index as usize / 64, 1 << (index % 64))
}

fn clear(bits: &mut [u64], index: u32) {
    let (word, bit) = place(index);
    bits[word] &= !bit;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(indices: &[u32]) -> IndexQueue {
        let mut queue = IndexQueue::default();
        indices.iter().for_each(|index| queue.push(*index));
        queue
    }

    #[test]
    fn index_is_in_the_queue_once_until_it_is_popped() {
        let mut queue = queue(&[64, 0, 63, 0, 64]);
        assert_eq!(queue.iter().collect::<Vec<_>>(), [64, 0, 63]);
        assert_eq!((queue.pop(), queue.len()), (Some(64), 2));
        queue.push(64);
        assert_eq!([(); 4].map(|()| queue.pop()), [Some(0), Some(63), Some(64), None]);
        assert!(queue.is_empty());
    }

    #[test]
    fn index_that_was_taken_out_can_be_pushed_again() {
        let mut queue = queue(&[5, 200, 7]);
        assert_eq!(queue.take_all(), [5, 200, 7]);
        assert!(queue.is_empty());
        for index in [7, 5, 200] {
            queue.push(index);
        }
        queue.retain(|index| index != 5);
        queue.push(7);
        queue.push(5);
        assert_eq!(queue.take_all(), [7, 200, 5]);
    }
}
