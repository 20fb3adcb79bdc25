//! Tickets: proof that a client had a descriptor of a file of the mount, and what it may do with it.
//!
//! They come from the handler that serves an ioctl on that descriptor, are random, and are used once. They are in
//! ordinary memory: a new server knows none, and clients ask again.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use spinio_pagecache::messages::{Access, Ticket};

/// Tickets that were not used yet; the oldest are dropped.
const LIMIT: usize = 4096;
/// A client connects right after it got its ticket.
const VALID: Duration = Duration::from_secs(60);

/// What a ticket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) node: u64,
    /// How the descriptor was opened.
    pub(crate) access: Access,
}

/// Those that were given out.
#[derive(Debug, Default)]
pub(crate) struct Tickets(Mutex<VecDeque<(Ticket, Grant, Instant)>>);

impl Tickets {
    /// A new one.
    pub(crate) fn give(&self, grant: Grant) -> Result<Ticket, Errno> {
        let mut ticket = Ticket::default();
        if rustix::rand::getrandom(&mut ticket, rustix::rand::GetRandomFlags::empty())? != ticket.len() {
            return Err(Errno::AGAIN);
        }
        let mut given = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        given.retain(|(_, _, at)| at.elapsed() < VALID);
        if given.len() >= LIMIT {
            given.pop_front();
        }
        given.push_back((ticket, grant, Instant::now()));
        Ok(ticket)
    }

    /// What it is for, once.
    pub(crate) fn take(&self, ticket: &Ticket) -> Option<Grant> {
        let mut given = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let at = given.iter().position(|(one, _, at)| one == ticket && at.elapsed() < VALID)?;
        given.remove(at).map(|(_, grant, _)| grant)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticket_is_used_once() {
        let tickets = Tickets::default();
        let grant = Grant { node: 7, access: Access::Write };
        let ticket = tickets.give(grant).unwrap();
        assert_eq!(tickets.take(&[0; 16]), None);
        assert_eq!(tickets.take(&ticket), Some(grant));
        assert_eq!(tickets.take(&ticket), None);
    }

    #[test]
    fn oldest_of_too_many_tickets_is_dropped() {
        let tickets = Tickets::default();
        let grant = Grant { node: 7, access: Access::Read };
        let all: Vec<_> = (0..LIMIT + 1).map(|_| tickets.give(grant).unwrap()).collect();
        assert_eq!(tickets.take(&all[0]), None);
        assert_eq!(tickets.take(&all[LIMIT]), Some(grant));
    }
}
