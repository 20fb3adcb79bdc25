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

/// A counter: an atomic of the standard library, or that of the model checker.
pub trait Counter {
    /// Its value.
    fn get(&self) -> u64;
    /// Another value.
    fn set(&self, value: u64);
    /// One more.
    fn count(&self);
}

macro_rules! counters {
    ($($kind:ty)*) => { $(impl Counter for $kind {
        fn get(&self) -> u64 {
            self.load(SeqCst)
        }

        fn set(&self, value: u64) {
            self.store(value, SeqCst);
        }

        fn count(&self) {
            self.fetch_add(1, SeqCst);
        }
    })* };
}

counters!(AtomicU64);
#[cfg(loom)]
counters!(loom::sync::atomic::AtomicU64);

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
pub fn read<C: Counter>(file: &[C], servers: &[C]) -> Option<Unwritten> {
    // The writer first: once it is gone, its changes are counted.
    let writers = file[WRITERS].get();
    let changes = file[CHANGES].get();
    let servers = servers[SERVERS].get();
    (writers == 0).then_some(Unwritten { servers, changes })
}

/// The file's pages have changed. Called before a program is told.
pub fn count_change(file: &[impl Counter]) {
    file[CHANGES].count();
}

/// Whether a program may have the file open for writing. Called before the program is told that it is open.
pub fn set_writers(file: &[impl Counter], any: bool) {
    file[WRITERS].set(any.into());
}

/// A server starts; the one before it has ended.
pub fn count_server(servers: &[impl Counter]) {
    servers[SERVERS].count();
}

#[cfg(all(test, loom))]
mod interleavings {
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
    use loom::thread;

    use super::*;

    /// The counters, a byte of the file, and whether a program knows that it has stored another one.
    struct World {
        file: [AtomicU64; FILE_WORDS],
        servers: [AtomicU64; SERVER_WORDS],
        byte: AtomicU64,
        is_stored: AtomicU64,
    }

    fn words<const N: usize>() -> [AtomicU64; N] {
        std::array::from_fn(|_| AtomicU64::new(0))
    }

    /// A program stores, beside a client that acquires twice: what it has after the second time must be what the program
    /// knew before that to be stored.
    fn check(store: impl Fn(&World) + Copy + Send + Sync + 'static) {
        loom::model(move || {
            let (byte, is_stored) = (AtomicU64::new(0), AtomicU64::new(0));
            let world = Arc::new(World { file: words(), servers: words(), byte, is_stored });
            let program = {
                let world = Arc::clone(&world);
                thread::spawn(move || store(&world))
            };
            // An acquire that began later is not answered: the server that this memory is of has ended.
            let first = read(&world.file, &world.servers).filter(|first| first.servers == 0);
            let copy = world.byte.load(SeqCst);
            let is_stored = world.is_stored.load(SeqCst);
            let second = read(&world.file, &world.servers);
            if is_stored == 1 && second.is_some() && second == first {
                assert_eq!(copy, 1, "a store that the client does not see");
            }
            program.join().unwrap();
            assert!(read(&world.file, &world.servers).is_some());
        });
    }

    /// A store to memory, which nothing orders.
    fn store(world: &World) {
        world.byte.store(1, Relaxed);
        world.is_stored.store(1, SeqCst);
    }

    #[test]
    fn store_of_a_program_that_has_the_file_open_is_not_missed() {
        check(|world| {
            set_writers(&world.file, true);
            store(world);
            count_change(&world.file);
            set_writers(&world.file, false);
        });
    }

    #[test]
    fn change_by_the_server_is_not_missed() {
        check(|world| {
            world.byte.store(1, Relaxed);
            count_change(&world.file);
            // The program is told.
            world.is_stored.store(1, SeqCst);
        });
    }

    /// The server that this memory is of counts no more: the program was answered by another one.
    #[test]
    fn store_after_the_death_of_the_server_is_not_missed() {
        check(|world| {
            count_server(&world.servers);
            store(world);
        });
    }
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
