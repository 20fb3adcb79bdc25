//! Pages that one map gets from another of the same program, on another device.
//!
//! ```text
//!   Acquire { peers: owners of the program's other maps } ──> Fills, some with Source::Peer(which of them)
//!   Filled, or FilledBut { the pages that were not copied } ─> did that owner keep its pages? Fills: the others, elsewhere
//! ```
//!
//! An owner is named by the number that came with [`Reply::Mapped`](super::Reply::Mapped). The server looks it up among the
//! owners of the file: others are as if they had no page.

use super::{FILLED_BUT, RUN, Run, Runs, encode_run, start};

/// Appends a [`Request::FilledBut`](super::Request::FilledBut) to an empty buffer.
pub fn filled_but(out: &mut Vec<u8>, runs: &[Run]) {
    start(out, FILLED_BUT, runs.len());
    runs.iter().for_each(|run| encode_run(out, *run, 0));
}

pub(super) fn encode_filled_but(out: &mut Vec<u8>, runs: Runs<'_>) {
    start(out, FILLED_BUT, runs.0.len() / RUN);
    out.extend(runs.0);
}
