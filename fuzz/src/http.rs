//! The HTTP parser and the writers of replies that kernels have: `device/include/spinio/http.h`. `http.cpp` says what must hold.
#![no_main]

use libfuzzer_sys::fuzz_target;

const COUNTERS: usize = 1 << 14;
/// The longest input: more than the head that the example takes.
const LONGEST: usize = 4096;

/// The fuzzer looks at this section beside its own counters.
#[unsafe(link_section = "__libfuzzer_extra_counters")]
static mut SEEN: [u8; COUNTERS] = [0; COUNTERS];

unsafe extern "C" {
    fn spinio_fuzz_http(bytes: *const u8, count: usize);
}

/// Called at each jump of the C++ code, by the compiler's doing.
///
/// # Safety
///
/// Only by that code, in one thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn spinio_fuzz_jump(place: usize) {
    // SAFETY: one thread, and inside the array.
    unsafe {
        let seen = (&raw mut SEEN).cast::<u8>().add((place >> 1) % COUNTERS);
        *seen = (*seen).saturating_add(1);
    }
}

fuzz_target!(|bytes: &[u8]| {
    let call = |bytes: &[u8]| {
        // SAFETY: bytes and their number.
        unsafe { spinio_fuzz_http(bytes.as_ptr(), bytes.len().min(LONGEST)) }
    };
    call(bytes);
    // Parts of a good request, so that short inputs reach all of the parser.
    let [kind, rest @ ..] = bytes else { return };
    let parts: [(&[u8], &[u8]); 6] = [
        (b"GET /", b" HTTP/1.1\r\nHost: a\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: ", b"\r\n\r\n"),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: ", b"\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n", b"\r\n\r\n"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nConnection: ", b"\r\n\r\n"),
        (b"", b" / HTTP/1.1\r\nHost: a\r\n\r\n"),
    ];
    let (before, after) = parts[usize::from(*kind) % parts.len()];
    call(&[before, rest, after].concat());
});
