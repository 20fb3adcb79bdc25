"""Sockets of kernels: the host's side here, and kernels of the emulated GPU against Python's own sockets.

Kernels are built by the C++ compiler from net_kernels.cpp with the installed headers, and launched by ctypes, in processes
that have loaded libspinio.so: its emulated GPU runs them.
"""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import select
import shutil
import socket
import subprocess
import sys
import textwrap
import threading

import pytest

import spinio

LIBRARY = os.environ.get("SPINIO_LIBRARY")
# A hang becomes a failure.
SECONDS = 300


@pytest.fixture
def net():
    with spinio.net.open("emulated") as net:
        yield net


def raises(number):
    """A block that must raise an OSError of this errno, with a sentence."""
    return pytest.raises(OSError, check=lambda e: e.errno == number and bool(e.strerror))


# ---- without kernels


def test_handle_is_what_kernels_take(net):
    handle = net.handle
    assert len(bytes(handle)) == 64 and any(handle.opaque) and bytes(net.handle) == bytes(handle)
    numpy = pytest.importorskip("numpy")
    array = handle.numpy()
    assert isinstance(array, numpy.ndarray) and (array.size, array.nbytes) == (1, 64) and array.tobytes() == bytes(handle)


def test_addresses(net, tmp_path):
    at = net.address(net.listen("tcp://127.0.0.1:0"))
    assert at.startswith("tcp://127.0.0.1:") and not at.endswith(":0")
    with raises(errno.EADDRINUSE):
        net.listen(at)
    path = tmp_path / "socket"
    assert net.address(net.listen(f"unix://{path}", backlog=1)) == f"unix://{path}"
    assert path.is_socket()
    for wrong in ("", "http://127.0.0.1:80", "tcp://127.0.0.1", "tcp://127.0.0.1:65536"):
        with raises(errno.EINVAL):
            net.listen(wrong)
    with raises(errno.EBADF):
        net.address(12345)
    assert net.stats()["open"] == 2


def test_connect_reaches_a_python_socket(net):
    with socket.create_server(("127.0.0.1", 0)) as server:
        s = net.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        peer, at = server.accept()
        with peer:
            assert net.address(s) == f"tcp://127.0.0.1:{at[1]}" and net.stats()["connected"] == 1
            port = server.getsockname()[1]
    with raises(errno.ECONNREFUSED):
        net.connect(f"tcp://127.0.0.1:{port}")


def test_socket_moves_to_kernels_and_back(net):
    ours, peer = socket.socketpair()
    with peer:
        peer.sendall(b"unread")
        s = net.adopt(ours)
        assert ours.fileno() == -1
        back, unread = net.release(s)
        with back:
            assert back.family == socket.AF_UNIX and back.getblocking()
            peer.sendall(b", later")
            peer.shutdown(socket.SHUT_WR)
            # How much had arrived is a matter of time. No byte is lost, and none comes twice.
            received = unread + back.makefile("rb").read()
            assert received == b"unread, later"
            back.sendall(b"answer")
            assert peer.recv(100) == b"answer"
    with raises(errno.EBADF):
        net.release(s)


def test_socket_that_is_refused_stays(net):
    with socket.socket() as unconnected:
        with raises(errno.ENOTCONN):
            net.adopt(unconnected)
        assert unconnected.fileno() >= 0
        unconnected.bind(("127.0.0.1", 0))
    with raises(errno.EBADF):
        net.adopt(unconnected)
    ssl = pytest.importorskip("ssl")
    context = ssl.create_default_context()
    with context.wrap_socket(socket.socket(), server_hostname="localhost") as encrypted:
        with pytest.raises(ValueError, match="TLS"):
            net.adopt(encrypted)


def test_event_sets(net):
    listener, sets = net.listen("tcp://127.0.0.1:0"), [net.set() for _ in range(16)]
    assert len(set(sets)) == 16
    with raises(errno.ENOBUFS):
        net.set()
    net.add(sets[3], listener, select.POLLIN | select.POLLRDHUP)
    net.add(sets[3], listener, 0)
    for set_, s, events, number in (
        (sets[0], 4711, select.POLLIN, errno.EBADF),
        (999, listener, select.POLLIN, errno.EBADF),
        (sets[0], listener, 1 << 20, errno.EINVAL),
    ):
        with raises(number):
            net.add(set_, s, events)


