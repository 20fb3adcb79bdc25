"""fromfile, and the emulated device's arrays."""

from __future__ import annotations

import errno

import pytest

import spinio
from spinio import _arrays, emulated

numpy = pytest.importorskip("numpy")


def test_fromfile_equals_numpy(memory, data, noise, tmp_path):
    def bytes_of(array):
        return array.tobytes() if memory.name == "emulated" else memory.read(array)

    for dtype, count, offset in [("uint8", -1, 0), ("float32", -1, 1), ("int64", 1000, 8), ("int16", 1 << 40, 5), ("uint8", 0, 0), ("uint8", -1, 1 << 40)]:
        array = spinio.fromfile(data, dtype, count, offset, device=memory.device, library=memory.library)
        want = numpy.fromfile(data, dtype, min(count, len(noise)), offset=min(offset, len(noise)))
        assert bytes_of(array) == want.tobytes(), (dtype, count, offset)
        assert tuple(array.shape) == want.shape
    with pytest.raises(ValueError):
        spinio.fromfile(data, offset=-1)
    with pytest.raises(ValueError, match="size"):
        spinio.fromfile("/dev/zero")
    with pytest.raises(TypeError, match="not an element type"):
        spinio.fromfile(data, "float7")
    for swapped in (">f4", numpy.dtype(">i8")):
        with pytest.raises(TypeError, match="byte order"):
            spinio.fromfile(data, swapped)


def test_emulated_array_views():
    host = numpy.arange(2 * 3 * 4, dtype="int32").reshape(2, 3, 4)
    array = emulated.array(host)
    for key in [0, -1, (1, 2), (slice(None), 1), (Ellipsis, slice(1, 3)), (1, slice(None, None, -1)), slice(0, 0), slice(1, 0), (1, slice(1, 2, -1)), (1, 2, 3)]:
        want = host[key]
        assert array[key].shape == want.shape
        assert array[key].tobytes() == want.tobytes(), key
    assert (array.reshape(6, -1).numpy() == host.reshape(6, -1)).all()
    assert (array.view("uint8").numpy() == host.view("uint8").reshape(-1)).all()
    assert array[1].address == array.address + 48 and array.strides == host.strides
    assert array[0:0][::-1].tobytes() == b""
    for wrong in [2, (0, 0, 0, 0), (0, 3)]:
        with pytest.raises(IndexError):
            array[wrong]
    with pytest.raises(ValueError):
        array[:, 1].reshape(8)
    with pytest.raises(ValueError):
        array.reshape(5, 5)
    with pytest.raises(ValueError):
        array.set(b"too short")


def test_new_memory_is_filled_with_a_pattern():
    assert set(emulated.empty(100).tobytes()) == {0xA5}


def test_device_out_of_memory():
    with pytest.raises(MemoryError):
        emulated.empty(1 << 45)


def test_invalid_device_configuration():
    with pytest.raises(ValueError, match="the parts are"):
        emulated.configure("colour=blue")


def test_error_after_some_bytes_is_raised(memory, bad_bytes, monkeypatch):
    monkeypatch.setattr(_arrays, "size_of", lambda f: bad_bytes.start + bad_bytes.size)
    options = {"device": memory.device, "library": memory.library, "offset": bad_bytes.start}
    array = spinio.fromfile(bad_bytes.path, "uint8", bad_bytes.good, **options)
    assert memory.read(array) == bytes([5]) * bad_bytes.good
    # The rest that fails may be short.
    for more in (4096, bad_bytes.size - bad_bytes.good):
        with pytest.raises(OSError) as raised:
            spinio.fromfile(bad_bytes.path, "uint8", bad_bytes.good + more, **options)
        assert raised.value.errno == errno.EIO and raised.value.filename == bad_bytes.path
