//! Messages between a client that maps leased files and `spinio gaia serve`, over a SOCK_SEQPACKET socket.
//!
//! ```text
//!   client                                                       daemon
//!   Hello { device } + descriptor of the file ─────────────────> one connection = one map
//!          <──────────────────────────────────────────────────── Opened
//!   Acquire { bytes of the file } ─────────────────────────────> is the file excluded from writes? which chunks are there?
//!          <──────────────────── Chunks { .. } + a descriptor each: map them, and ask again
//!          <──────────────────── Fill { .. }: create these, read the file into them, then for each
//!          <──────────────────── FillFrom { .. } + a descriptor each: another device has a copy of them; then the same
//!   Filled { chunk } + its descriptor ─────────────────────────>
//!          <──────────────────────────────────────────────────── Kept, or not: the file was written meanwhile
//!   Abandon { chunk } ── no memory for it ─────────────────────> drops chunks that no client has mapped
//!          <──────────────────────────────────────────────────── Freed
//!   Acquire { the same } ──────────────────────────────────────>
//!          <──────────────────────────────────────────────────── Ready: all are mapped, and the file is as they are
//! ```
//!
//! Every message has 64 bytes: kind, version of the protocol, number of descriptors that come with it, and seven
//! numbers, little-endian, those that the kind does not use 0. Only [`Reply::File`] ends in a path. Parsing is total:
//! what is accepted is within the limits below, and anything else is refused.

mod content;

pub use content::{Content, ContentId, FILLS, HUGE_FILE, LARGE_FILE, MAX_CHUNK, MIN_CHUNK};

use crate::messages::BadMessage;

/// The version of the protocol.
pub const VERSION: u16 = 3;

/// Bytes of a message without a path.
pub const MESSAGE: usize = 64;

/// The longest message.
pub const MAX_MESSAGE: usize = MESSAGE + MAX_PATH;

/// The longest path that is reported.
pub const MAX_PATH: usize = 1024;

/// Descriptors in one message at most.
pub const MAX_DESCRIPTORS: usize = 64;

/// The socket of root's daemon, which serves all users.
pub const ROOT_SOCKET: &str = "/run/spinio/gaia/serve.sock";

/// Files and ranges end below this.
pub const MAX_BYTES: u64 = 1 << 46;

/// Where the bytes of a chunk came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Source {
    /// The file.
    #[default]
    File,
    /// The copy that [`Reply::FillFrom`] offered.
    Peer,
    /// The file, since that copy could not be used.
    Refused(PeerRefusal),
}

/// Why the copy on another device could not be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRefusal {
    /// The process has no such device.
    NoDevice,
    /// The two devices cannot access each other's memory.
    NoAccess,
    /// The memory could not be imported or mapped.
    Import,
    /// The copy failed.
    Copy,
    /// A call on the other map was under way.
    Busy,
    /// The other map had an epoch of the pages, or had lost them.
    Unavailable,
    /// The other map may have changed or lost pages while they were copied.
    Changed,
}

impl PeerRefusal {
    /// Its number, as `spinio_gaia_info` has it too; 5 is none ([`Source::Peer`]).
    pub fn number(self) -> u64 {
        match self {
            PeerRefusal::NoDevice => 1,
            PeerRefusal::NoAccess => 2,
            PeerRefusal::Import => 3,
            PeerRefusal::Copy => 4,
            PeerRefusal::Busy => 6,
            PeerRefusal::Unavailable => 7,
            PeerRefusal::Changed => 8,
        }
    }

    /// The refusal of a number.
    pub fn of_number(number: u64) -> Option<PeerRefusal> {
        let all = [
            PeerRefusal::NoDevice,
            PeerRefusal::NoAccess,
            PeerRefusal::Import,
            PeerRefusal::Copy,
            PeerRefusal::Busy,
            PeerRefusal::Unavailable,
            PeerRefusal::Changed,
        ];
        all.into_iter().find(|refusal| refusal.number() == number)
    }

    /// For people.
    pub fn sentence(self) -> &'static str {
        match self {
            PeerRefusal::NoDevice => "the process does not have the device",
            PeerRefusal::NoAccess => "the devices cannot access each other's memory",
            PeerRefusal::Import => "its memory could not be imported",
            PeerRefusal::Copy => "the copy failed",
            PeerRefusal::Busy => "a call on the map of the other device was under way",
            PeerRefusal::Unavailable => "the map of the other device had an epoch of the pages, or had lost them",
            PeerRefusal::Changed => "the map of the other device had changed or lost pages when they were copied",
        }
    }
}

