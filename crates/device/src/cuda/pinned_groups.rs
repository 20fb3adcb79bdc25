//! Pinned memory of 2 MiB or more, which several threads allocate at once: the bounce buffers of a first long read.
//!
//! ```text
//!   thread 1   takes its part of a region, makes its pages ─┐
//!   thread 2                 "                              ├─ ready ──> one of them registers all that is ready:
//!   thread 3                 "                             ─┘            adjacent parts with one call (a group)
//! ```
//!
//! The driver registers for one thread at a time and stops copies of others meanwhile, and a call costs much more than its
//! bytes. On an H200 machine 12 threads that each register 8 MiB are done after 18 to 30 ms, 55 ms where the driver makes
//! the pages; 128 MiB take 3 ms in one call (benches/gpu/growing.c). Huge pages are made in 2 ms by each of 12 threads side
//! by side. So threads make their pages themselves and register as databases commit: while one is at it, the others
//! become ready, and the next one registers for all of them.
//!
//! Known flaw: a group is unregistered, and its memory given back, when its last part is freed.

#![expect(unsafe_code, reason = "driver calls and memory of the process")]

use std::sync::{Mutex, MutexGuard, PoisonError};

use spinio_sys::cuda::{CuError, register};
use spinio_sys::linux;

use super::capture::RelaxedCapture;
use super::device::Cuda;
use crate::{DeviceError, ErrorKind, PinnedBuffer};

type Result<T> = core::result::Result<T, DeviceError>;

/// The least that is worth it, and the alignment of parts.
pub(super) const MIN_PART: usize = 2 << 20;

/// Address space of a region; parts above it have regions of their own.
const REGION: usize = 128 << 20;

/// Addresses from `start` to `end`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Part {
    start: usize,
    end: usize,
}

impl Part {
    fn of(memory: &PinnedBuffer) -> Part {
        let start = memory.ptr as usize;
        Part { start, end: start + memory.len.next_multiple_of(MIN_PART) }
    }

    fn len(self) -> usize {
        self.end - self.start
    }

    fn ptr(self) -> *mut u8 {
        self.start as *mut u8
    }
}

/// Parts that were registered by one call.
struct Group {
    range: Part,
    /// Its parts that are not freed.
    live: usize,
}

#[derive(Default)]
struct Parts {
    /// What is left of the newest region.
    unused: Option<Part>,
    /// With pages, not registered.
    ready: Vec<Part>,
    groups: Vec<Group>,
    /// Parts that could not be registered, until their threads take notice.
    refused: Vec<(Part, CuError)>,
}

/// The pinned memory of a context that is allocated in parts.
#[derive(Default)]
pub(super) struct PinnedGroups {
    parts: Mutex<Parts>,
    /// Held by the thread that registers.
    registering: Mutex<()>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sorts parts and joins the adjacent ones: each range with the number of its parts.
fn join(mut parts: Vec<Part>) -> Vec<(Part, usize)> {
    parts.sort_unstable();
    let mut joined: Vec<(Part, usize)> = Vec::new();
    for part in parts {
        match joined.last_mut() {
            Some((range, count)) if range.end == part.start => (range.end, *count) = (part.end, *count + 1),
            _ => joined.push((part, 1)),
        }
    }
    joined
}

impl PinnedGroups {
    /// Addresses for `len` bytes, without pages.
    fn take(&self, len: usize) -> Result<Part> {
        let refused = |_| DeviceError::new(ErrorKind::NoMemory, "addresses for pinned memory");
        let len = len.next_multiple_of(MIN_PART);
        let mut parts = lock(&self.parts);
        let region = match parts.unused {
            Some(unused) if unused.len() >= len => unused,
            _ => {
                // Where addresses are limited there may be enough for the part alone.
                let map = |size| linux::map_anonymous(size, MIN_PART).map(|start| (start, size));
                let (start, size) = map(len.max(REGION)).or_else(|_| map(len)).map_err(refused)?;
                // SAFETY: advice on a new mapping of this function. A forked child cannot use memory that a device reads,
                // and must not make the parent copy it.
                unsafe {
                    let _ = linux::madvise(start, size, linux::MADV_HUGEPAGE);
                    let _ = linux::madvise(start, size, linux::MADV_DONTFORK);
                }
                Part { start: start as usize, end: start as usize + size }
            }
        };
        let part = Part { start: region.start, end: region.start + len };
        let rest = (part.end < region.end).then_some(Part { start: part.end, end: region.end });
        // The longer one serves later parts.
        let (kept, given_back) = match (parts.unused.filter(|unused| *unused != region), rest) {
            (Some(unused), Some(rest)) if rest.len() > unused.len() => (Some(rest), Some(unused)),
            (Some(unused), rest) => (Some(unused), rest),
            (None, rest) => (rest, None),
        };
        parts.unused = kept;
        if let Some(part) = given_back {
            // SAFETY: addresses of a region that no part has.
            let _ = unsafe { linux::munmap(part.ptr(), part.len()) };
        }
        Ok(part)
    }
}

impl Cuda {
    /// Allocates `len` bytes, at least [`MIN_PART`].
    pub(super) fn alloc_pinned_part(&self, len: usize) -> Result<PinnedBuffer> {
        let _entered = self.enter()?;
        let part = self.pinned_groups.take(len)?;
        // SAFETY: memory of this function. Kernels before 5.14 refuse, and the driver makes the pages.
        let _ = unsafe { linux::madvise(part.ptr(), part.len(), linux::MADV_POPULATE_WRITE) };
        lock(&self.pinned_groups.parts).ready.push(part);
        {
            let _registering = lock(&self.pinned_groups.registering);
            // Nothing, if another thread has registered this part with its own.
            let ready = std::mem::take(&mut lock(&self.pinned_groups.parts).ready);
            self.register_parts(ready);
        }
        let mut parts = lock(&self.pinned_groups.parts);
        let Some(at) = parts.refused.iter().position(|(refused, _)| *refused == part) else {
            return Ok(PinnedBuffer { ptr: part.ptr(), len });
        };
        let (_, error) = parts.refused.swap_remove(at);
        drop(parts);
        // SAFETY: never published.
        let _ = unsafe { linux::munmap(part.ptr(), part.len()) };
        let error = self.driver_error("cuMemHostRegister", error);
        let kind = if error.kind == ErrorKind::Driver { ErrorKind::NoMemory } else { error.kind };
        Err(DeviceError { kind, ..error })
    }

