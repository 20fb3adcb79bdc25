//! Moves of NVMMU, as the microbenchmarks make them.

use std::ffi::c_void;
use std::path::{Path, PathBuf};

use spinio_io::settings::NvmmuStripes;
use spinio_io::{Runtime, Settings, Target};
use spinio_nvmmu::{Direction, OutputMode, Session};

use crate::case::{CaseError, Outcome, expect, fail};

/// Offset and length of a move.
pub(super) type Range = (u64, usize);

/// Moves of NVMMU.
pub(super) struct Moves {
    runtime: &'static Runtime,
    session: Option<Session>,
    file: PathBuf,
    wanted: NvmmuStripes,
}

impl Moves {
    /// The mode of an output on an array with parity.
    pub(super) fn new(wanted: NvmmuStripes) -> Moves {
        let settings = Settings { nvmmu_stripes: wanted, ..Settings::default() };
        Moves { runtime: Box::leak(Box::new(Runtime::new(settings))), session: None, file: PathBuf::new(), wanted }
    }

    fn go(&mut self, target: Target, (offset, len): Range, direction: Direction) -> Outcome {
        let Some(session) = &mut self.session else { return fail("moved before it began") };
        let address = target.addr.0 as *mut c_void;
        let moved = session.move_range(&self.file, address, offset, len as u64, direction);
        expect("bytes moved", moved.map_err(|e| CaseError::Failed(e.to_string()))?, len as u64)
    }

    /// Work before the first move, while a kernel computes; waits until it is done.
    pub(super) fn begin(&mut self, file: &Path, moves: &[Range]) -> Outcome {
        file.clone_into(&mut self.file);
        let output = (!moves.is_empty()).then_some(file);
        let mut session = Session::begin(self.runtime, output).map_err(|e| CaseError::Failed(e.to_string()))?;
        for &(offset, len) in moves {
            session.hint_range(offset, len as u64);
        }
        let promise = session.report().mode;
        let kept = match promise {
            OutputMode::NoOutput => moves.is_empty(),
            OutputMode::Passthrough(_) => self.wanted == NvmmuStripes::Passthrough,
            OutputMode::Aligned(_) => self.wanted == NvmmuStripes::Aligned,
            _ => self.wanted == NvmmuStripes::Preread,
        };
        if !kept {
            return fail(format!("{:?} was requested, but the output is {promise}", self.wanted));
        }
        self.session = Some(session);
        Ok(())
    }

    /// File to device.
    pub(super) fn upload(&mut self, to: Target, range: Range) -> Outcome {
        self.go(to, range, Direction::Upload)
    }

    /// Device to file.
    pub(super) fn download(&mut self, from: Target, range: Range) -> Outcome {
        self.go(from, range, Direction::Download)
    }

    /// The program is done: gathered bytes are written.
    pub(super) fn finish(&mut self) -> Outcome {
        let Some(session) = &mut self.session else { return fail("finished before it began") };
        session.flush().map_err(|e| CaseError::Failed(e.to_string()))
    }

    /// All bytes are on storage.
    pub(super) fn sync(&mut self) -> Outcome {
        let Some(mut session) = self.session.take() else { return fail("ended before it began") };
        session.sync().and_then(|()| session.end()).map(drop).map_err(|e| CaseError::Failed(e.to_string()))
    }
}
