//! Reads the trace, of this process or another, while it is written.
//!
//! ```text
//!   poll ──> records after the last one ── path ──────> joined, and stored for its file
//!                     │                  └─ request, piece ──> an event, with the path
//!                     └─ overrun, torn, or never finished: counted as lost
//! ```

use std::collections::HashMap;
use std::io;

use spinio_plan::{Reason, Route};

use super::{NO_OFFSET, PATH, PATH_WORDS, PIECE, REQUEST, device_name};
use crate::Direction;
use crate::layout::{RECORD_WORDS, RECORDS, RING, header};
use crate::ring::{self, Body};

/// One event of the trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A request has returned.
    Request(Request),
    /// A piece of a request has been moved; it precedes its request.
    Piece(Piece),
}

/// A request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The number of the request in its process.
    pub id: u64,
    /// The PID in the process's own namespace.
    pub pid: u32,
    /// The thread that made it.
    pub tid: u32,
    /// The direction.
    pub direction: Direction,
    /// The descriptor, -1 where there was none.
    pub fd: i32,
    /// The path of the file, if it is known.
    pub path: Option<String>,
    /// The device, such as `cuda:0`.
    pub device: Option<String>,
    /// The offset in the file; `None` for files without offsets.
    pub offset: Option<u64>,
    /// Bytes requested.
    pub len: u64,
    /// Bytes that the call returned, or its errno.
    pub result: Result<u64, i32>,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub start: u64,
    /// Nanoseconds.
    pub duration: u64,
    /// For a small request, which has no pieces: its route and reason.
    pub route_reason: Option<(Route, Reason)>,
}

/// A piece of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of its request.
    pub request: u64,
    /// The PID in the process's own namespace.
    pub pid: u32,
    /// The thread that completed it.
    pub tid: u32,
    /// The route.
    pub route: Route,
    /// The reason for the route.
    pub reason: Reason,
    /// From the start of the request.
    pub offset: u64,
    /// Bytes moved.
    pub bytes: u64,
    /// CLOCK_MONOTONIC, nanoseconds.
    pub start: u64,
    /// Nanoseconds.
    pub duration: u64,
}

/// Reads the ring of a file, of this process or another, repeatedly.
#[derive(Debug, Default)]
pub struct Reader {
    next: Option<u64>,
    lost: u64,
    /// How often the next record was found incomplete.
    polls: u32,
    paths: HashMap<(u64, u64), String>,
    partial_paths: HashMap<(u64, u64), Vec<Option<Vec<u8>>>>,
}

/// Polls after which an incomplete record counts as lost.
const MAX_POLLS: u32 = 50;

/// Files whose paths are kept, and those of which parts are: another one takes the place of any. A process records the
/// path of a file that it still uses again.
const MOST_PATHS: usize = 16384;
const MOST_PARTIAL_PATHS: usize = 64;

/// Makes room for one more.
fn make_room<T>(map: &mut HashMap<(u64, u64), T>, file: (u64, u64), most: usize) {
    if map.len() >= most
        && !map.contains_key(&file)
        && let Some(any) = map.keys().next().copied()
    {
        map.remove(&any);
    }
}

impl Reader {
    /// Reads from the next event on.
    pub fn from_now(read_at: impl Fn(&mut [u8], u64) -> io::Result<()>) -> io::Result<Reader> {
        let head = word_at(&read_at, header::TICKETS)?;
        let mut reader = Reader { next: Some(head.saturating_sub(RECORDS as u64)), ..Reader::default() };
        // Paths that were recorded earlier are still valid.
        reader.poll(&read_at, true)?;
        Ok(Reader { next: Some(head), lost: 0, ..reader })
    }

