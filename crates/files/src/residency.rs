//! Who is resident: the page cache asked as cheaply as this file allows.
//!
//! ```text
//!   owner     cachestat, 512 KiB at a time ── all or nothing ──> one extent
//!                                          └─ mixed ──> mincore of that step, page by page
//!   stranger  a byte or two read with RWF_NOWAIT in every 64 KiB: the file of another owner,
//!             for which cachestat says EPERM and mincore says, untruly, that all is resident
//! ```
//!
//! Costs, 8 MiB: 5 us absent, 67 us cached for an owner; a microsecond a probe for a
//! stranger, which is why it asks for two bytes of 64 KiB and takes them for the whole run.
//! A run wrongly believed cached is found out when it is read with RWF_NOWAIT; one wrongly
//! believed absent is read from storage, which is always right.
//!
//! Known flaw: a stranger's probe of an absent page makes the kernel read that one page. After many cold reads of one
//! range enough of them are there for a wrong guess; the read is right all the same.

use std::ops::Range;

use spinio_plan::{Extent, Residency, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, PAGE, RWF_NOWAIT};

use spinio_transfer::Mapping;
use spinio_host::syscalls::Kernel;

const STEP: u64 = 512 << 10;
const RUN: u64 = 64 << 10;
const PAGE64: u64 = PAGE as u64;

/// How the residency of a file may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rights {
    /// `cachestat` and `mincore` tell the truth.
    Owner,
    /// Only reading tells (RWF_NOWAIT).
    Stranger,
    /// The file lives in memory or has no page cache to ask.
    Resident,
}

/// Adds a run of bytes, joined to the last one where it is the same.
pub fn push(extents: &mut Vec<Extent>, len: u64, residency: Residency) {
    match extents.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.residency == residency => last.len += len,
        _ => extents.push(Extent { len, residency }),
    }
}

/// How residency may be asked of a file of this owner. `twin`: a read-only descriptor of ours, because a descriptor
/// that the program may write through has rights that the twins lack.
pub fn rights(kernel: &dyn Kernel, twin: Fd, owner: u32) -> Rights {
    let euid = linux::geteuid();
    match kernel.cachestat(twin, 0, PAGE64) {
        Ok(_) => Rights::Owner,
        // A kernel without cachestat: mincore is honest to owners.
        Err(Errno::NOSYS) if euid == owner || euid == 0 => Rights::Owner,
        // No page cache of its own (hugetlbfs).
        Err(Errno::OPNOTSUPP) => Rights::Resident,
        Err(_) => Rights::Stranger,
    }
}

/// The runs of a range that are surely absent, in order. A stretch that is mixed on a small scale is left out: nobody
/// shall take somebody else's page for absent. Nothing where cachestat does not answer.
pub fn absent_runs(kernel: &dyn Kernel, fd: Fd, range: Range<u64>) -> Vec<Range<u64>> {
    let fine = if range.end - range.start <= RUN { PAGE64 } else { 4 * PAGE64 };
    let mut out: Vec<Range<u64>> = Vec::new();
    // Front to back, so the later half waits below the earlier one.
    let mut open = vec![range];
    while let Some(part) = open.pop() {
        let pages = (part.end - part.start).div_ceil(PAGE64);
        match kernel.cachestat(fd, part.start, part.end - part.start) {
            Ok(c) if c.cached == 0 => match out.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => out.push(part),
            },
            Ok(c) if c.cached >= pages || part.end - part.start <= fine => {}
            Ok(_) => {
                let middle = part.start + (pages / 2).max(1) * PAGE64;
                open.push(middle..part.end);
                open.push(part.start..middle);
            }
            Err(_) => return Vec::new(),
        }
    }
    out
}

/// A question about a range.
pub struct Survey<'a> {
    pub kernel: &'a dyn Kernel,
    /// In the calling thread's table.
    pub fd: Fd,
    pub mapping: Option<&'a Mapping>,
}

