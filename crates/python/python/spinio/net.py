"""Sockets that GPU kernels call: GPUnet, the host's side.

    import spinio, cupy

    with spinio.net.open() as net:
        listener = net.listen("tcp://127.0.0.1:8080")
        stream = net.runs_on(cupy.cuda.Stream(non_blocking=True))
        with stream:
            echo((4,), (128,), (net.handle.numpy(), listener))     # a kernel that calls spinio::net::accept ...
        net.wait()                                                 # until Ctrl-C, which stops the net

Kernels include <spinio/net.h>, from the folder spinio.include(). docs/gpunet.md explains their calls, and examples/net/cupy is
a whole program.

    Net.stop() ──> every call of a kernel returns -ESHUTDOWN ──> the kernels end ──> close(): synchronizes with their
                                                                                     streams, and frees the memory

The functions are those of spinio_net.h, called through the runtime of the process and not by ctypes in libspinio.so: so this
module and a preloaded library share one runtime, a wheel needs no second library in the process, and the calls release the
GIL. Kernels of the emulated GPU are linked with libspinio.so, whose emulated GPU must be the one of the net: load it before
`import spinio`, as `spinio run` does.

Known flaws: a call waits up to 5 ms for the next look of the net's thread (idle_us). Ctrl-C waits for the end of a call, which
is long for a `connect` that nothing answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import operator
import os
import select
import socket
import threading
import time
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spinio import _file, _spinio

if TYPE_CHECKING:
    from spinio._spinio import _NetStats

__all__ = ["Handle", "Net", "open"]

_DEFAULT_RING = 65536
# NVRTC, which compiles CuPy's kernels, puts Python's handler of SIGINT back with SA_RESTART (NVRTC 13.0): after that Ctrl-C ends
# no wait that has no limit, but is seen when a wait with a limit is over.
_LOOK_EVERY = 0.5


class _Synchronizes(Protocol):
    def synchronize(self) -> Any: ...


_S = TypeVar("_S", bound=_Synchronizes)


class Handle(ctypes.Structure):
    """The argument of kernels, by value: spinio::net::Handle on the device. 64 bytes.

    ctypes passes it as it is. CuPy's RawKernel takes `handle.numpy()`; `bytes(handle)` is for others.
    """

    _fields_ = [("opaque", ctypes.c_uint64 * 8)]

    def numpy(self) -> Any:
        """A NumPy array of one element of 64 bytes, which CuPy passes by value."""
        import numpy

        return numpy.frombuffer(bytes(self), "V64")


def open(
    device: Any = None,
    *,
    files_root: str | bytes | os.PathLike[Any] | None = None,
    files_write: bool = False,
    files: int = 0,
    sockets: int = 0,
    connections: int = 0,
    ring_bytes: int = 0,
    idle_us: int = 0,
    upgrade: bool = True,
    shared_connections: int = 0,
    threads: int = 0,
) -> Net:
    """Opens a net, the network stack of one device in this process; a context manager that stops and closes it.

    device: "cuda:0", which must be in use on this thread (with CuPy: cupy.cuda.Device(0).use(), and any allocation), or
    "emulated"; by default the device in use and, without one, the emulated one. If there is a GPU that is not in use yet, the
    default is ENODEV, unless SPINIO_EMULATED is set.

    files_root: kernels may open the files below this directory, "/" for all that the process may open; by default none.
    files_write: they may write them too. files: at a time (default 64, at most 256).

    0 is the default of the numbers. sockets: at a time (1024, at most 65536). connections: pairs of rings (256). ring_bytes: of
    each direction, a power of two from 4096 to 4 MiB (65536, and 1 MiB in device memory of other nets). idle_us: the longest
    sleep of the net's thread in microseconds (5000). upgrade=False: all connections go through Linux. shared_connections: those
    that programs and other nets make to this one and that do not (a quarter of all, at most 32, or 16 MiB; at most 512).
    threads: that make the system calls of streams (SPINIO_NET_THREADS, or a quarter of the processors, at most 4; at most 64).

    All memory is made here: 37 MiB of pinned host memory with the defaults (2 more with files_root), and 18 MiB of the device. Errors are an OSError:
    EINVAL for options, ENODEV for a device that is not in use, ENOMEM, ENOTSUP if the device has no virtual memory management,
    and those of opening files_root.
    """
    return Net(
        _spinio.Net(
            _file.device_name(device, "device with sockets"),
            operator.index(sockets),
            operator.index(connections),
            operator.index(ring_bytes),
            operator.index(idle_us),
            bool(upgrade),
            None if files_root is None else os.fsdecode(files_root),
            bool(files_write),
            operator.index(files),
            operator.index(shared_connections),
            operator.index(threads),
        ),
        operator.index(ring_bytes) or _DEFAULT_RING,
    )


class Net:
    """The network stack of a device; a context manager that closes.

    Sockets and event sets are numbers, arguments of kernels. Any thread may call the methods at any time. An error is an
    OSError with errno and a sentence: ESHUTDOWN after `stop`, ENODEV in a forked child. A closed net is a ValueError.

    A net that is dropped, or is open when the program ends, is stopped, so that its kernels end. Its memory is then given
    back with the process.
    """

    def __init__(self, net: _spinio.Net, ring_bytes: int) -> None:
        self._net, self._ring_bytes = net, ring_bytes
        self._streams: list[_Synchronizes] = []
        self._stopped = threading.Event()
        # At exit too: a kernel that waits would let the driver's own handlers wait forever.
        self._at_end = weakref.finalize(self, _stop, net)

    @property
    def handle(self) -> Handle:
        """What a kernel takes as its argument, by value."""
        return Handle.from_buffer_copy(self._net.handle())

    def listen(self, address: str, backlog: int = 128) -> int:
        """Makes a listening socket for kernels: its number.

        Addresses are tcp://127.0.0.1:8080, tcp://[::1]:8080, unix:///PATH and unix:@NAME (abstract). With port 0 the system
        chooses one, which `address` tells. Errors: EINVAL for an address, ENAMETOOLONG, and those of bind and listen.
        """
        return self._net.listen(address, operator.index(backlog))

    def connect(self, address: str) -> int:
        """Makes a connected socket for kernels: its number. Errors: EINVAL, ENAMETOOLONG, and those of connect."""
        return self._net.connect(address)

    def adopt(self, sock: socket.socket) -> int:
        """Moves a socket of the program to the kernels: its number there.

        It is connected, or listens, or is a datagram socket; TCP, UDP or UNIX. The Python socket is closed, and kernels
        receive what the program has not read. After an error it is as before: ENOTCONN, EAFNOSUPPORT, EPROTONOSUPPORT, ENOBUFS
        if all rings are in use, EPERM or ENOSYS if a sandbox refuses pidfd_getfd. A socket with TLS is a ValueError: kernels
        would get the encrypted bytes.
        """
        if hasattr(sock, "unwrap"):
            raise ValueError("a socket with TLS cannot move to a kernel")
        number = self._net.adopt(sock.fileno())
        sock.close()
        return number

    def release(self, s: int) -> tuple[socket.socket, bytes]:
        """Takes a socket from the kernels: a Python socket, and bytes that arrived and no kernel has received.

        The bytes come before what the Python socket receives. What kernels have sent leaves before; if the peer does not take
        it within a second, or datagrams were not received by a kernel, it fails with EBUSY and the socket stays with the
        kernels. No kernel may use the socket any more: one that calls net::release() has ended its use. EBADF: no such
        socket. EOPNOTSUPP: its bytes do not go through Linux.
        """
        fd, unread = self._net.release(operator.index(s), self._ring_bytes)
        return socket.socket(fileno=fd), unread

    def set(self) -> int:
        """Makes an event set, for kernels to wait on: its number. ENOBUFS: there are 16 already."""
        return self._net.set()

    def add(self, set: int, s: int, events: int = select.POLLIN) -> None:
        """Puts a socket into an event set and arms it; a socket is in one set at most.

        events: select.POLLIN, select.POLLOUT, select.POLLRDHUP; 0 takes it out. A listening socket gives its connections to
        the set. EBADF: no such set or socket. EINVAL: other events.
        """
        self._net.add(operator.index(set), operator.index(s), operator.index(events))

    def address(self, s: int) -> str:
        """The address of a socket: "tcp://127.0.0.1:40123" after a port 0."""
        return self._net.address(operator.index(s))

    def stats(self) -> _NetStats:
        """What the net has done: connections, bytes, calls; docs/gpunet.md explains the names."""
        return self._net.stats()

    def runs_on(self, stream: _S) -> _S:
        """Tells that kernels of this net run on a stream, which it returns: `close` waits for the stream after the stop.

        Any object with `synchronize()`: a stream of CuPy or PyTorch, or spinio.emulated.Stream. It must be a non-blocking
        stream: a copy on CUDA's default stream waits for the kernels on all others.
        """
        if not callable(getattr(stream, "synchronize", None)):
            raise TypeError(f"{stream!r} is no stream: it has no synchronize()")
        self._streams.append(stream)
        return stream

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until `stop` was called, by any thread; False if `timeout` seconds are over before.

        Ctrl-C stops the net, and is raised: wait here and not in a stream's synchronize(), which no signal interrupts.
        """
        end = math.inf if timeout is None else time.monotonic() + timeout
        try:
            while not self._stopped.wait(min(_LOOK_EVERY, end - time.monotonic())):
                if time.monotonic() >= end:
                    return False
            return True
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends the net for kernels: all their calls return -ESHUTDOWN, those that wait as well.

        It waits for no kernel. Bytes that arrived before can be received, and what was sent before is sent.
        """
        self._net.stop()
        self._stopped.set()

    def close(self) -> None:
        """Stops the net, waits for the streams of `runs_on`, sends what is left (at most a second) and frees the memory.

        All kernels of the net must have ended, or end on these streams. Nothing happens to a net that is closed. EBUSY: a file
        system does not answer a read of a kernel, and the memory is kept.
        """
        if not self._at_end.alive:
            return
        self.stop()
        for stream in self._streams:
            stream.synchronize()
        self._at_end.detach()
        self._streams.clear()
        self._net.close()

    def __enter__(self) -> Net:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _stop(net: _spinio.Net) -> None:
    with contextlib.suppress(ValueError, OSError):
        net.stop()
