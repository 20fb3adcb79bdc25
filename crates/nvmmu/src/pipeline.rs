//! The loop of every program whose data is larger than its device's memory: while a GPU kernel works on one chunk, the
//! next one is uploaded and the last one is downloaded.
//!
//! ```text
//!   slot 0   up 0 │ kernel 0 │ down 0 │ up 3 │ kernel 3 │ down 3          each slot: a stream, an input and an output
//!   slot 1        │ up 1     │ kernel 1 │ down 1 │ up 4 ...               buffer; three slots keep all three busy
//!   slot 2        │          │ up 2     │ kernel 2 │ down 2 ...
//! ```
//!
//! Within a slot the stream keeps the order, so the only wait is for a slot's own download before the slot is used
//! again.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::path::Path;

use spinio_device::StreamId;

use crate::{Direction, Error, ErrorKind, Session, Ticket};

/// A stream, and the device memory of its chunks.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// The stream that copies and kernels of this slot are queued on.
    pub queue: StreamId,
    /// Memory for an input chunk.
    pub input: *mut c_void,
    /// Memory for an output chunk.
    pub output: *mut c_void,
}

/// The input and the output of a pipeline.
#[derive(Clone, Copy, Debug)]
pub struct PipelineSpec<'a> {
    /// The file that input is read from.
    pub input: &'a Path,
    /// First byte.
    pub input_offset: u64,
    /// Bytes in total.
    pub input_len: u64,
    /// Bytes per chunk; the last one may be shorter.
    pub chunk: u64,
    /// The file that output is written to, from this offset on, one chunk after the other.
    pub output: &'a Path,
    /// First byte.
    pub output_offset: u64,
}

/// A chunk that is on the device.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Counted from 0.
    pub number: u64,
    /// Its memory and its stream.
    pub slot: Slot,
    /// Bytes of input.
    pub len: u64,
}

impl Session {
    /// Moves chunks through the slots. `kernel` queues its work on the step's stream, and returns the number of bytes
    /// of output, or the cause of a failure. The bytes written.
    pub fn pipeline(
        &mut self,
        spec: &PipelineSpec<'_>,
        slots: &[Slot],
        mut kernel: impl FnMut(&Step) -> Result<u64, String>,
    ) -> Result<u64, Error> {
        if slots.is_empty() || spec.chunk == 0 {
            return Err(Error::new(ErrorKind::BadRange, "run a pipeline", "it has no slot, or pieces of no length"));
        }
        let mut in_flight: VecDeque<StepMoves> = VecDeque::new();
        let (mut number, mut taken, mut written) = (0, 0, 0);
        let ended = loop {
            if taken == spec.input_len {
                break Ok(());
            }
            if in_flight.len() == slots.len()
                && let Some(moves) = in_flight.pop_front()
                && let Err(error) = moves.wait()
            {
                break Err(error);
            }
            let slot = slots[(number % slots.len() as u64) as usize];
            let step = Step { number, slot, len: spec.chunk.min(spec.input_len - taken) };
            let done = self.step(spec, &step, spec.input_offset + taken, spec.output_offset + written, &mut kernel);
            match done {
                Ok(moves) => {
                    written += moves.down.len;
                    in_flight.push_back(moves);
                }
                Err(error) => break Err(error),
            }
            taken += step.len;
            number += 1;
        };
        // Also after a failure: the buffers belong to the caller, and copies from them may still run.
        let waited = self.wait_pending();
        let complete = in_flight.iter().try_for_each(StepMoves::wait);
        ended.and(waited).and(complete).map(|()| written)
    }

    fn step(
        &mut self,
        spec: &PipelineSpec<'_>,
        step: &Step,
        from: u64,
        to: u64,
        kernel: &mut impl FnMut(&Step) -> Result<u64, String>,
    ) -> Result<StepMoves, Error> {
        let queue = step.slot.queue;
        let up = self.move_async(spec.input, step.slot.input, from, step.len, Direction::Upload, queue)?;
        if up.len < step.len {
            return Err(input_too_short(spec.input, from, step.len, up.len));
        }
        let refused = |why| Error::new(ErrorKind::Failed(spinio_sys::Errno::CANCELED), "run a kernel", why);
        let output_len = kernel(step).map_err(refused)?;
        let down = self.move_async(spec.output, step.slot.output, to, output_len, Direction::Download, queue)?;
        Ok(StepMoves { up, down })
    }
}

/// The moves of a step.
struct StepMoves {
    up: Ticket,
    down: Ticket,
}

impl StepMoves {
    /// Waits for both. The file may have become shorter after the upload was queued: then the kernel worked on bytes that
    /// are not the file's.
    fn wait(&self) -> Result<(), Error> {
        let Ticket { path, offset, len, .. } = &self.up;
        match self.up.wait()? {
            moved if moved < *len => Err(input_too_short(path, *offset, *len, moved)),
            _ => self.down.wait().map(drop),
        }
    }
}

fn input_too_short(path: &Path, offset: u64, len: u64, there: u64) -> Error {
    let why = format!("it ends after {} bytes", offset + there);
    Error::new(ErrorKind::BadRange, "upload", why).with_path(path).with_range(offset, len)
}
