"""Files: reads and writes behave as POSIX specifies, for every kind of memory."""

from __future__ import annotations

import concurrent.futures
import errno
import io
import multiprocessing
import operator
import os
import pickle
import signal
import threading

import pytest

import spinio

SIZES = [1, 511, 4096, 65536, 65537, 1 << 20, (2 << 20) + 7]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 5, 4096, 700001])
def test_pread_fills_exactly_the_array(memory, data, noise, size, offset):
    array = memory.full(size + 24, 0xEE)
    with spinio.open(data) as f:
        assert f.pread(array[11 : 11 + size], offset) == size
        assert f.tell() == 0
    got = memory.read(array)
    assert got[11:-13] == noise[offset : offset + size]
    assert set(got[:11] + got[-13:]) == {0xEE}


def test_readinto_advances_offset_and_ends_short(memory, data, noise):
    with spinio.open(data) as f:
        array = memory.full(1 << 20, 0)
        for part in range(3):
            assert f.readinto(array) == 1 << 20
            assert memory.read(array) == noise[part << 20 :][: 1 << 20]
            assert f.tell() == (part + 1) << 20
        assert f.readinto(array) == 0
        f.seek(-100, os.SEEK_END)
        assert f.readinto(array) == 100
        assert memory.read(array)[:200] == noise[-100:] + noise[2 << 20 :][100:200]
        assert f.tell() == len(noise)


def test_reads_end_at_end_of_file(memory, data, noise):
    array = memory.full(100000, 0xEE)
    with spinio.open(data) as f:
        assert f.pread(array, len(noise) - 7) == 7
        assert f.pread(array, len(noise)) == 0
        assert f.pread(array, len(noise) + 12345) == 0
    assert memory.read(array) == noise[-7:] + b"\xee" * 99993


def test_empty_array_reads_nothing(memory, data):
    with spinio.open(data) as f:
        assert f.pread(memory.full(0, 0), 0) == 0
        assert f.readinto(memory.full(0, 0)) == 0


def test_elements_of_any_size(data, noise):
    for dtype in ("float64", "int16", "complex128", "bool", "bfloat16", "float8_e4m3fn"):
        array = spinio.emulated.empty((7, 3, 5), dtype)
        with spinio.open(data) as f:
            assert f.pread(array, 13) == array.nbytes
        assert array.tobytes() == noise[13 : 13 + array.nbytes]


def test_holes_and_empty_files(memory, tmp_path):
    path = tmp_path / "sparse"
    with open(path, "wb") as f:
        f.truncate(1 << 20)
    array = memory.full(1 << 20, 0xEE)
    with spinio.open(path) as f:
        assert f.pread(array, 0) == 1 << 20
    assert memory.read(array) == bytes(1 << 20)
    path.write_bytes(b"")
    with spinio.open(path) as f:
        assert f.pread(array, 0) == 0


def test_written_bytes_are_read(memory, tmp_path):
    path = tmp_path / "changing"
    array = memory.full(200000, 0)
    with open(path, "w+b", buffering=0) as other, spinio.open(path) as f:
        for turn in range(1, 6):
            other.seek(0)
            other.write(bytes([turn]) * 200000)
            assert f.pread(array, 0) == 200000
            assert memory.read(array) == bytes([turn]) * 200000


def test_file_is_a_raw_io_object(data, noise):
    with spinio.open(data) as f:
        assert isinstance(f, io.RawIOBase) and isinstance(f, spinio.File)
        assert f.readable() and f.seekable() and not f.writable() and f.mode == "rb"
        assert f.read(10) == noise[:10]
        assert len(f.readall()) == len(noise) - 10
        f.seek(0)
        with io.BufferedReader(f) as buffered:
            assert buffered.read(100000) == noise[:100000]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0, 5, 4096, 700001])
def test_pwrite_writes_exactly_the_array(memory, tmp_path, noise, size, offset):
    path = tmp_path / "out"
    path.write_bytes(b"\xee" * 1000000)
    array = memory.new(noise[: size + 24])
    with spinio.open(path, "r+") as f:
        assert f.pwrite(array[11 : 11 + size], offset) == size
        assert f.tell() == 0
    got = path.read_bytes()
    assert got[offset : offset + size] == noise[11 : 11 + size]
    assert set(got[:offset] + got[offset + size :]) <= {0xEE}
    assert len(got) == max(1000000, offset + size)


def test_write_advances_offset_and_append_appends(memory, tmp_path, noise):
    path = tmp_path / "out"
    with spinio.open(path, "w+") as f:
        at = 0
        for size in SIZES[:-1]:
            assert f.write(memory.new(noise[at : at + size])) == size
            at += size
            assert f.tell() == at
        back = memory.full(at, 0)
        assert f.pread(back, 0) == at
        assert memory.read(back) == noise[:at]
    with spinio.open(path, "a") as f:
        assert f.write(memory.new(b"the end")) == 7
        assert f.write(memory.new(b"")) == 0
    assert path.read_bytes() == noise[:at] + b"the end"


