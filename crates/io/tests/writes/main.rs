//! Writes out of device memory: what a `pwrite` of host memory guarantees holds for them.

mod atomicity;
mod consistency;
mod differential;
mod faults;
mod parallel;
mod routes;
mod stream_write;
mod stripes;
