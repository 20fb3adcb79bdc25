//! NVMMU as a Rust library, on the emulated device.

mod common;
mod errors;
mod forks;
mod later;
mod moves;
mod sessions;
mod striped;
