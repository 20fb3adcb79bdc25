//! The library as programs meet it.

mod build;
mod exports;
mod header;
mod programs;
