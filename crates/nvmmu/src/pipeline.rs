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
        let mut in_flight: VecDeque<[Ticket; 2]> = VecDeque::new();
        let (mut number, mut taken, mut written) = (0, 0, 0);
        let ended = loop {
            if taken == spec.input_len {
                break Ok(());
            }
            if in_flight.len() == slots.len()
                && let Some([up, down]) = in_flight.pop_front()
                && let Err(error) = up.wait().and(down.wait())
            {
                break Err(error);
            }
            let slot = slots[(number % slots.len() as u64) as usize];
            let step = Step { number, slot, len: spec.chunk.min(spec.input_len - taken) };
            let done = self.step(spec, &step, spec.input_offset + taken, spec.output_offset + written, &mut kernel);
            match done {
                Ok([up, down]) => {
                    written += down.len;
                    in_flight.push_back([up, down]);
                }
                Err(error) => break Err(error),
            }
            taken += step.len;
            number += 1;
        };
        // Also after a failure: the buffers belong to the caller, and copies from them may still run.
        let waited = self.wait_pending();
        ended.and(waited).map(|()| written)
    }

    fn step(
        &mut self,
        spec: &PipelineSpec<'_>,
        step: &Step,
        from: u64,
        to: u64,
        kernel: &mut impl FnMut(&Step) -> Result<u64, String>,
    ) -> Result<[Ticket; 2], Error> {
        let queue = step.slot.queue;
        let up = self.move_async(spec.input, step.slot.input, from, step.len, Direction::Upload, queue)?;
        if up.len < step.len {
            let why = format!("it ends after {} bytes", from + up.len);
            return Err(Error::new(ErrorKind::BadRange, "upload", why)
                .with_path(spec.input)
                .with_range(from, step.len));
        }
        let refused = |why| Error::new(ErrorKind::Failed(spinio_sys::Errno::CANCELED), "run a kernel", why);
        let output_len = kernel(step).map_err(refused)?;
        let down = self.move_async(spec.output, step.slot.output, to, output_len, Direction::Download, queue)?;
        Ok([up, down])
    }
}
