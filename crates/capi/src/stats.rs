//! Counters, version, and the last error.

#![expect(unsafe_code, reason = "C functions and their arguments")]

use std::ffi::{c_char, c_int};

use spinio_io::runtime;
use spinio_plan::Route;

use crate::ffi_guard::{self as guard, Failure};
use crate::fill_struct;
use crate::last_error;

/// `struct spinio_route_counters`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RouteCounters {
    pieces: u64,
    bytes: u64,
    nanoseconds: u64,
}

/// `struct spinio_counters`. It grows only at its end.
#[repr(C)]
#[derive(Default)]
struct Counters {
    reads: u64,
    read_bytes: u64,
    read_nanoseconds: u64,
    routes: [RouteCounters; Route::ALL.len()],
    writes: u64,
    written_bytes: u64,
    write_nanoseconds: u64,
    batches: u64,
    batch_bytes: u64,
    batch_nanoseconds: u64,
}

#[unsafe(no_mangle)]
unsafe extern "C" fn spinio_stats(out: *mut Counters, size: usize) -> c_int {
    guard::status(|| {
        if out.is_null() {
            return Err(Failure::Errno(libc::EINVAL));
        }
        let snapshot = runtime().stats();
        let mut counters = Counters {
            reads: snapshot.read.calls,
            read_bytes: snapshot.read.bytes,
            read_nanoseconds: snapshot.read.nanos,
            writes: snapshot.write.calls,
            written_bytes: snapshot.write.bytes,
            write_nanoseconds: snapshot.write.nanos,
            batches: snapshot.batch.calls,
            batch_bytes: snapshot.batch.bytes,
            batch_nanoseconds: snapshot.batch.nanos,
            ..Counters::default()
        };
        for line in &snapshot.rows {
            let route = &mut counters.routes[line.route as usize];
            route.pieces += line.pieces;
            route.bytes += line.bytes;
            route.nanoseconds += line.nanos;
        }
        // SAFETY: the header requires `size` bytes at `out`; the struct has no padding.
        unsafe { fill_struct(out.cast(), size, &counters) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn spinio_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[unsafe(no_mangle)]
extern "C" fn spinio_last_error() -> *const c_char {
    last_error::pointer()
}
