//! Descriptors of the keepers' table, owned by anybody.
//!
//! A number means something only in the table it was opened in, so a thread of the program that lets one go cannot close
//! it: it is buried, and a keeper does that.

use std::sync::Arc;

use spinio_sys::linux::Fd;


/// A descriptor to be closed, and what is to be done with it first.
pub struct Grave {
    /// The number, in the table that it lives in.
    pub fd: Fd,
    /// Done first.
    pub farewell: Option<Farewell>,
}

/// A pool whose workers close descriptors of their table.
pub trait Closer: Send + Sync {
    /// Has it closed by a worker, some time.
    fn bury(&self, grave: Grave);
}

/// Done by a helper with a descriptor that it is about to close.
pub type Farewell = Box<dyn FnOnce(Fd) + Send + Sync>;

/// Closes descriptors of the crew's table, from any thread.
#[derive(Clone)]
pub struct Graveyard(pub(crate) Arc<dyn Closer>);

/// A descriptor in the crew's table: only helpers may use the number.
pub struct PrivateFd {
    fd: Fd,
    graveyard: Graveyard,
    farewell: Option<Farewell>,
}

impl PrivateFd {
    /// Takes over a descriptor that a helper opened.
    pub fn new(fd: Fd, graveyard: Graveyard) -> PrivateFd {
        PrivateFd { fd, graveyard, farewell: None }
    }

    /// What a helper is to do before it closes this. It must not panic.
    pub fn say_farewell(&mut self, farewell: Farewell) {
        self.farewell = Some(farewell);
    }

    /// The number, for a helper.
    pub fn get(&self) -> Fd {
        self.fd
    }
}

impl Drop for PrivateFd {
    fn drop(&mut self) {
        self.graveyard.0.bury(Grave { fd: self.fd, farewell: self.farewell.take() });
    }
}