def test_write_follows_earlier_queued_copies(tmp_path, data, noise):
    array = spinio.emulated.empty(4096)
    with spinio.open(data) as f, spinio.open(tmp_path / "out", "w") as out:
        for turn in range(50):
            f.pread(array, turn * 1000)  # small: only queued
            assert out.pwrite(array, 0) == 4096
            assert (tmp_path / "out").read_bytes() == noise[turn * 1000 :][:4096]


def test_writes_of_host_memory(tmp_path):
    path = tmp_path / "out"
    with spinio.open(path, "w+") as f:
        assert f.write(b"abc") == 3
        assert f.write(memoryview(b"defg")) == 4
        assert f.pwrite(b"X", 1) == 1
        assert f.tell() == 7
    assert path.read_bytes() == b"aXcdefg"


def test_read_only_memory_can_be_written(tmp_path, noise):
    array = spinio.emulated.empty(1000)
    array.set(noise[:1000])
    with spinio.open(tmp_path / "out", "w") as f:
        assert f.write(array.as_readonly()) == 1000
    assert (tmp_path / "out").read_bytes() == noise[:1000]


def test_failed_writes_report_the_cause(memory, tmp_path):
    with spinio.open("/dev/full", "w") as f:
        with pytest.raises(OSError) as caught:
            f.write(memory.full(100000, 1))
        assert caught.value.errno == errno.ENOSPC
    read_end, write_end = os.pipe()
    with spinio.open(write_end, "w") as f:
        assert f.write(memory.new(b"hello")) == 5
        assert os.read(read_end, 100) == b"hello"
        with pytest.raises(OSError, match="Cannot write 10 bytes at offset 77") as caught:
            f.pwrite(memory.full(10, 1), 77)
        assert caught.value.errno == errno.ESPIPE
        os.close(read_end)
        with pytest.raises(BrokenPipeError):
            f.write(memory.full(10, 1))


# ---- errors


def test_errors_name_errno_and_file(memory, tmp_path, data):
    with pytest.raises(FileNotFoundError):
        spinio.open(tmp_path / "nothing")
    with spinio.open(data) as f:
        with pytest.raises(OSError) as caught:
            f.pread(memory.full(10, 0), -1)
        assert caught.value.errno == errno.EINVAL
    with pytest.raises(ValueError):
        f.pread(memory.full(10, 0), 0)  # closed
    directory = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        spinio._spinio.read(directory, memory.full(100000, 0), 0)
    os.close(directory)
    with spinio.open(tmp_path / "out", "w") as f:
        with pytest.raises(io.UnsupportedOperation):
            f.pread(memory.full(10, 0), 0)
        with pytest.raises(OSError) as caught:
            spinio._spinio.read(f.fileno(), memory.full(10, 0), 0)
        assert caught.value.errno == errno.EBADF
    with spinio.open(data) as f, pytest.raises(io.UnsupportedOperation):
        f.write(memory.full(10, 0))


def test_read_error_names_the_file(memory, data):
    with spinio.open(data) as f:
        number = f.fileno()
        spare = os.dup(number)
        read_end, write_end = os.pipe()
        os.dup2(read_end, number)
        with pytest.raises(OSError, match="Cannot read 10 bytes at offset 77") as caught:
            f.pread(memory.full(10, 0), 77)
        assert caught.value.errno == errno.ESPIPE
        assert caught.value.filename == f.name
        os.dup2(spare, number)
        for fd in (spare, read_end, write_end):
            os.close(fd)


def test_pipe_read_returns_available_bytes(memory):
    read_end, write_end = os.pipe()
    with spinio.open(read_end) as f:
        array = memory.full(100, 0)
        os.write(write_end, b"hello")
        assert f.readinto(array) == 5
        assert memory.read(array)[:5] == b"hello"
        os.set_blocking(read_end, False)
        assert f.readinto(array) is None
        os.close(write_end)
        assert f.readinto(array) == 0


# ---- threads


def gil_is_released_during(body):
    """Runs body on a thread while the device's copies are paused, resumes them, and waits for the thread."""
    done = threading.Event()

    def run():
        body()
        done.set()

    thread = threading.Thread(target=run)
    with spinio.emulated.paused():
        thread.start()
        # No copy completes; if that thread held the GIL, this one could not get here to resume the device.
        assert not done.wait(0.2)
    thread.join(600)
    assert done.is_set()


