//! Requests: from the bytes that the kernel sends to a typed value that borrows from them.
//!
//! ```text
//!   InHeader (40 bytes) │ structure of the operation │ name\0 ... or data │ extensions
//! ```
//!
//! Parsing is a pure function of the bytes: every length is checked, and no input panics. An operation that this
//! version does not know is [`Operation::Unknown`], to be answered with ENOSYS.

use std::ffi::CStr;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{self, InHeader, opcode};

/// A request.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Number, node, and the caller's identity.
    pub header: InHeader,
    /// What is asked.
    pub operation: Operation<'a>,
    /// The group of the directory, if the request makes a name in it and the caller has this group besides its own.
    pub group: Option<u32>,
}

/// The bytes are not a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Malformed;

/// What a request asks.
#[derive(Clone, Copy, Debug)]
#[expect(missing_docs, reason = "named after the operations in fuse.h, their structures and names")]
pub enum Operation<'a> {
    Lookup {
        name: &'a CStr,
    },
    Forget {
        lookups: u64,
    },
    BatchForget(Forgets<'a>),
    Getattr(abi::GetattrIn),
    /// Since Linux 6.6, where a program asks for the birth time.
    Statx(abi::StatxIn),
    Setattr(abi::SetattrIn),
    Readlink,
    Symlink {
        name: &'a CStr,
        target: &'a CStr,
    },
    Mknod {
        args: abi::MknodIn,
        name: &'a CStr,
    },
    Mkdir {
        args: abi::MkdirIn,
        name: &'a CStr,
    },
    Unlink {
        name: &'a CStr,
    },
    Rmdir {
        name: &'a CStr,
    },
    /// RENAME (flags 0) and RENAME2.
    Rename {
        name: &'a CStr,
        new_parent: u64,
        new_name: &'a CStr,
        flags: u32,
    },
    Link {
        args: abi::LinkIn,
        name: &'a CStr,
    },
    Open(abi::OpenIn),
    Create {
        args: abi::CreateIn,
        name: &'a CStr,
    },
    Tmpfile {
        args: abi::CreateIn,
    },
    Read(abi::ReadIn),
    Write {
        args: abi::WriteIn,
        data: &'a [u8],
    },
    Statfs,
    Release(abi::ReleaseIn),
    Flush(abi::FlushIn),
    Fsync(abi::FsyncIn),
    Setxattr {
        flags: u32,
        name: &'a CStr,
        value: &'a [u8],
    },
    Getxattr {
        size: u32,
        name: &'a CStr,
    },
    Listxattr {
        size: u32,
    },
    Removexattr {
        name: &'a CStr,
    },
    Init {
        args: abi::InitIn,
        flags2: u32,
    },
    Opendir(abi::OpenIn),
    Readdir(abi::ReadIn),
    Readdirplus(abi::ReadIn),
    Releasedir(abi::ReleaseIn),
    Fsyncdir(abi::FsyncIn),
    Access(abi::AccessIn),
    Interrupt {
        unique: u64,
    },
    Destroy,
    Ioctl {
        args: abi::IoctlIn,
        data: &'a [u8],
    },
    Fallocate(abi::FallocateIn),
    Lseek(abi::LseekIn),
    CopyFileRange(abi::CopyFileRangeIn),
    Unknown(u32),
}

/// The nodes of a BATCH_FORGET.
#[derive(Clone, Copy, Debug)]
pub struct Forgets<'a>(&'a [u8]);

impl Iterator for Forgets<'_> {
    type Item = abi::ForgetOne;

    fn next(&mut self) -> Option<abi::ForgetOne> {
        let (one, rest) = abi::ForgetOne::read_from_prefix(self.0).ok()?;
        self.0 = rest;
        Some(one)
    }
}

