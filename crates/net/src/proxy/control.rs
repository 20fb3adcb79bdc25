//! Calls with an answer: socket, bind, listen, shutdown, names; connect.rs and accept.rs have those that wait.
//!
//! Arguments come from kernels. A descriptor is looked up, an address goes to the Linux kernel as it is, and what that
//! says is the answer. Calls that wait are kept with their socket; each mailbox has at most one.

use spinio_ring::layout::Descriptor;
use spinio_ring::mailbox::{Address, Call, Reply, Request};
use spinio_sys::Errno;
use spinio_sys::linux::socket::{self, AF_UNIX, SocketAddress, is_inet};

use super::Proxy;
use super::caller::{Caller, failed};
use super::sockets::{DGRAM, SEQPACKET, STREAM, State};

impl Proxy {
    pub(super) fn call(&mut self, request: Request, caller: Caller, now: u64) {
        self.counters.calls.add(1);
        self.pace.gave(now);
        if self.stopped {
            return self.answer(caller, failed(self.refusal));
        }
        let done = match request.call {
            Ok(Call::Socket) => self.socket(request.argument, now).map(|d| Reply::new(d.number())),
            Ok(Call::Set) => self.make_set().map(Reply::new),
            // Only a kernel can arm an end of a connection inside the net: it has to look at device memory.
            Ok(Call::Add) if matches!(caller, Caller::Host(_)) && self.is_end(request.descriptor) => {
                Err(Errno::OPNOTSUPP)
            }
            Ok(Call::Add) => self.watch(&request).map(|()| Reply::new(0)),
            Ok(Call::Accept) => return self.accept(&request, caller, now),
            Ok(Call::Connect) => return self.connect(&request, caller, now),
            Ok(Call::SendFile) => return self.send_file(&request, caller, now),
            Ok(Call::SetOption) => self.set_option(&request),
            Ok(Call::GetOption) => self.get_option(&request),
            Ok(call) if call as u8 >= Call::OpenFile as u8 => return self.file_call(call, &request, caller),
            Ok(call) => self.call_on_socket(call, &request),
            Err(_) => {
                self.counters.violations.add(1);
                Err(Errno::NOSYS)
            }
        };
        self.answer(caller, done.unwrap_or_else(failed));
    }

    /// Answers a call.
    pub(super) fn answer(&mut self, caller: Caller, reply: Reply) {
        match caller {
            Caller::Mailbox { mailbox, number, .. } => {
                self.waiting[mailbox as usize] = false;
                reply.store(self.memory.mailbox(mailbox).1, number);
            }
            Caller::Host(sender) => {
                let _ = sender.try_send(reply);
            }
        }
    }

    /// Answers the calls that wait for something on a socket.
    pub(super) fn cancel_calls(&mut self, index: u32, errno: Errno) {
        let Some(socket) = self.sockets.at(index) else { return };
        let mut callers: Vec<Caller> = socket.accepts.drain(..).map(|accept| accept.caller).collect();
        callers.extend(socket.connect.take().and_then(|connect| connect.caller));
        for caller in callers {
            self.answer(caller, failed(errno));
        }
        self.cancel_transfers(index, errno);
    }

    fn socket(&mut self, argument: u32, now: u64) -> Result<Descriptor, Errno> {
        let (domain, kind) = ((argument >> 16) as u16, argument & 0xffff);
        if domain != AF_UNIX && !is_inet(domain) {
            return Err(Errno::AFNOSUPPORT);
        }
        let kind = kind as u16;
        if !matches!(kind, STREAM | DGRAM | SEQPACKET) {
            return Err(Errno::SOCKTNOSUPPORT);
        }
        if !self.make_room(kind, now) {
            return Err(Errno::NOBUFS);
        }
        let fd = self.with_room(now, |_| socket::new_socket(domain, kind))?;
        if is_inet(domain) && kind == STREAM {
            let _ = socket::reuse_address(fd);
        }
        // Datagrams go without a connection.
        let state = if kind == DGRAM { State::Connected } else { State::Unconnected };
        self.add(fd, domain, kind, state)
    }

    /// A call that is answered at once.
    fn call_on_socket(&mut self, call: Call, request: &Request) -> Result<Reply, Errno> {
        let descriptor = Descriptor::of(request.descriptor);
        let index = descriptor.index;
        let socket = self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()).ok_or(Errno::BADF)?;
        let (state, kind, domain) = (socket.state, socket.kind, socket.domain);
        let (unnamed, end) = (socket.meeting.unnamed, socket.meeting.end.is_some());
        let fd = socket.raw_fd().ok_or(Errno::CONNRESET)?;
        match call {
            Call::Bind => {
                let (bytes, len) = request.address.bytes();
                socket::bind(fd, &bytes[..len])?;
            }
            Call::Listen => {
                if kind == DGRAM {
                    return Err(Errno::OPNOTSUPP);
                }
                if !matches!(state, State::Unconnected | State::Listening) || socket.connect.is_some() {
                    return Err(Errno::INVAL);
                }
                socket::listen(fd, request.argument)?;
                socket.state = State::Listening;
                self.sockets.free_rings(index);
                self.note_listener(index, request.argument);
            }
            Call::Shutdown => {
                if request.argument > 2 {
                    return Err(Errno::INVAL);
                }
                if kind == STREAM && !matches!(state, State::Connected | State::Upgraded) {
                    return Err(Errno::NOTCONN);
                }
                if kind != STREAM {
                    // Datagrams whose sends have returned go first. Without a connection that is an error at once.
                    let waits = socket.send_ring.pending() > 0 && (kind == SEQPACKET || domain == AF_UNIX);
                    socket.shut |= waits && request.argument != 0;
                    match request.argument {
                        1 if waits => {}
                        2 if waits => socket::shutdown(fd, 0)?,
                        how => socket::shutdown(fd, how)?,
                    }
                    if request.argument != 1 {
                        (socket.shut_receive, socket.readable) = (true, true);
                    }
                    self.heat(index);
                    return Ok(Reply::new(0));
                }
                if socket.meeting.end.as_ref().is_some_and(|end| end.place.shared) {
                    // Kernels end the stream in the granule. The end of the connection of Linux is that of a process.
                    return Ok(Reply::new(0));
                }
                if request.argument != 1 {
                    socket::shutdown(fd, 0)?;
                    socket.readable = true;
                }
                if state == State::Upgraded {
                    // Kernels end the stream. It may have ended before.
                    let _ = if request.argument != 0 { socket::shutdown(fd, 1) } else { Ok(()) };
                } else {
                    socket.shut |= request.argument != 0;
                }
                self.heat(index);
            }
            Call::SocketName if unnamed => return Ok(with_address(0, &SocketAddress::unnamed_unix())),
            Call::SocketName => return Ok(with_address(0, &socket::getsockname(fd)?)),
            Call::PeerName => {
                let name = socket::getpeername(fd)?;
                let unnamed = end && domain == AF_UNIX && self.peer_is_unnamed(index);
                return Ok(with_address(0, &if unnamed { SocketAddress::unnamed_unix() } else { name }));
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(Reply::new(0))
    }
}

pub(super) fn with_address(result: i32, address: &SocketAddress) -> Reply {
    Reply { result, address: Address::new(address.bytes()) }
}
