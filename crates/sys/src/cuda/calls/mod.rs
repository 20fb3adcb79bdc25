//! One method per driver function.
//!
//! A call is safe if it only queries, and takes no argument that the driver would use unchecked. The others are
//! `unsafe`: handles must be alive, and memory must be valid for the copy.

use super::CuError;

type Result<T> = core::result::Result<T, CuError>;

#[inline(always)]
fn check(code: i32) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(CuError(code)) }
}

/// Calls a function of the table and converts its status to a Result.
macro_rules! cu {
    ($self:ident.$f:ident($($arg:expr),*)) => {
        check(($self.f.$f)($($arg),*))
    };
    ($self:ident.$f:ident?($($arg:expr),*)) => {
        match $self.f.$f {
            Some(f) => check(f($($arg),*)),
            None => Err(CuError::NO_SUCH_FUNCTION),
        }
    };
}

// After the macro: it is used in the following modules.
mod addresses;
mod contexts;
mod devices;
mod kernels;
mod memory;
mod streams;
mod virtual_memory;
