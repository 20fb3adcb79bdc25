//! A FUSE file system of files in memory, served by a separate process.
//!
//! ```text
//!   test ── read ──> Linux: fuse ── request ──> /dev/fuse ──> serve(): a file is a vector
//! ```
//!
//! A read of a file whose name begins with `hang` is never answered. The server ends when a file named `end` is looked
//! up: then the kernel fails the requests that wait for it.
//!
//! A separate process, because a server in the process that it serves can wait for itself. It implements just enough of
//! the protocol (version 7.31) to create, read, write, truncate and remove files in one directory; other requests are
//! answered with ENOSYS, as the protocol requires. It ends when the file system is unmounted, or with the test.

#![expect(unsafe_code, reason = "C calls of tests")]

use std::collections::{HashMap, HashSet};
use std::ffi::CString;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::deadline::TIMEOUT;

const ROOT: u64 = 1;
const MAX_WRITE: u32 = 128 << 10;
const IN_HEADER: usize = 40;
const FOREVER: u64 = 3600;

/// Mounts the file system on an empty directory.
pub(crate) fn mount(dir: &Path) -> Result<(), String> {
    let target = CString::new(dir.as_os_str().as_encoded_bytes()).map_err(|e| e.to_string())?;
    let before = device_of(dir);
    // SAFETY: the child only makes system calls and uses memory of its own, then ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let ended = serve(&target);
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(ended.err().unwrap_or(0)) };
    }
    let deadline = Instant::now() + TIMEOUT;
    while device_of(dir) == before {
        let mut status = 0;
        // SAFETY: asks about our own child.
        if unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } != 0 {
            return Err(format!("mount: {}", std::io::Error::from_raw_os_error(libc::WEXITSTATUS(status))));
        }
        if Instant::now() > deadline {
            return Err("mount: no answer".to_owned());
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn device_of(path: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata(path).ok().map(|m| m.dev())
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

/// Mounts and serves until unmounted.
fn serve(target: &CString) -> Result<(), i32> {
    // SAFETY: no memory is involved; descriptors of the tests must not stay open here.
    let fuse = unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
        libc::open(c"/dev/fuse".as_ptr(), libc::O_RDWR)
    };
    if fuse < 0 {
        return Err(errno());
    }
    let data = format!("fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other,default_permissions");
    let data = CString::new(data).map_err(|_| libc::EINVAL)?;
    let (name, flags) = (c"fuse".as_ptr(), libc::MS_NOSUID | libc::MS_NODEV);
    // SAFETY: all strings live across the call.
    if unsafe { libc::mount(name, target.as_ptr(), name, flags, data.as_ptr().cast()) } != 0 {
        return Err(errno());
    }
    let mut files = Files::default();
    let mut request = vec![0u8; MAX_WRITE as usize + (64 << 10)];
    loop {
        // SAFETY: `request` has as many bytes as the call is given.
        let got = unsafe { libc::read(fuse, request.as_mut_ptr().cast(), request.len()) };
        match got {
            0.. => {}
            _ if matches!(errno(), libc::EINTR | libc::ENOENT | libc::EAGAIN) => continue,
            // Unmounted.
            _ => return Ok(()),
        }
        let request = &request[..got as usize];
        if read_u32(request, 4) == 1 && request.get(IN_HEADER..).is_some_and(|body| body.starts_with(b"end\0")) {
            return Ok(());
        }
        let Some(answer) = files.answer(request) else { continue };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(errno) => (-errno, Vec::new()),
        };
        let mut reply = Vec::with_capacity(16 + body.len());
        reply.extend((16 + body.len() as u32).to_ne_bytes());
        reply.extend(error.to_ne_bytes());
        reply.extend_from_slice(&request[8..16]);
        reply.extend(body);
        // SAFETY: `reply` lives across the call. A request that was interrupted takes no answer.
        unsafe { libc::write(fuse, reply.as_ptr().cast(), reply.len()) };
    }
}

/// The files: numbers by name, and bytes by number.
#[derive(Default)]
struct Files {
    names: HashMap<Vec<u8>, u64>,
    bytes: HashMap<u64, Vec<u8>>,
    /// Files whose reads are not answered.
    hanging: HashSet<u64>,
    last: u64,
}

type Answer = Result<Vec<u8>, i32>;

/// Words of a reply, one after another.
#[derive(Default)]
struct Words(Vec<u8>);

impl Words {
    fn u64s(mut self, words: &[u64]) -> Words {
        self.0.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
        self
    }

    fn u32s(mut self, words: &[u32]) -> Words {
        self.0.extend(words.iter().flat_map(|w| w.to_ne_bytes()));
        self
    }
}

fn read_u64(body: &[u8], at: usize) -> u64 {
    body.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_ne_bytes)
}

fn read_u32(body: &[u8], at: usize) -> u32 {
    body.get(at..at + 4).and_then(|b| b.try_into().ok()).map_or(0, u32::from_ne_bytes)
}

