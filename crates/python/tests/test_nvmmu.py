"""NVMMU sessions, on every device available here."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import threading
import time
import weakref

import pytest

import spinio
from spinio import emulated, nvmmu


def test_upload_and_download(device, data, noise, tmp_path):
    array = device.full(1 << 20, 0)
    with nvmmu.session(tmp_path / "out") as s:
        assert s.upload(data, array, 4096) == 1 << 20
        assert device.read(array) == noise[4096:][: 1 << 20]
        assert s.download(array) == 1 << 20
    assert (tmp_path / "out").read_bytes() == noise[4096:][: 1 << 20]
    assert s.report["uploaded"] == s.report["downloaded"] == 1 << 20
    assert isinstance(s.report["mode"], str)


@pytest.mark.parametrize("size", [1, 4096, 65537, 1 << 20])
def test_moves_at_any_offset(device, data, noise, tmp_path, size):
    (tmp_path / "out").write_bytes(b"\xee" * 3000000)
    array = device.full(size, 0)
    with nvmmu.session(tmp_path / "out") as s:
        s.hint_range(777, 3 * size)
        for turn in range(3):
            s.upload(str(data), array, turn * size)
            s.download(array, 777 + turn * size)
            s.download(array, 5, path=tmp_path / f"other{turn}")
    got = (tmp_path / "out").read_bytes()
    assert len(got) == max(3000000, 777 + 3 * size)
    assert got[777 : 777 + 3 * size] == noise[: 3 * size]
    assert set(got[:777] + got[777 + 3 * size :]) <= {0xEE}
    assert (tmp_path / "other2").read_bytes() == bytes(5) + noise[2 * size : 3 * size]


def test_upload_ends_at_end_of_file(device, data, noise):
    array = device.full(1000, 0xEE)
    with nvmmu.session() as s:
        assert s.upload(data, array, len(noise) - 10) == 10
        assert s.upload(data, array, len(noise) + 10) == 0
        assert s.upload(data, device.full(0, 0)) == 0
    assert device.read(array) == noise[-10:] + b"\xee" * 990


def test_downloaded_bytes_are_uploaded(device, noise, tmp_path):
    array, back = device.new(noise[:100000]), device.full(100000, 0)
    with nvmmu.session(tmp_path / "out") as s:
        for at in range(0, 100000, 1000):
            s.download(array[at : at + 1000], at)
        assert s.upload(tmp_path / "out", back) == 100000
        assert device.read(back) == noise[:100000]
        s.flush()
        assert (tmp_path / "out").read_bytes() == noise[:100000]
        s.sync()


def test_download_follows_earlier_queued_copies(data, noise, tmp_path):
    array = emulated.empty(4096)
    with nvmmu.session(tmp_path / "out") as s:
        for turn in range(30):
            s.upload(data, array, turn * 100)
            s.download(array, turn * 4096)
    want = b"".join(noise[turn * 100 :][:4096] for turn in range(30))
    assert (tmp_path / "out").read_bytes() == want


def test_invalid_moves(data, tmp_path):
    array = emulated.empty(100)
    with nvmmu.session() as s:
        with pytest.raises(BufferError, match="the host's"):
            s.upload(data, bytearray(100))
        with pytest.raises(BufferError, match="contiguous"):
            s.upload(data, array[::2])
        with pytest.raises(BufferError, match="read-only"):
            s.upload(data, array.as_readonly())
        with pytest.raises(FileNotFoundError) as caught:
            s.upload(tmp_path / "none", array)
        assert caught.value.filename == str(tmp_path / "none")
        with pytest.raises(OSError, match="no output") as caught:
            s.download(array)
        assert caught.value.errno == errno.EINVAL
        with pytest.raises(OverflowError):
            s.upload(data, array, -1)
    with pytest.raises(IsADirectoryError):
        nvmmu.session(tmp_path)


def test_session_ends_once(tmp_path):
    array = emulated.empty(100)
    s = nvmmu.session(tmp_path / "out")
    s.download(array)
    report = s.end()
    assert report["downloaded"] == 100 and s.end() == report == s.report
    with pytest.raises(ValueError, match="has ended"):
        s.download(array)


def test_dropped_session_loses_nothing(tmp_path):
    array = spinio.emulated.empty(100)
    s = nvmmu.session(tmp_path / "out")
    s.download(array)
    del s
    gc.collect()
    assert (tmp_path / "out").read_bytes() == array.tobytes()


# ---- stream-ordered moves


class Borrowed:
    """Memory of an array of the emulated device, by the CUDA array interface; a test can detect references to it."""

    def __init__(self, of):
        self._of = of
        self.__cuda_array_interface__ = {"shape": (of.nbytes,), "typestr": "|u1", "data": (of.address, False), "strides": None, "version": 3}


@pytest.mark.parametrize("size", [1, 65537, (2 << 20) + 5])
def test_moves_are_stream_ordered(device, data, noise, tmp_path, size):
    array = device.full(size, 0)
    with nvmmu.session(tmp_path / "out") as s:
        up = s.upload_async(data, array, 100)
        down = s.download_async(array, 7)
        other = s.download_async(array, path=tmp_path / "other")
        assert [t.wait() for t in (up, down, other, up)] == [size] * 4
        assert up.done() and down.done() and other.done()
    want = noise[100:][:size]
    assert device.read(array) == want
    assert (tmp_path / "out").read_bytes() == bytes(7) + want and (tmp_path / "other").read_bytes() == want
    assert s.report["uploaded"] == size and s.report["downloaded"] == 2 * size


def test_move_waits_for_earlier_stream_work(data, noise, tmp_path):
    array = emulated.empty(3 << 20)
    with nvmmu.session(tmp_path / "out") as s:
        with emulated.paused():
            up = s.upload_async(data, array)
            down = s.download_async(array)
            assert not up.done() and not down.done()
            waited = threading.Thread(target=up.wait)
            waited.start()
            waited.join(0.1)
            # Its wait does not block other threads.
            assert waited.is_alive() and not up.done()
        waited.join(600)
        assert down.wait() == 3 << 20
    assert array.tobytes() == noise and (tmp_path / "out").read_bytes() == noise


def test_end_waits_for_unwaited_moves(device, noise, tmp_path):
    with nvmmu.session(tmp_path / "out") as s:
        for at in range(0, 3 << 20, 300000):
            s.download_async(device.new(noise[at:][:300000]), at)
    assert (tmp_path / "out").read_bytes() == noise


def test_async_upload_ends_at_end_of_file(device, data, noise):
    array = device.full(1000, 0xEE)
    with nvmmu.session() as s:
        assert s.upload_async(data, array, len(noise) - 10).wait() == 10
        assert s.upload_async(data, array, len(noise) + 10).wait() == 0
        assert s.upload_async(data, device.full(0, 0)).wait() == 0
    assert device.read(array) == noise[-10:] + b"\xee" * 990


@pytest.mark.parametrize("wrap", [Borrowed, lambda array: array])
def test_memory_stays_until_move_completes(data, noise, tmp_path, wrap):
    array = wrap(emulated.empty(1 << 20))
    reference = weakref.ref(array) if wrap is Borrowed else None
    with nvmmu.session(tmp_path / "out") as s:
        with emulated.paused():
            s.upload_async(data, array, 5)
            s.download_async(array)
            del array
            gc.collect()
            assert not reference or reference() is not None
            # Would be placed there if that memory were free.
            emulated.empty(1 << 20)
        s.flush()
        gc.collect()
        assert not reference or reference() is None
    assert (tmp_path / "out").read_bytes() == noise[5:][: 1 << 20]


def test_invalid_async_moves(data, tmp_path):
    array = emulated.empty(100)
    with nvmmu.session() as s:
        for move in (s.upload_async, lambda _path, array: s.download_async(array, path=tmp_path / "x")):
            with pytest.raises(BufferError, match="the host's"):
                move(data, bytearray(100))
            with pytest.raises(BufferError, match="contiguous"):
                move(data, array[::2])
        with pytest.raises(BufferError, match="read-only"):
            s.upload_async(data, array.as_readonly())
        with pytest.raises(FileNotFoundError) as caught:
            s.upload_async(tmp_path / "none", array)
        assert caught.value.filename == str(tmp_path / "none")
        with pytest.raises(OSError, match="no output"):
            s.download_async(array)
        with pytest.raises(OverflowError):
            s.upload_async(data, array, -1)
    with pytest.raises(ValueError, match="has ended"):
        s.upload_async(data, array)


def test_async_failure_is_raised_by_wait_and_end(tmp_path):
    array = emulated.empty(1 << 20)
    path = str(tmp_path / "out")
    s = nvmmu.session()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        down = s.download_async(array, 4096, path=path)
        for _ in range(2):
            with pytest.raises(OSError, match=f"Cannot download {1 << 20} bytes at offset 4096 of {path}") as caught:
                down.wait()
            assert caught.value.errno == errno.EFBIG and caught.value.filename == path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert down.done()
    with pytest.raises(OSError, match="File too large"):
        s.end()


def test_signal_ends_a_wait(data):
    array = emulated.empty(1 << 20)

    class Enough(Exception):
        pass

    def end(_number, _frame):
        raise Enough

    about_to_wait = threading.Event()

    def send():
        about_to_wait.wait()
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, end)
    try:
        with nvmmu.session() as s:
            with emulated.paused():
                up = s.upload_async(data, array)
                sender = threading.Thread(target=send)
                sender.start()
                with pytest.raises(Enough):
                    about_to_wait.set()
                    up.wait()
                sender.join()
            assert up.wait() == 1 << 20
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_forked_child_has_no_session(data, noise, tmp_path):
    array = emulated.empty(1 << 20)
    s = nvmmu.session(tmp_path / "out")
    with emulated.paused():
        up = s.upload_async(data, array)
        # This thread is in the session, and has locked it, at the fork.
        inside = threading.Thread(target=s.flush)
        inside.start()
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(600)
                for ask in (lambda: s.report, s.flush, s.end, up.wait, up.done, lambda: s.upload(data, array)):
                    with pytest.raises((ProcessLookupError, BufferError)):
                        ask()
                del s, up
                gc.collect()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    inside.join(600)
    assert up.wait() == 1 << 20 and s.download(array) == 1 << 20
    s.end()
    assert (tmp_path / "out").read_bytes() == noise[: 1 << 20]


def test_torch_streams_overlap_and_keep_order(data, noise, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    streams = [torch.cuda.Stream() for _ in range(3)]
    arrays = [torch.empty(100000, dtype=torch.uint8, device="cuda") for _ in streams]
    with nvmmu.session(tmp_path / "out") as s:
        for turn in range(30):
            array = arrays[turn % 3]
            with torch.cuda.stream(streams[turn % 3]):
                torch.cuda._sleep(1000000)
                s.upload_async(data, array, turn * 100000)
                array += 1
                s.download_async(array, turn * 100000)
    assert (tmp_path / "out").read_bytes() == bytes((b + 1) % 256 for b in noise[:3000000])


def test_cupy_streams_overlap_and_keep_order(data, noise, tmp_path):
    cupy = pytest.importorskip("cupy")
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
    arrays = [cupy.empty(100000, "uint8") for _ in streams]
    cupy.cuda.runtime.deviceSynchronize()
    with nvmmu.session(tmp_path / "out") as s:
        for turn in range(30):
            array = arrays[turn % 3]
            with streams[turn % 3]:
                s.upload_async(data, array, turn * 100000)
                array += 1
                s.download_async(array, turn * 100000)
    assert (tmp_path / "out").read_bytes() == bytes((b + 1) % 256 for b in noise[:3000000])
