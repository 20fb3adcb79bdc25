//! The cheapest start of a storage transfer that ends here.
//!
//! ```text
//!   candidates, by their ends:       x   x  x     x   x x  │ here
//!                                    └─ far ──┘└── near ───┘
//!                                              cutoff bytes
//! ```
//!
//! A transfer from a *near* candidate costs C whatever its length, so the best of them is the one
//! with the least cost so far: a sliding-window minimum, kept as a queue of rising costs. From a
//! *far* one it costs `C + (length - cutoff) / BW`; there `cost so far - end / BW` decides, and since
//! a far candidate stays far, one running minimum is enough. Each candidate enters and leaves once.
//!
//! A later candidate that costs no more so far beats an earlier one in both parts, because a cost of
//! Eq. 1 never falls with length. So no candidate that the queue drops is needed again.

use crate::Cost;

/// A possible start of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Bytes before it.
    pub(crate) end: f64,
    /// Cost so far.
    pub(crate) cost: f64,
    /// Its identifier.
    pub(crate) id: u32,
}

/// Candidates whose costs rise, in `queue[head..]`, and the best of the far ones.
pub(crate) struct SlidingMin<'a> {
    queue: &'a mut Vec<Candidate>,
    head: usize,
    far: f64,
    far_id: u32,
    cutoff: f64,
    fixed: f64,
    per_byte: f64,
}

impl<'a> SlidingMin<'a> {
    pub(crate) fn new(queue: &'a mut Vec<Candidate>, cost: &Cost) -> SlidingMin<'a> {
        let (cutoff, fixed, per_byte) = (cost.cutoff() as f64, cost.fixed(), cost.per_byte());
        let mut window = SlidingMin { queue, head: 0, far: f64::INFINITY, far_id: 0, cutoff, fixed, per_byte };
        window.clear();
        window
    }

    /// Removes all candidates.
    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.head = 0;
        self.far = f64::INFINITY;
    }

    /// Candidates are added in the order of their ends.
    #[inline]
    pub(crate) fn push(&mut self, candidate: Candidate) {
        while self.queue.len() > self.head && self.queue[self.queue.len() - 1].cost >= candidate.cost {
            self.queue.pop();
        }
        self.queue.push(candidate);
    }

    /// The least cost of a transfer that ends at `end`, and the identifier of its start. `end` never falls
    /// from call to call, and is past every candidate.
    #[inline]
    pub(crate) fn best(&mut self, end: f64) -> (f64, u32) {
        while let Some(first) = self.queue.get(self.head)
            && end - first.end >= self.cutoff
        {
            let key = first.cost - first.end * self.per_byte;
            if key < self.far {
                (self.far, self.far_id) = (key, first.id);
            }
            self.head += 1;
        }
        let far = self.far + (end - self.cutoff) * self.per_byte;
        match self.queue.get(self.head) {
            Some(near) if near.cost < far => (near.cost + self.fixed, near.id),
            _ => (far + self.fixed, self.far_id),
        }
    }
}
