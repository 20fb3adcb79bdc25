//! Requests that wait for a lease, for bytes from a device, or for descriptors and memory, without a worker of the server.
//!
//! ```text
//!   worker ── handler ─┬ open: EAGAIN, a client holds a lease on the file (up to 45 s) ─────┬─> Late::wait, next request
//!                      └ ARRIVING: pages that a release has handed over are on their way ───┘      │ a thread for those of
//!                                                                                                  v a file that wait now
//!                        answered as any request <── for EAGAIN: opened, and kept open; for ARRIVING: a part has arrived
//! ```
//!
//! While a thread answers those of a file, more of them may come: they get another thread.
//!
//! Clients get descriptors of files below the mount, and may take leases on them; and a release that hands device memory over
//! has as much to copy as the client likes, from a device that may be slow. There are few workers: with as many requests for
//! such files one user could have stopped all requests of the mount. There is a thread at most for each of these: the writes that
//! the Linux kernel has on their way (64), the callers that wait, and the files that it has forgotten meanwhile.
//!
//! Known flaws: these writes count for the Linux kernel, which sends no others meanwhile if all are of such files. A program
//! whose writes pass by the page cache is told ENOMEM where [`MOST`] bytes wait already.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, mpsc};
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
    /// Bytes of them, and of those that are answered now.
    held: Arc<AtomicUsize>,
    /// Nodes that need a thread; `None`: there will be no more.
    nodes: mpsc::Sender<Option<u64>>,
}

/// A request that waits. Its bytes count until it is dropped.
#[derive(Debug)]
pub(crate) struct LateRequest {
    bytes: Vec<u8>,
    held: Arc<AtomicUsize>,
}

impl LateRequest {
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for LateRequest {
    fn drop(&mut self) {
        self.held.fetch_sub(self.bytes.len(), Relaxed);
    }
}

/// Those of a node.
#[derive(Debug, Default)]
struct Waiting {
    requests: Vec<LateRequest>,
    /// One of them waits for more than bytes on their way: the file is to be opened.
    opens: bool,
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
        (Late { waiting: Mutex::default(), held: Arc::default(), nodes }, begun)
    }

    /// Whether so many bytes wait that a request of a program, of which it can be told, must not.
    pub(crate) fn is_full(&self, operation: &Operation<'_>) -> bool {
        let is_told = matches!(operation, Operation::Write { args, .. } if args.write_flags & WRITE_CACHE == 0);
        is_told && self.held.load(Relaxed) >= MOST
    }

    /// The request is answered later.
    pub(crate) fn wait(&self, node: u64, bytes: Vec<u8>, cause: Errno) {
        self.held.fetch_add(bytes.len(), Relaxed);
        self.wait_again(node, LateRequest { bytes, held: Arc::clone(&self.held) }, cause);
    }

    /// So is one that has waited already.
    pub(crate) fn wait_again(&self, node: u64, request: LateRequest, cause: Errno) {
        let mut waiting = lock(&self.waiting);
        let of_node = waiting.entry(node).or_default();
        of_node.requests.push(request);
        of_node.opens |= cause != ARRIVING;
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

    /// Serves them until the end. `ready` waits for bytes that are on their way, for [`ARRIVAL`] at most; and with `true`, until
    /// the file of the node can be opened, and keeps it open. Clients keep leases on files that are not opened.
    pub(crate) fn run(
        &self,
        nodes: mpsc::Receiver<Option<u64>>,
        ready: impl Fn(u64, bool, Duration) -> Result<(), Errno> + Sync,
        answer: impl Fn(Vec<LateRequest>) + Sync,
    ) {
        let serve = |node: u64| {
            let (opens, pauses) = lock(&self.waiting).get(&node).map_or((false, false), |of| (of.opens, of.pauses));
            if ready(node, opens, ARRIVAL).is_err() || pauses {
                std::thread::sleep(PAUSE);
            }
            // A statement of its own: the requests may wait again.
            let waiting = lock(&self.waiting).remove(&node).unwrap_or_default();
            answer(waiting.requests);
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
            late.wait(1, request.clone(), ARRIVING);
        }
        assert!(late.is_full(&program) && !late.is_full(&cached));
        assert!(!late.is_full(&Operation::Statfs));
    }

    #[test]
    fn request_that_waits_again_counts_once_until_it_is_answered() {
        let (late, nodes) = Late::new();
        late.wait(1, vec![0; 100], ARRIVING);
        let tries = AtomicUsize::new(0);
        let answer = |requests: Vec<LateRequest>| {
            for request in requests {
                assert_eq!(late.held.load(Relaxed), 100);
                if tries.fetch_add(1, SeqCst) < 2 {
                    late.wait_again(1, request, ARRIVING);
                    assert_eq!(late.held.load(Relaxed), 100);
                } else {
                    late.end();
                }
            }
        };
        late.run(nodes, |_, _, _| Ok(()), answer);
        assert_eq!((tries.into_inner(), late.held.load(Relaxed)), (3, 0));
    }

    #[test]
    fn file_is_opened_only_for_what_waits_for_more_than_bytes_on_their_way() {
        let (late, nodes) = Late::new();
        for (node, cause) in [(1, ARRIVING), (2, Errno::AGAIN), (3, Errno::NOMEM), (4, ARRIVING), (4, Errno::AGAIN)] {
            late.wait(node, vec![0], cause);
        }
        late.end();
        let opened = Mutex::new(Vec::new());
        let ready = |node, opens: bool, _| {
            lock(&opened).extend(opens.then_some(node));
            Ok(())
        };
        late.run(nodes, ready, drop);
        let mut opened: Vec<u64> = opened.into_inner().unwrap();
        opened.sort_unstable();
        assert_eq!(opened, [2, 3, 4]);
    }

    #[test]
    fn requests_of_a_file_wait_together_and_others_do_not_wait_for_them() {
        let (late, nodes) = Late::new();
        let (may_go_on, go_on) = (Mutex::new(()), mpsc::channel());
        let (answered, answers) = (Mutex::new(go_on.0), go_on.1);
        let opened = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let held = lock(&may_go_on);
            late.wait(1, b"a".to_vec(), Errno::AGAIN);
            late.wait(1, b"b".to_vec(), Errno::AGAIN);
            late.wait(2, b"c".to_vec(), Errno::AGAIN);
            let ready = |node, _, _| {
                opened.fetch_add(1, SeqCst);
                if node == 1 {
                    drop(lock(&may_go_on));
                }
                Err(Errno::IO)
            };
            let answer = |requests: Vec<LateRequest>| {
                requests.iter().for_each(|request| lock(&answered).send(request.bytes().to_vec()).unwrap());
            };
            let late = &late;
            scope.spawn(move || late.run(nodes, ready, answer));
            assert_eq!(answers.recv().unwrap(), b"c");
            late.wait(1, b"d".to_vec(), Errno::AGAIN);
            drop(held);
            assert_eq!([(); 3].map(|()| answers.recv().unwrap()), [b"a", b"b", b"d"]);
            late.wait(1, b"e".to_vec(), Errno::AGAIN);
            assert_eq!(answers.recv().unwrap(), b"e");
            late.end();
        });
        assert_eq!(opened.into_inner(), 3);
    }
}
