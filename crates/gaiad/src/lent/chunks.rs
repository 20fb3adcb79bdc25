//! The chunks that are lent of one file, and the tags of their pages.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use spinio_pagecache::{OwnerId, offset_of};

use super::tag::Tag;
use crate::device_process::DeviceChunk;
use crate::lock::lock;

/// The chunks that are lent of one file.
#[derive(Debug, Default)]
pub(crate) struct LentChunks {
    /// Whether there are any.
    any: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Counts changes of the file while there are chunks.
    generation: u64,
    chunks: Vec<Lent>,
}

#[derive(Debug)]
struct Lent {
    owner: OwnerId,
    /// Of the file.
    pages: Range<u64>,
    chunk: Arc<DeviceChunk>,
    /// Of each page, while the file has its bytes.
    tags: Vec<Option<Tag>>,
    _counted: Counted,
}

/// Where pages are in a chunk, and what they must be.
pub(super) struct Found {
    pub(super) chunk: Arc<DeviceChunk>,
    pub(super) from: u64,
    pub(super) tags: Vec<Tag>,
}

impl LentChunks {
    /// Whether there are any.
    pub(super) fn has_any(&self) -> bool {
        self.any.load(Relaxed)
    }

    /// Pages of the file are about to change. With the lock of the file's pages.
    pub(crate) fn change(&self, pages: &Range<u64>) {
        if !self.any.load(Relaxed) {
            return;
        }
        let mut state = lock(&self.state);
        state.generation += 1;
        for lent in &mut state.chunks {
            let both = pages.start.max(lent.pages.start)..pages.end.min(lent.pages.end);
            for page in both {
                lent.tags[(page - lent.pages.start) as usize] = None;
            }
        }
    }

    /// Forgets chunks of an owner that have any of these pages.
    pub(crate) fn end(&self, owner: OwnerId, pages: &Range<u64>) {
        if !self.any.load(Relaxed) {
            return;
        }
        let meets = |lent: &Lent| lent.pages.start < pages.end && pages.start < lent.pages.end;
        let ended: Vec<Lent> = {
            let mut state = lock(&self.state);
            let ended = state.chunks.extract_if(.., |lent| lent.owner == owner && meets(lent)).collect();
            self.any.store(!state.chunks.is_empty(), Relaxed);
            ended
        };
        // Without the lock: the device process is told.
        drop(ended);
    }

    pub(super) fn add(&self, owner: OwnerId, pages: Range<u64>, chunk: Arc<DeviceChunk>, counted: Counted) {
        self.end(owner, &pages);
        let tags = vec![None; (pages.end - pages.start) as usize];
        lock(&self.state).chunks.push(Lent { owner, pages, chunk, tags, _counted: counted });
        self.any.store(true, Relaxed);
    }

    /// With the lock of the file's pages.
    pub(super) fn generation(&self) -> u64 {
        lock(&self.state).generation
    }

    /// Stores tags of pages from `first` on, unless the file has changed since that generation. With the lock of the file's
    /// pages.
    pub(super) fn set_tags(&self, owner: OwnerId, first: u64, tags: &[Tag], generation: u64) {
        let mut state = lock(&self.state);
        if state.generation != generation {
            return;
        }
        let Some(lent) = state.chunks.iter_mut().find(|lent| lent.owner == owner && lent.pages.contains(&first)) else {
            return;
        };
        let at = (first - lent.pages.start) as usize;
        for (place, tag) in lent.tags[at..].iter_mut().zip(tags) {
            *place = Some(*tag);
        }
    }

    /// A chunk with all of these pages.
    pub(super) fn find(&self, pages: &Range<u64>) -> Option<Found> {
        let state = lock(&self.state);
        state.chunks.iter().find_map(|lent| {
            if pages.start < lent.pages.start || pages.end > lent.pages.end {
                return None;
            }
            let at = (pages.start - lent.pages.start) as usize;
            let tags = lent.tags[at..at + (pages.end - pages.start) as usize].iter().copied();
            let tags = tags.collect::<Option<Vec<Tag>>>()?;
            Some(Found { chunk: Arc::clone(&lent.chunk), from: offset_of(at as u64), tags })
        })
    }
}

/// A chunk of those that may be lent, of all files.
#[derive(Debug)]
pub(super) struct Counted(Arc<AtomicUsize>);

impl Counted {
    /// One more, if there are not `most` of them.
    pub(super) fn new(count: &Arc<AtomicUsize>, most: usize) -> Option<Counted> {
        let before = count.fetch_add(1, Relaxed);
        let counted = Counted(Arc::clone(count));
        (before < most).then_some(counted)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Relaxed);
    }
}
