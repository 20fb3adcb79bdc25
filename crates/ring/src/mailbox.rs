//! Mailboxes: calls that need an answer, such as bind and accept.
//!
//! ```text
//!   request, written by a kernel   w0: call 8 | address length 8 | flags 16 | number 32     w1: descriptor 32 | argument 32
//!   reply, written by the proxy    w0: result 32 | number 32                                w1: address length
//!   in both                        w2-w15: a socket address; of accept and of calls for files: numbers
//! ```
//!
//! A kernel claims a mailbox in device memory, stores its request with the next number, rings the doorbell, and waits until
//! the reply has that number. It keeps the mailbox until then.

use crate::Word;
use crate::layout::ADDRESS_BYTES;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Call {
    /// Argument: domain 16, type 16.
    Socket = 1,
    /// With an address.
    Bind = 2,
    /// Argument: backlog.
    Listen = 3,
    /// Argument: the block, for people. Number: nanoseconds or 0. Waits for so long at most, unless flags have [`DONTWAIT`]; the
    /// reply has the peer's address.
    Accept = 4,
    /// With an address; argument: the block, for people. Waits, unless flags have [`DONTWAIT`].
    Connect = 5,
    /// Argument: how.
    Shutdown = 6,
    /// The reply has the address.
    SocketName = 7,
    /// The reply has the address.
    PeerName = 8,
    /// Argument: level 16, option 16. With the value instead of an address.
    SetOption = 9,
    /// Argument: level 16, option 16. The reply has the value instead of an address.
    GetOption = 10,
    /// A new event set: the reply has its number.
    Set = 16,
    /// Argument: set 16, events 16. Puts a socket into a set, or takes it out.
    Add = 17,
    /// Descriptor: the file buffer with the path. Argument: flags of open(2). Number: mode.
    OpenFile = 32,
    /// Descriptor: a file.
    CloseFile = 33,
    /// Descriptor: a file. Argument: the file buffer. Numbers: offset, bytes. Waits.
    ReadFile = 34,
    /// The same, from the buffer into the file.
    WriteFile = 35,
    /// Descriptor: a file. The reply has its size, mode, time of modification in nanoseconds, inode and device.
    StatFile = 36,
    /// Argument: a file. Numbers: offset, bytes, nanoseconds or 0; the reply has the bytes sent. Waits.
    SendFile = 37,
}

/// Flag: the call does not wait.
pub const DONTWAIT: u16 = 1;

const WORDS: usize = ADDRESS_BYTES / 8;

/// A socket address as the kernel of the operating system knows it, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address {
    len: u8,
    words: [u64; WORDS],
}

impl Address {
    /// None.
    pub const EMPTY: Address = Address { len: 0, words: [0; WORDS] };

    /// Of bytes; those after the most that a mailbox has room for are left out.
    pub fn new(bytes: &[u8]) -> Address {
        let mut all = [0; ADDRESS_BYTES];
        let len = bytes.len().min(ADDRESS_BYTES);
        all[..len].copy_from_slice(&bytes[..len]);
        let words = std::array::from_fn(|i| u64::from_le_bytes(std::array::from_fn(|b| all[i * 8 + b])));
        Address { len: len as u8, words }
    }

    /// Of words, and how many bytes of them count.
    pub const fn of_words(words: [u64; WORDS], len: u8) -> Address {
        Address { len, words }
    }

    /// Its words.
    pub const fn words(&self) -> [u64; WORDS] {
        self.words
    }

    /// Its bytes, and how many of them count.
    pub fn bytes(&self) -> ([u8; ADDRESS_BYTES], usize) {
        let all = std::array::from_fn(|i| self.words[i / 8].to_le_bytes()[i % 8]);
        (all, (self.len as usize).min(ADDRESS_BYTES))
    }
}

/// A request, copied out of its mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What is asked for; the number as it came if it is no [`Call`].
    pub call: Result<Call, u8>,
    /// [`DONTWAIT`]
    pub flags: u16,
    /// Of this use of the mailbox.
    pub number: u32,
    /// A descriptor.
    pub descriptor: u32,
    /// As the call needs it.
    pub argument: u32,
    /// Of bind and connect.
    pub address: Address,
    /// Of connect, whose mailbox has no room for it: nanoseconds, 0: none. It comes with the doorbell.
    pub time_limit: u64,
}

/// A reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// >= 0 or -errno.
    pub result: i32,
    /// Of accept and the names.
    pub address: Address,
}

