//! LSEEK with SEEK_DATA and SEEK_HOLE: where a file has data is known below the mount, except for dirty pages.
//!
//! ```text
//!   no writer ─────────────────────────────> the file below knows, and the handler asks it
//!   a descriptor is open for writing ──> queue ──> a thread: INVAL, which writes dirty pages back ──> as above
//! ```
//!
//! A handler may not wait for INVAL, which waits for handlers of WRITE; so another thread does, and answers the request. It is
//! one for all files, since that is soon done, but for files with a page table, which may wait for a client or a device.
//!
//! The alternative, ENOSYS, means for the life of the mount that files have no holes: copies of sparse files are not.

use std::os::fd::AsFd;
use std::sync::{Arc, mpsc};

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use spinio_fuse::Connection;
use spinio_fuse::abi::{LseekIn, LseekOut};
use zerocopy::IntoBytes;

use crate::backing::Access;
use crate::clients::Clients;
use crate::files::Others;
use crate::report::report;
use crate::threads::spawn;

const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
/// To INVAL, a length of zero means to the end.
const WHOLE_FILE: std::ops::Range<u64> = 0..0;

/// A request that waits for INVAL.
#[derive(Clone, Debug)]
pub(crate) struct Seek {
    pub(crate) unique: u64,
    pub(crate) node: u64,
    pub(crate) args: LseekIn,
}

/// The thread's queue.
#[derive(Debug)]
pub(crate) struct Seeker(mpsc::Sender<Seek>);

impl Seeker {
    /// Starts the thread.
    pub(crate) fn start(connection: Arc<Connection>, all: Arc<Clients>) -> Result<Seeker, Errno> {
        let (sender, queue) = mpsc::channel::<Seek>();
        spawn("gaia-seek", move || {
            for seek in queue {
                // A file with a table may have bytes on their way, or a lease, and so may the WRITEs of its dirty pages: other
                // files do not wait for these.
                let may_wait = all.content.files().hold_now(seek.node).file().is_some();
                let (connection, all) = (connection.clone(), all.clone());
                let serve = move || serve(&connection, &all, &seek);
                if !may_wait || spawn("gaia-seek", serve.clone()).is_err() {
                    serve();
                }
            }
        })?;
        Ok(Seeker(sender))
    }

    /// The thread will answer it.
    pub(crate) fn answer(&self, seek: Seek) -> Result<(), Errno> {
        self.0.send(seek).map_err(|_| Errno::IO)
    }
}

/// Answers a request, and waits for all that it takes.
fn serve(connection: &Connection, all: &Clients, seek: &Seek) {
    let Seek { unique, node, args } = seek;
    all.kernel.invalidate(*node, std::slice::from_ref(&WHOLE_FILE));
    let sought = match self::seek(all, *node, args, Others::Wait) {
        // A lease.
        Err(Errno::AGAIN) => {
            let _ = all.backing.open_waiting(*node, Access::Write);
            self::seek(all, *node, args, Others::Wait)
        }
        sought => sought,
    };
    let sent = match sought {
        Ok(offset) => connection.reply(*unique, &[LseekOut { offset }.as_bytes()]),
        Err(error) => connection.reply_error(*unique, error),
    };
    if let Err(error) = sent
        && error != Errno::NODEV
    {
        report!("cannot answer a request for holes: {error}");
    }
}

/// What the file below the mount knows, after released pages were written to it.
pub(crate) fn seek(all: &Clients, node: u64, args: &LseekIn, others: Others) -> Result<u64, Errno> {
    let file = all.backing.open(node, Access::Read)?;
    let to = match args.whence {
        SEEK_DATA => SeekFrom::Data(args.offset),
        SEEK_HOLE => SeekFrom::Hole(args.offset),
        _ => return Err(Errno::INVAL),
    };
    all.content.write_out_node(node, others)?;
    // The position of the descriptor is not used: all reads name theirs.
    rustix::fs::seek(file.as_fd(), to)
}
