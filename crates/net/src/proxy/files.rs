//! Files of kernels: open, pread, pwrite, fstat, close.
//!
//! ```text
//!   kernel ── path, or bytes to write, in a file buffer ── request ──> proxy ── job ──> worker: openat2, pread, pwrite
//!          <── bytes of the file in the buffer ── reply <──────────── proxy <── result ──┘ (same descriptor table)
//! ```
//!
//! A kernel copies between its memory and a buffer in pinned memory by itself, as it does with rings. So no call of a file
//! calls the device: whatever the driver makes wait for a running kernel, no file waits for it. It also reads into any
//! memory that the kernel can store to, shared memory too, and a wrong address is the kernel's fault alone.
//!
//! The proxy only keeps the table of files and hands jobs to workers, which have its descriptor table: the program cannot
//! close these descriptors, and a forked child has none of them. A file system that does not answer holds at most half of
//! the workers.
//!
//! Which files: those below the directory that the program names when it opens the net; without one, none. Regular files
//! only: others may wait without end.
//!
//! Known flaws: a read passes through the page cache and one more copy than the fastest routes of SPIN need. A kernel that
//! ends with an error inside a call keeps its buffer.

use std::sync::Arc;

use spinio_ring::mailbox::{Call, Reply, Request};
use spinio_sys::Errno;
use spinio_sys::linux::{self, Fd};

use super::Proxy;
use super::caller::{Caller, failed};
use super::file_table::Outcome;
use super::transfers::FileRef;

impl Proxy {
    /// The file of a number that is not stale.
    pub(super) fn file(&self, number: u32) -> Option<FileRef> {
        self.files.as_ref()?.get(number)
    }

    /// A call for a file, which a worker answers, but for close.
    pub(super) fn file_call(&mut self, call: Call, request: &Request, caller: Caller) {
        let refused = match self.begin_file_call(call, request, caller) {
            Ok(()) => return,
            Err(refused) => refused,
        };
        let (caller, errno) = refused;
        self.answer(caller, Reply::new(errno.map_or(0, |errno| -errno.raw_os_error())));
    }

    /// Hands the job to a worker; else the caller, and why.
    fn begin_file_call(
        &mut self,
        call: Call,
        request: &Request,
        caller: Caller,
    ) -> Result<(), (Caller, Option<Errno>)> {
        let memory = Arc::clone(&self.memory);
        let Some(files) = &mut self.files else { return Err((caller, Some(Errno::ACCESS))) };
        if call == Call::OpenFile {
            return files.open(request, caller, &memory).map_err(|(caller, errno)| (caller, Some(errno)));
        }
        if call == Call::CloseFile {
            let closed = files.close(request.descriptor);
            return Err((caller, closed.err()));
        }
        let Some(file) = files.get(request.descriptor) else { return Err((caller, Some(Errno::BADF))) };
        let (buffer, [at, bytes, ..]) = (request.argument, request.address.words());
        files.submit(file.0.share_key(), Some(caller), move || {
            let fd = file.0.get();
            let done = match call {
                Call::StatFile => stat(fd),
                _ if at > i64::MAX as u64 => Err(Errno::INVAL),
                Call::ReadFile => again(|| memory.read_file(fd, buffer, bytes as usize, at)),
                Call::WriteFile => again(|| memory.write_file(fd, buffer, bytes as usize, at)),
                _ => Err(Errno::NOSYS),
            };
            Outcome::Done(done.unwrap_or_else(failed))
        });
        Ok(())
    }

    /// Takes what workers have done; whether there was anything.
    pub(super) fn take_results(&mut self, now: u64) -> bool {
        let mut worked = false;
        while let Some(files) = &mut self.files
            && let Ok((call, outcome)) = files.results.try_recv()
        {
            worked = true;
            files.working -= 1;
            let caller = files.calls.remove(&call);
            let reply = match outcome {
                Outcome::Opened(place, opened) => files.opened(place, opened),
                Outcome::Done(reply) => reply,
                Outcome::Sent(sent) => {
                    self.take_sent(sent, now);
                    continue;
                }
            };
            if let Some(caller) = caller {
                self.answer(caller, reply);
                self.pace.gave(now);
            }
        }
        worked
    }

    /// Answers the calls that wait for workers, which go on.
    pub(super) fn cancel_file_calls(&mut self, errno: Errno) {
        let calls = self.files.as_mut().map(|files| std::mem::take(&mut files.calls)).unwrap_or_default();
        for caller in calls.into_values() {
            self.answer(caller, failed(errno));
        }
    }
}

fn again(call: impl Fn() -> Result<usize, Errno>) -> Result<Reply, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done.map(|bytes| Reply::new(bytes as i32)),
        }
    }
}

fn stat(fd: Fd) -> Result<Reply, Errno> {
    let stat = linux::fstat(fd)?;
    let numbers = [stat.size, stat.mode.into(), stat.mtime_ns as u64, stat.ino, stat.dev];
    Ok(Reply::with_numbers(0, numbers))
}
