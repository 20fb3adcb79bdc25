//! NVMMU's ground and its proof: moves between files and devices on arrays with parity.
//!
//! The paper's problem: a download that covers a stripe only in part makes the array read old data and old parity
//! before it can write, and the program waits for that. Two cures, both counted here at the members of the array:
//!
//! ```text
//!   shaped       consecutive moves gather until they cover whole stripes: nothing has to be read
//!   prepared     the neighbours of a part are read while the kernel still computes; then whole stripes again
//! ```
//!
//! ```text
//!   stripes    what the kernel's arrays do, by plain system calls
//!   portions   large direct writes of SPIN's, which keep to stripes too
//!   bench      the paper's four microbenchmarks
//!   moves      the moves that they make
//!   counters   what members were asked for
//! ```

mod bench;
mod counters;
mod moves;
mod portions;
mod stripes;

use crate::case::Case;
use crate::memory::has_p2p;

pub(crate) fn cases() -> Vec<Case> {
    let mut all = stripes::cases();
    // Once is enough: what is compared are ways to move, not kernels.
    if has_p2p() {
        all.extend(portions::cases());
        all.extend(bench::cases());
    }
    all
}
