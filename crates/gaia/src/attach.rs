//! Attaching to a server.
//!
//! The ticket comes from the mount, so the call waits in the Linux kernel until a server serves it. Between the ticket
//! and the connection that server may end too; then all is done again.

use std::sync::Arc;
use std::time::Duration;

use spinio_host::lock;
use spinio_pagecache::messages::Request;
use spinio_sys::linux::{self, Fd};
use spinio_sys::{Errno, injection_point};

use crate::Result;
use crate::connection::{Connection, Descriptors};
use crate::counters::Counters;
use crate::file_reader::FileReader;
use crate::link::{Attached, Link, LinkState, Spec};
use crate::mounted_file::MountedFile;
use crate::owner_name::Name;
use crate::state::State;
use crate::window::Window;

/// For so long a server may take to start, and die again.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(10);

/// A connection to a server that knows of the map now.
pub(crate) struct Greeted {
    pub(crate) connection: Connection,
    size: u64,
    name: Name,
    sent: Descriptors,
}

/// Says hello to a server.
pub(crate) fn say_hello(file: &dyn MountedFile, spec: &Spec) -> Result<Greeted> {
    let ticket = file.ticket()?;
    injection_point!("client: ticket received");
    let mut connection = Connection::dial(&ticket)?;
    injection_point!("client: connected");
    let Spec { access, first, pages, kind } = *spec;
    let hello = Request::Hello { ticket: ticket.ticket, access, first, pages: pages as u64, kind };
    let (size, name, sent) = connection.hello(hello)?;
    Ok(Greeted { connection, size, name, sent })
}

impl LinkState {
    /// Attaches to a server.
    fn attach(&mut self) -> Result<(Arc<Window>, Counters, u64, Name, Fd)> {
        self.attached = None;
        let Greeted { connection, size, name, sent } = say_hello(&*self.file, &self.spec)?;
        let window = Arc::new(Window::map(&sent.window, self.spec.pages)?);
        let [changes, servers] = &sent.counters;
        let counters = Counters::map(changes, servers)?;
        injection_point!("client: attached");
        if let Some(order) = self.order {
            let _ = linux::fadvise(sent.file.get(), 0, 0, order);
        }
        let backing = sent.file.get();
        self.attached = Some(Attached { connection, backing: sent.file, window: Arc::clone(&window) });
        Ok((window, counters, size, name, backing))
    }
}

/// Attaches, however often servers end meanwhile.
pub(crate) fn attach(link: &Link, reader: Option<&'static dyn FileReader>, state: &mut State) -> Result<()> {
    let (window, counters, size, name, backing) = patiently(|| link.run(LinkState::attach))?;
    *lock(&state.name) = Some(name);
    state.window = Some(window);
    state.counters = Some(counters);
    // A program that has lost the right to open the file has the descriptor, through which the link reads.
    state.backing = reader.and_then(|reader| reader.open(link.tid(), backing).ok());
    state.info.file_size = size;
    Ok(())
}

/// Repeats an attempt that failed because its server has ended.
pub(crate) fn patiently<T>(mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
    let give_up = linux::monotonic_ns() + PATIENCE.as_nanos() as u64;
    loop {
        match attempt() {
            // The second: the ticket was of a server that has ended.
            Err(e) if e.is_disconnected() || (e.is_refused() && e.errno == Errno::STALE) => {
                if linux::monotonic_ns() > give_up {
                    return Err(e);
                }
                std::thread::sleep(PAUSE);
            }
            done => return done,
        }
    }
}
