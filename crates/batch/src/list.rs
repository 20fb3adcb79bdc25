//! The pieces of a batch, in either of the forms a program may have them in.
//!
//! ```text
//!   Piece  [fd, offset, length, address, result]  [fd, ...]  ...      any files, any devices
//!   Many   one fd; offsets [..], lengths [..] or one for all, addresses [..] or one behind the other
//! ```
//!
//! A million pieces are looked at one after another in a few milliseconds, so reading one costs a load each and no call.

use spinio_sys::linux::Fd;

/// One read of a batch, and what became of it. The layout is that of `struct spinio_piece`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Piece {
    /// Descriptor.
    pub fd: Fd,
    /// 0.
    pub reserved: u32,
    /// Offset in the file.
    pub offset: u64,
    /// Bytes wanted.
    pub len: u64,
    /// Device memory that they go to; memory of the host as well.
    pub address: u64,
    /// Afterwards: bytes read, short at the end of the file, or an errno with a minus sign.
    pub result: i64,
}

/// Numbers of many pieces.
#[derive(Clone, Copy, Debug)]
pub enum Each<'a> {
    /// The same for all.
    Same(u64),
    /// One a piece.
    Of(&'a [u64]),
    /// The first, and so much more for each next one.
    Step(u64, u64),
}

/// Many reads of one file.
#[derive(Debug)]
pub struct Many<'a> {
    /// Descriptor.
    pub fd: Fd,
    /// Offsets in the file.
    pub offsets: Each<'a>,
    /// Bytes wanted.
    pub lens: Each<'a>,
    /// Where they go.
    pub addresses: Each<'a>,
    /// As [`Piece::result`]; its length says how many pieces there are.
    pub results: &'a mut [i64],
}

/// Numbers, without a lifetime.
#[derive(Clone, Copy)]
enum Numbers {
    Of(*const u64),
    Step(u64, u64),
}

impl Numbers {
    /// `None` if there are not `n`.
    fn of(each: Each<'_>, n: usize) -> Option<Numbers> {
        match each {
            Each::Same(value) => Some(Numbers::Step(value, 0)),
            Each::Step(first, step) => Some(Numbers::Step(first, step)),
            Each::Of(all) => (all.len() >= n).then_some(Numbers::Of(all.as_ptr())),
        }
    }

    /// # Safety
    /// `i` must be below the number that [`Numbers::of`] was told, and the slice be there.
    #[inline(always)]
    unsafe fn get(self, i: usize) -> u64 {
        match self {
            // SAFETY: passed on to the caller.
            Numbers::Of(all) => unsafe { *all.add(i) },
            Numbers::Step(first, step) => first.wrapping_add(step.wrapping_mul(i as u64)),
        }
    }
}

#[derive(Clone, Copy)]
enum Form {
    Pieces(*mut Piece),
    Arrays { fd: Fd, offsets: Numbers, lens: Numbers, addresses: Numbers, results: *mut i64 },
}

/// The pieces of a batch while threads work on it. Whoever makes one keeps what it points to until the batch is done.
#[derive(Clone, Copy)]
pub(crate) struct List {
    n: usize,
    form: Form,
}

// SAFETY: pieces are only read, and a result is written by the one thread that sorts the piece, then by the one that ended
// it, or by the caller when every other thread is done; the memory is kept by who made the list.
unsafe impl Send for List {}
// SAFETY: as above.
unsafe impl Sync for List {}

/// What a piece asks for.
#[derive(Clone, Copy)]
pub(crate) struct Asked {
    pub(crate) fd: Fd,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) address: u64,
}

impl List {
    pub(crate) fn of_pieces(pieces: &mut [Piece]) -> List {
        List { n: pieces.len(), form: Form::Pieces(pieces.as_mut_ptr()) }
    }

    /// `None` where an array is shorter than the results.
    pub(crate) fn of_many(many: Many<'_>) -> Option<List> {
        let n = many.results.len();
        let form = Form::Arrays {
            fd: many.fd,
            offsets: Numbers::of(many.offsets, n)?,
            lens: Numbers::of(many.lens, n)?,
            addresses: Numbers::of(many.addresses, n)?,
            results: many.results.as_mut_ptr(),
        };
        Some(List { n, form })
    }

    pub(crate) fn len(&self) -> usize {
        self.n
    }

    #[inline(always)]
    pub(crate) fn get(&self, i: usize) -> Asked {
        debug_assert!(i < self.n);
        match self.form {
            Form::Pieces(pieces) => {
                // SAFETY: below the number of pieces; by the contract of the list they are there, and nobody writes
                // these four fields.
                let (fd, offset, len, address) = unsafe {
                    let p = pieces.add(i);
                    ((*p).fd, (*p).offset, (*p).len, (*p).address)
                };
                Asked { fd, offset, len, address }
            }
            // SAFETY: below the number that all three were checked against.
            Form::Arrays { fd, offsets, lens, addresses, .. } => unsafe {
                Asked { fd, offset: offsets.get(i), len: lens.get(i), address: addresses.get(i) }
            },
        }
    }

    /// Sets the result of a piece: by one thread at a time for each.
    #[inline(always)]
    pub(crate) fn set(&self, i: usize, result: i64) {
        debug_assert!(i < self.n);
        // SAFETY: below the number of pieces; by the contract of the list they are there, and no other thread reads or
        // writes this result meanwhile.
        unsafe {
            match self.form {
                Form::Pieces(pieces) => (*pieces.add(i)).result = result,
                Form::Arrays { results, .. } => *results.add(i) = result,
            }
        }
    }

    /// The result of a piece, when nobody works on it any more.
    pub(crate) fn result(&self, i: usize) -> i64 {
        debug_assert!(i < self.n);
        // SAFETY: as above.
        unsafe {
            match self.form {
                Form::Pieces(pieces) => (*pieces.add(i)).result,
                Form::Arrays { results, .. } => *results.add(i),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_say_the_same() {
        let offsets = [7u64, 5, 3];
        let mut results = [0i64; 3];
        let many = Many {
            fd: 9,
            offsets: Each::Of(&offsets),
            lens: Each::Same(2),
            addresses: Each::Step(100, 2),
            results: &mut results,
        };
        let arrays = List::of_many(many).unwrap();
        let mut pieces: Vec<Piece> = (0..3)
            .map(|i| Piece { fd: 9, offset: offsets[i], len: 2, address: 100 + 2 * i as u64, ..Piece::default() })
            .collect();
        let list = List::of_pieces(&mut pieces);
        for i in 0..3 {
            let (a, b) = (arrays.get(i), list.get(i));
            assert_eq!((a.fd, a.offset, a.len, a.address), (b.fd, b.offset, b.len, b.address));
            list.set(i, -5);
            arrays.set(i, i as i64);
            assert_eq!((arrays.result(i), list.result(i)), (i as i64, -5));
        }
        assert_eq!((results, pieces[2].result), ([0, 1, 2], -5));
        let short = Many {
            fd: 9,
            offsets: Each::Of(&offsets[..2]),
            lens: Each::Same(2),
            addresses: Each::Same(1),
            results: &mut results,
        };
        assert!(List::of_many(short).is_none());
    }
}