impl Source {
    fn number(self) -> u64 {
        match self {
            Source::File => 0,
            Source::Refused(refusal) => refusal.number(),
            Source::Peer => 5,
        }
    }

    fn of_number(number: u64) -> Result<Source, BadMessage> {
        match number {
            0 => Ok(Source::File),
            5 => Ok(Source::Peer),
            1..=4 => PeerRefusal::of_number(number).map(Source::Refused).ok_or(BadMessage::Kind),
            _ => Err(BadMessage::Kind),
        }
    }
}

/// From the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// The first message; the descriptor of the file comes with it.
    Hello {
        /// The device that the file is mapped on.
        device: [u8; 16],
    },
    /// Which chunks of a range of the file are not mapped yet?
    Acquire {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// A chunk is filled; its descriptor comes with it.
    Filled {
        /// Of this content.
        content: ContentId,
        /// Which.
        chunk: u64,
        /// From where.
        source: Source,
    },
    /// A chunk will not be filled.
    Abandon {
        /// Of this content.
        content: ContentId,
        /// Which.
        chunk: u64,
        /// The device has no memory for it.
        no_memory: bool,
    },
    /// Instead of [`Request::Hello`]: what the daemon holds.
    Status,
    /// Instead of [`Request::Hello`]: drop what no client has mapped.
    Drop,
    /// The same of one file, whose descriptor comes with it.
    DropFile,
    /// Instead of [`Request::Hello`]: end.
    Stop,
}

/// From the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// To [`Request::Hello`].
    Opened,
    /// Chunks that others have filled, each with a descriptor.
    Chunks {
        /// Their content.
        content: Content,
        /// The first.
        first: u64,
        /// How many, one after the other.
        count: u32,
    },
    /// Chunks that this client is to fill.
    Fill {
        /// The content.
        content: Content,
        /// The first.
        first: u64,
        /// How many, one after the other.
        count: u32,
    },
    /// Chunks that this client is to fill, each with the descriptor of a copy of it on another device.
    FillFrom {
        /// The content.
        content: Content,
        /// The first.
        first: u64,
        /// How many, one after the other.
        count: u32,
        /// The device that has the copies.
        peer: [u8; 16],
    },
    /// All chunks of the range are mapped, and the file has not been written since they were filled.
    Ready {
        /// Their content.
        content: Content,
    },
    /// To [`Request::Filled`].
    Kept {
        /// False: the file was written meanwhile, or another client has filled the chunk. It is to be dropped.
        kept: bool,
    },
    /// To [`Request::Abandon`] and [`Request::Drop`].
    Freed {
        /// Bytes that were dropped to make room.
        bytes: u64,
    },
    /// To [`Request::Status`]; then a [`Reply::File`] for each file, and the end. To [`Request::Stop`], too.
    Daemon {
        /// Its process.
        pid: u64,
        /// Seconds since it started.
        seconds: u64,
        /// Maps of clients.
        maps: u64,
        /// Bytes of chunks.
        bytes: u64,
        /// The most for each user and device; 0: no limit.
        limit: u64,
    },
    /// A file of which there are chunks or maps.
    File(FileStatus<'a>),
    /// To any request: an errno.
    Failed {
        /// The errno.
        errno: u32,
    },
}

/// What the daemon holds of a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FileStatus<'a> {
    /// Its user.
    pub user: u32,
    /// The device.
    pub device: [u8; 16],
    /// Maps of it.
    pub maps: u32,
    /// Chunks that are there.
    pub chunks: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Among them, those that were copied from another device.
    pub peer_bytes: u64,
    /// Why a copy on another device could not be used, the last time.
    pub refused: Option<PeerRefusal>,
    /// Bytes of the file.
    pub size: u64,
    /// Its path, at most [`MAX_PATH`] bytes of it.
    pub path: &'a [u8],
}

const HELLO: u16 = 0x21;
const ACQUIRE: u16 = 0x22;
const FILLED: u16 = 0x23;
const ABANDON: u16 = 0x24;
const STATUS: u16 = 0x25;
const DROP: u16 = 0x26;
const STOP: u16 = 0x27;
const DROP_FILE: u16 = 0x28;
const OPENED: u16 = 0xa1;
const CHUNKS: u16 = 0xa2;
const FILL: u16 = 0xa3;
const READY: u16 = 0xa4;
const KEPT: u16 = 0xa5;
const FREED: u16 = 0xa6;
const DAEMON: u16 = 0xa7;
const FILE: u16 = 0xa8;
const FILL_FROM: u16 = 0xa9;
const FAILED: u16 = 0xbf;

type Numbers = [u64; 7];

