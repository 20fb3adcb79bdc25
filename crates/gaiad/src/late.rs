//! Requests that wait for a lease, for bytes from a device, or for descriptors and memory, without a worker of the server.
//!
//! ```text
//!   worker ── handler ─┬ open: EAGAIN, a client holds a lease on the file (up to 45 s) ─────┬─> Late::wait, next request
//!                      └ ARRIVING: pages that a release has handed over are on their way ───┘      │ a thread for each file
//!                              answered as any request <── opened, and kept open; bytes arrived <──┘
//! ```
//!
//! Clients get descriptors of files below the mount, and may take leases on them; and a release that hands device memory over
//! has as much to copy as the client likes, from a device that may be slow. There are few workers: with as many requests for
//! such files one user could have stopped all requests of the mount. The Linux kernel has a limited number of writes on their
//! way (64), so there are not more threads than that, and those of callers that wait.
//!
//! Known flaws: these writes count for the Linux kernel, which sends no others meanwhile if all are of such files. A program
//! whose writes pass by the page cache is told ENOMEM where [`MOST`] bytes wait already.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use spinio_fuse::Operation;
use spinio_fuse::abi::WRITE_CACHE;

use crate::lock::lock;

/// Before a request is tried again whose file could not be opened, or that lacked descriptors or memory.
const PAUSE: Duration = Duration::from_millis(20);
/// How long bytes of a file are waited for before its requests are tried again: those that began to wait just after theirs had
/// come would wait for others.
const ARRIVAL: Duration = Duration::from_millis(100);
/// Bytes of the requests that wait, from which on those wait no more that programs can be told of.
const MOST: usize = 256 << 20;

/// Bytes of the pages of a request are on their way from a device. No call on a file fails so.
pub(crate) const ARRIVING: Errno = Errno::INPROGRESS;

/// The requests, by their nodes.
#[derive(Debug)]
pub(crate) struct Late {
    waiting: Mutex<HashMap<u64, Waiting>>,
    /// Bytes of them.
    held: AtomicUsize,
    /// Nodes that need a thread; `None`: there will be no more.
    nodes: mpsc::Sender<Option<u64>>,
}

/// Those of a node.
#[derive(Debug, Default)]
struct Waiting {
    requests: Vec<Vec<u8>>,
    /// One of them lacked descriptors or memory, which opening the file does not wait for.
    pauses: bool,
}

/// Whether a request that fails so waits. One that is not of the page cache is a program's, which is told of a lease.
pub(crate) fn may_wait(operation: &Operation<'_>, error: Errno) -> bool {
    if error == ARRIVING {
        return true;
    }
    match operation {
        Operation::Write { args, .. } => args.write_flags & WRITE_CACHE != 0 && may_pass(error),
        Operation::Fsync(_) | Operation::Lseek(_) => error == Errno::AGAIN,
        _ => false,
    }
}

/// Whether bytes of the page cache that cannot be written now may be written later. The Linux kernel drops those whose
/// WRITE has failed.
pub(crate) fn may_pass(error: Errno) -> bool {
    matches!(error, Errno::AGAIN | ARRIVING | Errno::MFILE | Errno::NFILE | Errno::NOMEM)
}

impl Late {
    /// None, and the nodes for [`Late::run`].
    pub(crate) fn new() -> (Late, mpsc::Receiver<Option<u64>>) {
        let (nodes, begun) = mpsc::channel();
        (Late { waiting: Mutex::default(), held: AtomicUsize::new(0), nodes }, begun)
    }

    /// Whether so many bytes wait that a request of a program, of which it can be told, must not.
    pub(crate) fn is_full(&self, operation: &Operation<'_>) -> bool {
        let is_told = matches!(operation, Operation::Write { args, .. } if args.write_flags & WRITE_CACHE == 0);
        is_told && self.held.load(Relaxed) >= MOST
    }

    /// The request is answered later.
    pub(crate) fn wait(&self, node: u64, request: &[u8], cause: Errno) {
        self.held.fetch_add(request.len(), Relaxed);
        let mut waiting = lock(&self.waiting);
        let of_node = waiting.entry(node).or_default();
        of_node.requests.push(request.to_vec());
        of_node.pauses |= !matches!(cause, Errno::AGAIN | ARRIVING);
        if of_node.requests.len() == 1 {
            // After the end there is no request.
            let _ = self.nodes.send(Some(node));
        }
    }

