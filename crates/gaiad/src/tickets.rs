//! Tickets: proof that a client had a descriptor of a file of the mount, and what it may do with it.
//!
//! They come from the handler that serves an ioctl on that descriptor, are random, and are used once. They are in
//! ordinary memory: a new server knows none, and clients ask again.
//!
//! There is room for a number of them. Where it is short the user who has most loses the oldest one: as many ioctls as one
//! user likes take none from a user who has fewer.

use std::collections::{HashMap, VecDeque};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use spinio_pagecache::messages::{Access, Ticket};

use crate::lock::lock;

/// Tickets that were not used yet.
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

/// One that was given out.
#[derive(Debug)]
struct Given {
    ticket: Ticket,
    grant: Grant,
    user: u32,
    at: Instant,
}

/// Those that were given out, in this order.
#[derive(Debug, Default)]
pub(crate) struct Tickets(Mutex<VecDeque<Given>>);

impl Tickets {
    /// A new one, for a user.
    pub(crate) fn give(&self, grant: Grant, user: u32) -> Result<Ticket, Errno> {
        let mut ticket = Ticket::default();
        if rustix::rand::getrandom(&mut ticket, rustix::rand::GetRandomFlags::empty())? != ticket.len() {
            return Err(Errno::AGAIN);
        }
        let mut given = lock(&self.0);
        given.retain(|one| one.at.elapsed() < VALID);
        if given.len() >= LIMIT {
            drop_oldest_of_most(&mut given);
        }
        given.push_back(Given { ticket, grant, user, at: Instant::now() });
        Ok(ticket)
    }

    /// What it is for, once.
    pub(crate) fn take(&self, ticket: &Ticket) -> Option<Grant> {
        let mut given = lock(&self.0);
        let at = given.iter().position(|one| one.ticket == *ticket && one.at.elapsed() < VALID)?;
        given.remove(at).map(|one| one.grant)
    }
}

/// Drops the oldest one of the user who has most.
fn drop_oldest_of_most(given: &mut VecDeque<Given>) {
    let mut counts: HashMap<u32, usize> = HashMap::new();
    for one in &*given {
        *counts.entry(one.user).or_default() += 1;
    }
    let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(user, _)| user);
    if let Some(at) = given.iter().position(|one| Some(one.user) == most) {
        given.remove(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticket_is_used_once() {
        let tickets = Tickets::default();
        let grant = Grant { node: 7, access: Access::Write };
        let ticket = tickets.give(grant, 1).unwrap();
        assert_eq!(tickets.take(&[0; 16]), None);
        assert_eq!(tickets.take(&ticket), Some(grant));
        assert_eq!(tickets.take(&ticket), None);
    }

    #[test]
    fn oldest_of_too_many_tickets_is_dropped() {
        let tickets = Tickets::default();
        let grant = Grant { node: 7, access: Access::Read };
        let all: Vec<_> = (0..LIMIT + 1).map(|_| tickets.give(grant, 1).unwrap()).collect();
        assert_eq!(tickets.take(&all[0]), None);
        assert_eq!(tickets.take(&all[LIMIT]), Some(grant));
    }

    #[test]
    fn tickets_of_one_user_push_out_none_of_another() {
        let tickets = Tickets::default();
        let grant = Grant { node: 7, access: Access::Read };
        let give = |user, count: usize| (0..count).map(|_| tickets.give(grant, user).unwrap()).collect::<Vec<_>>();
        let of_others = [give(1, 10), give(2, 1)].concat();
        drop(give(3, 3 * LIMIT));
        let later = give(1, 1);
        drop(give(3, LIMIT));
        for ticket in of_others.iter().chain(&later) {
            assert_eq!(tickets.take(ticket), Some(grant));
        }
    }
}
