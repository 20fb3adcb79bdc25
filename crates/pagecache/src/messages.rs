//! Messages between a client of GAIA and its server, over a SOCK_SEQPACKET socket.
//!
//! ```text
//!   client                                                       server
//!   ioctl TICKET on its descriptor of the mounted file ────────> handler of that open file
//!          <──────────────────────────────────────────────────── one-time ticket, path of the socket
//!   Hello { ticket, pages of the file } ───────────────────────> one connection = one map = one owner
//!          <─────────── Mapped + descriptors of the window, of the file (read-only), and of counters of changes and of
//!                       servers (change_counters.rs)
//!   Acquire ───────────────────────────────────────────────────> which pages are absent or stale?
//!          <──────────────────────────────────────────────────── Fills: runs of pages, each with its source
//!   Filled, FilledBut ─────────────────────────────────────────> did head advance meanwhile?
//!          <──────────────────────────────────────────────────── Fills: those again; an empty list ends the acquire
//!   Release, a part of it ─────────────────────────────────────> copy the pages
//!          <──────────────────────────────────────────────────── Staged
//!   Release, the last part ────────────────────────────────────> merge, commit, invalidate
//!          <──────────────────────────────────────────────────── Committed
//!   HandOver + descriptors of chunks ──────────────────────────> commit; the pages are copied later, from the chunks
//!          <──────────────────────────────────────────────────── Committed
//!   Drop ──────────────────────────────────────────────────────> these pages are absent: fetched by the next acquire
//!          <──────────────────────────────────────────────────── Dropped
//!   Lend + descriptor of a chunk ──────────────────────────────> CPU reads may be answered from it, until Drop
//!          <──────────────────────────────────────────────────── Lent
//!   Was { id } ── after a reconnection ────────────────────────> was that release committed?
//! ```
//!
//! The **window** is a memory file of two pages for each page of the map and [`STAGE`] more: page `i` of the map is at page
//! `i`, and if a fill says [`Source::Patch`], its base is at page `pages + i`. That part is sparse, and the client frees
//! what it has read. The **stage** after it, from page `2 * pages`, has the pages of one part of a release, or of two:
//! the client fills one half while the server copies the other. It stays, because fresh memory for each page took longer
//! than its copies.
//!
//! All numbers are little-endian. A message has a header of 8 bytes (kind, version of the protocol, number of runs, or
//! of bytes of a path) and a body whose length follows from the kind and that number: any other length is refused.
//! Parsing is total: there is no input that panics, and a parsed list of runs is in bounds, ascending and not empty in
//! any run.

/// The version of the protocol. Client and server are of one build, or at least of one version.
pub const VERSION: u16 = 7;

/// The longest message.
pub const MAX_MESSAGE: usize = 8 + 64 + MAX_RUNS * RUN;

/// The most runs in one message; longer lists are split.
pub const MAX_RUNS: usize = 1024;

/// Pages of the stage: 8 MiB.
pub const STAGE: u32 = 2048;

/// The most pages in one map: 64 TiB.
pub const MAX_PAGES: u64 = 1 << 34;

/// The identity of a release: a random number, not 0.
pub type ReleaseId = u64;

mod bad_message;
mod hand_over;
mod holders;
mod lists;
mod peers;
mod run;
mod source;
mod status;
mod ticket;

pub use bad_message::BadMessage;
pub use hand_over::{HandOver, MAX_CHUNKS, hand_over};
pub use holders::{Holder, MapKind, RangeState};
pub use lists::{Fills, Ranges, Runs};
pub use peers::filled_but;
pub use run::{Run, pages_in};
pub use source::{MAX_PEERS, NO_PEERS, Peers, Source};
pub use status::{FileStatus, ServerLimits, ServerStatus, Stats, Totals, UserStatus, UserUse};
pub use ticket::{REFUSALS_IOCTL, REFUSALS_REPLY, TICKET_IOCTL, TICKET_REPLY, Ticket, TicketReply};

use source::source_of;

const HEADER: usize = 8;
const RUN: usize = 16;

/// What a map or an epoch may do with its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Load.
    Read,
    /// Load and store, and release.
    Write,
}

/// Consecutive pages with one source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fill {
    /// The pages.
    pub run: Run,
    /// Their bytes.
    pub source: Source,
}

