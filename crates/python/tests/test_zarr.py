"""The Zarr store: the results of LocalStore, in any memory of Zarr's buffers."""

from __future__ import annotations

import asyncio
import errno

import pytest

numpy = pytest.importorskip("numpy")
zarr = pytest.importorskip("zarr", minversion="3")

from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest  # noqa: E402
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype  # noqa: E402
from zarr.storage import LocalStore  # noqa: E402

import spinio.zarr  # noqa: E402
from spinio import emulated  # noqa: E402
from spinio.zarr import Store  # noqa: E402


class EmulatedBuffer(Buffer):
    """A Zarr buffer in the emulated device's memory."""

    def __init__(self, array):
        self._data = array

    @classmethod
    def create_zero_length(cls):
        return cls(emulated.empty(0))

    @classmethod
    def from_buffer(cls, buffer):
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, bytes_like):
        raise AssertionError("the bytes went through host memory")

    def as_numpy_array(self):
        return self._data.numpy()

    def combine(self, others):
        raise NotImplementedError


EMULATED = BufferPrototype(buffer=EmulatedBuffer, nd_buffer=default_buffer_prototype().nd_buffer)
REQUESTS = [
    None,
    RangeByteRequest(0, 10),
    RangeByteRequest(5, 100000),
    RangeByteRequest(2999990, 1 << 24),
    OffsetByteRequest(100),
    OffsetByteRequest(1 << 40),
    SuffixByteRequest(70000),
    SuffixByteRequest(1 << 40),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_values_and_parts_of_them(tmp_path, noise, request_):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "0").write_bytes(noise[:3000000])
    ours, theirs = Store(tmp_path), LocalStore(tmp_path)
    want = asyncio.run(theirs.get("c/0", default_buffer_prototype(), request_))
    for prototype in (default_buffer_prototype(), EMULATED):
        got = asyncio.run(ours.get("c/0", prototype, request_))
        assert type(got) is prototype.buffer
        assert got.as_numpy_array().tobytes() == want.to_bytes()
        assert ours.get_sync("c/0", prototype=prototype, byte_range=request_).as_numpy_array().tobytes() == want.to_bytes()


def test_missing_values(tmp_path):
    (tmp_path / "folder").mkdir()
    store = Store(tmp_path)
    for key in ("none", "folder", "none/deeper"):
        assert asyncio.run(store.get(key, EMULATED)) is None
        assert store.get_sync(key) is None
    with pytest.raises(TypeError, match="byte_range"):
        (tmp_path / "x").write_bytes(b"x")
        store.get_sync("x", byte_range=object())


def test_partial_values(tmp_path):
    for i in range(50):
        (tmp_path / str(i)).write_bytes(bytes([i]) * 1000)
    requests = [(str(i), RangeByteRequest(i, 500)) for i in range(60)]
    got = asyncio.run(Store(tmp_path).get_partial_values(EMULATED, requests))
    assert [g and g.as_numpy_array().tobytes() for g in got] == [bytes([i]) * (500 - i) for i in range(50)] + [None] * 10


def test_values_are_written_atomically(tmp_path, noise):
    store = Store(tmp_path)
    array = emulated.empty(100000)
    array.set(noise[:100000])
    for value in (EmulatedBuffer(array), EMULATED.buffer(emulated.empty(0)), default_buffer_prototype().buffer.from_bytes(b"host")):
        asyncio.run(store.set("deep/er/c", value))
        assert (tmp_path / "deep/er/c").read_bytes() == value.as_numpy_array().tobytes()
        store.set_sync("d", value)
        assert (tmp_path / "d").read_bytes() == value.as_numpy_array().tobytes()
    asyncio.run(store.set_if_not_exists("d", EmulatedBuffer(array)))
    assert (tmp_path / "d").read_bytes() == b"host"
    asyncio.run(store.set_if_not_exists("e", EmulatedBuffer(array)))
    assert (tmp_path / "e").read_bytes() == noise[:100000]
    assert not list(tmp_path.rglob("*.partial"))
    with pytest.raises(TypeError):
        asyncio.run(store.set("x", b"bytes"))
    with pytest.raises(ValueError, match="read-only"):
        asyncio.run(Store(tmp_path, read_only=True).set("x", value))


def test_zarr_arrays(tmp_path):
    store = Store(tmp_path / "a.zarr")
    values = numpy.arange(100 * 70, dtype="int32").reshape(100, 70)
    array = zarr.create_array(store, shape=values.shape, dtype="int32", chunks=(30, 30), shards=(60, 60))
    array[:] = values
    array.attrs["unit"] = "m"
    again = zarr.open_array(Store(tmp_path / "a.zarr", read_only=True), mode="r")
    assert (again[:] == values).all() and (again[17:83, 5:66] == values[17:83, 5:66]).all()
    assert again.attrs["unit"] == "m"
    assert store == Store(tmp_path / "a.zarr") and store.with_read_only(True).read_only


def test_zarr_arrays_on_a_gpu(tmp_path):
    cupy = pytest.importorskip("cupy")
    values = numpy.arange(1000 * 700, dtype="int32").reshape(1000, 700)
    array = zarr.create_array(Store(tmp_path), shape=values.shape, dtype="int32", chunks=(300, 300), compressors=None)
    array[:] = values
    with zarr.config.enable_gpu():
        part = zarr.open_array(Store(tmp_path), mode="r")[100:900]
        assert isinstance(part, cupy.ndarray)
        assert (part.get() == values[100:900]).all()
        zarr.open_array(Store(tmp_path), mode="r+")[100:900] = part + 1
    assert (zarr.open_array(Store(tmp_path), mode="r")[100:900] == values[100:900] + 1).all()


@pytest.mark.parametrize("prototype", [default_buffer_prototype(), EMULATED])
def test_error_after_some_bytes_is_raised(bad_bytes, monkeypatch, prototype):
    monkeypatch.setattr(spinio.zarr, "_range", lambda request, size: (request.start, request.end))
    start, (folder, _, key) = bad_bytes.start, bad_bytes.path.rpartition("/")
    store = Store(folder, read_only=True)
    good = store.get_sync(key, prototype=prototype, byte_range=RangeByteRequest(start, start + bad_bytes.good))
    assert len(good) == bad_bytes.good
    with pytest.raises(OSError) as raised:
        store.get_sync(key, prototype=prototype, byte_range=RangeByteRequest(start, start + bad_bytes.size))
    assert raised.value.errno == errno.EIO
