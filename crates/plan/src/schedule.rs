//! The schedule: the result of a planner, with its working memory.

use crate::scratch::Scratch;
use crate::{Reason, Route, Segment};

/// Segments that cover a request, in order, without gap or overlap.
///
/// Reuse one for many plans: it also contains the planner's working memory, so only
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

    /// Whether no byte is covered.
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }
}

impl From<Vec<Segment>> for Schedule {
    fn from(segments: Vec<Segment>) -> Schedule {
        Schedule { segments, scratch: Scratch::default() }
    }
}

// The working memory is not part of the schedule's value.

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
