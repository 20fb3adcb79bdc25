//! Moves in the order of a stream of the program's.

mod moves;

pub use moves::AsyncResult;
pub(crate) use moves::StreamMoves;
