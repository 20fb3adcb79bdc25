//! Read-ahead against models that keep every page.

mod further;
mod set;
mod stream;
