//! Read-ahead against models that keep every page.

mod set;
mod stream;