    /// There will be no more.
    pub(crate) fn end(&self) {
        let _ = self.nodes.send(None);
    }

    /// Serves them until the end. `open` waits until the file of a node can be opened, and keeps it open; and for bytes that are
    /// on their way, for [`ARRIVAL`] at most.
    pub(crate) fn run(
        &self,
        nodes: mpsc::Receiver<Option<u64>>,
        open: impl Fn(u64, Duration) -> Result<(), Errno> + Sync,
        answer: impl Fn(&[Vec<u8>]) + Sync,
    ) {
        let serve = |node: u64| {
            let pauses = lock(&self.waiting).get(&node).is_some_and(|waiting| waiting.pauses);
            if open(node, ARRIVAL).is_err() || pauses {
                std::thread::sleep(PAUSE);
            }
            let waiting = lock(&self.waiting).remove(&node).unwrap_or_default();
            let bytes = waiting.requests.iter().map(Vec::len).sum();
            answer(&waiting.requests);
            self.held.fetch_sub(bytes, Relaxed);
        };
        let serve = &serve;
        std::thread::scope(|scope| {
            for node in nodes.into_iter().map_while(|node| node) {
                let thread = std::thread::Builder::new().name("gaia-late".to_owned());
                if thread.spawn_scoped(scope, move || serve(node)).is_err() {
                    serve(node);
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use spinio_fuse::abi::WriteIn;

    use super::*;

    #[test]
    fn what_the_page_cache_writes_waits_for_descriptors_and_memory() {
        let write = |write_flags| {
            let args = WriteIn { write_flags, ..WriteIn::default() };
            move |error| may_wait(&Operation::Write { args, data: &[] }, error)
        };
        let [cached, of_program] = [WRITE_CACHE, 0].map(write);
        for error in [Errno::AGAIN, Errno::MFILE, Errno::NFILE, Errno::NOMEM] {
            assert!(cached(error) && !of_program(error), "{error}");
        }
        assert!(cached(ARRIVING) && of_program(ARRIVING));
        assert!(!cached(Errno::NOSPC) && !cached(Errno::STALE));
    }

    #[test]
    fn write_of_a_program_is_refused_where_too_many_bytes_wait() {
        let (late, _nodes) = Late::new();
        let args = WriteIn::default();
        let [program, cached] =
            [0, WRITE_CACHE].map(|write_flags| Operation::Write { args: WriteIn { write_flags, ..args }, data: &[] });
        let request = vec![0; MOST / 4];
        for _ in 0..4 {
            assert!(!late.is_full(&program));
            late.wait(1, &request, ARRIVING);
        }
        assert!(late.is_full(&program) && !late.is_full(&cached));
        assert!(!late.is_full(&Operation::Statfs));
    }

    #[test]
    fn requests_of_a_file_wait_together_and_others_do_not_wait_for_them() {
        let (late, nodes) = Late::new();
        let (may_go_on, go_on) = (Mutex::new(()), mpsc::channel());
        let (answered, answers) = (Mutex::new(go_on.0), go_on.1);
        let opened = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let held = lock(&may_go_on);
            late.wait(1, b"a", Errno::AGAIN);
            late.wait(1, b"b", Errno::AGAIN);
            late.wait(2, b"c", Errno::AGAIN);
            let open = |node, _| {
                opened.fetch_add(1, SeqCst);
                if node == 1 {
                    drop(lock(&may_go_on));
                }
                Err(Errno::IO)
            };
            let answer = |requests: &[Vec<u8>]| requests.iter().for_each(|r| lock(&answered).send(r.clone()).unwrap());
            let late = &late;
            scope.spawn(move || late.run(nodes, open, answer));
            assert_eq!(answers.recv().unwrap(), b"c");
            late.wait(1, b"d", Errno::AGAIN);
            drop(held);
            assert_eq!([(); 3].map(|()| answers.recv().unwrap()), [b"a", b"b", b"d"]);
            late.wait(1, b"e", Errno::AGAIN);
            assert_eq!(answers.recv().unwrap(), b"e");
            late.end();
        });
        assert_eq!(opened.into_inner(), 3);
    }
}
