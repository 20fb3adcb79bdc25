//! Dropping pages of the replica: the stores of an epoch, or copies in no epoch for writing.
//!
//! A dropped page is absent at the server, so that the next acquire fetches it, whatever bytes the replica has.

use std::ops::Range;

use spinio_host::lock;
use spinio_pagecache::messages::Run;
use spinio_sys::injection_point;

use crate::Result;
use crate::map::Map;
use crate::page_states::Epoch;
use crate::state::State;

impl Map {
    /// Ends the epoch of the pages of `len` bytes from `offset` without a release: no program sees its stores. An epoch
    /// that was lost ends too; of pages that are in no epoch for writing only, the reading.
    pub fn discard(&self, offset: u64, len: u64) -> Result<()> {
        let range = self.pages_of(offset, len)?;
        let _turn = self.turn()?;
        let mut state = lock(&self.state);
        // A kernel that stores after the drop would store into the next epoch.
        self.replica.on_stream(|_| Ok(()))?;
        if state.pages.has_open(range.clone()) {
            self.drop_pages(&mut state, range.clone(), true)?;
            injection_point!("client: stores discarded");
        }
        state.pages.discard(range.clone());
        state.pages.end_reading(range);
        Ok(())
    }

    /// Kernels no longer load pages of `len` bytes from `offset`, unless they are in an epoch for writing, which goes on.
    pub fn end_reading(&self, offset: u64, len: u64) -> Result<()> {
        let range = self.pages_of(offset, len)?;
        lock(&self.state).pages.end_reading(range);
        Ok(())
    }

    /// A block of the program begins that will acquire `len` bytes from `offset` for reading. Until its end no release, and no
    /// end of another block, lets their memory go.
    pub fn begin_block(&self, offset: u64, len: u64) -> Result<()> {
        let range = self.pages_of(offset, len)?;
        lock(&self.state).pages.begin_block(range);
        Ok(())
    }

    /// It has ended, or could not acquire them; [`Map::end_reading`] with the last one.
    pub fn end_block(&self, offset: u64, len: u64) -> Result<()> {
        let range = self.pages_of(offset, len)?;
        lock(&self.state).pages.end_block(range);
        Ok(())
    }

    /// Drops pages that are in no epoch for writing, and gives their memory back.
    pub(crate) fn drop_copies(&self, range: Range<usize>) -> Result<()> {
        // Jobs that are queued need the state, and memory is freed when none is.
        let _turn = self.queue.last_turn(|| self.replica.is_lost());
        let mut state = lock(&self.state);
        if state.window.is_some() {
            self.drop_pages(&mut state, range.clone(), false)?;
        }
        state.pages.stop_reading(range.clone());
        drop(state);
        // The server has dropped them, or is another one.
        self.replica.end_lending(&range);
        self.replica.give_back(&range);
        Ok(())
    }

    fn drop_pages(&self, state: &mut State, range: Range<usize>, open: bool) -> Result<()> {
        state.current.forget();
        let run = Run { first: range.start as u64, count: range.len() as u32 };
        match self.link.run(move |link| link.drop_pages(run, open)) {
            Err(e) if !e.is_refused() => {
                self.detach(state);
                // No other server knows of these pages.
                if open {
                    state.pages.set_epoch(range, Epoch::Closed);
                }
                if e.is_disconnected() { Ok(()) } else { Err(e) }
            }
            result => result,
        }
    }
}
