//! The basis and the proof of NVMMU: moves between files and devices on arrays with parity.
//!
//! The paper's problem: a download that covers a stripe only partially makes the array read old data and old parity
//! before it can write, and the program waits for that. Two remedies, both counted here at the members of the array:
//!
//! ```text
//!   aligned      consecutive moves are gathered into full stripes: no reads
//!   preread      the filler of a partial stripe is read while the GPU kernel still computes; then full stripes again
//! ```
//!
//! ```text
//!   stripes    the behaviour of md arrays, by plain system calls
//!   chunks     large direct writes of SPIN, which are aligned to stripes too
//!   bench      the paper's four microbenchmarks
//!   moves      their moves
//!   counters   the requests to the members
//! ```

mod bench;
mod chunks;
mod counters;
mod moves;
mod stripes;

use crate::case::Case;
use crate::memory::has_p2p;

pub(crate) fn cases() -> Vec<Case> {
    let mut all = stripes::cases();
    // With one Linux kernel only: the cases compare ways to move, not kernels.
    if has_p2p() {
        all.extend(chunks::cases());
        all.extend(bench::cases());
    }
    all
}
