//! Buffers that requests are read into and replies are made in.

/// A buffer whose pages exist. A thread that is killed while the kernel copies a request into a page that does not
/// exist yet makes that request fail with EIO, instead of staying pending.
pub(crate) fn resident_buffer(bytes: usize) -> Vec<u8> {
    vec![0xff; bytes]
}
