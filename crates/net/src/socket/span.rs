//! Bytes of a stream in place: a program writes what it sends, and reads what it receives, in the memory that it shares.
//!
//! ```text
//!   reserve ── room in the ring ──> the program writes ──> commit(n): the first n bytes are sent
//!   borrow  ── bytes there      ──> the program reads  ──> give_back(n): the first n bytes are received
//! ```
//!
//! Between the two calls the program has the direction: others wait. A span ends where the ring does, and a reserved one has at most
//! half of the ring, as in kernels (`device/include/spinio/net/span.h`). On a socket that shares no memory the calls have the same
//! results and copy, through a buffer.

#![expect(unsafe_code, reason = "memory that GPU kernels access at the same time")]

use spinio_ring::Word;
use spinio_ring::peer::TAIL;
use spinio_sys::Errno;

use super::deadline::deadline;
use super::flags::{MSG_DONTWAIT, MSG_PEEK};
use super::{IN, OUT, Socket, plain};

/// Bytes of a span of a socket that shares no memory.
const BUFFER: usize = 64 << 10;

type Result<T> = core::result::Result<T, Errno>;

impl Socket {
    /// Room for up to `most` bytes that are to be sent. Flags: MSG_DONTWAIT.
    pub fn reserve(&self, most: usize, flags: u32) -> Result<(*mut u8, usize)> {
        self.check_span(most, flags)?;
        let mut side = self.sends.lock(flags & MSG_DONTWAIT == 0)?;
        let Some(shared) = &self.shared else {
            let len = most.min(BUFFER);
            side.buffer.resize(len, 0);
            side.span = len;
            return Ok((side.buffer.as_mut_ptr(), len));
        };
        let room = self.wait_for_room(shared, side.position, flags, deadline(self.timeouts[1]))?.ok_or(Errno::PIPE)?;
        let (at, whole) = shared.memory.contiguous(false, side.position);
        let len = room.min(most).min(whole).min(shared.memory.size() as usize / 2);
        side.span = len;
        Ok((at, len))
    }

    /// Sends the first `bytes` of what was reserved, and gives the rest back. EINVAL: nothing is reserved, or less. Waits only on
    /// a socket that shares no memory: EAGAIN if its limit has passed, after which some bytes may be sent.
    pub fn commit(&self, bytes: usize) -> Result<()> {
        self.check()?;
        let mut side = self.sends.take_back(bytes)?;
        let Some(shared) = &self.shared else {
            let (mut done, deadline) = (0, deadline(self.timeouts[1]));
            while done < bytes {
                let rest = &side.buffer[done..bytes];
                // SAFETY: the rest of the buffer lives across the call.
                done += unsafe { plain::send(self.anchor.0, &self.kept, rest.as_ptr(), rest.len(), 0, deadline) }?;
            }
            return Ok(());
        };
        if bytes > 0 {
            side.position = side.position.after(bytes as u64);
            shared.memory.words()[TAIL].store_release(shared.mark(side.position, 0));
            self.tell(shared, IN);
        }
        Ok(())
    }

    /// Up to `most` bytes that have arrived; none at the end of the stream. Flags: MSG_DONTWAIT.
    pub fn borrow(&self, most: usize, flags: u32) -> Result<(*mut u8, usize)> {
        self.check_span(most, flags)?;
        let mut side = self.receives.lock(flags & MSG_DONTWAIT == 0)?;
        let Some(shared) = &self.shared else {
            let len = most.min(BUFFER);
            side.buffer.resize(len, 0);
            let (to, flags, deadline) = (side.buffer.as_mut_ptr(), flags | MSG_PEEK, deadline(self.timeouts[0]));
            // SAFETY: the buffer has these bytes.
            side.span = unsafe { plain::receive(self.anchor.0, &self.kept, to, len, flags, deadline) }?;
            return Ok((to, side.span));
        };
        let there = self.wait_for_bytes(shared, side.position, flags, deadline(self.timeouts[0]))?;
        let (at, whole) = shared.memory.contiguous(true, side.position);
        side.span = there.min(most).min(whole);
        Ok((at, side.span))
    }

    /// Has received the first `bytes` of what was borrowed; the rest comes again. EINVAL: nothing is borrowed, or less. ENODATA, on
    /// a socket that shares no memory: some of them are there no more, since another call received them through the descriptor.
    pub fn give_back(&self, bytes: usize) -> Result<()> {
        self.check()?;
        let mut side = self.receives.take_back(bytes)?;
        let Some(shared) = &self.shared else {
            let mut done = 0;
            while done < bytes {
                let to = side.buffer.as_mut_ptr();
                // SAFETY: the buffer has these bytes.
                match unsafe { plain::receive(self.anchor.0, &self.kept, to, bytes - done, MSG_DONTWAIT, None) } {
                    // MSG_PEEK has seen them, so who else has the descriptor took them. To ask again would not end.
                    Ok(0) | Err(Errno::AGAIN) => return Err(Errno::NODATA),
                    received => done += received?,
                }
            }
            return Ok(());
        };
        if bytes > 0 {
            side.position = side.position.after(bytes as u64);
            self.publish_consumed(shared, side.position);
            self.tell(shared, OUT);
        }
        Ok(())
    }

    fn check_span(&self, most: usize, flags: u32) -> Result<()> {
        if most == 0 || flags & !MSG_DONTWAIT != 0 {
            return Err(Errno::INVAL);
        }
        self.check()
    }
}
