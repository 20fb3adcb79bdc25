//! Calls with an answer: socket, bind, listen, connect, shutdown, names; accept.rs has accept.
//!
//! Arguments come from kernels. A descriptor is looked up, an address goes to the Linux kernel as it is, and what that
//! says is the answer. Calls that wait are kept with their socket; each mailbox has at most one.

use spinio_ring::Word;
use spinio_ring::layout::Descriptor;
use spinio_ring::line::{CONNECTING, ERR};
use spinio_ring::mailbox::{Address, Call, DONTWAIT, Reply, Request};
use spinio_sys::linux::socket::{self, AF_UNIX, SocketAddress, is_inet};
use spinio_sys::{Errno, injection_point};

use super::Proxy;
use super::caller::Caller;
use super::sockets::{Connect, DGRAM, SEQPACKET, STREAM, State};

impl Proxy {
    pub(super) fn call(&mut self, request: Request, caller: Caller, now: u64) {
        self.counters.calls.add(1);
        self.pace.gave(now);
        if self.stopped {
            return self.answer(caller, Reply::new(-self.refusal.raw_os_error()));
        }
        let done = match request.call {
            Ok(Call::Socket) => self.socket(request.argument).map(|d| Reply::new(d.number())),
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
        self.answer(caller, done.unwrap_or_else(|errno| Reply::new(-errno.raw_os_error())));
    }

    fn socket(&mut self, argument: u32) -> Result<Descriptor, Errno> {
        let (domain, kind) = ((argument >> 16) as u16, argument & 0xffff);
        if domain != AF_UNIX && !is_inet(domain) {
            return Err(Errno::AFNOSUPPORT);
        }
        let kind = kind as u16;
        if !matches!(kind, STREAM | DGRAM | SEQPACKET) {
            return Err(Errno::SOCKTNOSUPPORT);
        }
        if !self.sockets.has_room(kind) {
            return Err(Errno::NOBUFS);
        }
        let fd = socket::new_socket(domain, kind)?;
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
        let fd = socket.fd.as_ref().map(|fd| fd.0).ok_or(Errno::CONNRESET)?;
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
                    let waits = socket.incoming.pending() > 0 && (kind == SEQPACKET || domain == AF_UNIX);
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

    fn connect(&mut self, request: &Request, caller: Caller, now: u64) {
        let descriptor = Descriptor::of(request.descriptor);
        let errno = match self.sockets.get(descriptor).filter(|socket| socket.closing.is_none()) {
            None => Errno::BADF,
            Some(socket) if socket.connect.is_some() => Errno::ALREADY,
            Some(socket) if socket.kind == DGRAM => {
                // At once, also again, and back to no address.
                let (bytes, len) = request.address.bytes();
                let fd = socket.fd.as_ref().map(|fd| fd.0);
                let done = fd.map_or(Err(Errno::CONNRESET), |fd| socket::connect(fd, &bytes[..len]));
                let result = done.map_or_else(|errno| -errno.raw_os_error(), |()| 0);
                return self.answer(caller, Reply::new(result));
            }
            Some(socket) => match socket.state {
                State::Connected | State::Upgraded => Errno::ISCONN,
                State::Listening => Errno::INVAL,
                State::Failed => Errno::CONNRESET,
                State::Unconnected | State::Connecting => {
                    let (bytes, len) = request.address.bytes();
                    socket.connect = Some(Connect { caller: Some(caller), to: bytes[..len].to_vec() });
                    socket.meeting.since = None;
                    if std::mem::take(&mut socket.connect_error) != 0 {
                        self.set_error(descriptor.index, Errno::NOTCONN.raw_os_error() as u16);
                    }
                    self.note_client(descriptor.index);
                    if !self.announce(descriptor.index, now) {
                        self.connect_again(descriptor.index, now);
                    }
                    if request.flags & DONTWAIT != 0 {
                        self.connect_later(descriptor.index);
                    }
                    return;
                }
            },
        };
        self.answer(caller, Reply::new(-errno.raw_os_error()));
    }

    /// A call of connect does not wait: it returns, if the connection is not there yet.
    fn connect_later(&mut self, index: u32) {
        let Some(socket) = self.sockets.at(index).filter(|socket| socket.kind == STREAM) else { return };
        let Some(caller) = socket.connect.as_mut().and_then(|connect| connect.caller.take()) else { return };
        // Neither an error nor room, until it is connected or has failed.
        (socket.errno, socket.flags) = (CONNECTING, socket.flags & !ERR);
        let line = self.memory.device_line(index);
        line[0].store_release(socket.outgoing.line(socket.flags).word());
        line[1].store_release(socket.incoming.line(socket.errno).word());
        self.answer(caller, Reply::new(-Errno::INPROGRESS.raw_os_error()));
    }

    /// The connection is there, or has failed: answers the call, or tells those that look at the socket later.
    pub(super) fn end_connect(&mut self, index: u32, connect: Option<Connect>, errno: i32) {
        let Some(connect) = connect else { return };
        if let Some(caller) = connect.caller {
            return self.answer(caller, Reply::new(-errno));
        }
        let Some(socket) = self.sockets.at(index) else { return };
        socket.connect_error = errno as u16;
        socket.tells_connected = socket.meeting.end.as_ref().is_some_and(|end| !end.place.shared);
        if errno != 0 {
            self.set_error(index, errno as u16);
        }
        // Not told at once: accept of this net may come here, and has counted the room for its own event.
        self.heat(index);
    }

    /// Begins to connect, or tries once more where a listener's backlog was full.
    pub(super) fn connect_again(&mut self, index: u32, now: u64) {
        if self.stopped || self.waits_for_welcome(index) {
            return;
        }
        let Some(socket) = self.sockets.at(index) else { return };
        let (Some(fd), Some(connect)) = (socket.fd.as_ref().map(|fd| fd.0), &socket.connect) else { return };
        // After an attempt that failed, Linux says so once more, where nothing has asked connect(2) how it ended.
        let again = |errno| if errno == Errno::CONNABORTED { socket::connect(fd, &connect.to) } else { Err(errno) };
        match socket::connect(fd, &connect.to).or_else(again) {
            Ok(()) => self.connected(index, 0, now),
            Err(Errno::INPROGRESS | Errno::INTR) => socket.state = State::Connecting,
            Err(Errno::AGAIN) => self.postpone(index),
            Err(errno) => self.connected(index, errno.raw_os_error(), now),
        }
    }

    /// An event came while it was connecting.
    pub(super) fn finish_connect(&mut self, index: u32, now: u64) {
        if self.stopped {
            return;
        }
        let Some(fd) = self.sockets.at(index).and_then(|socket| socket.fd.as_ref().map(|fd| fd.0)) else { return };
        match socket::take_error(fd) {
            Ok(0) if socket::getpeername(fd).is_ok() => self.connected(index, 0, now),
            Ok(0) => {}
            Ok(errno) => self.connected(index, errno, now),
            Err(errno) => self.connected(index, errno.raw_os_error(), now),
        }
    }

    fn connected(&mut self, index: u32, errno: i32, now: u64) {
        if errno == 0 && self.waits_for_go(index) {
            injection_point!("connecting net: connected");
            if let Some(socket) = self.sockets.at(index) {
                socket.state = State::Connecting;
            }
            return;
        }
        if errno == 0 && self.meet(index, now) {
            return self.pace.gave(now);
        }
        if errno != 0 {
            self.forget_announced(index);
        }
        let Some(socket) = self.sockets.at(index) else { return };
        let connect = socket.connect.take();
        socket.state = if errno == 0 { State::Connected } else { State::Unconnected };
        if errno == 0 {
            if let Some(fd) = socket.fd.as_ref().filter(|_| is_inet(socket.domain)) {
                let _ = socket::no_delay(fd.0);
            }
            socket.readable = true;
            socket.writable = true;
            self.set_error(index, 0);
            self.counters.connected.add(1);
            self.heat(index);
        }
        self.end_connect(index, connect, errno);
        self.pace.gave(now);
    }
}

pub(super) fn with_address(result: i32, address: &SocketAddress) -> Reply {
    Reply { result, address: Address::new(address.bytes()) }
}
