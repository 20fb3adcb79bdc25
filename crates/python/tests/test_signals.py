"""A signal whose handler raises ends a long transfer early, before its last byte; any other handler runs during it.

The device is slow here, so that a transfer takes seconds, and an interval timer interrupts it long before its end.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Device and bounce buffers can be configured once per process.
SLOW = {"SPINIO_EMULATED": "size=1G,gbps=0.1", "SPINIO_BOUNCE_LIMIT": "64M", "PYTHONDEVMODE": "1"}

# Of a program that has to be repeated.
AGAIN = 75

PROGRAM = """
import os, signal, sys, threading, time
import spinio
from spinio import emulated, nvmmu

SIZE, path = 256 << 20, sys.argv[1]
memory = emulated.empty(SIZE + 4096)
array = memory[:SIZE]
UNTOUCHED = b"\\xa5" * 4096

class Enough(Exception):
    pass

def enough(*_):
    raise Enough

def again():
    # This machine was so busy that the signal came before the transfer, or after it.
    os._exit(75)

def in_a_moment(handler, seconds=0.3):
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)

# The device needs 2.6 s for all bytes: before that a transfer cannot be complete.
INCOMPLETE = 2.4

def must_end(transfer, *arguments, seconds=0.3):
    begun = time.monotonic()
    try:
        in_a_moment(enough, seconds)
        transfer(*arguments)
    except Enough:
        if time.monotonic() - begun > INCOMPLETE:
            again()
        return
    sys.exit("it was not interrupted")

def must_end_partway(f, transfer):
    # A busy machine may have moved nothing at the first signal.
    for seconds in (0.3, 0.6, 1.2, 2.0):
        f.seek(0)
        must_end(transfer, array, seconds=seconds)
        if f.tell() > 0:
            break
    if f.tell() == 0:
        again()
    assert f.tell() < SIZE, f.tell()

def part(at):
    return array[at : at + 4096].tobytes()

def has_come(at):
    with open(path, "rb") as f:
        return part(at) == os.pread(f.fileno(), 4096, at)

def all_has_come():
    # Checked at every MiB: the order of the bytes depends on the number of reading threads. Past the array nothing
    # changes.
    assert memory[SIZE:].tobytes() == UNTOUCHED
    return all(has_come(at) for at in range(0, SIZE, 1 << 20))
"""


def run(body, path):
    environment = os.environ | SLOW
    words = [sys.executable, "-c", PROGRAM + body, str(path)]
    for _ in range(8):
        said = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if said.returncode != AGAIN:
            break
    assert said.returncode == 0 and said.stderr == "", said.stderr
    return said.stdout


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "file"
    with open(path, "wb") as f:
        for at in range(0, 256 << 20, 1 << 20):
            f.write(at.to_bytes(8, "little") * (1 << 17))
    yield path
    path.unlink()


def test_signal_ends_read(large):
    run("""
with spinio.open(path) as f:
    must_end(f.pread, array, 0)
    assert not all_has_come() and f.tell() == 0
    must_end_partway(f, f.readinto)
    # The file offset is then the number of bytes read.
    assert has_come(f.tell() - 4096), f.tell()
    assert all(has_come(at) for at in range(0, f.tell() - 4096, 1 << 20))
    # Later reads are unaffected.
    assert f.pread(array[:1 << 20], 5) == 1 << 20
""", large)


def test_signal_ends_write(large, tmp_path):
    run(f"""
with spinio.open({str(tmp_path / "out")!r}, "w") as f:
    must_end_partway(f, f.write)
    assert f.tell() == os.fstat(f.fileno()).st_size
    must_end(f.pwrite, array, 0)
""", large)


def test_signal_ends_session_move(large, tmp_path):
    run(f"""
with nvmmu.session({str(tmp_path / "out")!r}) as s:
    must_end(s.upload, path, array)
    assert not all_has_come()
    must_end(lambda: s.download(array, path={str(tmp_path / "other")!r}))
    assert s.upload(path, array[: 1 << 20], 7) == 1 << 20
""", large)


def test_signal_ends_wait_for_lease(large, tmp_path):
    said = run(f"""
import fcntl
out = {str(tmp_path / "out")!r}
fd = os.open(out, os.O_RDWR | os.O_CREAT)
signal.signal(signal.SIGIO, signal.SIG_IGN)
try:
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
except OSError as why:
    print("skipped:", why)
    sys.exit()
must_end(nvmmu.session, out)
with nvmmu.session() as s:
    must_end(s.upload, out, array)
    os.close(fd)
    assert s.upload(out, array) == 0
nvmmu.session(out).end()
""", large)
    if said:
        pytest.skip(said)


def test_handler_runs_during_transfer(large):
    said = run("""
small = emulated.empty(1 << 20)

def look(*_):
    if time.monotonic() - begun > INCOMPLETE:
        again()
    # Read first: other threads continue to copy meanwhile, and the transfer may be complete after a look at the array.
    print("handled", spinio.stats()["read"]["calls"], spinio.current_stream())
    # The handler may read, also with the busy device.
    with spinio.open(path) as other:
        assert other.pread(small, 3 << 20) == 1 << 20

with spinio.open(path) as f:
    begun = time.monotonic()
    in_a_moment(look)
    assert f.pread(array, 0) == SIZE
    print("read", all_has_come())
    assert small.tobytes() == os.pread(f.fileno(), 1 << 20, 3 << 20)
""", large)
    assert said.split("\n") == ["handled 0 0", "read True", ""]


def test_handler_sees_the_programs_stream(large):
    said = run("""
mine, another, small, found = emulated.Stream(), emulated.Stream(), emulated.empty(1 << 20), []

def look(*_):
    found.append(spinio.current_stream())
    with spinio.stream(another), spinio.open(path) as other:
        if len(found) == 2:
            # This may wait until all copies of other threads are complete; the next signal must not interrupt it here.
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert other.pread(small, 3 << 20) == 1 << 20

signal.signal(signal.SIGALRM, look)
signal.setitimer(signal.ITIMER_REAL, 0.3, 0.6)
with spinio.open(path) as f, spinio.stream(mine):
    assert f.pread(array, 0) == SIZE
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert spinio.current_stream() == mine.handle
if len(found) < 2:
    again()
print(set(found) == {mine.handle})
""", large)
    assert said == "True\n"


def test_handler_cannot_use_interrupted_session(large):
    said = run("""
s = nvmmu.session()

def look(*_):
    try:
        s.upload(path, array[:4096])
        # The other move has not begun, or has ended.
        again()
    except RuntimeError as why:
        print(why)

in_a_moment(look)
s.upload(path, array)
s.end()
""", large)
    assert said == "A signal's handler cannot use the session whose move it came into\n"


def test_signal_does_not_end_read_of_other_thread(large):
    run("""
def read():
    with spinio.open(path) as f:
        assert f.pread(array, 0) == SIZE
    done.set()

done = threading.Event()
threading.Thread(target=read).start()
must_end(done.wait)
done.wait()
assert all_has_come()
""", large)


def test_long_host_read_is_one_read(large):
    run("""
size = (130 << 20) + 5
into = bytearray(b"\\xee") * (size + 10)
with spinio.open(path) as f:
    assert f.pread(memoryview(into)[:size], 3) == size
    assert into[:size] == os.pread(f.fileno(), size, 3) and set(into[size:]) == {0xEE}
    assert f.pread(into, SIZE - 5) == 5 and f.pread(into, SIZE) == 0
    assert f.pread(into, SIZE - size) == size
""", large)