/// From the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// The first message: makes a map.
    Hello {
        /// From the ioctl.
        ticket: Ticket,
        /// What the map may do.
        access: Access,
        /// The map's first page in the file.
        first: u64,
        /// Its length.
        pages: u64,
        /// How kernels load its pages.
        kind: MapKind,
    },
    /// Begins or extends an epoch.
    Acquire {
        /// First page, counted from the map's.
        first: u64,
        /// How many.
        pages: u64,
        /// What the epoch may do.
        access: Access,
        /// False, with [`Access::Write`]: the program will overwrite the pages, so they are not fetched. False, with
        /// [`Access::Read`]: the client finds their bytes in the mounted file, once no release is under way.
        fetch: bool,
        /// Maps of the program on other devices, from which it can copy pages.
        peers: Peers,
    },
    /// The pages of the last [`Reply::Fills`] are in the replica.
    Filled,
    /// But for these, which could not be copied from a peer.
    FilledBut {
        /// The pages.
        runs: Runs<'a>,
    },
    /// Pages that the epoch has changed, or the next of them; their bytes are in the stage, one after the other.
    Release {
        /// The release.
        id: ReleaseId,
        /// The epoch's range: its first page.
        first: u64,
        /// The epoch's range: how many pages. It ends for all of them, changed or not.
        pages: u32,
        /// No more pages follow.
        last: bool,
        /// Where the first of these pages is in the stage.
        at: u32,
        /// Pages of the whole release.
        total: u32,
        /// The pages.
        runs: Runs<'a>,
    },
    /// A whole release: the pages, `runs`, are in chunks that the client no longer uses; their descriptors come with it.
    #[expect(missing_docs, reason = "said above")]
    HandOver { part: HandOver, runs: Runs<'a> },
    /// Forgets pages of the replica: the next acquire fetches them.
    Drop {
        /// First page, counted from the map's.
        first: u64,
        /// How many.
        pages: u32,
        /// Those in an epoch for writing, which ends, and whose stores are lost; otherwise all others.
        open: bool,
    },
    /// Lends a chunk of the replica, whose descriptor comes with it: CPU reads may be answered from its memory, until a
    /// [`Request::Drop`] of one of its pages that is in no epoch, or the end of the connection.
    Lend {
        /// The chunk's first page, counted from the map's.
        first: u64,
        /// Its pages that are in the map.
        pages: u32,
        /// Its length in bytes.
        bytes: u64,
        /// The identity of its device.
        device: [u8; 16],
    },
    /// Whether a release was committed whose reply was lost.
    Was {
        /// The release.
        id: ReleaseId,
    },
    /// Counters of the file.
    Stats,
    /// Instead of [`Request::Hello`]: what the server holds, for root and the daemon's own user.
    Status,
    /// Instead of [`Request::Hello`]: write all released pages to their files, and those to storage. For whom
    /// [`Request::Status`] is. The answer is [`Reply::ServerStatus`] once all is written, or else a [`Reply::FileStatus`]
    /// of a file that cannot be, and the error.
    WriteOut,
    /// Instead of [`Request::Hello`]: where the pages of a file are, and who has copies.
    Explain {
        /// From the ioctl.
        ticket: Ticket,
    },
}

/// From the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply<'a> {
    /// To [`Request::Hello`]; the descriptors of the window, of the file and of two memories of counters come with it.
    Mapped {
        /// The owner, for people.
        owner: u64,
        /// Bytes of the file.
        size: u64,
        /// What no other file has, at this server or another one.
        file: u64,
    },
    /// To [`Request::Acquire`], [`Request::Filled`] and [`Request::FilledBut`]; no fill at all: the acquire is complete.
    Fills {
        /// Bytes of the file.
        size: u64,
        /// The pages.
        fills: Fills<'a>,
    },
    /// To a [`Request::Release`] that is not the last one.
    Staged,
    /// To the last [`Request::Release`].
    Committed {
        /// Pages whose bytes were new.
        pages: u64,
        /// Among them, pages that another release or a CPU program had changed since they were acquired.
        merged: u64,
        /// Bytes of the released pages that are inside the file.
        bytes: u64,
    },
    /// To [`Request::Drop`].
    Dropped,
    /// To [`Request::Lend`].
    Lent,
    /// To [`Request::Was`].
    Was {
        /// It was.
        committed: bool,
    },
    /// To [`Request::Stats`].
    Stats(Stats),
    /// To [`Request::Status`]; then a [`Reply::UserStatus`] for each user who has something, a [`Reply::FileStatus`] for
    /// each file with a page table, and the end.
    ServerStatus(ServerStatus),
    /// A user who has something.
    UserStatus(UserStatus),
    /// A file with a page table.
    FileStatus(FileStatus<'a>),
    /// To [`Request::Explain`], one or more, for the file from its begin to its end; then a [`Reply::Holder`] for each
    /// map, and the end.
    Explained {
        /// The ranges.
        ranges: Ranges<'a>,
    },
    /// A map of the file.
    Holder(Holder),
    /// To any request: an errno. After [`Request::Release`] nothing was committed, and the epoch goes on.
    Failed {
        /// The errno.
        errno: u32,
    },
}

