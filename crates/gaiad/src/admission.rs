//! Who may use a socket of the daemon, and how much of it: asked once, right after the connection.
//!
//! ```text
//!   connection ── another user's daemon? EACCES ── too many of all users? closed ── too many of this user? EUSERS
//!              └─> time limits: a client says hello at once, and reads its replies
//! ```

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout, socket_peercred};

use crate::quotas::{Counted, Quotas};

/// A client says hello right after it has connected.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) pid: u32,
    pub(crate) user: u32,
}

/// A client that may ask.
pub(crate) struct Admitted<'a> {
    pub(crate) peer: Peer,
    pub(crate) counted: Counted<'a>,
}

/// Why a client may not. It is told so at once: a connection that says nothing takes the place of another user's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// With this error.
    Told(Errno),
    /// There are too many connections for that.
    Closed,
}

/// Admits a client. Root and the daemon's own user may ask how things are even with too many connections: these are not
/// within their share ([`Counted::is_within`]), and get no map.
pub(crate) fn admit<'a>(quotas: &'a Quotas, socket: &OwnedFd) -> Result<Admitted<'a>, Refusal> {
    let credentials = socket_peercred(socket).map_err(|_| Refusal::Closed)?;
    let peer = Peer { pid: credentials.pid.as_raw_pid() as u32, user: credentials.uid.as_raw() };
    let own = rustix::process::geteuid();
    let privileged = credentials.uid.is_root() || credentials.uid == own;
    // The daemon of a user serves no other user, even one that the directory of the socket lets in.
    if !own.is_root() && !privileged {
        return Err(Refusal::Told(Errno::ACCESS));
    }
    let counted = quotas.connect(peer.user).ok_or(Refusal::Closed)?;
    if !counted.is_within() && !privileged {
        return Err(Refusal::Told(Errno::USERS));
    }
    let _ = set_socket_timeout(socket, Timeout::Recv, Some(HELLO_WITHIN));
    // A client that reads no replies keeps its place no longer than one that sends nothing.
    let _ = set_socket_timeout(socket, Timeout::Send, Some(HELLO_WITHIN));
    Ok(Admitted { peer, counted })
}
