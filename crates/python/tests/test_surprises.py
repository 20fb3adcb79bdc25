"""Problems of new users: argument names, reprs, and error messages."""

from __future__ import annotations

import errno
import os
import pathlib
import warnings

import pytest

import spinio
from spinio import emulated, nvmmu, safetensors


def test_keyword_arguments(data, noise, tmp_path):
    array = emulated.empty(100)
    with spinio.open(data) as f:
        assert f.pread(array, offset=7) == 100
        assert list(f.read_many(offsets=[5, 9], lengths=10, out=array)) == [10, 10]
        assert array.tobytes()[:20] == noise[5:15] + noise[9:19]
        with pytest.raises(TypeError, match="an offset is an integer, not None"):
            f.pread(array, None)
    with spinio.open(tmp_path / "out", "w") as f:
        assert f.pwrite(b"abc", offset=4) == 3
        with pytest.raises(TypeError, match="offset"):
            f.pwrite(b"abc")


def test_reprs(data, tmp_path):
    name = repr(data)
    with spinio.open(data) as f:
        assert repr(f) == f"<spinio.File name={name} mode='rb'>"
        with f.pin(like=emulated.empty(1)) as h:
            assert repr(h) == f"<spinio.PinnedFile of {f!r}>"
            with h.map(0, 4096) as m:
                assert repr(m) == f"<spinio.Map of 4096 bytes at {m.address:#x}>"
            assert repr(m) == "<spinio.Map unmapped>"
        assert repr(h) == "<spinio.PinnedFile unpinned>"
    assert repr(f) == "<spinio.File closed>"
    out = os.fspath(tmp_path / "out")
    with nvmmu.session(out) as s:
        assert repr(s) == f"<spinio.nvmmu.Session into {out!r}>"
        with emulated.paused():
            move = s.upload_async(data, emulated.empty(100))
            assert repr(move) == "<spinio.nvmmu.Ticket in flight>"
        move.wait()
        assert repr(move) == "<spinio.nvmmu.Ticket of a completed move>"
    assert repr(s) == f"<spinio.nvmmu.Session into {out!r}, ended>" and "without output" in repr(nvmmu.session())
    with nvmmu.pipeline(data, device="emulated") as pieces:
        for step in pieces:
            assert repr(step).startswith("<spinio.nvmmu.Step 0: <spinio.emulated.Array uint8[")
    assert repr(pieces) == f"<spinio.nvmmu.Pipeline through {os.fspath(data)!r}: piece 1 of 1, ended>"


def test_safetensors_reprs(tmp_path):
    numpy = pytest.importorskip("numpy")
    save = pytest.importorskip("safetensors.numpy").save_file
    path = tmp_path / "model.safetensors"
    save({"a": numpy.zeros((2, 3), "float32")}, path)
    with safetensors.safe_open(path) as f:
        assert repr(f) == f"<spinio.safetensors.safe_open {str(path)!r}: 1 tensors>"
        assert repr(f.get_slice("a")) == "<spinio.safetensors.Slice 'a': F32[2, 3]>"
    assert repr(f).endswith(", closed>")
    with pytest.raises(ValueError, match="'pt' is no device: .*, and the framework is named by library="):
        safetensors.safe_open(path, "pt")


def test_unclosed_file_warns():
    with pytest.warns(ResourceWarning, match="unclosed file <spinio.File name="):
        spinio.open(__file__)


