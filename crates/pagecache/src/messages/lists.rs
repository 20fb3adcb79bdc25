//! Lists in messages, which are parsed as they are iterated over: a message was checked as a whole when it came.

use super::{Fill, RUN, RangeState, Run, Source, parse_run, source_of};

/// A parsed list of ranges and how they are, as [`Runs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranges<'a>(pub(super) &'a [u8]);

impl<'a> Ranges<'a> {
    /// In order.
    pub fn iter(self) -> impl Iterator<Item = (Run, RangeState)> + 'a {
        self.0.chunks_exact(RUN).map(|bytes| {
            let (run, flags) = parse_run(bytes);
            (run, RangeState::from_flags(flags).unwrap_or_default())
        })
    }
}

/// A parsed list of runs: ascending, disjoint, none empty, none beyond [`MAX_PAGES`](super::MAX_PAGES).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs<'a>(pub(super) &'a [u8]);

/// A parsed list of fills, as [`Runs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fills<'a>(pub(super) &'a [u8]);

impl<'a> Runs<'a> {
    /// In order.
    pub fn iter(self) -> impl Iterator<Item = Run> + 'a {
        self.0.chunks_exact(RUN).map(|bytes| parse_run(bytes).0)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<'a> Fills<'a> {
    /// In order.
    pub fn iter(self) -> impl Iterator<Item = Fill> + 'a {
        self.0.chunks_exact(RUN).map(|bytes| {
            let (run, source) = parse_run(bytes);
            Fill { run, source: source_of(source).unwrap_or(Source::File) }
        })
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