fn numbers<const N: usize>(given: [u64; N]) -> Numbers {
    let mut all = [0; 7];
    all[..N].copy_from_slice(&given);
    all
}

fn encode(out: &mut Vec<u8>, kind: u16, count: u32, numbers: Numbers) {
    out.extend(kind.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.extend(count.to_le_bytes());
    numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
}

/// A 16-byte identity as two numbers.
fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let whole = u128::from_le_bytes(bytes);
    [whole as u64, (whole >> 64) as u64]
}

fn whole(low: u64, high: u64) -> [u8; 16] {
    (u128::from(low) | u128::from(high) << 64).to_le_bytes()
}

impl Request {
    /// Appends the message to an empty buffer.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Request::Hello { device } => encode(out, HELLO, 1, numbers(halves(device))),
            Request::Acquire { offset, len } => encode(out, ACQUIRE, 0, numbers([offset, len])),
            Request::Filled { content, chunk, source } => {
                encode(out, FILLED, 1, numbers([content, chunk, source.number()]));
            }
            Request::Abandon { content, chunk, no_memory } => {
                encode(out, ABANDON, 0, numbers([content, chunk, no_memory.into()]));
            }
            Request::Status => encode(out, STATUS, 0, [0; 7]),
            Request::Drop => encode(out, DROP, 0, [0; 7]),
            Request::DropFile => encode(out, DROP_FILE, 1, [0; 7]),
            Request::Stop => encode(out, STOP, 0, [0; 7]),
        }
    }

    /// Descriptors that come with it.
    pub fn descriptors(&self) -> usize {
        usize::from(matches!(self, Request::Hello { .. } | Request::Filled { .. } | Request::DropFile))
    }
}

impl Reply<'_> {
    /// Appends the message to an empty buffer.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Reply::Opened => encode(out, OPENED, 0, [0; 7]),
            Reply::Chunks { content: Content { id, size }, first, count } => {
                encode(out, CHUNKS, count, numbers([id, size, first]));
            }
            Reply::Fill { content: Content { id, size }, first, count } => {
                encode(out, FILL, count, numbers([id, size, first]));
            }
            Reply::FillFrom { content: Content { id, size }, first, count, peer } => {
                let [low, high] = halves(peer);
                encode(out, FILL_FROM, count, numbers([id, size, first, low, high]));
            }
            Reply::Ready { content: Content { id, size } } => encode(out, READY, 0, numbers([id, size])),
            Reply::Kept { kept } => encode(out, KEPT, 0, numbers([kept.into()])),
            Reply::Freed { bytes } => encode(out, FREED, 0, numbers([bytes])),
            Reply::Daemon { pid, seconds, maps, bytes, limit } => {
                encode(out, DAEMON, 0, numbers([pid, seconds, maps, bytes, limit]));
            }
            Reply::File(FileStatus { user, device, maps, chunks, bytes, peer_bytes, refused, size, path }) => {
                let path = &path[..path.len().min(MAX_PATH)];
                let [low, high] = halves(device);
                let counts = u64::from(maps) << 32 | u64::from(chunks);
                let refused = refused.map_or(0, PeerRefusal::number);
                let of_user = u64::from(user) | refused << 32;
                encode(out, FILE, path.len() as u32, [of_user, low, high, counts, bytes, size, peer_bytes]);
                out.extend(path);
            }
            Reply::Failed { errno } => encode(out, FAILED, 0, numbers([errno.into()])),
        }
    }
}

/// Parses a message of a client.
pub fn parse_request(bytes: &[u8]) -> Result<Request, BadMessage> {
    let (kind, count, n, rest) = parse(bytes)?;
    let (request, used) = match kind {
        HELLO => (Request::Hello { device: whole(n[0], n[1]) }, 2),
        ACQUIRE => {
            let end = n[0].checked_add(n[1]).filter(|end| n[1] > 0 && *end <= MAX_BYTES);
            end.ok_or(BadMessage::Run)?;
            (Request::Acquire { offset: n[0], len: n[1] }, 2)
        }
        FILLED => (Request::Filled { content: n[0], chunk: chunk(n[1])?, source: Source::of_number(n[2])? }, 3),
        ABANDON => (Request::Abandon { content: n[0], chunk: chunk(n[1])?, no_memory: flag(n[2])? }, 3),
        STATUS => (Request::Status, 0),
        DROP => (Request::Drop, 0),
        DROP_FILE => (Request::DropFile, 0),
        STOP => (Request::Stop, 0),
        _ => return Err(BadMessage::Kind),
    };
    let length = rest.is_empty() && count as usize == request.descriptors();
    if length && n[used..].iter().all(|n| *n == 0) { Ok(request) } else { Err(BadMessage::Length) }
}

