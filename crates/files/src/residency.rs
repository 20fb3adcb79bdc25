//! The pages of a range that are in the page cache, queried as cheaply as the file permits.
//!
//! ```text
//!   permitted       cachestat, 512 KiB at a time ── all or nothing ──> one extent
//!                                                └─ mixed ──> mincore of that step, page by page
//!                   after an absent step twice as much at a time: what is absent costs nothing
//!   not permitted   a byte or two read with RWF_NOWAIT in every 64 KiB: the file of another owner,
//!                   for which cachestat returns EPERM and mincore reports, wrongly, that all is resident
//! ```
//!
//! Costs, 8 MiB: 5 us absent, 67 us cached with permission; a microsecond per probe without it, which is why two bytes
//! of 64 KiB are probed and count for the whole run. A run that was wrongly assumed cached is found when it is read
//! with RWF_NOWAIT; one that was wrongly assumed absent is read from storage, which is always correct.
//!
//! Known flaw: a probe of an absent page makes the Linux kernel read that one page. After many cold reads of one range
//! enough of them are cached for a wrong guess; the read is correct nevertheless.

#![expect(unsafe_code, reason = "system calls into buffers, mappings")]

use std::ops::Range;

use spinio_plan::{Extent, Residency, Route};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd, PAGE, RWF_NOWAIT};

use spinio_host::syscalls::Syscalls;
use spinio_transfer::Mapping;

const SURVEY_STEP: u64 = 512 << 10;
/// The longest step, which is wasted where its end is cached.
const MAX_SURVEY_STEP: u64 = 8 << 20;
const PROBE_SPAN: u64 = 64 << 10;
const PAGE64: u64 = PAGE as u64;

/// How the residency of a file may be queried.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResidencyAccess {
    /// `cachestat` and `mincore` report it.
    Permitted,
    /// Only reads with RWF_NOWAIT show it.
    NotPermitted,
    /// The file is in memory or has no page cache to query.
    InMemory,
}

/// Adds a run of bytes, merged with the last one if the residency is equal.
pub fn push_extent(extents: &mut Vec<Extent>, len: u64, residency: Residency) {
    match extents.last_mut() {
        _ if len == 0 => {}
        Some(last) if last.residency == residency => last.len += len,
        _ => extents.push(Extent { len, residency }),
    }
}

/// How the residency of a file of this owner may be queried. `shadow_fd`: a read-only shadow descriptor, because a
/// writable descriptor of the program has rights that shadow descriptors lack.
pub fn residency_access(sys: &dyn Syscalls, shadow_fd: Fd, owner: u32) -> ResidencyAccess {
    let euid = linux::geteuid();
    match sys.cachestat(shadow_fd, 0, PAGE64) {
        Ok(_) => ResidencyAccess::Permitted,
        // A Linux kernel without cachestat: mincore is correct for owners.
        Err(Errno::NOSYS) if euid == owner || euid == 0 => ResidencyAccess::Permitted,
        // No page cache to query (hugetlbfs).
        Err(Errno::OPNOTSUPP) => ResidencyAccess::InMemory,
        Err(_) => ResidencyAccess::NotPermitted,
    }
}

/// The runs of a range that are certainly absent, in order. A part mixed at a small scale is left out, so that no page
/// of another process is assumed absent. Empty if cachestat fails.
pub fn absent_runs(sys: &dyn Syscalls, fd: Fd, range: Range<u64>) -> Vec<Range<u64>> {
    let granularity = if range.end - range.start <= PROBE_SPAN { PAGE64 } else { 4 * PAGE64 };
    let mut out: Vec<Range<u64>> = Vec::new();
    // Front to back: the later half is pushed first.
    let mut pending = vec![range];
    while let Some(part) = pending.pop() {
        let pages = (part.end - part.start).div_ceil(PAGE64);
        match sys.cachestat(fd, part.start, part.end - part.start) {
            Ok(c) if c.cached == 0 => match out.last_mut() {
                Some(last) if last.end == part.start => last.end = part.end,
                _ => out.push(part),
            },
            Ok(c) if c.cached >= pages || part.end - part.start <= granularity => {}
            Ok(_) => {
                let middle = part.start + (pages / 2).max(1) * PAGE64;
                pending.push(middle..part.end);
                pending.push(part.start..middle);
            }
            Err(_) => return Vec::new(),
        }
    }
    out
}