def test_options(tmp_path):
    for options in ({"ring_bytes": 5000}, {"sockets": 1 << 17}, {"files_root": tmp_path, "files": 1000}):
        with raises(errno.EINVAL):
            spinio.net.open("emulated", **options)
    with raises(errno.ENOENT):
        spinio.net.open("emulated", files_root=tmp_path / "absent")
    with raises(errno.ENODEV):
        spinio.net.open("cuda:7")
    with pytest.raises(ValueError, match="tpu"):
        spinio.net.open("tpu")
    with pytest.raises(OverflowError):
        spinio.net.open("emulated", sockets=-1)
    with pytest.raises(TypeError):
        spinio.net.open("emulated", sockets="many")


def test_closed_net_is_a_value_error():
    net = spinio.net.open("emulated")
    net.close()
    net.close()
    for call in (net.stop, net.stats, net.set, lambda: net.handle, lambda: net.listen("tcp://127.0.0.1:0")):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_stop_ends_waiting_threads(net):
    assert net.wait(0.01) is False
    waited = []
    thread = threading.Thread(target=lambda: waited.append(net.wait(SECONDS)))
    thread.start()
    net.stop()
    thread.join(SECONDS)
    assert waited == [True]
    net.stop()


def test_close_waits_for_streams_after_the_stop():
    with spinio.net.open("emulated") as net:
        seen = []

        class Stream:
            def synchronize(self):
                seen.append((net.wait(0), net.stats()["open"]))

        stream = Stream()
        assert net.runs_on(stream) is stream
        net.listen("tcp://127.0.0.1:0")
        with pytest.raises(TypeError, match="synchronize"):
            net.runs_on(7)
    assert [stopped for stopped, _ in seen] == [True]


def test_dropped_net_is_stopped():
    net = spinio.net.open("emulated")
    handle = net._net
    del net
    gc.collect()
    # The memory is still there for kernels.
    assert handle.stats()["open"] == 0
    handle.close()


