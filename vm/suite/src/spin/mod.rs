//! SPIN on this machine: `Runtime::read` into memory of the p2pmem device, and `write` from it.
//!
//! ```text
//!   routes         the route of the bytes, and the reason
//!   bytes          edges, holes, dirty pages, writers: the bytes are correct on every route
//!   concurrent_writer   reads while another thread writes, truncates or punches the file
//!   p2p_probe      a transfer that fails silently is detected
//!   writes         the same for writes
//!   differential   random requests against a plain pread of the same moment
//! ```

mod bytes;
mod concurrent_writer;
mod differential;
mod p2p_probe;
mod routes;
mod writes;

use std::fs::File;
use std::os::fd::AsRawFd;

use spinio_io::stats::Snapshot;
use spinio_io::{Buffer, Runtime, Settings};
use spinio_plan::{Reason, Route};
use spinio_testkit::Rng;

use crate::case::{Case, CaseError, Outcome, expect, expect_bytes};
use crate::memory::{Memory, P2pMemory};

pub(crate) const MIB: usize = 1 << 20;

/// A byte value that no test file is filled with.
const UNTOUCHED: u8 = 0xee;

/// Guard bytes checked on both sides of a read.
const GUARD: usize = 4096;

pub(crate) fn cases() -> Vec<Case> {
    let mut all = routes::cases();
    all.extend(bytes::cases());
    all.extend(concurrent_writer::cases());
    all.extend(p2p_probe::cases());
    all.extend(differential::cases());
    all.extend(writes::cases());
    all
}

/// The cases for an ordinary user: whole disks are not accessible to users.
pub(crate) fn cases_for_users() -> Vec<Case> {
    let mut all = cases();
    all.retain(|case| ["raw NVMe", "one unreachable disk", "loop device"].iter().all(|disk| !case.name.contains(disk)));
    all
}

/// A new runtime: it trusts no pair of file system and device yet.
pub(crate) fn fresh() -> Runtime {
    Runtime::new(Settings::default())
}

/// Device memory for reads of up to `len` bytes at any misalignment, with room for the guards.
pub(crate) fn memory_for(len: usize) -> Result<P2pMemory, CaseError> {
    P2pMemory::of_spin(len + 4 * GUARD)
}

/// One read of `len` bytes at `offset`, to the device address `skew` bytes past a page's start.
/// Passes if it returns as many bytes as are in `expected`, these bytes arrived, and nothing around them changed.
pub(crate) fn read_and_check(
    runtime: &Runtime,
    file: &File,
    memory: &mut dyn Memory,
    (offset, skew, len): (u64, usize, usize),
    expected: &[u8],
) -> Result<Snapshot, CaseError> {
    let at = GUARD + skew;
    memory.fill_range(0, at + len + GUARD, UNTOUCHED);
    let before = runtime.stats();
    let got = runtime
        .read(file.as_raw_fd(), Some(offset), memory.target(at)?, len)
        .map_err(|e| CaseError::Failed(format!("offset {offset}, {len} bytes, skew {skew}: {e}")))?;
    let what = format!("offset {offset}, {len} bytes, skew {skew}");
    expect(&format!("{what}: bytes returned"), got, expected.len())?;
    expect_bytes(&what, &memory.bytes(at, got), expected)?;
    expect_bytes(&format!("{what}: before it"), &memory.bytes(0, at), &vec![UNTOUCHED; at])?;
    // Past the returned bytes, not past the requested ones: a short read leaves the rest unchanged.
    let rest = len - got + GUARD;
    expect_bytes(&format!("{what}: past its end"), &memory.bytes(at + got, rest), &vec![UNTOUCHED; rest])?;
    Ok(runtime.stats().since(&before))
}

/// A random number below `end`.
fn below(random: &mut Rng, end: usize) -> usize {
    random.below(end as u64) as usize
}

/// Bytes served by a route.
pub(crate) fn by(stats: &Snapshot, route: Route) -> u64 {
    stats.rows.iter().filter(|l| l.route == route).map(|l| l.bytes).sum()
}

/// Every reason that `explain` gives for a read of the whole file, both for routes taken and refused.
pub(crate) fn explained(runtime: &Runtime, file: &File, memory: &dyn Memory) -> Result<Vec<Reason>, CaseError> {
    let allocation = memory.target(0)?.allocation;
    let buffer = Buffer::of(&allocation);
    let len = file.metadata()?.len();
    let explained =
        runtime.explain(file.as_raw_fd(), 0, len, buffer).map_err(|e| CaseError::Failed(format!("explain: {e}")))?;
    Ok(explained.schedule.segments.iter().flat_map(|s| [Some(s.reason), s.refused]).flatten().collect())
}

/// Passes if `bytes` went peer to peer, else reports their routes.
pub(crate) fn expect_p2p(what: &str, stats: &Snapshot, bytes: usize) -> Outcome {
    if by(stats, Route::P2p) == bytes as u64 {
        return Ok(());
    }
    let lines: Vec<String> = stats.rows.iter().map(|l| format!("{} {} ({})", l.bytes, l.route, l.reason)).collect();
    Err(CaseError::Failed(format!("{what}: expected {bytes} bytes by p2p, but they went: {}", lines.join(", "))))
}
