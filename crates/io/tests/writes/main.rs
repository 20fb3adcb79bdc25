//! Writes out of device memory: what a `pwrite` of host memory guarantees holds for them.

mod differential;
