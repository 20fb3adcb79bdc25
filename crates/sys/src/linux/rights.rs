//! Descriptors that come with the bytes of a UNIX socket, all of them: the Linux kernel closes what has no room in the buffer or in the
//! table within the call, which then waits as long as their close(2) does. The buffer has room for as many as a message has.

use rustix::io::Errno;

use super::files::Fd;
use super::socket::{SOL_SOCKET, set_option};

type Result<T> = core::result::Result<T, Errno>;

const SCM_RIGHTS: i32 = 1;
const SCM_PIDFD: i32 = 4;
const SO_PASSRIGHTS: u16 = 83;
/// 253 descriptors, the most of a message, and what else a socket may have asked for: credentials, a label, times.
const BUFFER_WORDS: usize = 256;
/// Bytes of `struct cmsghdr`.
const HEADER: usize = 16;

/// Refuses descriptors from the peer, or takes them again; EINVAL, ENOPROTOOPT: before Linux 6.16 a socket always takes them.
pub fn pass_rights(fd: Fd, on: bool) -> Result<()> {
    set_option(fd, SOL_SOCKET, SO_PASSRIGHTS, on.into())
}

/// Whether a socket takes descriptors.
pub fn passes_rights(fd: Fd) -> bool {
    super::socket::option(fd, SOL_SOCKET, SO_PASSRIGHTS) != Ok(0)
}

/// What came beside the bytes of a message.
#[derive(Debug)]
pub struct Rights {
    words: [u64; BUFFER_WORDS],
    len: usize,
}

impl Default for Rights {
    fn default() -> Rights {
        Rights { words: [0; BUFFER_WORDS], len: 0 }
    }
}

impl Rights {
    pub(super) fn buffer(&mut self) -> (usize, usize) {
        self.len = 0;
        (self.words.as_mut_ptr() as usize, size_of_val(&self.words))
    }

    pub(super) fn filled(&mut self, len: usize) {
        self.len = len.min(size_of_val(&self.words));
    }

    /// Calls `take` once for each descriptor, which is open in this table now. What is not taken stays open.
    pub fn take(&mut self, mut take: impl FnMut(Fd)) {
        let end = std::mem::take(&mut self.len);
        let mut at = 0;
        while at + HEADER <= end {
            let (len, what) = (self.words[at / 8] as usize, self.words[at / 8 + 1]);
            if len < HEADER || at + len > end {
                break;
            }
            let is_socket_level = what as u32 == u32::from(SOL_SOCKET);
            if is_socket_level && matches!((what >> 32) as i32, SCM_RIGHTS | SCM_PIDFD) {
                for fd in (at + HEADER..at + len).step_by(4).filter(|fd| fd + 4 <= at + len) {
                    take((self.words[fd / 8] >> (fd % 8 * 8)) as u32 as Fd);
                }
            }
            at += len.next_multiple_of(8);
        }
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "system calls and driver entry points")]
mod tests {
    use super::*;
    use crate::linux::channel::send_packet;
    use crate::linux::close;
    use crate::linux::datagram::recv_with_rights;
    use crate::linux::socket_move::Passage;

    #[test]
    fn descriptors_come_with_bytes_and_can_be_refused() {
        let passage = Passage::new().unwrap();
        let (mut rights, mut byte) = (Rights::default(), 0_u8);
        let mut receive = |rights: &mut Rights| {
            // SAFETY: the byte lives across the call.
            unsafe { recv_with_rights(passage.inner, &raw mut byte, 1, rights) }
        };
        let mut got = Vec::new();
        send_packet(passage.outer, b"a", Some(passage.outer)).unwrap();
        send_packet(passage.outer, b"b", None).unwrap();
        assert_eq!(receive(&mut rights), Ok(1));
        rights.take(|fd| got.push(fd));
        assert_eq!(got.len(), 1);
        close(got[0]).unwrap();
        assert_eq!(receive(&mut rights), Ok(1));
        rights.take(|_| unreachable!("there is none"));
        if pass_rights(passage.inner, false).is_ok() {
            assert!(!passes_rights(passage.inner));
            assert_eq!(send_packet(passage.outer, b"a", Some(passage.outer)), Err(Errno::PERM));
            pass_rights(passage.inner, true).unwrap();
        }
        assert!(passes_rights(passage.inner));
    }
}
