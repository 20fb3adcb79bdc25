"""Arrays of CuPy are made, copied and read into while their own device is the current one, with a stand-in for CuPy."""

from __future__ import annotations

import sys
import types

import pytest

import spinio
from spinio import _file
from spinio.safetensors import load_file, safe_open

numpy = pytest.importorskip("numpy")


@pytest.fixture
def cupy(monkeypatch):
    """CuPy in host memory. `used` collects the device that was current at each call that depends on it."""
    current, used = [0], []

    class Device:
        def __init__(self, ordinal):
            self.ordinal = ordinal

        def __enter__(self):
            current.append(self.ordinal)

        def __exit__(self, *_):
            current.pop()

    class Array(numpy.ndarray):
        def copy(self, *arguments):
            used.append(("copy", current[-1]))
            return super().copy(*arguments)

    def empty(shape, dtype):
        used.append(("empty", current[-1]))
        return numpy.empty(shape, dtype).view(Array)

    for name in ("_read_full", "read_many"):

        def read(self, *arguments, call=getattr(_file.File, name), name=name):
            # The header is read into host memory.
            if any(isinstance(argument, Array) for argument in arguments):
                used.append((name, current[-1]))
            return call(self, *arguments)

        monkeypatch.setattr(_file.File, name, read)
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(empty=empty, cuda=types.SimpleNamespace(Device=Device)))
    return used


@pytest.fixture
def path(tmp_path):
    text = b'{"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F64","shape":[4,8],"data_offsets":[3,259]}}'
    path = tmp_path / "odd"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"abc" + numpy.arange(32.0).tobytes())
    return path


def test_other_device_than_the_current_one(cupy, path):
    loaded = load_file(path, device="cuda:1", library="cupy")
    assert loaded["b"].tolist() == numpy.arange(32.0).reshape(4, 8).tolist()
    with safe_open(path, device="cuda:1", library="cupy") as f:
        assert f.get_slice("b")[1:3, 2:4].tolist() == [[10, 11], [18, 19]]
        assert f.get_slice("b")[::-1, 0].tolist() == [24, 16, 8, 0]
    assert len(spinio.fromfile(path, device="cuda:1", library="cupy")) == path.stat().st_size
    assert {name for name, _ in cupy} == {"empty", "copy", "_read_full", "read_many"}
    assert {device for _, device in cupy} == {1}, cupy