def test_forked_child_has_no_net(net):
    child = os.fork()
    if child == 0:
        try:
            net.stats()
        except OSError as why:
            os._exit(0 if why.errno == errno.ENODEV else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert net.stats()["open"] == 0


def test_headers_are_installed():
    folder = pathlib.Path(spinio.include())
    for name in ("spinio/net.h", "spinio/kernel.h", "spinio/net/stream.h", "spinio.h", "spinio_net.h"):
        assert (folder / name).is_file(), name


# ---- with kernels

PROGRAM = """
import ctypes, errno, os, select, signal, socket, sys, threading
import spinio
from spinio import emulated

kernels = ctypes.CDLL(sys.argv[1])
kernels.launch_echo.argtypes = [ctypes.c_void_p, spinio.net.Handle, ctypes.c_int, ctypes.c_uint]
kernels.launch_greet.argtypes = [ctypes.c_void_p, spinio.net.Handle, ctypes.c_int, ctypes.POINTER(ctypes.c_int)]

def client(net, listener):
    host, port = net.address(listener).removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=100)

def received(s, size):
    data = bytearray()
    while len(data) < size:
        part = s.recv(size - len(data))
        assert part, f"the stream ended after {len(data)} of {size} bytes"
        data += part
    return bytes(data)
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    if LIBRARY is None:
        pytest.skip("SPINIO_LIBRARY names no libspinio.so")
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    made = tmp_path_factory.mktemp("kernels") / "kernels.so"
    source = pathlib.Path(__file__).parent / "net_kernels.cpp"
    options = ["-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-I", spinio.include()]
    subprocess.run([compiler, *options, source, "-o", made], check=True, timeout=600)
    return made


def start(kernels, script, *arguments):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPINIO_")}
    environment |= {"LD_PRELOAD": LIBRARY, "SPINIO_EMULATED": "size=64M", "PYTHONUNBUFFERED": "1"}
    words = [sys.executable, "-c", PROGRAM + textwrap.dedent(script), kernels, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True)


def run(kernels, script, *arguments):
    """Runs a script and returns its output; fails the test if the script fails."""
    process = start(kernels, script, *arguments)
    try:
        said, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0 and errors == "", errors
    return said


def test_kernel_echoes_to_python_sockets(kernels):
    said = run(kernels, """
        with spinio.net.open() as net:
            listener = net.listen("tcp://127.0.0.1:0")
            stream = net.runs_on(emulated.Stream())
            assert kernels.launch_echo(stream.handle, net.handle, listener, 2) == 0
            data = os.urandom(300_000)
            with client(net, listener) as one, client(net, listener) as two:
                for s in (one, two):
                    s.sendall(b"small")
                    assert received(s, 5) == b"small"
                sender = threading.Thread(target=one.sendall, args=(data,))
                sender.start()
                assert received(one, len(data)) == data
                sender.join()
            # A byte is counted after it was sent; the stop comes after that.
            net.stop()
            stats = net.stats()
            print(stats["accepted"], stats["bytes_sent"], stats["violations"])
    """)
    assert said == "2 300010 0\n"


def test_kernel_goes_on_with_an_adopted_connection(kernels, tmp_path):
    # The listening socket is a Python server's, and it is in an event set. The kernel's answer is a file.
    (tmp_path / "greeting").write_text("good morning")
    said = run(kernels, """
        result = ctypes.c_int(-1)
        with spinio.net.open("emulated", files_root=sys.argv[2]) as net:
            with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 100) as peer:
                connection, _ = server.accept()
                peer.sendall(b"login hello")
                assert received(connection, 6) == b"login "
                s, set = net.adopt(connection), net.set()
                net.add(set, s)
                stream = net.runs_on(emulated.Stream())
                assert kernels.launch_greet(stream.handle, net.handle, set, ctypes.byref(result)) == 0
                assert received(peer, 12) == b"good morning"
                stream.synchronize()
                back, unread = net.release(s)
                with back:
                    back.sendall(b", from the host")
                    print(result.value, unread, received(peer, 15).decode())
    """, tmp_path)
    assert said == "12 b'' , from the host\n"


def test_error_of_a_file_reaches_the_kernel(kernels):
    # Without files_root a kernel opens no file.
    said = run(kernels, """
        result = ctypes.c_int(0)
        with spinio.net.open("emulated") as net:
            ours, peer = socket.socketpair()
            s, set = net.adopt(ours), net.set()
            net.add(set, s)
            peer.sendall(b"hello")
            stream = net.runs_on(emulated.Stream())
            assert kernels.launch_greet(stream.handle, net.handle, set, ctypes.byref(result)) == 0
        print(errno.errorcode[-result.value])
    """)
    assert said == "EACCES\n"


SERVER = """
net = spinio.net.open()
listener = net.listen("tcp://127.0.0.1:0")
stream = net.runs_on(emulated.Stream())
assert kernels.launch_echo(stream.handle, net.handle, listener, 1) == 0
"""


def test_ctrl_c_stops_a_server(kernels):
    process = start(kernels, SERVER + textwrap.dedent("""
        # A background job of a shell ignores it, and so would all that it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with net:
                print(net.address(listener))
                net.wait()
        except KeyboardInterrupt:
            print("stopped", net.wait(0))
    """))
    with process:
        try:
            port = int(process.stdout.readline().rsplit(":", 1)[1])
            with socket.create_connection(("127.0.0.1", port), SECONDS) as peer:
                peer.sendall(b"x")
                assert peer.recv(1) == b"x"
                # The kernel waits in recv of this connection.
                process.send_signal(2)
                said, errors = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, said, errors) == (0, "stopped True\n", "")


def test_program_that_forgets_the_net_ends(kernels):
    # The end of the interpreter stops the net, so that the kernel ends; the stream says that it has.
    said = run(kernels, """
        import atexit
        def at_end():
            stream.synchronize()
            print("ended")
        atexit.register(at_end)
    """ + textwrap.indent(SERVER, " " * 8))
    assert said == "ended\n"
