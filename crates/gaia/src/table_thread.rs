//! A thread with an unshared descriptor table that owns all descriptors of a map.
//!
//! The program may close, replace or count any number in its own table, and a forked child inherits that table. So the
//! sockets and files of a map are in a table of one thread, and the map's calls run there.

use std::sync::mpsc;

use spinio_sys::Errno;
use spinio_sys::linux::{self, FdTableRoot};

use crate::{Error, Result};

/// A call for the thread.
type Call<S> = Box<dyn FnOnce(&mut S) + Send>;

/// The thread, which owns an `S`; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct TableThread<S> {
    calls: mpsc::Sender<Call<S>>,
    tid: u32,
}

impl<S: 'static> TableThread<S> {
    /// Starts the thread; `open` runs there.
    pub(crate) fn spawn(open: impl FnOnce() -> Result<S> + Send + 'static) -> Result<TableThread<S>> {
        let root = FdTableRoot::new()
            .map_err(|e| Error::new(Errno::AGAIN, format!("Cannot start a thread with its own descriptors: {e:?}")))?;
        let (calls, queue) = mpsc::channel::<Call<S>>();
        let (answer, opened) = mpsc::channel();
        let body = move || {
            let mut state = match open() {
                Ok(state) => state,
                Err(error) => return drop(answer.send(Err(error))),
            };
            let _ = answer.send(Ok(linux::gettid()));
            queue.into_iter().for_each(|call| call(&mut state));
        };
        if !root.spawn("spinio-gaia", body) {
            return Err(Error::of(Errno::AGAIN, "start a thread"));
        }
        let tid = opened.recv().unwrap_or_else(|_| Err(Error::of(Errno::AGAIN, "start a thread")))?;
        Ok(TableThread { calls, tid })
    }

    /// Runs a call on the thread and waits for its result.
    pub(crate) fn run<T: Send + 'static>(&self, call: impl FnOnce(&mut S) -> Result<T> + Send + 'static) -> Result<T> {
        self.run_beside(call, || ())
    }

    /// The same, and does other work here meanwhile, in any case.
    pub(crate) fn run_beside<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut S) -> Result<T> + Send + 'static,
        work: impl FnOnce(),
    ) -> Result<T> {
        let (answer, result) = mpsc::channel();
        let ended = || Error::new(Errno::IO, "The thread of the map has ended");
        let call: Call<S> = Box::new(move |state| drop(answer.send(call(state))));
        let sent = self.calls.send(call).map_err(|_| ended());
        work();
        sent?;
        result.recv().map_err(|_| ended())?
    }

    /// Its id, for taking descriptors out of its table.
    pub(crate) fn tid(&self) -> u32 {
        self.tid
    }
}
