//! Writes out of device memory keep the guarantees of a `pwrite` of host memory.

mod atomicity;
mod consistency;
mod differential;
mod faults;
mod parallel;
mod routes;
mod stream_write;
mod stripes;
