//! Lending: chunks of the replica from which CPU reads may be answered.
//!
//! ```text
//!   chunk ── descriptor, in the program's table ──> the link's thread ──> server      while the file is not in host memory
//!     └ held, so that it is not evicted, until DONTNEED or unmap
//! ```
//!
//! The server verifies each page that it takes. So chunks may be lent whatever they contain, and kernels may go on to store.
//!
//! Known flaw: a server that replaces another one has no chunk; they stay held, and are lent again by the next call.

use std::ops::Range;

use spinio_host::lock;
use spinio_pagecache::messages::Request;
use spinio_sys::{Errno, linux};

use crate::map::Map;
use crate::{Error, Result};

impl Map {
    /// Lends the chunks that lie wholly in a range of pages, and have memory.
    pub(crate) fn lend(&self, range: Range<usize>) -> Result<()> {
        let _turn = self.turn()?;
        let lent = self.lend_chunks(&range);
        let Err(error) = lent else { return Ok(()) };
        if error.is_refused() {
            return Err(error);
        }
        self.detach(&mut lock(&self.state));
        // Another server may be there.
        if error.is_disconnected() { self.lend_chunks(&range) } else { Err(error) }
    }

    fn lend_chunks(&self, range: &Range<usize>) -> Result<()> {
        self.attached(&mut lock(&self.state))?;
        let none = || Error::new(Errno::NOTSUP, "The device has no memory that it can share");
        let (chunks, numbers) = self.replica.chunks_inside(range).ok_or_else(none)?;
        let failed = |e| Error::device(e, "share memory of a map").into_refusal();
        let device = chunks.device_uuid().map_err(failed)?;
        for number in numbers {
            let pages = chunks.pages(number);
            let pages = pages.start..pages.end.min(self.spec.pages);
            let (first, count, bytes) = (pages.start as u64, pages.len() as u32, chunks.len(number));
            self.replica.keep_lent(number, || {
                let fd = chunks.export(number).map_err(failed)?;
                let request = Request::Lend { first, pages: count, bytes, device };
                let (tid, raw) = (linux::gettid(), fd.get());
                self.link.run(move |link| link.lend(request, tid, raw))
            })?;
        }
        Ok(())
    }
}