/// Parses a message of the daemon.
pub fn parse_reply(bytes: &[u8]) -> Result<Reply<'_>, BadMessage> {
    let (kind, count, n, rest) = parse(bytes)?;
    let content = || Content { id: n[0], size: n[1] };
    let mut tail = 0;
    let (reply, used) = match kind {
        OPENED => (Reply::Opened, 0),
        CHUNKS | FILL | FILL_FROM => {
            let (content, first) = (content(), n[2]);
            let end =
                first.checked_add(count.into()).filter(|end| content.size <= MAX_BYTES && *end <= content.chunks());
            if count == 0 || count as usize > MAX_DESCRIPTORS || end.is_none() {
                return Err(BadMessage::Run);
            }
            let reply = match kind {
                CHUNKS => Reply::Chunks { content, first, count },
                FILL => Reply::Fill { content, first, count },
                _ => Reply::FillFrom { content, first, count, peer: whole(n[3], n[4]) },
            };
            (reply, if kind == FILL_FROM { 5 } else { 3 })
        }
        READY if n[1] > MAX_BYTES => return Err(BadMessage::Run),
        READY => (Reply::Ready { content: content() }, 2),
        KEPT => (Reply::Kept { kept: flag(n[0])? }, 1),
        FREED => (Reply::Freed { bytes: n[0] }, 1),
        DAEMON => (Reply::Daemon { pid: n[0], seconds: n[1], maps: n[2], bytes: n[3], limit: n[4] }, 5),
        FILE => {
            let (user, refused) = (n[0] as u32, n[0] >> 32);
            let refused = match refused {
                0 => None,
                number => Some(PeerRefusal::of_number(number).ok_or(BadMessage::Kind)?),
            };
            let (maps, chunks) = ((n[3] >> 32) as u32, n[3] as u32);
            tail = count as usize;
            let device = whole(n[1], n[2]);
            let (bytes, size, peer_bytes) = (n[4], n[5], n[6]);
            let status = FileStatus { user, device, maps, chunks, bytes, peer_bytes, refused, size, path: rest };
            (Reply::File(status), 7)
        }
        FAILED => (Reply::Failed { errno: u32::try_from(n[0]).map_err(|_| BadMessage::Kind)? }, 1),
        _ => return Err(BadMessage::Kind),
    };
    let counted = matches!(kind, CHUNKS | FILL | FILL_FROM | FILE) || count == 0;
    if rest.len() == tail && tail <= MAX_PATH && counted && n[used..].iter().all(|n| *n == 0) {
        Ok(reply)
    } else {
        Err(BadMessage::Length)
    }
}

/// Where the daemon is: the first is where it binds its socket, the others are asked too. None: it has to be named.
/// `setting`: SPINIO_GAIA_SOCKET; `runtime_dir`: XDG_RUNTIME_DIR.
pub fn sockets(setting: Option<&str>, root: bool, runtime_dir: Option<&str>) -> Vec<String> {
    if let Some(path) = setting {
        return vec![path.to_owned()];
    }
    let own = runtime_dir.filter(|directory| !root && directory.starts_with('/'));
    let own = own.map(|directory| format!("{directory}/spinio/gaia-serve.sock"));
    own.into_iter().chain([ROOT_SOCKET.to_owned()]).collect()
}

fn parse(bytes: &[u8]) -> Result<(u16, u32, Numbers, &[u8]), BadMessage> {
    let (head, rest) = bytes.split_first_chunk::<MESSAGE>().ok_or(BadMessage::Length)?;
    let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
    if half(2) != VERSION {
        return Err(BadMessage::Version(half(2)));
    }
    let count = u32::from_le_bytes([head[4], head[5], head[6], head[7]]);
    let mut numbers = [0; 7];
    for (number, bytes) in numbers.iter_mut().zip(head[8..].as_chunks::<8>().0) {
        *number = u64::from_le_bytes(*bytes);
    }
    Ok((half(0), count, numbers, rest))
}

fn chunk(number: u64) -> Result<u64, BadMessage> {
    if number < MAX_BYTES / MIN_CHUNK { Ok(number) } else { Err(BadMessage::Run) }
}

