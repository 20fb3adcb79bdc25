//! Read-ahead against models that keep every page.

mod extend;
mod set;
mod stream;