/// Added to the number of an access: nothing is fetched.
const KEPT: u64 = 4;

const HELLO: u16 = 1;
const ACQUIRE: u16 = 2;
const FILLED: u16 = 3;
const RELEASE: u16 = 4;
const WAS: u16 = 5;
const STATS: u16 = 6;
const STATUS: u16 = 7;
const DROP: u16 = 8;
const EXPLAIN: u16 = 9;
const HAND_OVER: u16 = 10;
const LEND: u16 = 11;
const FILLED_BUT: u16 = 12;
const WRITE_OUT: u16 = 13;
const MAPPED: u16 = 0x81;
const FILLS: u16 = 0x82;
const STAGED: u16 = 0x83;
const COMMITTED: u16 = 0x84;
const WAS_REPLY: u16 = 0x85;
const STATS_REPLY: u16 = 0x86;
const SERVER_STATUS: u16 = 0x87;
const FILE_STATUS: u16 = 0x88;
const DROPPED: u16 = 0x89;
const EXPLAINED: u16 = 0x8a;
const HOLDER: u16 = 0x8b;
const LENT: u16 = 0x8c;
const USER_STATUS: u16 = 0x8d;
const FAILED: u16 = 0xff;

impl Request<'_> {
    /// Appends the message to an empty buffer; the lists of [`Request::Release`] come from [`release`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Request::Hello { ticket, access, first, pages, kind } => {
                start(out, HELLO, 0);
                out.extend(ticket);
                numbers(out, &[first, pages, access_number(access), kind as u64]);
            }
            Request::Acquire { first, pages, access, fetch, peers } => {
                start(out, ACQUIRE, 0);
                let kept = if fetch { 0 } else { KEPT };
                numbers(out, &[first, pages, access_number(access) | kept]);
                numbers(out, &peers);
            }
            Request::Filled => start(out, FILLED, 0),
            Request::FilledBut { runs } => peers::encode_filled_but(out, runs),
            Request::Release { id, first, pages, last, at, total, runs } => {
                release_head(out, ReleasePart { id, first, pages, last, at, total }, runs.0.len() / RUN);
                out.extend(runs.0);
            }
            Request::HandOver { part, runs } => {
                hand_over::head(out, part, runs.0.len() / RUN);
                out.extend(runs.0);
            }
            Request::Drop { first, pages, open } => {
                start(out, DROP, 0);
                numbers(out, &[first, u64::from(pages) << 1 | u64::from(open)]);
            }
            Request::Lend { first, pages, bytes, device } => {
                start(out, LEND, 0);
                out.extend(device);
                numbers(out, &[first, u64::from(pages), bytes]);
            }
            Request::Was { id } => {
                start(out, WAS, 0);
                numbers(out, &[id]);
            }
            Request::Stats => start(out, STATS, 0),
            Request::Status => start(out, STATUS, 0),
            Request::WriteOut => start(out, WRITE_OUT, 0),
            Request::Explain { ticket } => {
                start(out, EXPLAIN, 0);
                out.extend(ticket);
            }
        }
    }
}

/// A [`Request::Release`] without its list.
#[derive(Clone, Copy, Debug)]
pub struct ReleasePart {
    /// As there.
    pub id: ReleaseId,
    /// As there.
    pub first: u64,
    /// As there.
    pub pages: u32,
    /// As there.
    pub last: bool,
    /// As there.
    pub at: u32,
    /// As there.
    pub total: u32,
}

