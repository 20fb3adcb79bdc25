//! Addresses as text: `tcp://127.0.0.1:8080`, `tcp://[::1]:8080`, `unix:///tmp/socket`, `unix:@name` (abstract).

use std::fmt;
use std::net::{Ipv6Addr, SocketAddr, SocketAddrV6};

use spinio_sys::Errno;
use spinio_sys::linux::socket::{AF_INET, AF_INET6, AF_UNIX};

use crate::{Error, Result};

/// The most bytes of a path in `struct sockaddr_un`.
const PATH_BYTES: usize = 108;

/// A socket address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetAddress {
    bytes: Vec<u8>,
}

impl NetAddress {
    /// Parses a text.
    pub fn parse(text: &str) -> Result<NetAddress> {
        if let Some(rest) = text.strip_prefix("tcp://") {
            let address: SocketAddr = rest.parse().map_err(|_| {
                let right = "tcp://127.0.0.1:8080 or tcp://[::1]:8080";
                Error::new(Errno::INVAL, format!("\"{text}\" has no IP address and port, as {right}"))
            })?;
            return Ok(NetAddress { bytes: bytes_of(address) });
        }
        let Some(path) = text.strip_prefix("unix://").or_else(|| text.strip_prefix("unix:")) else {
            let sentence = format!("\"{text}\" is no address: tcp://ADDRESS:PORT, unix:///PATH or unix:@NAME");
            return Err(Error::new(Errno::INVAL, sentence));
        };
        let mut bytes = AF_UNIX.to_ne_bytes().to_vec();
        match path.strip_prefix('@') {
            Some(name) => {
                bytes.push(0);
                bytes.extend(name.as_bytes());
            }
            None => {
                bytes.extend(path.as_bytes());
                bytes.push(0);
            }
        }
        if path.is_empty() || path.contains('\0') || bytes.len() > 2 + PATH_BYTES {
            let sentence = format!("\"{text}\" has no path of 1 to 107 bytes");
            return Err(Error::new(if path.is_empty() { Errno::INVAL } else { Errno::NAMETOOLONG }, sentence));
        }
        Ok(NetAddress { bytes })
    }

    /// Of the Linux kernel's bytes.
    pub fn of(bytes: &[u8]) -> NetAddress {
        NetAddress { bytes: bytes.to_vec() }
    }

    /// The Linux kernel's bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Its family.
    pub fn family(&self) -> u16 {
        self.bytes.first_chunk().map_or(0, |family| u16::from_ne_bytes(*family))
    }
}

/// As the Linux kernel has it.
fn bytes_of(address: SocketAddr) -> Vec<u8> {
    let family = if address.is_ipv4() { AF_INET } else { AF_INET6 };
    let mut bytes = family.to_ne_bytes().to_vec();
    bytes.extend(address.port().to_be_bytes());
    match address {
        SocketAddr::V4(address) => {
            bytes.extend(address.ip().octets());
            bytes.extend([0; 8]);
        }
        SocketAddr::V6(address) => {
            bytes.extend(address.flowinfo().to_be_bytes());
            bytes.extend(address.ip().octets());
            bytes.extend(address.scope_id().to_ne_bytes());
        }
    }
    bytes
}

impl fmt::Display for NetAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.family(), &self.bytes[..]) {
            (AF_INET, [_, _, p0, p1, a, b, c, d, ..]) => {
                write!(f, "tcp://{a}.{b}.{c}.{d}:{}", u16::from_be_bytes([*p0, *p1]))
            }
            (AF_INET6, [_, _, p0, p1, _, _, _, _, rest @ ..]) if rest.len() >= 16 => {
                let octets = rest.first_chunk().map_or([0; 16], |octets: &[u8; 16]| *octets);
                let scope = rest[16..].first_chunk().map_or(0, |scope| u32::from_ne_bytes(*scope));
                let port = u16::from_be_bytes([*p0, *p1]);
                write!(f, "tcp://{}", SocketAddrV6::new(Ipv6Addr::from(octets), port, 0, scope))
            }
            (AF_UNIX, [_, _, 0, name @ ..]) => write!(f, "unix:@{}", String::from_utf8_lossy(name)),
            (AF_UNIX, [_, _, path @ ..]) => {
                let path = path.split(|b| *b == 0).next().unwrap_or_default();
                write!(f, "unix://{}", String::from_utf8_lossy(path))
            }
            (family, _) => write!(f, "an address of family {family}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_a_round_trip() {
        let six = ["tcp://[::1]:8080", "tcp://[2001:db8::2:1]:1", "tcp://[fe80::1%3]:65535", "tcp://[::]:0"];
        for text in
            six.into_iter().chain(["tcp://127.0.0.1:8080", "unix:///tmp/a socket", "unix:@name", "unix://relative"])
        {
            assert_eq!(NetAddress::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(NetAddress::parse("tcp://1.2.3.4:258").unwrap().bytes()[..8], [2, 0, 1, 2, 1, 2, 3, 4]);
        let long = NetAddress::parse("tcp://[102::f]:258").unwrap();
        assert_eq!((long.bytes().len(), &long.bytes()[..10]), (28, &[10, 0, 1, 2, 0, 0, 0, 0, 1, 2][..]));
        assert_eq!(NetAddress::of(&long.bytes()[..20]).to_string(), "an address of family 10", "it is cut");
    }

    #[test]
    fn bad_addresses_get_an_errno_and_a_sentence() {
        for text in [
            "",
            "127.0.0.1:80",
            "tcp://localhost:80",
            "tcp://1.2.3.4",
            "tcp://::1:80",
            "tcp://[::1]",
            "unix:",
            "udp://1.2.3.4:5",
        ] {
            let error = NetAddress::parse(text).unwrap_err();
            assert_eq!(error.errno, Errno::INVAL, "{text}");
            assert!(error.to_string().contains(text));
        }
        let long = format!("unix://{}", "x".repeat(108));
        assert_eq!(NetAddress::parse(&long).unwrap_err().errno, Errno::NAMETOOLONG);
        assert!(NetAddress::parse(&long[..long.len() - 1]).is_ok());
    }
}