/// A residency query.
pub struct Survey<'a> {
    /// The system calls.
    pub sys: &'a dyn Syscalls,
    /// A descriptor of the calling thread.
    pub fd: Fd,
    /// A mapping of the file, if there is one.
    pub mapping: Option<&'a Mapping>,
}

impl Survey<'_> {
    /// The extents of `len` bytes from `offset`, where access is permitted.
    pub fn by_cachestat(&self, offset: u64, len: u64) -> Vec<Extent> {
        let mut out = Vec::new();
        let end = offset + len;
        let (mut at, mut step) = (offset, SURVEY_STEP);
        while at < end {
            let next = end.min((at / SURVEY_STEP + step / SURVEY_STEP) * SURVEY_STEP);
            let first = at / PAGE64 * PAGE64;
            let pages = (next - first).div_ceil(PAGE64);
            match self.sys.cachestat(self.fd, first, pages * PAGE64) {
                Ok(c) if c.cached == 0 => {
                    push_extent(&mut out, next - at, Residency::Absent);
                    step = (step * 2).min(MAX_SURVEY_STEP);
                }
                // Once more from here, in short steps.
                _ if step > SURVEY_STEP => {
                    step = SURVEY_STEP;
                    continue;
                }
                Ok(c) => {
                    let cached = if c.dirty > 0 { Residency::Dirty } else { Residency::Clean };
                    if c.cached >= pages {
                        push_extent(&mut out, next - at, cached);
                    } else {
                        self.by_page(at, next, cached, &mut out);
                    }
                }
                Err(_) => self.by_page(at, next, Residency::Clean, &mut out),
            }
            at = next;
        }
        out
    }

    /// Page by page if there is a mapping; else one cachestat per 64 KiB.
    fn by_page(&self, at: u64, end: u64, cached: Residency, out: &mut Vec<Extent>) {
        let first = at / PAGE64 * PAGE64;
        let pages = (end - first).div_ceil(PAGE64) as usize;
        if let Some(m) = self.mapping.filter(|m| first + (pages * PAGE) as u64 <= m.len as u64) {
            let mut bits = [0u8; (SURVEY_STEP / PAGE64) as usize + 1];
            let bits = &mut bits[..pages];
            // SAFETY: the range lies inside the mapping, which outlives the call.
            if unsafe { linux::mincore(m.ptr.wrapping_add(first as usize), bits) }.is_ok() {
                for (i, bit) in bits.iter().enumerate() {
                    let from = at.max(first + i as u64 * PAGE64);
                    let to = end.min(first + (i as u64 + 1) * PAGE64);
                    push_extent(out, to - from, if bit & 1 != 0 { cached } else { Residency::Absent });
                }
                return;
            }
        }
        let mut from = at;
        while from < end {
            let to = end.min((from / PROBE_SPAN + 1) * PROBE_SPAN);
            let (start, pages) = (from / PAGE64 * PAGE64, (to - from / PAGE64 * PAGE64).div_ceil(PAGE64));
            let full = self.sys.cachestat(self.fd, start, pages * PAGE64).is_ok_and(|c| c.cached >= pages);
            push_extent(out, to - from, if full { cached } else { Residency::Absent });
            from = to;
        }
    }

    /// The extents by probes, which need only read access; `fd` must be a shadow descriptor with FADV_RANDOM.
    /// `span`: bytes that a probe stands for. `nonce`: a different number for every request.
    pub fn by_probes(&self, offset: u64, len: u64, span: u64, nonce: u64) -> Vec<Extent> {
        let mut out = Vec::new();
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let next = end.min((at / span + 1) * span);
            // A probe of an absent page makes the Linux kernel read that page, so the next request must not probe the
            // same one; and one resident page proves little: a run counts as cached only after two probes.
            let probe_at =
                |attempt: u64| at + (at ^ nonce << 1 ^ attempt).wrapping_mul(0x9e37_79b9_7f4a_7c15) % (next - at);
            let residency = match self.probe(probe_at(0)) {
                Residency::Clean => self.probe(probe_at(1)),
                other => other,
            };
            push_extent(&mut out, next - at, residency);
            at = next;
        }
        out
    }

    fn probe(&self, at: u64) -> Residency {
        let mut byte = 0u8;
        // SAFETY: one byte is read into a local.
        match unsafe { self.sys.pread(Route::Copy, self.fd, &mut byte, 1, at, RWF_NOWAIT) } {
            Ok(1) => Residency::Clean,
            Err(Errno::AGAIN) => Residency::Absent,
            // A file system without RWF_NOWAIT: only the read itself shows it.
            _ => Residency::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A kernel with these pages cached, which counts the queries.
    struct Pages(Vec<bool>, std::sync::atomic::AtomicUsize);

    impl Syscalls for Pages {
        fn cachestat(&self, _fd: Fd, offset: u64, len: u64) -> Result<linux::CacheStat, Errno> {
            self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let (from, to) = (offset / PAGE64, (offset + len).div_ceil(PAGE64));
            let cached = self.0[from as usize..to as usize].iter().filter(|&&cached| cached).count() as u64;
            Ok(linux::CacheStat { cached, ..linux::CacheStat::default() })
        }
    }

    fn survey(pages: &Pages, offset: u64, len: u64) -> Vec<Extent> {
        Survey { sys: pages, fd: 0, mapping: None }.by_cachestat(offset, len)
    }

    /// The same extents as from queries of 512 KiB each, wherever the cached runs lie.
    #[test]
    fn long_steps_find_what_short_ones_find() {
        let mut rng = spinio_testkit::Rng::from_env(7);
        for _ in 0..300 {
            let mut pages = vec![false; 24 << 20 >> 12];
            for _ in 0..rng.below(6) {
                let from = rng.below(pages.len() as u64) as usize;
                let to = (from + 1 + rng.below(2000) as usize).min(pages.len());
                pages[from..to].fill(true);
            }
            let pages = Pages(pages, Default::default());
            let offset = rng.below(4 << 20);
            let end = offset + 1 + rng.below((24 << 20) - offset - 1);
            let (mut expected, mut at) = (Vec::new(), offset);
            while at < end {
                let next = end.min((at / SURVEY_STEP + 1) * SURVEY_STEP);
                survey(&pages, at, next - at).iter().for_each(|e| push_extent(&mut expected, e.len, e.residency));
                at = next;
            }
            assert_eq!(survey(&pages, offset, end - offset), expected, "{offset}..{end}");
        }
    }

    #[test]
    fn absent_range_takes_few_queries() {
        let pages = Pages(vec![false; 8 << 20 >> 12], Default::default());
        assert_eq!(survey(&pages, 0, 8 << 20), [Extent { len: 8 << 20, residency: Residency::Absent }]);
        assert_eq!(pages.1.into_inner(), 5, "0.5, 1, 2, 4 and the last 0.5 MiB");
    }

    #[test]
    fn push_merges_equal_runs() {
        let mut out = Vec::new();
        for (len, r) in
            [(4096, Residency::Clean), (0, Residency::Absent), (1, Residency::Clean), (7, Residency::Absent)]
        {
            push_extent(&mut out, len, r);
        }
        assert_eq!(
            out,
            [Extent { len: 4097, residency: Residency::Clean }, Extent { len: 7, residency: Residency::Absent }]
        );
    }
}