/// Appends a [`Request::Release`] to an empty buffer.
pub fn release(out: &mut Vec<u8>, part: ReleasePart, runs: &[Run]) {
    release_head(out, part, runs.len());
    for run in runs {
        encode_run(out, *run, 0);
    }
}

fn release_head(out: &mut Vec<u8>, part: ReleasePart, count: usize) {
    let ReleasePart { id, first, pages, last, at, total } = part;
    start(out, RELEASE, count);
    numbers(out, &[id, first, u64::from(pages) << 1 | u64::from(last), u64::from(total) << 32 | u64::from(at)]);
}

/// Appends a [`Reply::Fills`] to an empty buffer.
pub fn fills(out: &mut Vec<u8>, size: u64, fills: &[Fill]) {
    start(out, FILLS, fills.len());
    numbers(out, &[size]);
    for fill in fills {
        encode_run(out, fill.run, fill.source.flags());
    }
}

/// Appends a [`Reply::Explained`] to an empty buffer.
pub fn explained(out: &mut Vec<u8>, ranges: &[(Run, RangeState)]) {
    start(out, EXPLAINED, ranges.len());
    for (run, state) in ranges {
        encode_run(out, *run, state.to_flags());
    }
}

impl Reply<'_> {
    /// Appends the message to an empty buffer; the lists come from [`fills`] and [`explained`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Reply::Mapped { owner, size, file } => {
                start(out, MAPPED, 0);
                numbers(out, &[owner, size, file]);
            }
            Reply::Fills { size, fills } => {
                start(out, FILLS, fills.0.len() / RUN);
                numbers(out, &[size]);
                out.extend(fills.0);
            }
            Reply::Committed { pages, merged, bytes } => {
                start(out, COMMITTED, 0);
                numbers(out, &[pages, merged, bytes]);
            }
            Reply::Staged => start(out, STAGED, 0),
            Reply::Dropped => start(out, DROPPED, 0),
            Reply::Lent => start(out, LENT, 0),
            Reply::Was { committed } => {
                start(out, WAS_REPLY, 0);
                numbers(out, &[u64::from(committed)]);
            }
            Reply::Stats(Stats { commits, merged, unchanged, twins, published }) => {
                start(out, STATS_REPLY, 0);
                numbers(out, &[commits, merged, unchanged, twins, published]);
            }
            Reply::ServerStatus(status) => {
                let ServerStatus { pid, seconds, connections, mapped, used, slots, replaced, totals, limits } = status;
                start(out, SERVER_STATUS, 0);
                numbers(out, &[pid, seconds, connections, mapped, used, slots, replaced]);
                let Totals { commits, published, merged, invalidations, invalidated, from_devices } = totals;
                numbers(out, &[commits, published, merged, invalidations, invalidated, from_devices]);
                numbers(out, &limits.numbers());
            }
            Reply::UserStatus(UserStatus { user, has: UserUse { connections, mapped, used } }) => {
                start(out, USER_STATUS, 0);
                numbers(out, &[user, connections, mapped, used]);
            }
            Reply::FileStatus(FileStatus { maps, in_place, owners, dirty, stats, path }) => {
                let path = &path[..path.len().min(MAX_RUNS)];
                let Stats { commits, merged, unchanged, twins, published } = stats;
                start(out, FILE_STATUS, path.len());
                numbers(out, &[maps, in_place, owners, dirty, commits, merged, unchanged, twins, published]);
                out.extend(path);
            }
            Reply::Explained { ranges } => {
                start(out, EXPLAINED, ranges.0.len() / RUN);
                out.extend(ranges.0);
            }
            Reply::Holder(Holder { pid, user, first, pages, current, stale, open, from_peers, kind }) => {
                start(out, HOLDER, 0);
                numbers(out, &[pid, user, first, pages, current, stale, open, from_peers, kind as u64]);
            }
            Reply::Failed { errno } => {
                start(out, FAILED, 0);
                numbers(out, &[u64::from(errno)]);
            }
        }
    }
}