    fn register_parts(&self, ready: Vec<Part>) {
        let _relaxed = RelaxedCapture::enter(self.driver);
        let register = |range: Part, live| {
            // SAFETY: mapped by `take`, and unmapped only after it is unregistered.
            unsafe { self.driver.host_register(range.ptr(), range.len(), register::PORTABLE) }?;
            lock(&self.pinned_groups.parts).groups.push(Group { range, live });
            Ok(())
        };
        for (range, count) in join(ready.clone()) {
            if register(range, count).is_ok() {
                continue;
            }
            // Less of it may still be possible.
            for part in ready.iter().filter(|part| range.start <= part.start && part.end <= range.end) {
                if let Err(error) = register(*part, 1) {
                    lock(&self.pinned_groups.parts).refused.push((*part, error));
                }
            }
        }
    }

    /// Frees memory of [`Cuda::alloc_pinned_part`].
    pub(super) fn free_pinned_part(&self, memory: PinnedBuffer) {
        let part = Part::of(&memory);
        let mut parts = lock(&self.pinned_groups.parts);
        let inside = |group: &Group| group.range.start <= part.start && part.end <= group.range.end;
        let Some(at) = parts.groups.iter().position(inside) else { return };
        parts.groups[at].live -= 1;
        if parts.groups[at].live > 0 {
            return;
        }
        let range = parts.groups.swap_remove(at).range;
        drop(parts);
        if self.unregister_memory(range.ptr()) {
            // SAFETY: mapped by `take`; all of its parts are freed, and the device no longer uses them.
            let _ = unsafe { linux::munmap(range.ptr(), range.len()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adjacent_parts_are_joined() {
        let part = |start, end| Part { start, end };
        assert_eq!(join(vec![]), []);
        assert_eq!(
            join(vec![part(6, 8), part(2, 4), part(0, 2), part(10, 12)]),
            [(part(0, 4), 2), (part(6, 8), 1), (part(10, 12), 1)]
        );
    }

    #[test]
    fn parts_of_a_region_are_adjacent_and_aligned() {
        let groups = PinnedGroups::default();
        let [first, second] = [groups.take(MIN_PART).unwrap(), groups.take(MIN_PART + 1).unwrap()];
        assert_eq!((first.start % MIN_PART, first.len()), (0, MIN_PART));
        assert_eq!((second.start, second.len()), (first.end, 2 * MIN_PART));
        let large = groups.take(2 * REGION).unwrap();
        assert_eq!(large.len(), 2 * REGION, "a region of its own");
        let next = groups.take(MIN_PART).unwrap();
        assert_eq!(next.start, second.end, "what is left of the first region is still used");
        assert_eq!(groups.take(REGION).unwrap().len(), REGION);
        let unused = lock(&groups.parts).unused.unwrap();
        assert_eq!(unused, Part { start: next.end, end: first.start + REGION });
        // A part that it has no room for: of the two remainders the longer one is kept.
        let half = groups.take(REGION - MIN_PART).unwrap();
        assert_eq!(lock(&groups.parts).unused, Some(unused), "{half:?} leaves {MIN_PART} bytes, which are given back");
    }
}
