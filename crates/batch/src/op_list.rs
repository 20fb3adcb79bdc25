//! The operations of a batch, in either of the two forms of the API.
//!
//! ```text
//!   ReadOp       [fd, offset, length, address, result]  [fd, ...]  ...      any files, any devices
//!   ReadArrays   one fd; offsets [..], lengths [..] or one for all, addresses [..] or with a stride
//! ```
//!
//! Reading an operation costs one load per field and no call: a million operations take a few milliseconds.

#![expect(unsafe_code, reason = "operations in the caller's memory, copies to the device")]

use spinio_sys::linux::Fd;

/// One read of a batch, and its result. The layout is that of `struct spinio_read_op`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ReadOp {
    /// Descriptor.
    pub fd: Fd,
    /// 0.
    pub reserved: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes requested.
    pub len: u64,
    /// The destination: device memory, or host memory.
    pub address: u64,
    /// Afterwards: bytes read, short at the end of the file, or an errno with a minus sign.
    pub result: i64,
}

/// Arguments of many operations.
#[derive(Clone, Copy, Debug)]
pub enum Arg<'a> {
    /// The same for all.
    Same(u64),
    /// One for each operation.
    Slice(&'a [u64]),
    /// The first, and the difference to the next.
    Stride(u64, u64),
}

/// Many reads of one file.
#[derive(Debug)]
pub struct ReadArrays<'a> {
    /// Descriptor.
    pub fd: Fd,
    /// Offsets in the file.
    pub offsets: Arg<'a>,
    /// Bytes requested.
    pub lens: Arg<'a>,
    /// The destinations.
    pub addresses: Arg<'a>,
    /// As [`ReadOp::result`]; its length is the number of operations.
    pub results: &'a mut [i64],
}

/// An argument, without a lifetime.
#[derive(Clone, Copy)]
enum Column {
    Slice(*const u64),
    Stride(u64, u64),
}

impl Column {
    /// `None` if there are not `n`.
    fn new(arg: Arg<'_>, n: usize) -> Option<Column> {
        match arg {
            Arg::Same(value) => Some(Column::Stride(value, 0)),
            Arg::Stride(first, step) => Some(Column::Stride(first, step)),
            Arg::Slice(values) => (values.len() >= n).then_some(Column::Slice(values.as_ptr())),
        }
    }

    /// # Safety
    /// `i` must be below the number that [`Column::new`] checked, and the slice must exist.
    #[inline(always)]
    unsafe fn get(self, i: usize) -> u64 {
        match self {
            // SAFETY: passed on to the caller.
            Column::Slice(values) => unsafe { *values.add(i) },
            Column::Stride(first, step) => first.wrapping_add(step.wrapping_mul(i as u64)),
        }
    }
}

#[derive(Clone, Copy)]
enum Layout {
    Ops(*mut ReadOp),
    Arrays { fd: Fd, offsets: Column, lens: Column, addresses: Column, results: *mut i64 },
}

/// The operations of a batch while threads work on it. Its creator keeps the memory that it points to until the batch
/// is done.
#[derive(Clone, Copy)]
pub(crate) struct OpList {
    n: usize,
    layout: Layout,
}

// SAFETY: operations are only read, and a result is written by the one thread that resolves the operation, then by the
// one that completed it, or by the caller when every other thread is done; the creator of the list keeps the memory.
unsafe impl Send for OpList {}
// SAFETY: as above.
unsafe impl Sync for OpList {}

/// The request of an operation.
#[derive(Clone, Copy)]
pub(crate) struct OpView {
    pub(crate) fd: Fd,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) address: u64,
}

impl OpList {
    pub(crate) fn from_ops(ops: &mut [ReadOp]) -> OpList {
        OpList { n: ops.len(), layout: Layout::Ops(ops.as_mut_ptr()) }
    }

    /// `None` if an array is shorter than the results.
    pub(crate) fn from_arrays(arrays: ReadArrays<'_>) -> Option<OpList> {
        let n = arrays.results.len();
        let form = Layout::Arrays {
            fd: arrays.fd,
            offsets: Column::new(arrays.offsets, n)?,
            lens: Column::new(arrays.lens, n)?,
            addresses: Column::new(arrays.addresses, n)?,
            results: arrays.results.as_mut_ptr(),
        };
        Some(OpList { n, layout: form })
    }

    pub(crate) fn len(&self) -> usize {
        self.n
    }

    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> OpView {
        debug_assert!(i < self.n);
        match self.layout {
            Layout::Ops(ops) => {
                // SAFETY: below the number of operations; by the contract of the list they exist, and no thread writes
                // these four fields.
                let (fd, offset, len, address) = unsafe {
                    let p = ops.add(i);
                    ((*p).fd, (*p).offset, (*p).len, (*p).address)
                };
                OpView { fd, offset, len, address }
            }
            // SAFETY: below the number that all three were checked against.
            Layout::Arrays { fd, offsets, lens, addresses, .. } => unsafe {
                OpView { fd, offset: offsets.get(i), len: lens.get(i), address: addresses.get(i) }
            },
        }
    }

    /// Sets the result of an operation: only one thread at a time may do so for each.
    #[inline(always)]
    pub(crate) fn set(&self, i: usize, result: i64) {
        debug_assert!(i < self.n);
        // SAFETY: below the number of operations; by the contract of the list they are there, and no other thread reads
        // or writes this result meanwhile.
        unsafe {
            match self.layout {
                Layout::Ops(ops) => (*ops.add(i)).result = result,
                Layout::Arrays { results, .. } => *results.add(i) = result,
            }
        }
    }

    /// The result of an operation, when no thread works on it any more.
    pub(crate) fn result(&self, i: usize) -> i64 {
        debug_assert!(i < self.n);
        // SAFETY: as above.
        unsafe {
            match self.layout {
                Layout::Ops(ops) => (*ops.add(i)).result,
                Layout::Arrays { results, .. } => *results.add(i),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_give_same_ops() {
        let offsets = [7u64, 5, 3];
        let mut results = [0i64; 3];
        let arrays = ReadArrays {
            fd: 9,
            offsets: Arg::Slice(&offsets),
            lens: Arg::Same(2),
            addresses: Arg::Stride(100, 2),
            results: &mut results,
        };
        let arrays = OpList::from_arrays(arrays).unwrap();
        let mut pieces: Vec<ReadOp> = (0..3)
            .map(|i| ReadOp { fd: 9, offset: offsets[i], len: 2, address: 100 + 2 * i as u64, ..ReadOp::default() })
            .collect();
        let list = OpList::from_ops(&mut pieces);
        for i in 0..3 {
            let (a, b) = (arrays.get(i), list.get(i));
            assert_eq!((a.fd, a.offset, a.len, a.address), (b.fd, b.offset, b.len, b.address));
            list.set(i, -5);
            arrays.set(i, i as i64);
            assert_eq!((arrays.result(i), list.result(i)), (i as i64, -5));
        }
        assert_eq!((results, pieces[2].result), ([0, 1, 2], -5));
        let short = ReadArrays {
            fd: 9,
            offsets: Arg::Slice(&offsets[..2]),
            lens: Arg::Same(2),
            addresses: Arg::Same(1),
            results: &mut results,
        };
        assert!(OpList::from_arrays(short).is_none());
    }
}
