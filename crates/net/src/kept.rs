//! Why the bytes of a connection go through Linux, as `spinio_net_stats()` counts it and `spinio net` shows it.

use spinio_ring::granule::Refusal;
use spinio_sys::Errno;

use crate::counters::{Counter, Counters};
use crate::handshake::Unreached;

/// What kept a connection with Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    /// Nothing else was asked for: there is no net and no program that shares memory at the other end.
    Plain,
    /// Only streams are upgraded.
    Type,
    /// The program gave the socket to the net, or the listening one it comes from.
    Adopted,
    Setting,
    /// No rings in device memory were left.
    Memory,
    Backlog,
    Name,
    Granules,
    /// No descriptor was left for what the other ways need: the accepted socket, a door, a channel, a process, memory to share.
    Descriptors,
    User,
    Time,
    /// The device cannot use memory of other processes.
    Device,
}

impl Kept {
    /// Why there is no descriptor that was asked for.
    pub(crate) const fn of(errno: Errno, otherwise: Kept) -> Kept {
        // The last one: as many are on their way through UNIX sockets as one process may have.
        if matches!(errno, Errno::MFILE | Errno::NFILE | Errno::TOOMANYREFS) { Kept::Descriptors } else { otherwise }
    }

    /// One word for tables: the counter's name has it too, where there is one.
    pub(crate) const fn word(self) -> &'static str {
        match self {
            Kept::Plain => "plain",
            Kept::Type => "type",
            Kept::Adopted => "adopted",
            Kept::Setting => "setting",
            Kept::Memory => "memory",
            Kept::Backlog => "backlog",
            Kept::Name => "name",
            Kept::Granules => "granules",
            Kept::Descriptors => "descriptors",
            Kept::User => "user",
            Kept::Time => "time",
            Kept::Device => "device",
        }
    }

    pub(crate) const fn sentence(self) -> &'static str {
        match self {
            Kept::Plain => {
                "the other end has a plain socket: a program without spinio_socket_connect(), or another machine"
            }
            Kept::Type => "datagrams and packets always go through Linux",
            Kept::Adopted => "the program gave it, or the socket that it was accepted on, to the net (adopt)",
            Kept::Setting => "upgrades are off: SPINIO_NET_UPGRADE=off, or no_upgrade at one of the ends",
            Kept::Memory => "all pairs of rings in device memory were in use (connections)",
            Kept::Backlog => "as many connections as the backlog allows waited for accept",
            Kept::Name => {
                "it is bound to a path or to all interfaces, its address is translated, or another socket took the connection"
            }
            Kept::Granules => "no memory to share was left, at one of the ends (shared_connections)",
            Kept::Descriptors => "no descriptor was left, at one of the ends (ulimit -n)",
            Kept::User => "the net at the other end is of another user",
            Kept::Time => "the other end did not agree in time, or broke off",
            Kept::Device => "this device cannot use memory of other processes",
        }
    }

    pub(crate) const fn counter(self, counters: &Counters) -> Option<&Counter> {
        match self {
            Kept::Setting => Some(&counters.kept_by_setting),
            Kept::Memory => Some(&counters.kept_by_memory),
            Kept::Backlog => Some(&counters.kept_by_backlog),
            Kept::Name => Some(&counters.kept_by_name),
            Kept::Granules => Some(&counters.kept_by_granules),
            Kept::Descriptors => Some(&counters.kept_by_descriptors),
            Kept::User => Some(&counters.kept_by_user),
            Kept::Time => Some(&counters.kept_by_time),
            Kept::Plain | Kept::Type | Kept::Adopted | Kept::Device => None,
        }
    }
}

impl From<Refusal> for Kept {
    fn from(refusal: Refusal) -> Kept {
        match refusal {
            Refusal::Memory => Kept::Granules,
            Refusal::Backlog => Kept::Backlog,
            Refusal::Setting => Kept::Setting,
            Refusal::Descriptors => Kept::Descriptors,
        }
    }
}

impl From<Unreached> for Kept {
    fn from(unreached: Unreached) -> Kept {
        match unreached {
            Unreached::NoDescriptor => Kept::Descriptors,
            Unreached::Busy => Kept::Time,
            Unreached::NoDoor => Kept::Plain,
        }
    }
}
