//! Where the pages of a fill are, and its encoding.

/// Owners in one request.
pub const MAX_PEERS: usize = 8;

/// Owners that pages may be copied from, the best first; 0 is none.
pub type Peers = [u64; MAX_PEERS];

/// No owner.
pub const NO_PEERS: Peers = [0; MAX_PEERS];

/// Where a client finds the bytes of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// In the file, through the descriptor that came with [`Reply::Mapped`](super::Reply::Mapped); past its end the bytes are zeros.
    File,
    /// In the window.
    Window,
    /// In the replica: they stay, and are released as new bytes.
    Kept,
    /// In the window, its base too: only bytes that differ between the two are stored, because the page has
    /// unreleased stores of this epoch.
    Patch,
    /// In the replica of another map, that of this number among the acquire's peers.
    Peer(u8),
}

impl Source {
    pub(super) fn flags(self) -> u32 {
        match self {
            Source::File => 0,
            Source::Window => 1,
            Source::Kept => 2,
            Source::Patch => 3,
            Source::Peer(peer) => 4 | u32::from(peer) << 8,
        }
    }
}

pub(super) fn source_of(flags: u32) -> Option<Source> {
    let [kind, peer, ..] = flags.to_le_bytes();
    let source = match kind {
        0 => Source::File,
        1 => Source::Window,
        2 => Source::Kept,
        3 => Source::Patch,
        4 if usize::from(peer) < MAX_PEERS => Source::Peer(peer),
        _ => return None,
    };
    (source.flags() == flags).then_some(source)
}
