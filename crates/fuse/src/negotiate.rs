//! INIT: which facilities kernel and server use. Once per mount; the result is stored, and a server that attaches later
//! needs no INIT.
//!
//! ```text
//!   wanted: WRITEBACK_CACHE (CPU stores and mmap share one cache, POSIX)   not wanted: AUTO_INVAL_DATA, ATOMIC_O_TRUNC
//!           HAS_RESEND (a new server gets the requests of a dead one)                  EXPORT_SUPPORT
//!           POSIX_ACL (the kernel checks them), and DONT_MASK: a default ACL replaces the umask
//!           requests of 1 MiB, parallel directory operations, READDIRPLUS
//! ```

use rustix::io::Errno;
use zerocopy::IntoBytes;

use crate::abi::{InitOut, init};
use crate::connection::{Connection, Received};
use crate::request::{Operation, Request};

/// Data of one READ or WRITE at most.
pub const MAX_WRITE: u32 = 1 << 20;
/// Bytes of a buffer that holds every request.
pub const REQUEST_BYTES: usize = MAX_WRITE as usize + 4096;

const MAX_PAGES: u16 = (MAX_WRITE / 4096) as u16;
/// Asynchronous requests in flight: read-ahead and write-back.
const MAX_BACKGROUND: u16 = 64;
const CONGESTION: u16 = 48;

const MAJOR: u32 = 7;
/// Linux 5.4: the first that has all that is required here.
const MINOR_MIN: u32 = 31;
/// Structures of later versions are the same for the operations in use.
const MINOR_MAX: u32 = 45;

/// Linux 6.16: the first in which a page is under write-back until the server has answered its WRITE. Before, the kernel
/// copied the page, and INVAL and `sync_file_range` waited for the copy only. No flag says so: it is inferred from the minor
/// version of that release, which came with another change. A kernel with only one of the two is taken for what it is not.
const MINOR_WRITEBACK_WAITS: u32 = 44;

const REQUIRED: u64 = init::WRITEBACK_CACHE | init::BIG_WRITES | init::MAX_PAGES;
const WANTED: u64 = REQUIRED
    | init::ASYNC_READ
    | init::ASYNC_DIO
    | init::PARALLEL_DIROPS
    | init::DO_READDIRPLUS
    | init::READDIRPLUS_AUTO
    | init::CACHE_SYMLINKS
    | init::HANDLE_KILLPRIV_V2
    | init::POSIX_ACL
    | init::DONT_MASK
    | init::INIT_EXT
    | init::CREATE_SUPP_GROUP
    | init::HAS_RESEND;

/// What was agreed: plain data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Minor version of the protocol.
    pub minor: u32,
    /// Data of one WRITE at most.
    pub max_write: u32,
    /// Read-ahead, in bytes.
    pub max_readahead: u32,
    /// Flags of [`init`] in use.
    pub flags: u64,
}

impl Negotiated {
    /// Words to store.
    pub fn to_words(self) -> [u64; 4] {
        [self.minor.into(), self.max_write.into(), self.max_readahead.into(), self.flags]
    }

    /// From stored words; `None` if [`Negotiated::to_words`] did not make them.
    pub fn from_words(words: [u64; 4]) -> Option<Negotiated> {
        let [minor, max_write, max_readahead] = [words[0], words[1], words[2]].map(|w| u32::try_from(w).ok());
        let made = Negotiated { minor: minor?, max_write: max_write?, max_readahead: max_readahead?, flags: words[3] };
        (made.minor >= MINOR_MIN && made.max_write > 0).then_some(made)
    }

    /// Whether INVAL and `sync_file_range` wait until the server has answered the WRITE of a dirty page.
    pub fn waits_for_writeback(&self) -> bool {
        self.minor >= MINOR_WRITEBACK_WAITS
    }

    /// Whether requests can be sent again to a new server.
    pub fn has_resend(&self) -> bool {
        self.flags & init::HAS_RESEND != 0
    }
}

/// Why there is no agreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// A system call failed.
    System(Errno),
    /// The kernel lacks something; in words.
    Kernel(String),
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Refusal::System(error) => write!(f, "the FUSE handshake failed: {error}"),
            Refusal::Kernel(words) => f.write_str(words),
        }
    }
}

impl std::error::Error for Refusal {}

/// Answers the INIT of a new mount.
///
/// # Errors
/// [`Refusal`]; the mount is then of no use.
pub fn negotiate(connection: &Connection) -> Result<Negotiated, Refusal> {
    let mut buffer = vec![0; REQUEST_BYTES];
    loop {
        let len = match connection.receive(&mut buffer).map_err(Refusal::System)? {
            Received::Request(len) => len,
            Received::Nothing => continue,
            Received::Unmounted => return Err(Refusal::System(Errno::NODEV)),
        };
        let request = Request::parse(&buffer[..len]).map_err(|_| Refusal::System(Errno::PROTO))?;
        let Operation::Init { args, flags2 } = request.operation else {
            return Err(Refusal::System(Errno::PROTO));
        };
        if args.major != MAJOR || args.minor < MINOR_MIN {
            let _ = connection.reply_error(request.header.unique, Errno::PROTO);
            let words = format!("the kernel has FUSE {}.{}, 7.{MINOR_MIN} is needed", args.major, args.minor);
            return Err(Refusal::Kernel(words));
        }
        let offered = u64::from(args.flags) | if has(args.flags, init::INIT_EXT) { u64::from(flags2) << 32 } else { 0 };
        if offered & REQUIRED != REQUIRED {
            let _ = connection.reply_error(request.header.unique, Errno::PROTO);
            return Err(Refusal::Kernel(format!(
                "FUSE of this kernel lacks facilities: flags {:x}",
                REQUIRED & !offered
            )));
        }
        let flags = offered & WANTED;
        let minor = args.minor.min(MINOR_MAX);
        let out = InitOut {
            major: MAJOR,
            minor,
            max_readahead: args.max_readahead,
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
            max_background: MAX_BACKGROUND,
            congestion_threshold: CONGESTION,
            max_write: MAX_WRITE,
            time_granularity: 1,
            max_pages: MAX_PAGES,
            ..InitOut::default()
        };
        connection.reply(request.header.unique, &[out.as_bytes()]).map_err(Refusal::System)?;
        return Ok(Negotiated { minor, max_write: MAX_WRITE, max_readahead: args.max_readahead, flags });
    }
}

fn has(flags: u32, flag: u64) -> bool {
    u64::from(flags) & flag != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writeback_waits_from_7_44_on() {
        let of = |minor| Negotiated { minor, max_write: MAX_WRITE, max_readahead: 0, flags: REQUIRED };
        assert!(!of(MINOR_MIN).waits_for_writeback() && !of(43).waits_for_writeback());
        assert!(of(44).waits_for_writeback() && of(MINOR_MAX).waits_for_writeback());
        assert_eq!(Negotiated::from_words(of(44).to_words()), Some(of(44)));
    }
}