impl Survey<'_> {
    /// The extents of `len` bytes from `offset`, as an owner may ask.
    pub fn owner(&self, offset: u64, len: u64) -> Vec<Extent> {
        let mut out = Vec::new();
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let next = end.min((at / STEP + 1) * STEP);
            self.step(at, next, &mut out);
            at = next;
        }
        out
    }

    fn step(&self, at: u64, end: u64, out: &mut Vec<Extent>) {
        let first = at / PAGE64 * PAGE64;
        let pages = (end - first).div_ceil(PAGE64);
        match self.kernel.cachestat(self.fd, first, pages * PAGE64) {
            Ok(c) if c.cached == 0 => push(out, end - at, Residency::Absent),
            Ok(c) => {
                let cached = if c.dirty > 0 { Residency::Dirty } else { Residency::Clean };
                if c.cached >= pages {
                    push(out, end - at, cached);
                } else {
                    self.pages(at, end, cached, out);
                }
            }
            Err(_) => self.pages(at, end, Residency::Clean, out),
        }
    }

    /// Page by page, where a mapping allows it; else halved with cachestat down to single runs.
    fn pages(&self, at: u64, end: u64, cached: Residency, out: &mut Vec<Extent>) {
        let first = at / PAGE64 * PAGE64;
        let pages = (end - first).div_ceil(PAGE64) as usize;
        if let Some(m) = self.mapping.filter(|m| first + (pages * PAGE) as u64 <= m.len as u64) {
            let mut bits = [0u8; (STEP / PAGE64) as usize + 1];
            let bits = &mut bits[..pages];
            // SAFETY: the range lies inside the mapping, which outlives the call.
            if unsafe { linux::mincore(m.ptr.wrapping_add(first as usize), bits) }.is_ok() {
                for (i, bit) in bits.iter().enumerate() {
                    let from = at.max(first + i as u64 * PAGE64);
                    let to = end.min(first + (i as u64 + 1) * PAGE64);
                    push(out, to - from, if bit & 1 != 0 { cached } else { Residency::Absent });
                }
                return;
            }
        }
        let mut from = at;
        while from < end {
            let to = end.min((from / RUN + 1) * RUN);
            let (start, pages) = (from / PAGE64 * PAGE64, (to - from / PAGE64 * PAGE64).div_ceil(PAGE64));
            let full = self.kernel.cachestat(self.fd, start, pages * PAGE64).is_ok_and(|c| c.cached >= pages);
            push(out, to - from, if full { cached } else { Residency::Absent });
            from = to;
        }
    }

    /// The extents as anybody may ask who can read; `fd` must be a twin under FADV_RANDOM.
    /// `every`: how many bytes a probe speaks for. `salt`: another number for every request.
    pub fn stranger(&self, offset: u64, len: u64, every: u64, salt: u64) -> Vec<Extent> {
        let mut out = Vec::new();
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let next = end.min((at / every + 1) * every);
            // A probe of an absent page makes the kernel read that page, so the next request must not ask for the same
            // one, and one resident page proves little: the whole run is believed only on the word of two.
            let spread = |turn: u64| at + (at ^ salt << 1 ^ turn).wrapping_mul(0x9e37_79b9_7f4a_7c15) % (next - at);
            let residency = match self.probe(spread(0)) {
                Residency::Clean => self.probe(spread(1)),
                other => other,
            };
            push(&mut out, next - at, residency);
            at = next;
        }
        out
    }

    fn probe(&self, at: u64) -> Residency {
        let mut byte = 0u8;
        // SAFETY: one byte is read into a local.
        match unsafe { self.kernel.pread(Route::Copy, self.fd, &mut byte, 1, at, RWF_NOWAIT) } {
            Ok(1) => Residency::Clean,
            Err(Errno::AGAIN) => Residency::Absent,
            // A file system without RWF_NOWAIT: only the read itself will tell.
            _ => Residency::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_joined_and_empty_ones_left_out() {
        let mut out = Vec::new();
        for (len, r) in
            [(4096, Residency::Clean), (0, Residency::Absent), (1, Residency::Clean), (7, Residency::Absent)]
        {
            push(&mut out, len, r);
        }
        assert_eq!(
            out,
            [Extent { len: 4097, residency: Residency::Clean }, Extent { len: 7, residency: Residency::Absent }]
        );
    }
}