/// A name that ends in a NUL.
fn name(body: &[u8]) -> Vec<u8> {
    body.split(|&b| b == 0).next().unwrap_or_default().to_vec()
}

impl Files {
    /// `None` for requests without an answer.
    fn answer(&mut self, request: &[u8]) -> Option<Answer> {
        let (opcode, node, body) = (read_u32(request, 4), read_u64(request, 16), request.get(IN_HEADER..)?);
        Some(match opcode {
            // FORGET, INTERRUPT, BATCH_FORGET
            2 | 36 | 42 => return None,
            // LOOKUP
            1 => self.names.get(&name(body)).copied().ok_or(libc::ENOENT).and_then(|id| self.entry(id)),
            // GETATTR
            3 => self.attributes(node),
            // SETATTR
            4 => {
                const SIZE: u32 = 1 << 3;
                if read_u32(body, 0) & SIZE != 0
                    && let Some(bytes) = self.bytes.get_mut(&node)
                {
                    bytes.resize(read_u64(body, 16) as usize, 0);
                }
                self.attributes(node)
            }
            // UNLINK: open files keep their bytes.
            10 => self.names.remove(&name(body)).map(|_| Vec::new()).ok_or(libc::ENOENT),
            // OPEN, OPENDIR
            14 | 27 => Ok(Words::default().u64s(&[0, 0]).0),
            // READ
            15 if self.hanging.contains(&node) => return None,
            15 => self.bytes.get(&node).ok_or(libc::ENOENT).map(|bytes| {
                let from = (read_u64(body, 8) as usize).min(bytes.len());
                let to = (from + read_u32(body, 16) as usize).min(bytes.len());
                bytes[from..to].to_vec()
            }),
            // WRITE
            16 => {
                let (from, len) = (read_u64(body, 8) as usize, read_u32(body, 16) as usize);
                match (self.bytes.get_mut(&node), body.get(40..40 + len)) {
                    (Some(bytes), Some(data)) => {
                        bytes.resize(bytes.len().max(from + len), 0);
                        bytes[from..from + len].copy_from_slice(data);
                        Ok(Words::default().u32s(&[len as u32, 0]).0)
                    }
                    _ => Err(libc::EIO),
                }
            }
            // STATFS
            17 => Ok(Words::default()
                .u64s(&[1 << 20, 1 << 20, 1 << 20, 1000, 1000])
                .u32s(&[4096, 255, 4096])
                .u32s(&[0; 7])
                .0),
            // RELEASE, FSYNC, FLUSH, RELEASEDIR
            18 | 20 | 25 | 29 => Ok(Vec::new()),
            // INIT
            26 => {
                const BIG_WRITES: u32 = 1 << 5;
                let limits = [16 | 12 << 16, MAX_WRITE, 1, 0];
                Ok(Words::default().u32s(&[7, 31, read_u32(body, 8), BIG_WRITES]).u32s(&limits).u32s(&[0; 8]).0)
            }
            // READDIR: an empty directory.
            28 => Ok(Vec::new()),
            // CREATE
            35 => {
                self.last += 1;
                let id = ROOT + self.last;
                self.names.insert(name(body.get(16..)?), id);
                self.bytes.insert(id, Vec::new());
                if name(body.get(16..)?).starts_with(b"hang") {
                    self.hanging.insert(id);
                }
                self.entry(id).map(|mut entry| {
                    entry.extend(Words::default().u64s(&[0, 0]).0);
                    entry
                })
            }
            _ => Err(libc::ENOSYS),
        })
    }

    fn entry(&self, id: u64) -> Answer {
        let head = Words::default().u64s(&[id, 0, FOREVER, self.attributes_valid(id)]).u32s(&[0, 0]);
        Ok(self.attribute(head, id)?.0)
    }

    fn attributes(&self, id: u64) -> Answer {
        Ok(self.attribute(Words::default().u64s(&[self.attributes_valid(id), 0]), id)?.0)
    }

    /// Seconds for which the kernel may answer `fstat` by itself. Of files that hang it asks each time, as it does of
    /// most servers after a second: then `fstat` fails once the server has ended.
    fn attributes_valid(&self, id: u64) -> u64 {
        if self.hanging.contains(&id) { 0 } else { FOREVER }
    }

    fn attribute(&self, head: Words, id: u64) -> Result<Words, i32> {
        let (size, mode) = match self.bytes.get(&id) {
            _ if id == ROOT => (0, libc::S_IFDIR | 0o777),
            Some(bytes) => (bytes.len() as u64, libc::S_IFREG | 0o666),
            None => return Err(libc::ENOENT),
        };
        let head = head.u64s(&[id, size, size.div_ceil(512), 0, 0, 0]);
        Ok(head.u32s(&[0, 0, 0, mode, 1, 0, 0, 0, 4096, 0]))
    }
}