    /// Records that were overwritten before they were read, or torn.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The events since the last poll. `last`: the process writes no more, so incomplete records are not waited for.
    pub fn poll(&mut self, read_at: impl Fn(&mut [u8], u64) -> io::Result<()>, last: bool) -> io::Result<Vec<Event>> {
        let head = word_at(&read_at, header::TICKETS)?;
        let mut next = self.next.unwrap_or(0);
        if head.wrapping_sub(next) > RECORDS as u64 {
            // Overrun, or an invalid head.
            let oldest = head.saturating_sub(RECORDS as u64);
            self.lost = self.lost.saturating_add(oldest.saturating_sub(next));
            next = oldest;
        }
        let mut events = Vec::new();
        let mut chunk = vec![0u8; 256 * RECORD_WORDS * 8];
        'ring: while next < head {
            let slot = next % RECORDS as u64;
            let count = (head - next).min(256).min(RECORDS as u64 - slot) as usize;
            let bytes = &mut chunk[..count * RECORD_WORDS * 8];
            read_at(bytes, (RING as u64 + slot * RECORD_WORDS as u64) * 8)?;
            for record in bytes.chunks_exact(RECORD_WORDS * 8) {
                let words: [u64; RECORD_WORDS] = std::array::from_fn(|i| {
                    u64::from_le_bytes(record[i * 8..i * 8 + 8].try_into().unwrap_or_default())
                });
                match ring::read(&words, next) {
                    Some(body) => events.extend(self.event(&body)),
                    // Claimed, but not yet written: tried again at the next poll.
                    None if words[0] <= next && !last && self.polls < MAX_POLLS => {
                        self.polls += 1;
                        break 'ring;
                    }
                    None => self.lost = self.lost.saturating_add(1),
                }
                self.polls = 0;
                next += 1;
            }
        }
        self.next = Some(next);
        Ok(events)
    }

    fn event(&mut self, body: &Body) -> Option<Event> {
        let meta = body[0];
        let direction = *Direction::ALL.get((meta >> 8 & 0xff) as usize).unwrap_or(&Direction::Read);
        let route = Route::ALL.get((meta >> 16 & 0xff) as usize).copied();
        let reason = Reason::ALL.get((meta >> 24 & 0xff) as usize).copied();
        let (pid, tid) = ((body[10] >> 32) as u32, (meta >> 32) as u32);
        match meta & 0xff {
            REQUEST => Some(Event::Request(Request {
                id: body[1],
                pid,
                tid,
                direction,
                fd: body[10] as i32,
                path: self.paths.get(&(body[7], body[8])).cloned(),
                device: device_name(body[9]),
                offset: (body[4] != NO_OFFSET).then_some(body[4]),
                len: body[5],
                result: match body[6] as i64 {
                    n if n < 0 => Err(i32::try_from(n.unsigned_abs()).unwrap_or(i32::MAX)),
                    n => Ok(n as u64),
                },
                start: body[2],
                duration: body[3],
                route_reason: route.zip(reason),
            })),
            PIECE => Some(Event::Piece(Piece {
                request: body[1],
                pid,
                tid,
                route: route?,
                reason: reason?,
                offset: body[4],
                bytes: body[5],
                start: body[2],
                duration: body[3],
            })),
            PATH => {
                self.add_path_part(body);
                None
            }
            _ => None,
        }
    }

    /// Adds a part of a path; stores the path when it is complete.
    fn add_path_part(&mut self, body: &Body) {
        let (part, parts, len) = (body[0] >> 8 & 0xff, body[0] >> 16 & 0xff, (body[0] >> 32) as usize);
        let (part, parts, file) = (part as usize, parts as usize, (body[1], body[2]));
        if part >= parts || len > PATH_WORDS * 8 {
            return;
        }
        let mut text: Vec<u8> = body[4..].iter().flat_map(|w| w.to_le_bytes()).collect();
        text.truncate(len);
        make_room(&mut self.partial_paths, file, MOST_PARTIAL_PATHS);
        let parts_seen = self.partial_paths.entry(file).or_default();
        if parts_seen.len() != parts {
            *parts_seen = vec![None; parts];
        }
        parts_seen[part] = Some(text);
        if parts_seen.iter().all(Option::is_some) {
            let path: Vec<u8> = parts_seen.drain(..).flatten().flatten().collect();
            self.partial_paths.remove(&file);
            make_room(&mut self.paths, file, MOST_PATHS);
            self.paths.insert(file, String::from_utf8_lossy(&path).into_owned());
        }
    }
}

fn word_at(read_at: &impl Fn(&mut [u8], u64) -> io::Result<()>, word: usize) -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    read_at(&mut bytes, word as u64 * 8)?;
    Ok(u64::from_le_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_a_hostile_process_take_bounded_memory() {
        let mut reader = Reader { lost: u64::MAX, ..Reader::default() };
        let mut part = |file: u64, parts: u64| {
            let mut body = Body::default();
            (body[0], body[1]) = (PATH | parts << 16 | 3 << 32, file);
            reader.add_path_part(&body);
        };
        (0..20_000).for_each(|file| part(file, 1));
        (0..1000).for_each(|file| part(file, 2));
        assert_eq!((reader.paths.len(), reader.partial_paths.len()), (MOST_PATHS, MOST_PARTIAL_PATHS));
        // A record that was never finished counts as lost.
        let head = |bytes: &mut [u8], _: u64| {
            bytes.fill(0);
            bytes[0] = u8::from(bytes.len() == 8);
            Ok(())
        };
        reader.next = Some(0);
        reader.poll(head, true).unwrap();
        assert_eq!((reader.lost(), reader.next), (u64::MAX, Some(1)));
    }
}
