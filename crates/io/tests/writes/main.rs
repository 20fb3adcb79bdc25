//! Writes out of device memory: what a `pwrite` of host memory guarantees holds for them.

mod abreast;
mod atomicity;
mod consistency;
mod differential;
mod faults;
mod later;
mod routes;
mod stripes;
