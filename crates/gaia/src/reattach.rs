//! Attaching again, after the server has ended.
//!
//! A new server knows nothing of this map: its pages are absent, and acquire fills them again. An open epoch is lost.

use std::sync::Arc;

use spinio_host::lock;
use spinio_pagecache::messages::ReleaseId;

use crate::attach::attach;
use crate::map::Map;
use crate::state::State;
use crate::window::Window;
use crate::{Error, Result};

impl Map {
    /// Ends the connection. Epochs are lost; returns whether there was one.
    pub(crate) fn detach(&self, state: &mut State) -> bool {
        state.window = None;
        *lock(&state.name) = None;
        state.counters = None;
        state.current.forget();
        state.backing = None;
        let _ = self.link.run(|link| {
            link.attached = None;
            Ok(())
        });
        state.pages.lose_all()
    }

    /// Attaches to a server, where none is attached.
    pub(crate) fn attached(&self, state: &mut State) -> Result<Arc<Window>> {
        if state.window.is_none() {
            attach(&self.link, self.reader, state)?;
            state.info.reattached += 1;
        }
        state.window.clone().ok_or_else(Error::disconnected)
    }

    /// Whether a release whose reply was lost had been committed.
    pub(crate) fn was_committed(&self, state: &mut State, id: ReleaseId) -> Result<bool> {
        loop {
            self.attached(state)?;
            match self.link.run(move |link| link.was_committed(id)) {
                Err(e) if e.is_disconnected() => drop(self.detach(state)),
                other => return other,
            }
        }
    }
}
