//! Geometry against machines written down as tables, and against noise.

mod machine;
mod noise;
mod stacks;
mod stripes;