def test_gil_is_released_during_device_copies(data, noise):
    array = spinio.emulated.empty(1 << 20)
    with spinio.open(data) as f:
        gil_is_released_during(lambda: f.pread(array, 0))
    assert array.tobytes() == noise[: 1 << 20]


def test_gil_is_released_during_read_many(data, noise):
    array = spinio.emulated.empty(1 << 20)
    with spinio.open(data) as f:
        gil_is_released_during(lambda: f.read_many(range(0, 1 << 20, 4096), 4096, array))
    assert array.tobytes() == noise[: 1 << 20]


def test_gil_is_released_during_pipe_read(memory):
    array = memory.full(5, 0)
    read_end, write_end = os.pipe()
    with spinio.open(read_end) as f:
        reader = threading.Thread(target=lambda: f.readinto(array))
        reader.start()
        # If the reader held the GIL, this thread could not write.
        os.write(write_end, b"hello")
        reader.join(600)
        assert not reader.is_alive() and memory.read(array) == b"hello"
    os.close(write_end)


def test_small_read_is_queued_in_order(data, noise):
    array = spinio.emulated.empty(4096)
    array.fill(0)
    with spinio.open(data) as f, spinio.emulated.paused():
        # Returns although no copy can run; the second read overwrites the bytes of the first.
        assert f.pread(array, 0) == 4096
        assert f.pread(array[:100], 999) == 100
    assert array.tobytes() == noise[999:1099] + noise[100:4096]


def test_small_read_with_wait(data):
    array = spinio.emulated.empty(4096)
    done = threading.Event()

    def read():
        with spinio.open(data) as f:
            spinio._spinio.read(f.fileno(), array, 0, wait=True)
        done.set()

    reader = threading.Thread(target=read)
    with spinio.emulated.paused():
        reader.start()
        assert not done.wait(0.2)
    reader.join(600)
    assert done.is_set()


def test_many_threads(memory, data, noise):
    wrong = []

    def work(seed):
        array = memory.full(70000, 0)
        with spinio.open(data) as f:
            for turn in range(20):
                size, at = (seed * 7919 + turn * 104729) % 70000, (seed * 31 + turn * 65537) % 2000000
                if f.pread(array[:size], at) != size or memory.read(array)[:size] != noise[at : at + size]:
                    wrong.append((seed, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_forked_child_reads_host_memory(data, noise):
    array = spinio.emulated.empty(100000)
    with spinio.open(data) as f:
        f.pread(array, 0)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                host = bytearray(100000)
                status = 0 if f.pread(host, 5) == 100000 and bytes(host) == noise[5:100005] else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert f.pread(array, 9) == 100000
    assert array.tobytes() == noise[9:100009]


# ---- other processes


def test_file_is_pickled_to_a_worker(data, noise):
    with spinio.open(data) as f:
        f.seek(1000)
        again = pickle.loads(pickle.dumps(f))
        assert again.read(10) == noise[1000:1010] and f.tell() == 1000
        again.close()
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(operator.methodcaller("read", 10), f).result(300) == noise[1000:1010]
            loaded = pool.submit(spinio.fromfile, data, "int64", 5, library="numpy").result(300)
            assert loaded.tobytes() == noise[:40]


def test_file_without_reopenable_name_is_not_pickled(data, tmp_path, monkeypatch):
    monkeypatch.chdir(data.parent)
    with spinio.open(data.name) as f:
        monkeypatch.chdir(tmp_path)
        # Its relative name, from the other directory.
        with pytest.raises(FileNotFoundError):
            pickle.loads(pickle.dumps(f))
    read_end, write_end = os.pipe()
    with (
        spinio.open(tmp_path / "out", "w+") as writing,
        spinio.open(os.open(data, os.O_RDONLY)) as number,
        spinio.open(data, opener=lambda path, flags: os.open(path, flags)) as opener,
        spinio.open(read_end) as pipe,
        open(write_end, "wb"),
    ):
        for file in (writing, number, opener, pipe):
            with pytest.raises(TypeError, match="opened by its name for reading"):
                pickle.dumps(file)
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(f)


def test_stats_count_reads(data):
    before = spinio.stats()
    array = spinio.emulated.empty(1 << 20)
    with spinio.open(data) as f:
        f.pread(array, 0)
        f.pread(bytearray(1000), 0)  # host memory: not counted
    after = spinio.stats()
    assert after["read"]["calls"] - before["read"]["calls"] >= 1
    assert after["read"]["bytes"] - before["read"]["bytes"] == 1 << 20
    assert sum(r["bytes"] for r in after["routes"]) - sum(r["bytes"] for r in before["routes"]) == 1 << 20
    assert {r["route"] for r in after["routes"]} <= {"copy", "dma", "store", "direct", "p2p", "gather"}
    assert after["gauges"]["bounce_bytes"][0] > 0 and isinstance(after["refused"], list)
