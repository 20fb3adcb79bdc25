"""One runtime per process: with a preloaded libspinio.so the module uses that library's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

LIBRARY = os.environ.get("SPINIO_LIBRARY")

# The library's counters and threads, by its C API.
LIBRARYS = """
import ctypes, os, sys
import spinio

lib = ctypes.CDLL(None, use_errno=True)

class Counters(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("reads", "read_bytes", "read_nanoseconds")]

def counters():
    c = Counters()
    assert lib.spinio_stats(ctypes.byref(c), ctypes.c_size_t(ctypes.sizeof(c))) == 0
    return c.reads, c.read_bytes

def threads():
    names = (open(f"/proc/self/task/{t}/comm").read().strip() for t in os.listdir("/proc/self/task"))
    return sorted(n for n in names if n.startswith("spinio"))
"""


def run(script, data, preload, **environment):
    """Runs a script and returns its output; fails the test if the script fails."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("SPINIO_")}
    env.update(environment, LD_PRELOAD=str(preload), SPINIO_EMULATED="size=64M")
    done = subprocess.run([sys.executable, "-c", LIBRARYS + script, str(data)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def library():
    if LIBRARY is None:
        pytest.skip("SPINIO_LIBRARY names no libspinio.so")
    return LIBRARY


def test_counters_are_shared(library, data):
    run(
        """
before, ours = counters(), spinio.stats()["read"]
array = spinio.emulated.empty(2 << 20)
with spinio.open(sys.argv[1]) as f:
    assert f.pread(array, 0) == 2 << 20
after, now = counters(), spinio.stats()["read"]
assert (after[0] - before[0], after[1] - before[1]) == (1, 2 << 20), (before, after)
assert (now["calls"], now["bytes"]) == after and now["calls"] - ours["calls"] == 1, (now, after)
""",
        data,
        library,
    )


def test_devices_are_shared(library, data):
    # A plain pread into the module's memory, which the library's hook serves; read back by the library's function.
    run(
        """
array = spinio.emulated.empty(100_000)
fd = os.open(sys.argv[1], os.O_RDONLY)
lib.pread.restype = ctypes.c_ssize_t
lib.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
assert lib.pread(fd, array.address, 100_000, 4096) == 100_000, ctypes.get_errno()
expected = os.pread(fd, 100_000, 4096)
assert array.tobytes() == expected
back = ctypes.create_string_buffer(100_000)
lib.spinio_mem_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
assert lib.spinio_mem_copy(back, array.address, 100_000) == 0
assert back.raw == expected
""",
        data,
        library,
    )


def test_close_releases_what_the_module_has_read(library, data):
    # The module calls no function of the C API: the library's hook of close must count it nevertheless.
    run(
        """
array = spinio.emulated.empty(2 << 20)
with spinio.open(sys.argv[1]) as f:
    assert f.pread(array, 0) == 2 << 20
    assert spinio.stats()["gauges"]["file_cache_entries"][0] == 1
# The next request updates the gauges.
with spinio.open("/dev/zero") as f:
    assert f.readinto(array[:100]) == 100
assert spinio.stats()["gauges"]["file_cache_entries"][0] == 0
""",
        data,
        library,
    )


def test_second_emulated_device_has_its_own_memory_and_streams(data):
    # In a process of its own: the number of devices is fixed once one is used.
    program = """
import sys, spinio
from spinio import emulated
emulated.configure("devices=2,size=64M")
one, two = (emulated.empty(100_000, device=f"emulated:{n}") for n in (0, 1))
assert [a.__dlpack_device__() for a in (one, two)] == [(12, 0), (12, 1)]
stream = emulated.Stream("emulated:1")
assert stream.handle >> 32 == 1
with spinio.open(sys.argv[1]) as f:
    with spinio.stream(stream):
        assert f.pread(two, 4096) == 100_000
    assert f.pread(one, 4096) == 100_000
expected = open(sys.argv[1], "rb").read()[4096:104096]
assert two.tobytes() == expected and one.tobytes() == expected
loaded = spinio.fromfile(sys.argv[1], device="emulated:1")
assert loaded.__dlpack_device__() == (12, 1) and loaded[4096:104096].tobytes() == expected
for call in (lambda: emulated.empty(1, device="emulated:2"), lambda: emulated.Stream("emulated:2")):
    try:
        call()
    except RuntimeError as e:
        assert "SPINIO_EMULATED has fewer" in str(e), e
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program, str(data)], check=True, timeout=120)


def test_streams_and_threads_are_shared(library, data):
    run(
        """
lib.spinio_set_stream.argtypes = [ctypes.c_void_p]
lib.spinio_set_stream(5)
assert spinio._spinio.stream() == 5
spinio.set_stream(0)

array = spinio.emulated.empty(3 << 20)
with spinio.open(sys.argv[1]) as f:
    os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    f.pread(array, 0)
first = threads()
# The hook's read, of the same size: it uses the existing threads.
lib.pread.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64]
fd = os.open(sys.argv[1], os.O_RDONLY)
lib.pread(fd, array.address, 3 << 20, 0)
workers = [n for n in first if n == "spinio-copy"]
assert workers and [n for n in threads() if n == "spinio-copy"] == workers, (first, threads())
""",
        data,
        library,
    )


def test_sessions_and_batches_use_the_shared_runtime(library, data, tmp_path):
    run(
        f"""
from spinio import nvmmu
array = spinio.emulated.empty(1 << 20)
with nvmmu.session({str(tmp_path / "out")!r}) as s:
    s.upload(sys.argv[1], array)
    s.download_async(array).wait()
bytes_ = open(sys.argv[1], "rb").read(1 << 20)
assert open({str(tmp_path / "out")!r}, "rb").read() == bytes_
with spinio.open(sys.argv[1]) as f:
    parts = spinio.emulated.empty(4 * 4096)
    f.read_many([0, 8192, 65536, 4096], 4096, parts)
assert parts.tobytes() == b"".join(bytes_[at : at + 4096] for at in (0, 8192, 65536, 4096))
try:
    nvmmu.session("/nowhere/at/all")
except OSError as why:
    assert why.errno == 2 and why.filename == "/nowhere/at/all", repr(why)
else:
    raise AssertionError("no such directory")
""",
        data,
        library,
    )


@pytest.mark.parametrize("words", ["{8, 0}", "{0}"])
def test_older_table_is_ignored(tmp_path, data, words):
    """A library with a shorter table than the module needs: the module uses a runtime of its own."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    source, older = tmp_path / "older.c", tmp_path / "older.so"
    source.write_text(f"const unsigned long spinio_runtime_v3[4] = {words};\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", older, source], check=True)
    run(
        """
array = spinio.emulated.empty(100_000)
with spinio.open(sys.argv[1]) as f:
    assert f.pread(array, 7) == 100_000
assert array.tobytes() == open(sys.argv[1], "rb").read()[7:100_007]
assert spinio.stats()["read"]["calls"] == 1
""",
        data,
        older,
    )
