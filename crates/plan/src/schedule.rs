//! The schedule: what a planner answers, with the memory it worked in.

use crate::scratch::Scratch;
use crate::{Reason, Route, Segment};

/// Segments that cover a request, in order, without gap or overlap.
///
/// Keep one and plan into it again and again: it also holds the planner's working memory, so only
/// the first and the longest plans allocate.
#[derive(Debug, Default)]
pub struct Schedule {
    /// Sorted by offset.
    pub segments: Vec<Segment>,
    pub(crate) scratch: Scratch,
}

impl Schedule {
    /// One segment for everything.
    pub fn single(len: u64, route: Route, reason: Reason) -> Schedule {
        Schedule::from(vec![Segment { offset: 0, len, route, reason, refused: None }])
    }

    /// Bytes covered.
    pub fn len(&self) -> u64 {
        self.segments.last().map_or(0, |s| s.offset + s.len)
    }

    /// Whether nothing is covered.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }
}

impl From<Vec<Segment>> for Schedule {
    fn from(segments: Vec<Segment>) -> Schedule {
        Schedule { segments, scratch: Scratch::default() }
    }
}

// The working memory is no part of what a schedule says.

impl Clone for Schedule {
    fn clone(&self) -> Schedule {
        Schedule::from(self.segments.clone())
    }
}

impl PartialEq for Schedule {
    fn eq(&self, other: &Schedule) -> bool {
        self.segments == other.segments
    }
}

impl Eq for Schedule {}