fn flag(number: u64) -> Result<bool, BadMessage> {
    match number {
        0 | 1 => Ok(number == 1),
        _ => Err(BadMessage::Kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> Vec<Request> {
        vec![
            Request::Hello { device: *b"0123456789abcdef" },
            Request::Acquire { offset: 4096, len: MAX_BYTES - 4096 },
            Request::Filled { content: u64::MAX, chunk: 7, source: Source::File },
            Request::Filled { content: 1, chunk: 7, source: Source::Peer },
            Request::Filled { content: 1, chunk: 7, source: Source::Refused(PeerRefusal::Copy) },
            Request::Abandon { content: 3, chunk: 0, no_memory: true },
            Request::Status,
            Request::Drop,
            Request::DropFile,
            Request::Stop,
        ]
    }

    fn replies() -> Vec<Reply<'static>> {
        let content = Content { id: 9, size: 5 * MIN_CHUNK - 1 };
        let device = *b"0123456789abcdef";
        let refused = Some(PeerRefusal::NoAccess);
        let (peer_bytes, size) = (3, 5);
        let file =
            FileStatus { user: 1, device, maps: 2, chunks: 3, bytes: 4, peer_bytes, refused, size, path: b"/m/a" };
        vec![
            Reply::Opened,
            Reply::Chunks { content, first: 1, count: 4 },
            Reply::Fill { content, first: 4, count: 1 },
            Reply::FillFrom { content, first: 2, count: 3, peer: *b"fedcba9876543210" },
            Reply::Ready { content },
            Reply::Kept { kept: true },
            Reply::Freed { bytes: 1 << 40 },
            Reply::Daemon { pid: 1, seconds: 2, maps: 3, bytes: 4, limit: 5 },
            Reply::File(file),
            Reply::Failed { errno: 12 },
        ]
    }

    #[test]
    fn messages_are_parsed_as_encoded_and_at_no_other_length() {
        let mut all = Vec::new();
        for request in requests() {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            assert_eq!(parse_request(&bytes), Ok(request));
            assert!(parse_reply(&bytes).is_err());
            all.push(bytes);
        }
        for reply in replies() {
            let mut bytes = Vec::new();
            reply.encode(&mut bytes);
            assert_eq!(parse_reply(&bytes), Ok(reply));
            assert!(parse_request(&bytes).is_err());
            all.push(bytes);
        }
        for mut bytes in all {
            for len in 0..bytes.len() {
                assert!(parse_request(&bytes[..len]).is_err() && parse_reply(&bytes[..len]).is_err(), "{bytes:?}");
            }
            bytes.push(0);
            assert!(parse_request(&bytes).is_err() && parse_reply(&bytes).is_err());
        }
    }

    #[test]
    fn numbers_outside_the_limits_are_refused() {
        let bad = |request: Request| {
            let mut bytes = Vec::new();
            request.encode(&mut bytes);
            parse_request(&bytes).is_err()
        };
        assert!(bad(Request::Acquire { offset: 0, len: 0 }));
        assert!(bad(Request::Acquire { offset: u64::MAX, len: 2 }));
        assert!(bad(Request::Acquire { offset: MAX_BYTES, len: 1 }));
        assert!(bad(Request::Filled { content: 0, chunk: u64::MAX, source: Source::File }));
        let mut bytes = Vec::new();
        Request::Filled { content: 0, chunk: 1, source: Source::Peer }.encode(&mut bytes);
        bytes[24] = 6;
        assert_eq!(parse_request(&bytes), Err(BadMessage::Kind), "a source that does not exist");
        bytes.clear();
        Reply::Chunks { content: Content { id: 1, size: MIN_CHUNK }, first: 1, count: 1 }.encode(&mut bytes);
        assert_eq!(parse_reply(&bytes), Err(BadMessage::Run), "a chunk past the end of the file");
        bytes.clear();
        let content = Content { id: 1, size: 3 * MIN_CHUNK };
        Reply::FillFrom { content, first: 1, count: 3, peer: [0; 16] }.encode(&mut bytes);
        assert_eq!(parse_reply(&bytes), Err(BadMessage::Run), "a copy past the end of the file");
        bytes.clear();
        Request::Status.encode(&mut bytes);
        bytes[2] = 9;
        assert_eq!(parse_request(&bytes), Err(BadMessage::Version(9)));
        bytes[2] = VERSION as u8;
        bytes[63] = 1;
        assert!(parse_request(&bytes).is_err(), "a number that the kind does not use");
    }

    #[test]
    fn user_prefers_its_own_daemon() {
        assert_eq!(sockets(Some("/a"), false, Some("/run/user/7")), ["/a"]);
        assert_eq!(sockets(None, false, Some("/run/user/7")), ["/run/user/7/spinio/gaia-serve.sock", ROOT_SOCKET]);
        assert_eq!(sockets(None, true, Some("/run/user/0")), [ROOT_SOCKET]);
        assert_eq!(sockets(None, false, None), [ROOT_SOCKET]);
    }
}