impl Request {
    /// Stores it. The doorbell publishes it.
    pub fn store<W: Word>(&self, request: &[W]) {
        let call = self.call.map_or_else(u64::from, |call| call as u64);
        for (word, value) in request[2..].iter().zip(self.address.words) {
            word.store_release(value);
        }
        request[1].store_release(u64::from(self.descriptor) | u64::from(self.argument) << 32);
        let length = u64::from(self.address.len) << 8;
        request[0].store_release(call | length | u64::from(self.flags) << 16 | u64::from(self.number) << 32);
    }

    /// Copies it, each word once.
    pub fn load<W: Word>(request: &[W]) -> Request {
        let (w0, w1) = (request[0].load_acquire(), request[1].load_acquire());
        let call = match w0 as u8 {
            1 => Ok(Call::Socket),
            2 => Ok(Call::Bind),
            3 => Ok(Call::Listen),
            4 => Ok(Call::Accept),
            5 => Ok(Call::Connect),
            6 => Ok(Call::Shutdown),
            7 => Ok(Call::SocketName),
            8 => Ok(Call::PeerName),
            9 => Ok(Call::SetOption),
            10 => Ok(Call::GetOption),
            16 => Ok(Call::Set),
            17 => Ok(Call::Add),
            32 => Ok(Call::OpenFile),
            33 => Ok(Call::CloseFile),
            34 => Ok(Call::ReadFile),
            35 => Ok(Call::WriteFile),
            36 => Ok(Call::StatFile),
            37 => Ok(Call::SendFile),
            other => Err(other),
        };
        let words = std::array::from_fn(|i| request[2 + i].load_acquire());
        Request {
            call,
            flags: (w0 >> 16) as u16,
            number: (w0 >> 32) as u32,
            descriptor: w1 as u32,
            argument: (w1 >> 32) as u32,
            address: Address { len: (w0 >> 8) as u8, words },
            time_limit: 0,
        }
    }
}

impl Reply {
    /// Without an address.
    pub const fn new(result: i32) -> Reply {
        Reply { result, address: Address::EMPTY }
    }

    /// With numbers instead of an address.
    pub fn with_numbers<const N: usize>(result: i32, numbers: [u64; N]) -> Reply {
        let words = std::array::from_fn(|i| numbers.get(i).copied().unwrap_or(0));
        Reply { result, address: Address::of_words(words, 0) }
    }

    /// Stores the reply to the request of this number.
    pub fn store<W: Word>(&self, reply: &[W], number: u32) {
        for (word, value) in reply[2..].iter().zip(self.address.words) {
            word.store_release(value);
        }
        reply[1].store_release(self.address.len.into());
        reply[0].store_release(u64::from(self.result as u32) | u64::from(number) << 32);
    }

    /// The reply to the request of this number, once it is there.
    pub fn load<W: Word>(reply: &[W], number: u32) -> Option<Reply> {
        let w0 = reply[0].load_acquire();
        if (w0 >> 32) as u32 != number {
            return None;
        }
        let len = reply[1].load_acquire() as u8;
        let words = std::array::from_fn(|i| reply[2 + i].load_acquire());
        Some(Reply { result: w0 as u32 as i32, address: Address { len, words } })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use super::*;

    #[test]
    fn request_and_reply_keep_all_fields() {
        let words: Vec<AtomicU64> = (0..32).map(|_| AtomicU64::new(0)).collect();
        let (request, reply) = words.split_at(16);
        let bytes: Vec<u8> = (1..=110).collect();
        let asked = Request {
            call: Ok(Call::Connect),
            flags: DONTWAIT,
            number: u32::MAX,
            descriptor: 0x7fff_ffff,
            argument: 5,
            address: Address::new(&bytes),
            time_limit: 0,
        };
        asked.store(request);
        assert_eq!(Request::load(request), asked);
        let (all, len) = asked.address.bytes();
        assert_eq!(all[..len], bytes);
        let answer = Reply { result: -111, address: Address::new(b"abc") };
        answer.store(reply, 7);
        assert_eq!(Reply::load(reply, 8), None);
        assert_eq!(Reply::load(reply, 7), Some(answer));
    }

    #[test]
    fn length_beyond_the_mailbox_is_cut() {
        let words: Vec<AtomicU64> = (0..16).map(|_| AtomicU64::new(u64::MAX)).collect();
        let request = Request::load(&words);
        assert_eq!((request.call, request.address.bytes().1), (Err(255), ADDRESS_BYTES));
    }
}
