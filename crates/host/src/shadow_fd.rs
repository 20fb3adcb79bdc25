//! Descriptors of the keepers' table, owned by anybody.
//!
//! A number means something only in the table it was opened in, so a thread of the program that lets one go cannot close
//! it: it is buried, and a keeper does that.

use std::sync::Arc;
use std::sync::atomic::Ordering::Release;

use spinio_sys::linux::Fd;

use super::helper::Shared;
use crate::lock::lock;

/// A descriptor to be closed, and what is to be done with it first.
pub(super) struct Grave {
    pub(super) fd: Fd,
    pub(super) farewell: Option<Farewell>,
}

/// Done by a helper with a descriptor that it is about to close.
pub(super) type Farewell = Box<dyn FnOnce(Fd) + Send + Sync>;

/// Closes descriptors of the crew's table, from any thread.
#[derive(Clone)]
pub(crate) struct Graveyard {
    pub(super) shared: Arc<Shared>,
}

impl Graveyard {
    fn bury(&self, grave: Grave) {
        let mut state = lock(&self.shared.state);
        state.graves.push(grave);
        self.shared.waiting.fetch_add(1, Release);
        drop(state);
        self.shared.wake.notify_one();
    }
}

/// A descriptor in the crew's table: only helpers may use the number.
pub(crate) struct PrivateFd {
    fd: Fd,
    graveyard: Graveyard,
    farewell: Option<Farewell>,
}

impl PrivateFd {
    /// Takes over a descriptor that a helper opened.
    pub(crate) fn new(fd: Fd, graveyard: Graveyard) -> PrivateFd {
        PrivateFd { fd, graveyard, farewell: None }
    }

    /// What a helper is to do before it closes this. It must not panic.
    pub(crate) fn say_farewell(&mut self, farewell: Farewell) {
        self.farewell = Some(farewell);
    }

    /// The number, for a helper.
    pub(crate) fn get(&self) -> Fd {
        self.fd
    }
}

impl Drop for PrivateFd {
    fn drop(&mut self) {
        self.graveyard.bury(Grave { fd: self.fd, farewell: self.farewell.take() });
    }
}
