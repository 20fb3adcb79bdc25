//! Counters in shared memory by which a client knows, without a message, that its copies are head.
//!
//! ```text
//!   supervisor ─ counts servers ─────────────────────────────┐
//!   server ───── counts changes of the file's pages ─────────┼──> client: the same as when the last acquire began,
//!          └──── whether a program may have it open to write ┘            and no writer then and now: nothing changed
//! ```
//!
//! A store of a CPU program, or a `write`, is in the Linux kernel's page cache, and the server hears of it late. But it
//! answered the program's `open` before: from then on the file has a writer, until the last descriptor is closed, when
//! the kernel has written back its pages and the server has counted their changes. A release counts as a change before
//! it returns, and so does a truncation. A server that has died counts nothing any more: the supervisor counts the next
//! one before it starts, and no program's `open` is answered in between.
//!
//! Known flaws: a program that has closed and unmapped the file while a device still stores to its pages (a read of
//! another file with O_DIRECT, into the mapping) changes them without being a writer. After a server has been replaced,
//! every file counts as one with a writer until unmount, since the new one does not know who has it open.

use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

/// Words of a file's memory.
pub const FILE_WORDS: usize = 2;
/// Words of the supervisor's memory.
pub const SERVER_WORDS: usize = 1;

const CHANGES: usize = 0;
const WRITERS: usize = 1;
const SERVERS: usize = 0;

/// The counters at one moment at which the file had no writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unwritten {
    servers: u64,
    changes: u64,
}

/// Reads the counters; `None`: a program may have the file open for writing.
pub fn read(file: &[AtomicU64], servers: &[AtomicU64]) -> Option<Unwritten> {
    // The writer first: once it is gone, its changes are counted.
    let writers = file[WRITERS].load(SeqCst);
    let changes = file[CHANGES].load(SeqCst);
    let servers = servers[SERVERS].load(SeqCst);
    (writers == 0).then_some(Unwritten { servers, changes })
}

/// The file's pages have changed. Called before a program is told.
pub fn count_change(file: &[AtomicU64]) {
    file[CHANGES].fetch_add(1, SeqCst);
}

/// Whether a program may have the file open for writing. Called before the program is told that it is open.
pub fn set_writers(file: &[AtomicU64], any: bool) {
    file[WRITERS].store(any.into(), SeqCst);
}

/// A server starts; the one before it has ended.
pub fn count_server(servers: &[AtomicU64]) {
    servers[SERVERS].fetch_add(1, SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<const N: usize>() -> [AtomicU64; N] {
        std::array::from_fn(|_| AtomicU64::new(0))
    }

    #[test]
    fn each_event_makes_another_moment() {
        let (file, servers) = (words::<FILE_WORDS>(), words::<SERVER_WORDS>());
        let first = read(&file, &servers);
        assert!(first.is_some() && read(&file, &servers) == first);
        count_change(&file);
        let second = read(&file, &servers);
        assert!(second.is_some() && second != first);
        count_server(&servers);
        assert!(read(&file, &servers) != second);
        set_writers(&file, true);
        assert_eq!(read(&file, &servers), None);
        set_writers(&file, false);
        assert!(read(&file, &servers).is_some());
    }
}