/// Parses a message of a client.
pub fn parse_request(bytes: &[u8]) -> Result<Request<'_>, BadMessage> {
    let mut at = Cursor::new(bytes)?;
    let request = match at.kind {
        HELLO => {
            let (ticket, first, pages) = (at.take()?, at.number()?, at.number()?);
            check_range(first, pages)?;
            let (access, kind) = (at.access()?, MapKind::of(at.number()?)?);
            Request::Hello { ticket, access, first, pages, kind }
        }
        ACQUIRE => {
            let (first, pages) = (at.number()?, at.number()?);
            check_range(first, pages)?;
            let (access, fetch) = match at.number()? {
                number if number & KEPT != 0 => (access_of(number & !KEPT)?, false),
                number => (access_of(number)?, true),
            };
            let mut peers = NO_PEERS;
            for peer in &mut peers {
                *peer = at.number()?;
            }
            Request::Acquire { first, pages, access, fetch, peers }
        }
        FILLED => Request::Filled,
        FILLED_BUT => Request::FilledBut { runs: Runs(at.runs(|flags| flags == 0)?) },
        RELEASE => {
            let (id, first, word, numbers) = (at.number()?, at.number()?, at.number()?, at.number()?);
            let pages = u32::try_from(word >> 1).map_err(|_| BadMessage::Run)?;
            check_range(first, pages.into())?;
            let (last, runs) = (word & 1 == 1, Runs(at.runs(|flags| flags == 0)?));
            let count: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
            let (at, total) = (numbers as u32, (numbers >> 32) as u32);
            if u64::from(at) + count > STAGE.into() {
                return Err(BadMessage::Run);
            }
            Request::Release { id, first, pages, last, at, total, runs }
        }
        HAND_OVER => {
            let part = hand_over::parse(&mut at)?;
            Request::HandOver { part, runs: Runs(at.runs(|flags| flags == 0)?) }
        }
        DROP => {
            let (first, word) = (at.number()?, at.number()?);
            let pages = u32::try_from(word >> 1).map_err(|_| BadMessage::Run)?;
            check_range(first, pages.into())?;
            Request::Drop { first, pages, open: word & 1 == 1 }
        }
        LEND => {
            let (device, first, pages, bytes) = (at.take()?, at.number()?, at.number()?, at.number()?);
            check_range(first, pages)?;
            let pages = u32::try_from(pages).map_err(|_| BadMessage::Run)?;
            Request::Lend { first, pages, bytes, device }
        }
        WAS => Request::Was { id: at.number()? },
        STATS => Request::Stats,
        STATUS => Request::Status,
        WRITE_OUT => Request::WriteOut,
        EXPLAIN => Request::Explain { ticket: at.take()? },
        _ => return Err(BadMessage::Kind),
    };
    at.end()?;
    Ok(request)
}

/// Parses a message of the server.
pub fn parse_reply(bytes: &[u8]) -> Result<Reply<'_>, BadMessage> {
    let mut at = Cursor::new(bytes)?;
    let reply = match at.kind {
        MAPPED => Reply::Mapped { owner: at.number()?, size: at.number()?, file: at.number()? },
        FILLS => {
            let size = at.number()?;
            Reply::Fills { size, fills: Fills(at.runs(|flags| source_of(flags).is_some())?) }
        }
        STAGED => Reply::Staged,
        COMMITTED => Reply::Committed { pages: at.number()?, merged: at.number()?, bytes: at.number()? },
        DROPPED => Reply::Dropped,
        LENT => Reply::Lent,
        WAS_REPLY => match at.number()? {
            committed @ 0..=1 => Reply::Was { committed: committed == 1 },
            _ => return Err(BadMessage::Kind),
        },
        STATS_REPLY => Reply::Stats(at.stats()?),
        SERVER_STATUS => Reply::ServerStatus(ServerStatus {
            pid: at.number()?,
            seconds: at.number()?,
            connections: at.number()?,
            mapped: at.number()?,
            used: at.number()?,
            slots: at.number()?,
            replaced: at.number()?,
            totals: at.totals()?,
            limits: at.limits()?,
        }),
        USER_STATUS => Reply::UserStatus(UserStatus { user: at.number()?, has: at.user_use()? }),
        FILE_STATUS => Reply::FileStatus(FileStatus {
            maps: at.number()?,
            in_place: at.number()?,
            owners: at.number()?,
            dirty: at.number()?,
            stats: at.stats()?,
            path: at.path()?,
        }),
        EXPLAINED => Reply::Explained { ranges: Ranges(at.runs(|flags| RangeState::from_flags(flags).is_some())?) },
        HOLDER => Reply::Holder(Holder {
            pid: at.number()?,
            user: at.number()?,
            first: at.number()?,
            pages: at.number()?,
            current: at.number()?,
            stale: at.number()?,
            open: at.number()?,
            from_peers: at.number()?,
            kind: MapKind::of(at.number()?)?,
        }),
        FAILED => Reply::Failed { errno: u32::try_from(at.number()?).map_err(|_| BadMessage::Kind)? },
        _ => return Err(BadMessage::Kind),
    };
    at.end()?;
    Ok(reply)
}

