//! Batches in every form, one at a time or several in flight: each op must give the result of the equivalent read.

use std::ffi::{c_int, c_void};

use arbitrary::Arbitrary;

use crate::library::{Library, ReadOp};
use crate::state::{Address, Offset, State, check_last_error, fetch, readable, readable_len};

/// An op of a batch.
#[derive(Arbitrary, Clone, Copy, Debug)]
pub struct OpSpec {
    pub to: Address,
    pub len: u16,
    pub offset: Offset,
    pub fd: u8,
}

/// A batch in flight.
pub struct PendingBatch {
    handle: *mut c_void,
    ops: Vec<ReadOp>,
    memory_lens: Vec<usize>,
    /// The value of [`State::changes`] when it began.
    changes_at_start: u64,
}

impl State {
    /// The ops, and the length of live memory at each destination.
    fn make_ops(&self, lib: &Library, specs: &[OpSpec], times: u8) -> (Vec<ReadOp>, Vec<usize>) {
        let one = |one: &OpSpec| {
            let (to, memory_len) = self.resolve(one.to);
            let (fd, offset) = (readable(lib, one.fd), one.offset.get() as u64);
            (ReadOp { fd, reserved: 0, offset, size: u64::from(one.len), buffer: to, result: 1 << 40 }, memory_len)
        };
        (0..1 + times % 8).flat_map(|_| specs[..specs.len().min(32)].iter().map(one)).unzip()
    }

    /// `spinio_batch`, or `spinio_batch_submit` and `spinio_batch_wait`.
    pub fn batch(&mut self, lib: &Library, specs: &[OpSpec], times: u8, with_submit: bool) {
        if with_submit {
            self.submit(lib, specs, times);
            return self.wait(lib, u8::try_from(self.pending_batches.len() - 1).unwrap_or(0));
        }
        self.changes += 1;
        let (mut ops, memory_lens) = self.make_ops(lib, specs, times);
        // SAFETY: an array of ours; the destinations stay allocated.
        let all = unsafe { (lib.batch)(ops.as_mut_ptr(), ops.len()) };
        check_results(lib, all, &ops, &memory_lens, self.pending_batches.is_empty());
    }

    /// `spinio_batch_submit`.
    pub fn submit(&mut self, lib: &Library, specs: &[OpSpec], times: u8) {
        if self.pending_batches.len() >= 8 {
            return;
        }
        self.changes += 1;
        let (mut ops, memory_lens) = self.make_ops(lib, specs, times);
        // SAFETY: an array of ours, untouched until the batch is done; the destinations stay allocated as long.
        let handle = unsafe { (lib.submit)(ops.as_mut_ptr(), ops.len()) };
        assert!(!handle.is_null());
        self.pending_batches.push(PendingBatch { handle, ops, memory_lens, changes_at_start: self.changes });
    }

    /// `spinio_batch_poll`, also of no batch.
    pub fn poll(&self, lib: &Library, which: u8) {
        let handle = self.pending_batches.get(usize::from(which) % 8).map_or(std::ptr::null_mut(), |f| f.handle);
        // SAFETY: null, or a batch that was not waited for.
        let status = unsafe { (lib.poll)(handle) };
        assert!(if handle.is_null() { status == -1 } else { (0..=1).contains(&status) });
    }

    /// `spinio_batch_wait`, in any order, also of no batch.
    pub fn wait(&mut self, lib: &Library, which: u8) {
        let which = usize::from(which) % 8;
        if which >= self.pending_batches.len() {
            // SAFETY: null is recognised.
            assert_eq!(unsafe { (lib.wait)(std::ptr::null_mut()) }, -1);
            return check_last_error(lib);
        }
        let PendingBatch { handle, ops, memory_lens, changes_at_start } = self.pending_batches.swap_remove(which);
        // SAFETY: waited for once.
        let all = unsafe { (lib.wait)(handle) };
        let memory_unchanged = self.changes == changes_at_start && self.pending_batches.is_empty();
        check_results(lib, all, &ops, &memory_lens, memory_unchanged);
    }

    /// `spinio_batch_file`. `with_results`: with an array of results; `null_array`: the array that is null, if any.
    pub fn arrays(&mut self, lib: &Library, specs: &[OpSpec], fd: u8, with_results: bool, null_array: u8) {
        self.changes += 1;
        let (mut ops, memory_lens) = self.make_ops(lib, specs, 0);
        let fd: c_int = readable(lib, fd);
        ops.iter_mut().for_each(|p| p.fd = fd);
        let n = ops.len();
        let offsets: Vec<u64> = ops.iter().map(|p| p.offset).collect();
        let sizes: Vec<u64> = ops.iter().map(|p| p.size).collect();
        let buffers: Vec<usize> = ops.iter().map(|p| p.buffer).collect();
        let mut results = vec![1i64 << 40; n];
        let array_or_null = |which, at: *const u64| if null_array % 16 == which { std::ptr::null() } else { at };
        let into = if with_results { results.as_mut_ptr() } else { std::ptr::null_mut() };
        // SAFETY: arrays of ours with the array_or_null length, or null; the destinations stay allocated.
        let all = unsafe {
            (lib.batch_file)(
                fd,
                array_or_null(1, offsets.as_ptr()),
                array_or_null(2, sizes.as_ptr()),
                array_or_null(3, buffers.as_ptr().cast()).cast(),
                into,
                n,
            )
        };
        if n > 0 && (1..=3).contains(&(null_array % 16)) {
            assert_eq!(all, -1, "an array was null");
            return check_last_error(lib);
        }
        if with_results {
            ops.iter_mut().zip(&results).for_each(|(p, &result)| p.result = result);
            check_results(lib, all, &ops, &memory_lens, self.pending_batches.is_empty());
        } else {
            let expected_sum = ops
                .iter()
                .zip(&memory_lens)
                .map(|(p, &memory_len)| readable_len(p.offset as i64, p.size as usize).min(memory_len));
            let expected_sum = if fd < 0 { 0 } else { expected_sum.sum::<usize>() };
            assert_eq!(all, expected_sum as isize, "the bytes of all ops");
        }
    }
}

/// `memory_unchanged`: no other call has changed the memory meanwhile.
fn check_results(lib: &Library, all: isize, ops: &[ReadOp], memory_lens: &[usize], memory_unchanged: bool) {
    assert_eq!(all, ops.iter().map(|p| p.result.max(0)).sum::<i64>() as isize, "the sum of the results");
    for (i, (p, &memory_len)) in ops.iter().zip(memory_lens).enumerate() {
        let expect = readable_len(p.offset as i64, p.size as usize).min(memory_len);
        if p.result < 0 {
            assert!(p.fd < 0 || p.offset > i64::MAX as u64 || memory_len == 0, "a valid op failed: {p:?}");
            continue;
        }
        assert!(p.fd >= 0 && p.result as usize == expect, "{p:?}, expected {expect}");
        // Ops with overlapping destinations complete in any order.
        let disjoint = |(j, o): (usize, &ReadOp)| {
            j == i || o.buffer + o.size as usize <= p.buffer || p.buffer + p.size as usize <= o.buffer
        };
        let at = p.offset as usize;
        if memory_unchanged && expect > 0 && ops.iter().enumerate().all(disjoint) {
            assert!(fetch(lib, p.buffer, expect) == lib.content[at..at + expect], "other bytes than the file's: {p:?}");
        }
    }
}
