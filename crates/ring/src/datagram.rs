//! Datagrams in the rings of a socket: each is a record, and positions only ever lie between records.
//!
//! ```text
//!   w0  stored length 32 | address length 8 | flags 8 | errno 16
//!   w1  address, up to 16 bytes (IPv4)   w2  the same
//!   w3  length of the datagram 32: more than is stored if it was too long for the ring
//!   payload, padded to 16      then an address of more than 16 bytes (UNIX, IPv6), padded to 16
//! ```
//!
//! Records begin at multiples of 16, and go around the end of a ring. A record of the proxy with an errno has no payload: it
//! is an error of the socket, such as ECONNREFUSED, in its place among the datagrams.

use crate::layout::ADDRESS_BYTES;
use crate::stream::Violation;

/// Bytes before the payload.
pub const HEADER_BYTES: usize = 32;
/// The longest address that has its place in the header.
pub const SHORT_ADDRESS_BYTES: usize = 16;
/// Flag of a record to be sent: if it would have to wait, it fails with EAGAIN.
pub const DONTWAIT: u8 = 1;
/// The longest datagram of UDP over IPv4.
pub const LONGEST_UDP: usize = 65_507;
/// The same over IPv6, whose lengths do not count the header.
pub const LONGEST_UDP6: usize = 65_527;

/// What is before the payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// Bytes of payload in the record.
    pub stored: u32,
    /// Bytes of the address; 0: none.
    pub address_len: u8,
    /// [`DONTWAIT`]
    pub flags: u8,
    /// Of a record that is an error.
    pub errno: u16,
    /// A short address.
    pub address: [u64; 2],
    /// Bytes of the datagram.
    pub len: u32,
}

/// Bytes with their padding.
const fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(16)
}

impl Header {
    /// As words.
    pub fn words(&self) -> [u64; 4] {
        let w0 = u64::from(self.stored)
            | u64::from(self.address_len) << 32
            | u64::from(self.flags) << 40
            | u64::from(self.errno) << 48;
        [w0, self.address[0], self.address[1], self.len.into()]
    }

    /// Of words.
    pub fn of([w0, w1, w2, w3]: [u64; 4]) -> Header {
        Header {
            stored: w0 as u32,
            address_len: (w0 >> 32) as u8,
            flags: (w0 >> 40) as u8,
            errno: (w0 >> 48) as u16,
            address: [w1, w2],
            len: w3 as u32,
        }
    }

    /// Of the words of a kernel, which says that there are so many bytes.
    pub fn check(words: [u64; 4], pending: u64) -> Result<Header, Violation> {
        let header = Header::of(words);
        let fits = header.record_bytes() as u64 <= pending && usize::from(header.address_len) <= ADDRESS_BYTES;
        if fits { Ok(header) } else { Err(Violation) }
    }

    /// From the beginning of the record to a long address.
    pub const fn long_address_at(&self) -> usize {
        HEADER_BYTES + padded(self.stored as usize)
    }

    /// Words of a long address; none if it is short.
    pub const fn long_address_words(&self) -> usize {
        let len = self.address_len as usize;
        if len > SHORT_ADDRESS_BYTES { padded(len) / 8 } else { 0 }
    }

    /// Bytes of the record.
    pub const fn record_bytes(&self) -> usize {
        self.long_address_at() + self.long_address_words() * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_all_fields() {
        let header =
            Header { stored: 0x12_3456, address_len: 110, flags: 1, errno: 111, address: [3, u64::MAX], len: u32::MAX };
        assert_eq!(Header::of(header.words()), header);
    }

    #[test]
    fn records_are_padded_and_long_addresses_come_after_the_payload() {
        let record = |stored, address_len| Header { stored, address_len, ..Header::default() }.record_bytes();
        assert_eq!([record(0, 0), record(1, 16), record(16, 17), record(17, 110)], [32, 48, 80, 176]);
        assert!(record(LONGEST_UDP6 as u32, 28) <= 2 * 65536);
    }

    #[test]
    fn record_of_a_kernel_is_no_longer_than_its_doorbell_says() {
        let words = |stored, address_len| Header { stored, address_len, ..Header::default() }.words();
        assert!(Header::check(words(16, 0), 48).is_ok());
        for (stored, address_len) in [(17, 0), (16, 17), (u32::MAX, 255), (0, 113)] {
            assert_eq!(Header::check(words(stored, address_len), 48), Err(Violation));
        }
        assert_eq!(Header::check(words(0, 113), 4096), Err(Violation), "an address that no system has");
    }
}
