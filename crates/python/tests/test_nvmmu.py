"""NVMMU's sessions, on every device that is here."""

from __future__ import annotations

import errno
import gc

import pytest

import spinio
from spinio import emulated, nvmmu


def test_a_program_of_three_lines(device, data, noise, tmp_path):
    array = device.full(1 << 20, 0)
    with nvmmu.session(tmp_path / "out") as s:
        assert s.upload(data, array, 4096) == 1 << 20
        assert device.read(array) == noise[4096:][: 1 << 20]
        assert s.download(array) == 1 << 20
    assert (tmp_path / "out").read_bytes() == noise[4096:][: 1 << 20]
    assert s.report["uploaded"] == s.report["downloaded"] == 1 << 20
    assert isinstance(s.report["promise"], str)


@pytest.mark.parametrize("size", [1, 4096, 65537, 1 << 20])
def test_moves_to_any_place(device, data, noise, tmp_path, size):
    (tmp_path / "out").write_bytes(b"\xee" * 3000000)
    array = device.full(size, 0)
    with nvmmu.session(tmp_path / "out") as s:
        s.expect(777, 3 * size)
        for turn in range(3):
            s.upload(str(data), array, turn * size)
            s.download(array, 777 + turn * size)
            s.download(array, 5, path=tmp_path / f"other{turn}")
    got = (tmp_path / "out").read_bytes()
    assert len(got) == max(3000000, 777 + 3 * size)
    assert got[777 : 777 + 3 * size] == noise[: 3 * size]
    assert set(got[:777] + got[777 + 3 * size :]) <= {0xEE}
    assert (tmp_path / "other2").read_bytes() == bytes(5) + noise[2 * size : 3 * size]


def test_an_upload_ends_with_the_file(device, data, noise):
    array = device.full(1000, 0xEE)
    with nvmmu.session() as s:
        assert s.upload(data, array, len(noise) - 10) == 10
        assert s.upload(data, array, len(noise) + 10) == 0
        assert s.upload(data, device.full(0, 0)) == 0
    assert device.read(array) == noise[-10:] + b"\xee" * 990


def test_what_was_downloaded_is_uploaded(device, noise, tmp_path):
    array, back = device.new(noise[:100000]), device.full(100000, 0)
    with nvmmu.session(tmp_path / "out") as s:
        for at in range(0, 100000, 1000):
            s.download(array[at : at + 1000], at)
        assert s.upload(tmp_path / "out", back) == 100000
        assert device.read(back) == noise[:100000]
        s.flush()
        assert (tmp_path / "out").read_bytes() == noise[:100000]
        s.sync()


def test_a_download_sees_what_was_queued_before(data, noise, tmp_path):
    array = emulated.empty(4096)
    with nvmmu.session(tmp_path / "out") as s:
        for turn in range(30):
            s.upload(data, array, turn * 100)
            s.download(array, turn * 4096)
    want = b"".join(noise[turn * 100 :][:4096] for turn in range(30))
    assert (tmp_path / "out").read_bytes() == want


def test_what_cannot_be_moved(data, tmp_path):
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


def test_a_session_ends_once(tmp_path):
    array = emulated.empty(100)
    s = nvmmu.session(tmp_path / "out")
    s.download(array)
    report = s.end()
    assert report["downloaded"] == 100 and s.end() == report == s.report
    with pytest.raises(ValueError, match="has ended"):
        s.download(array)


def test_a_session_that_is_let_go_of_loses_nothing(tmp_path):
    array = spinio.emulated.empty(100)
    s = nvmmu.session(tmp_path / "out")
    s.download(array)
    del s
    gc.collect()
    assert (tmp_path / "out").read_bytes() == array.tobytes()
