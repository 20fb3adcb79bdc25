//! Batches in every form, one at a time or several in flight: each piece must end as the read that it stands for.

use std::ffi::{c_int, c_void};

use arbitrary::Arbitrary;

use crate::library::{Library, Piece};
use crate::state::{Address, Offset, State, explained, fetch, readable, there};

/// A piece of a batch.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct Asked {
    pub to: Address,
    pub len: u16,
    pub offset: Offset,
    pub fd: u8,
}

/// A batch that goes on.
pub struct Flying {
    ticket: *mut c_void,
    pieces: Vec<Piece>,
    rooms: Vec<usize>,
    /// What [`State::changes`] was when it began.
    begun: u64,
}

impl State {
    /// Pieces, and how much memory each has.
    fn pieces(&self, lib: &Library, asked: &[Asked], times: u8) -> (Vec<Piece>, Vec<usize>) {
        let one = |one: &Asked| {
            let (to, room) = self.resolve(one.to);
            let (fd, offset) = (readable(lib, one.fd), one.offset.get() as u64);
            (Piece { fd, reserved: 0, offset, size: u64::from(one.len), buffer: to, result: 1 << 40 }, room)
        };
        (0..1 + times % 8).flat_map(|_| asked[..asked.len().min(32)].iter().map(one)).unzip()
    }

    /// `spinio_batch`, or `spinio_batch_submit` and `spinio_batch_wait`.
    pub fn batch(&mut self, lib: &Library, asked: &[Asked], times: u8, apart: bool) {
        if apart {
            self.submit(lib, asked, times);
            return self.wait(lib, u8::try_from(self.flying.len() - 1).unwrap_or(0));
        }
        self.changes += 1;
        let (mut pieces, rooms) = self.pieces(lib, asked, times);
        // SAFETY: pieces of ours; their memory stays.
        let all = unsafe { (lib.batch)(pieces.as_mut_ptr(), pieces.len()) };
        judge(lib, all, &pieces, &rooms, self.flying.is_empty());
    }

    /// `spinio_batch_submit`.
    pub fn submit(&mut self, lib: &Library, asked: &[Asked], times: u8) {
        if self.flying.len() >= 8 {
            return;
        }
        self.changes += 1;
        let (mut pieces, rooms) = self.pieces(lib, asked, times);
        // SAFETY: pieces of ours, which nobody touches until the batch is over; the memory stays as long.
        let ticket = unsafe { (lib.submit)(pieces.as_mut_ptr(), pieces.len()) };
        assert!(!ticket.is_null());
        self.flying.push(Flying { ticket, pieces, rooms, begun: self.changes });
    }

    /// `spinio_batch_poll`, also of no batch.
    pub fn poll(&self, lib: &Library, which: u8) {
        let ticket = self.flying.get(usize::from(which) % 8).map_or(std::ptr::null_mut(), |f| f.ticket);
        // SAFETY: null, or a batch that was not waited for.
        let told = unsafe { (lib.poll)(ticket) };
        assert!(if ticket.is_null() { told == -1 } else { (0..=1).contains(&told) });
    }

    /// `spinio_batch_wait`, in any order, also of no batch.
    pub fn wait(&mut self, lib: &Library, which: u8) {
        let which = usize::from(which) % 8;
        if which >= self.flying.len() {
            // SAFETY: null is told apart.
            assert_eq!(unsafe { (lib.wait)(std::ptr::null_mut()) }, -1);
            return explained(lib);
        }
        let Flying { ticket, pieces, rooms, begun } = self.flying.swap_remove(which);
        // SAFETY: waited for once.
        let all = unsafe { (lib.wait)(ticket) };
        let quiet = self.changes == begun && self.flying.is_empty();
        judge(lib, all, &pieces, &rooms, quiet);
    }

    /// `spinio_batch_file`. `told`: with an array of results; `lacks`: which of the arrays is null, if any.
    pub fn arrays(&mut self, lib: &Library, asked: &[Asked], fd: u8, told: bool, lacks: u8) {
        self.changes += 1;
        let (mut pieces, rooms) = self.pieces(lib, asked, 0);
        let fd: c_int = readable(lib, fd);
        pieces.iter_mut().for_each(|p| p.fd = fd);
        let n = pieces.len();
        let offsets: Vec<u64> = pieces.iter().map(|p| p.offset).collect();
        let sizes: Vec<u64> = pieces.iter().map(|p| p.size).collect();
        let buffers: Vec<usize> = pieces.iter().map(|p| p.buffer).collect();
        let mut results = vec![1i64 << 40; n];
        let given = |which, at: *const u64| if lacks % 16 == which { std::ptr::null() } else { at };
        let into = if told { results.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: arrays of ours, as long as is said, or null; their memory stays.
        let all = unsafe {
            (lib.batch_file)(
                fd,
                given(1, offsets.as_ptr()),
                given(2, sizes.as_ptr()),
                given(3, buffers.as_ptr().cast()).cast(),
                into,
                n,
            )
        };
        if n > 0 && (1..=3).contains(&(lacks % 16)) {
            assert_eq!(all, -1, "an array was null");
            return explained(lib);
        }
        if told {
            pieces.iter_mut().zip(&results).for_each(|(p, &result)| p.result = result);
            judge(lib, all, &pieces, &rooms, self.flying.is_empty());
        } else {
            let most = pieces.iter().zip(&rooms).map(|(p, &room)| there(p.offset as i64, p.size as usize).min(room));
            let most = if fd < 0 { 0 } else { most.sum::<usize>() };
            assert_eq!(all, most as isize, "the bytes of all pieces");
        }
    }
}

/// `quiet`: nothing else has changed the memory meanwhile.
fn judge(lib: &Library, all: isize, pieces: &[Piece], rooms: &[usize], quiet: bool) {
    assert_eq!(all, pieces.iter().map(|p| p.result.max(0)).sum::<i64>() as isize, "the sum of the results");
    for (i, (p, &room)) in pieces.iter().zip(rooms).enumerate() {
        let expect = there(p.offset as i64, p.size as usize).min(room);
        if p.result < 0 {
            assert!(p.fd < 0 || p.offset > i64::MAX as u64 || room == 0, "a piece that should work: {p:?}");
            continue;
        }
        assert!(p.fd >= 0 && p.result as usize == expect, "{p:?}, {expect} are there");
        // Two that go to the same bytes arrive in any order.
        let alone = |(j, o): (usize, &Piece)| {
            j == i || o.buffer + o.size as usize <= p.buffer || p.buffer + p.size as usize <= o.buffer
        };
        let at = p.offset as usize;
        if quiet && expect > 0 && pieces.iter().enumerate().all(alone) {
            assert!(fetch(lib, p.buffer, expect) == lib.content[at..at + expect], "other bytes than the file's: {p:?}");
        }
    }
}