def test_closed_file_does_not_warn(data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with spinio.open(data) as f:
            f.pread(bytearray(3), 0)
        with pytest.raises(FileNotFoundError):
            spinio.open("/none/such")


def test_numpy_types_by_any_name(tmp_path):
    numpy = pytest.importorskip("numpy")
    values = numpy.arange(4)
    values.tofile(tmp_path / "numbers")
    # NumPy's types compare equal to Python's, but have another hash.
    for kind in (int, "int64", numpy.int64, numpy.dtype("int64"), numpy.dtype(int)):
        assert numpy.array_equal(spinio.fromfile(tmp_path / "numbers", kind, library="numpy"), values)
    for name in ("bool", "float64", "complex128"):
        array = emulated.array(numpy.ones(3, name))
        assert array.dtype.name == name and numpy.array_equal(array.numpy(), numpy.ones(3, name))


def test_shapes_and_indices_of_numpy():
    numpy = pytest.importorskip("numpy")
    assert emulated.empty(numpy.int64(3)).shape == (3,)
    array = emulated.empty(numpy.array([2, 3]))
    assert array.shape == (2, 3) and all(type(n) is int for n in array.shape)
    assert array[numpy.int64(1)].shape == (3,)
    for wrong in ([0, 1], None, "0", 1.0):
        with pytest.raises(TypeError, match="by numbers and slices, not by"):
            array[wrong]
    for wrong in (2.5, "3", [2.5]):
        with pytest.raises(TypeError):
            emulated.empty(wrong)


def test_device_memory_is_not_converted_to_object_array():
    numpy = pytest.importorskip("numpy")
    for use in (numpy.asarray, numpy.sum, lambda a: numpy.zeros(4, "uint8") + a):
        with pytest.raises(TypeError):
            use(emulated.empty(4))


def test_integers_of_any_kind(data, noise):
    out = bytearray(20)
    with spinio.open(data) as f:
        assert list(f.read_many((at for at in (3, 8)), iter([10, 10]), out)) == [10, 10]
        assert bytes(out) == noise[3:13] + noise[8:18]
        with pytest.raises((ValueError, OverflowError)):
            f.read_many([10**30], 2, out)
        with pytest.raises(TypeError):
            f.read_many([None], 2, out)


def test_file_without_size_is_an_error(tmp_path):
    pytest.importorskip("numpy")
    for path in ("/dev/zero", "/dev/null"):
        for read in (lambda: spinio.fromfile(path, count=4), lambda: nvmmu.pipeline(path, device="emulated")):
            with pytest.raises(ValueError, match=f"{path}: only a file with a size"):
                read()
    with pytest.raises(OSError) as caught:
        spinio.fromfile("/proc/self/status")
    assert caught.value.filename == "/proc/self/status"


def test_floats_are_type_errors(data):
    pytest.importorskip("numpy")
    for wrong in ({"count": 1.5}, {"offset": 1.0}):
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            spinio.fromfile(data, **wrong)
        with pytest.raises(TypeError, match="'float' object cannot be interpreted as an integer"):
            nvmmu.pipeline(data, device="emulated", **wrong)
    with pytest.raises(TypeError, match="lengths are"):
        with spinio.open(data) as f:
            f.read_many([0, 1], None, bytearray(3))
    assert str(emulated.empty(3, "float32").dtype) == "float32"


def test_sessions_accept_bytes_paths(data, noise, tmp_path):
    array = emulated.empty(100)
    with nvmmu.session(os.fsencode(tmp_path / "out")) as s:
        assert s.upload(os.fsencode(data), array) == s.upload_async(os.fsencode(data), array).wait() == 100
        s.download(array)
        s.download(array, path=os.fsencode(tmp_path / "other"))
    assert (tmp_path / "out").read_bytes() == (tmp_path / "other").read_bytes() == noise[:100]
    with pytest.raises(TypeError, match="expected str, bytes or os.PathLike"):
        nvmmu.session(5)


def test_pin_and_map_errors_name_the_file(data, tmp_path):
    with spinio.open(data) as f, f.pin(like=emulated.empty(1)) as h:
        with pytest.raises(OSError, match="is not inside the file") as caught:
            h.map(0, 1 << 40)
        assert caught.value.errno == errno.EINVAL and caught.value.filename == data
    path = pathlib.Path(tmp_path / "writable")
    path.write_bytes(b"x" * 10000)
    with open(path, "r+b"), spinio.open(path) as f:
        with pytest.raises(OSError) as caught:
            f.pin(like=emulated.empty(1))
        assert str(caught.value.filename) == str(path)


def test_forked_child_error_names_the_cause(data):
    array = emulated.empty(100)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with spinio.open(data) as f:
                with pytest.raises(BufferError, match="a forked process has no device memory, its parent has"):
                    f.pread(array, 0)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