/// What is left to parse.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take<T: FromBytes + Immutable + KnownLayout>(&mut self) -> Result<T, Malformed> {
        let (value, rest) = T::read_from_prefix(self.0).map_err(|_| Malformed)?;
        self.0 = rest;
        Ok(value)
    }

    fn name(&mut self) -> Result<&'a CStr, Malformed> {
        let name = CStr::from_bytes_until_nul(self.0).map_err(|_| Malformed)?;
        self.0 = &self.0[name.count_bytes() + 1..];
        Ok(name)
    }

    /// A name of a directory entry: one component, which is not the directory itself.
    fn entry(&mut self) -> Result<&'a CStr, Malformed> {
        let name = self.name()?;
        let bytes = name.to_bytes();
        if bytes.is_empty() || bytes == b"." || bytes == b".." || bytes.contains(&b'/') {
            Err(Malformed)
        } else {
            Ok(name)
        }
    }

    fn bytes(&mut self, count: u32) -> Result<&'a [u8], Malformed> {
        let (bytes, rest) = self.0.split_at_checked(count as usize).ok_or(Malformed)?;
        self.0 = rest;
        Ok(bytes)
    }
}

impl<'a> Request<'a> {
    /// Parses the bytes of one request.
    ///
    /// # Errors
    /// [`Malformed`] if a length, a name or the end does not fit.
    pub fn parse(bytes: &'a [u8]) -> Result<Request<'a>, Malformed> {
        let (header, rest) = InHeader::read_from_prefix(bytes).map_err(|_| Malformed)?;
        let end = rest.len().checked_sub(usize::from(header.extensions) * 8).ok_or(Malformed)?;
        if header.len as usize != bytes.len() {
            return Err(Malformed);
        }
        let (body, extensions) = rest.split_at(end);
        Ok(Request { header, operation: Operation::parse(header.opcode, Rest(body))?, group: group(extensions) })
    }

    /// The bytes of a FORGET of one node, as of a BATCH_FORGET. It has no number, since it gets no reply.
    pub fn forget(one: abi::ForgetOne) -> Vec<u8> {
        let len = size_of::<InHeader>() + size_of::<abi::ForgetIn>();
        let header = InHeader { len: len as u32, opcode: opcode::FORGET, node: one.node, ..InHeader::default() };
        [header.as_bytes(), abi::ForgetIn { lookups: one.lookups }.as_bytes()].concat()
    }

    /// The number of the request, the same when it is sent again.
    pub fn id(&self) -> u64 {
        self.header.unique & !abi::UNIQUE_RESEND
    }

    /// Whether it was sent before.
    pub fn is_resent(&self) -> bool {
        self.header.unique & abi::UNIQUE_RESEND != 0
    }
}

/// The first supplementary group in the extensions; the kernel sends one at most.
fn group(mut extensions: &[u8]) -> Option<u32> {
    loop {
        let (header, body) = abi::ExtHeader::read_from_prefix(extensions).ok()?;
        if header.kind == abi::EXT_GROUPS {
            let (groups, list) = abi::SuppGroups::read_from_prefix(body).ok()?;
            return (groups.count > 0).then(|| u32::read_from_prefix(list).ok().map(|(group, _)| group))?;
        }
        // Each begins at a multiple of 8 bytes; one without a length would be read for ever.
        let size = (header.size as usize).checked_next_multiple_of(8).filter(|size| *size > 0)?;
        extensions = extensions.get(size..)?;
    }
}

impl<'a> Operation<'a> {
    fn parse(code: u32, mut rest: Rest<'a>) -> Result<Operation<'a>, Malformed> {
        use Operation as O;
        Ok(match code {
            opcode::LOOKUP => O::Lookup { name: rest.entry()? },
            opcode::FORGET => O::Forget { lookups: rest.take::<abi::ForgetIn>()?.lookups },
            opcode::BATCH_FORGET => {
                let count = rest.take::<abi::BatchForgetIn>()?.count;
                O::BatchForget(Forgets(rest.bytes(count.checked_mul(16).ok_or(Malformed)?)?))
            }
            opcode::GETATTR => O::Getattr(rest.take()?),
            opcode::STATX => O::Statx(rest.take()?),
            opcode::SETATTR => O::Setattr(rest.take()?),
            opcode::READLINK => O::Readlink,
            opcode::SYMLINK => O::Symlink { name: rest.entry()?, target: rest.name()? },
            opcode::MKNOD => O::Mknod { args: rest.take()?, name: rest.entry()? },
            opcode::MKDIR => O::Mkdir { args: rest.take()?, name: rest.entry()? },
            opcode::UNLINK => O::Unlink { name: rest.entry()? },
            opcode::RMDIR => O::Rmdir { name: rest.entry()? },
            opcode::RENAME => {
                let new_parent = rest.take::<abi::RenameIn>()?.new_parent;
                O::Rename { name: rest.entry()?, new_parent, new_name: rest.entry()?, flags: 0 }
            }
            opcode::RENAME2 => {
                let abi::Rename2In { new_parent, flags, .. } = rest.take()?;
                O::Rename { name: rest.entry()?, new_parent, new_name: rest.entry()?, flags }
            }
            opcode::LINK => O::Link { args: rest.take()?, name: rest.entry()? },
            opcode::OPEN => O::Open(rest.take()?),
            opcode::CREATE => O::Create { args: rest.take()?, name: rest.entry()? },
            opcode::TMPFILE => O::Tmpfile { args: rest.take()? },
            opcode::READ => O::Read(rest.take()?),
            opcode::WRITE => {
                let args: abi::WriteIn = rest.take()?;
                O::Write { args, data: rest.bytes(args.size)? }
            }
            opcode::STATFS => O::Statfs,
            opcode::RELEASE => O::Release(rest.take()?),
            opcode::FLUSH => O::Flush(rest.take()?),
            opcode::FSYNC => O::Fsync(rest.take()?),
            opcode::SETXATTR => {
                let args: abi::SetxattrIn = rest.take()?;
                O::Setxattr { flags: args.flags, name: rest.name()?, value: rest.bytes(args.size)? }
            }
            opcode::GETXATTR => O::Getxattr { size: rest.take::<abi::GetxattrIn>()?.size, name: rest.name()? },
            opcode::LISTXATTR => O::Listxattr { size: rest.take::<abi::GetxattrIn>()?.size },
            opcode::REMOVEXATTR => O::Removexattr { name: rest.name()? },
            opcode::INIT => {
                let args = rest.take()?;
                O::Init { args, flags2: rest.take::<abi::InitInRest>().map_or(0, |r| r.flags2) }
            }
            opcode::OPENDIR => O::Opendir(rest.take()?),
            opcode::READDIR => O::Readdir(rest.take()?),
            opcode::READDIRPLUS => O::Readdirplus(rest.take()?),
            opcode::RELEASEDIR => O::Releasedir(rest.take()?),
            opcode::FSYNCDIR => O::Fsyncdir(rest.take()?),
            opcode::ACCESS => O::Access(rest.take()?),
            opcode::INTERRUPT => O::Interrupt { unique: rest.take::<abi::InterruptIn>()?.unique },
            opcode::DESTROY => O::Destroy,
            opcode::IOCTL => {
                let args: abi::IoctlIn = rest.take()?;
                O::Ioctl { args, data: rest.bytes(args.in_size)? }
            }
            opcode::FALLOCATE => O::Fallocate(rest.take()?),
            opcode::LSEEK => O::Lseek(rest.take()?),
            opcode::COPY_FILE_RANGE => O::CopyFileRange(rest.take()?),
            unknown => O::Unknown(unknown),
        })
    }

    /// Whether the kernel awaits no reply.
    pub fn has_no_reply(&self) -> bool {
        matches!(self, Operation::Forget { .. } | Operation::BatchForget(_))
    }
}
