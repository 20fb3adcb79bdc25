//! The ticket: what a client gets from its descriptor of a mounted file, and shows to the server of the mount. And the other
//! question that a client asks by its descriptor: whether a write has failed.

/// `_IOR('S', 1, struct { u8 ticket[16]; char path[112]; })`
pub const TICKET_IOCTL: u32 = 2 << 30 | (TICKET_REPLY as u32) << 16 | (b'S' as u32) << 8 | 1;

/// Bytes of the reply to [`TICKET_IOCTL`].
pub const TICKET_REPLY: usize = 128;

/// `_IOR('S', 2, u64)`: how many requests that write this file, or its times, the server has refused since the Linux kernel
/// knows the file. What the kernel reports besides is of its own making.
pub const REFUSALS_IOCTL: u32 = 2 << 30 | (REFUSALS_REPLY as u32) << 16 | (b'S' as u32) << 8 | 2;

/// Bytes of the reply to [`REFUSALS_IOCTL`].
pub const REFUSALS_REPLY: usize = 8;

/// A one-time proof that the client had a descriptor of a file of the mount.
pub type Ticket = [u8; 16];

/// The reply to the ticket ioctl.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct TicketReply {
    /// For [`Request::Hello`].
    pub ticket: Ticket,
    path: [u8; TICKET_REPLY - 16],
}

impl TicketReply {
    /// With the path of the server's socket; `None` if it is too long for a socket address (107 bytes).
    pub fn new(ticket: Ticket, path: &[u8]) -> Option<TicketReply> {
        if path.len() > 107 || path.contains(&0) {
            return None;
        }
        let mut padded = [0; TICKET_REPLY - 16];
        padded[..path.len()].copy_from_slice(path);
        Some(TicketReply { ticket, path: padded })
    }

    /// The path of the socket.
    pub fn path(&self) -> &[u8] {
        let len = self.path.iter().position(|&b| b == 0).unwrap_or(self.path.len());
        &self.path[..len]
    }

    /// As the ioctl returns it.
    pub fn to_bytes(&self) -> [u8; TICKET_REPLY] {
        let mut bytes = [0; TICKET_REPLY];
        bytes[..16].copy_from_slice(&self.ticket);
        bytes[16..].copy_from_slice(&self.path);
        bytes
    }

    /// Parses what the ioctl returned.
    pub fn from_bytes(bytes: &[u8; TICKET_REPLY]) -> Option<TicketReply> {
        let mut reply = TicketReply { ticket: [0; 16], path: [0; TICKET_REPLY - 16] };
        reply.ticket.copy_from_slice(&bytes[..16]);
        reply.path.copy_from_slice(&bytes[16..]);
        (!reply.path().is_empty() && reply.path().len() <= 107).then_some(reply)
    }
}