fn start(out: &mut Vec<u8>, kind: u16, count: usize) {
    debug_assert!(out.is_empty() && count <= MAX_RUNS);
    out.extend(kind.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.extend((count as u32).to_le_bytes());
}

fn numbers(out: &mut Vec<u8>, numbers: &[u64]) {
    numbers.iter().for_each(|number| out.extend(number.to_le_bytes()));
}

fn encode_run(out: &mut Vec<u8>, run: Run, flags: u32) {
    out.extend(run.first.to_le_bytes());
    out.extend(run.count.to_le_bytes());
    out.extend(flags.to_le_bytes());
}

/// A run of 16 bytes, and its flags; zeros of a shorter one.
fn parse_run(bytes: &[u8]) -> (Run, u32) {
    let first = bytes.get(..8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
    let word = |at: usize| bytes.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_le_bytes);
    (Run { first, count: word(8) }, word(12))
}

fn access_number(access: Access) -> u64 {
    match access {
        Access::Read => 1,
        Access::Write => 3,
    }
}

fn access_of(number: u64) -> Result<Access, BadMessage> {
    match number {
        1 => Ok(Access::Read),
        3 => Ok(Access::Write),
        _ => Err(BadMessage::Kind),
    }
}

fn check_range(first: u64, pages: u64) -> Result<(), BadMessage> {
    let end = first.checked_add(pages).ok_or(BadMessage::Run)?;
    if pages == 0 || end > MAX_PAGES { Err(BadMessage::Run) } else { Ok(()) }
}

/// What is left of a message.
struct Cursor<'a> {
    kind: u16,
    count: usize,
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    fn new(bytes: &'a [u8]) -> Result<Cursor<'a>, BadMessage> {
        let (head, rest) = bytes.split_at_checked(HEADER).ok_or(BadMessage::Length)?;
        let half = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        if half(2) != VERSION {
            return Err(BadMessage::Version(half(2)));
        }
        let count = u32::from_le_bytes([head[4], head[5], head[6], head[7]]) as usize;
        if count > MAX_RUNS {
            return Err(BadMessage::Length);
        }
        Ok(Cursor { kind: half(0), count, rest })
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], BadMessage> {
        let (taken, rest) = self.rest.split_first_chunk::<N>().ok_or(BadMessage::Length)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn number(&mut self) -> Result<u64, BadMessage> {
        self.take().map(u64::from_le_bytes)
    }

    fn access(&mut self) -> Result<Access, BadMessage> {
        access_of(self.number()?)
    }

    /// As many bytes as the header says, which end the message.
    fn path(&mut self) -> Result<&'a [u8], BadMessage> {
        let (path, rest) = self.rest.split_at_checked(self.count).ok_or(BadMessage::Length)?;
        (self.rest, self.count) = (rest, 0);
        Ok(path)
    }

    /// All runs of the message, which end it.
    fn runs(&mut self, good_flags: impl Fn(u32) -> bool) -> Result<&'a [u8], BadMessage> {
        let (list, rest) = self.rest.split_at_checked(self.count * RUN).ok_or(BadMessage::Length)?;
        let mut end = 0;
        for bytes in list.chunks_exact(RUN) {
            let (run, flags) = parse_run(bytes);
            check_range(run.first, run.count.into())?;
            if run.first < end {
                return Err(BadMessage::Run);
            }
            if !good_flags(flags) {
                return Err(BadMessage::Kind);
            }
            end = run.first + u64::from(run.count);
        }
        (self.rest, self.count) = (rest, 0);
        Ok(list)
    }

    fn end(&self) -> Result<(), BadMessage> {
        if self.rest.is_empty() && self.count == 0 { Ok(()) } else { Err(BadMessage::Length) }
    }
}

#[cfg(test)]
mod tests;
