"""Safetensors: the same tensors as the format's own library; hostile headers are rejected."""

from __future__ import annotations

import errno
import json
import os
import pickle

import pytest

import spinio
from spinio import _arrays
from spinio.safetensors import SafetensorsError, _fill, load_file, load_sharded, safe_open

numpy = pytest.importorskip("numpy")
reference = pytest.importorskip("safetensors.numpy")

TENSORS = {
    "empty": numpy.zeros((0, 4), "float32"),
    "scalar": numpy.array(2.5, "float64"),
    "matrix": numpy.arange(7 * 33, dtype="float32").reshape(7, 33),
    "halves": numpy.arange(1000, dtype="float16").reshape(10, 10, 10),
    "bytes": numpy.arange(251, dtype="uint8"),
    "flags": numpy.arange(9) % 2 == 0,
    "big": numpy.arange(1 << 18, dtype="int64").reshape(256, 1024),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    reference.save_file(TENSORS, path, metadata={"format": "np", "author": "Ünïcode"})
    return path


def host(memory, array):
    """An array of any library as a NumPy array."""
    if memory.name == "emulated":
        return array.numpy()
    if memory.library == "torch":
        return array.cpu().numpy()
    return array.get() if memory.library == "cupy" else array


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_load_file_returns_saved_tensors(memory, model):
    loaded = load_file(model, device=memory.device, library=memory.library)
    assert set(loaded) == set(TENSORS)
    for name, want in TENSORS.items():
        assert same(host(memory, loaded[name]), want), name


def test_load_file_makes_one_read(model):
    before = spinio.stats()
    loaded = load_file(model, device="emulated")
    after = spinio.stats()
    assert after["read"]["calls"] - before["read"]["calls"] == 1
    addresses = [t.address for t in loaded.values()]
    assert max(addresses) - min(addresses) < 4 << 20


def test_safe_open_reads_requested_tensors(memory, model):
    with safe_open(model, memory.device, library=memory.library) as f:
        assert set(f.keys()) == set(TENSORS) and len(f) == len(TENSORS) and "matrix" in f and "other" not in f
        assert f.metadata() == {"format": "np", "author": "Ünïcode"}
        for name, want in TENSORS.items():
            assert same(host(memory, f.get_tensor(name)), want), name
        with pytest.raises(SafetensorsError, match="no tensor 'other'"):
            f.get_tensor("other")
    with pytest.raises(ValueError):
        f.get_tensor("matrix")


INDICES = [
    0, -1, slice(None), slice(2, 5), slice(5, 2), slice(-3, None), slice(None, None, 2), slice(1, 7, 3), Ellipsis,
    (slice(1, 5, 2), slice(0, 3)),
    (2, 3), (slice(1, 4), 5), (slice(1, 4), slice(2, 9)), (3, slice(4, 20, 5)), (Ellipsis, 1), (slice(None), slice(None)),
    slice(None, None, -1), slice(6, 1, -2), slice(1, 5, -1), (slice(1, 5), slice(None, None, -3)), (2, slice(None, None, -1)),
    (slice(None, None, -2), slice(9, 2, -1)),
]  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_slices(memory, model, index):
    with safe_open(model, memory.device, library=memory.library) as f:
        for name in ("matrix", "big", "halves"):
            part = f.get_slice(name)
            assert part.get_shape() == list(TENSORS[name].shape)
            assert same(host(memory, part[index]), TENSORS[name][index]), name
        assert f.get_slice("matrix").get_dtype() == "F32"


def test_slice_reads_its_rows_only(model):
    with safe_open(model, "emulated") as f:
        before = spinio.stats()["read"]["bytes"]
        f.get_slice("big")[10:20]
        assert spinio.stats()["read"]["bytes"] - before == 10 * 1024 * 8


@pytest.mark.parametrize("index", [(slice(None), slice(100, 300)), (slice(5, 9), slice(0, 1)), (slice(None), slice(-5, None)), (slice(3, 3), slice(2)), (slice(4), slice(9, 9))], ids=str)
def test_slice_reads_part_of_each_row(memory, model, index):
    with safe_open(model, memory.device, library=memory.library) as f:
        before = spinio.stats()
        assert same(host(memory, f.get_slice("big")[index]), TENSORS["big"][index])
        after = spinio.stats()
        if memory.name == "emulated":
            moved = sum(after[d]["bytes"] - before[d]["bytes"] for d in ("read", "batch"))
            assert moved == TENSORS["big"][index].nbytes
        assert same(host(memory, f.get_slice("halves")[2, 1:4, 0:3]), TENSORS["halves"][2, 1:4, 0:3])
        assert same(host(memory, f.get_slice("halves")[2:4, 1:4]), TENSORS["halves"][2:4, 1:4])


def test_invalid_slices(model):
    with safe_open(model, "emulated") as f:
        part = f.get_slice("matrix")
        for wrong, error in [(7, IndexError), (-8, IndexError), ((0, 0, 0), IndexError), ([1, 2], TypeError), ("a", TypeError), (True, TypeError), (None, TypeError), (numpy.ones(7, bool), TypeError), ((0, numpy.array([1])), TypeError), (slice(None, None, 0), ValueError), (slice(0.5), TypeError)]:
            with pytest.raises(error):
                part[wrong]


# ---- types


def write(path, header, data, prefix=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if prefix is None else prefix).to_bytes(8, "little") + text + data)
    return path


def one(dtype="U8", shape=(4,), offsets=(0, 4)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_type_of_the_format(tmp_path):
    bits = {
        "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
        "C64": 64, "F64": 64, "I64": 64, "U64": 64,
    }  # fmt: skip
    header, at = {}, 0
    for name, width in bits.items():
        header[name] = one(name, (2, 4), (at, at + width))
        at += width
    noise = bytes(i % 2 for i in range(at))
    loaded = load_file(write(tmp_path / "types", header, noise), device="emulated")
    assert len(loaded) == 22
    for name in bits:
        begin, end = header[name]["data_offsets"]
        assert loaded[name].tobytes() == noise[begin:end], name
        assert loaded[name].shape == (2, 4)


def test_unaligned_tensors(memory, tmp_path):
    header = {"a": one("U8", (3,), (0, 3)), "none": one("F64", (2, 0), (3, 3)), "b": one("F64", (2,), (3, 19))}
    values = numpy.array([1.5, -2.5])
    path = write(tmp_path / "odd", header, b"abc" + values.tobytes())
    loaded = load_file(path, memory.device, library=memory.library)
    assert same(host(memory, loaded["b"]), values)
    assert host(memory, loaded["a"]).tobytes() == b"abc"
    assert host(memory, loaded["none"]).shape == (2, 0)


def test_types_missing_in_a_library(tmp_path):
    path = write(tmp_path / "fours", {"x": one("F4", (8,), (0, 4))}, bytes(4))
    before = spinio.stats()["read"]["calls"]
    for kind in ("F4", "F6_E2M3"):
        bits = 4 if kind == "F4" else 6
        write(path, {"x": one(kind, (8,), (0, bits))}, bytes(bits))
        with pytest.raises(TypeError, match=f"fours: tensor 'x': NumPy has no type .*{kind}"):
            load_file(path, "cpu", library="numpy")
        with safe_open(path, "cpu", library="numpy") as f:
            assert f.get_slice("x").get_dtype() == kind and f.get_slice("x").get_shape() == [8]
            with pytest.raises(TypeError, match="tensor 'x'"):
                f.get_tensor("x")
    assert spinio.stats()["read"]["calls"] == before


# ---- hostile headers

HUGE = (1 << 64) - 1

HOSTILE = [
    ({"a": one(), "b": one(offsets=(2, 6))}, bytes(6), None, "overlap"),
    ({"a": one(), "b": one()}, bytes(4), None, "overlap"),
    ({"a": one(), "b": one(offsets=(5, 9))}, bytes(9), None, "gap"),
    ({"a": one(offsets=(1, 5))}, bytes(5), None, "gap"),
    ({"a": one()}, bytes(3), None, "after 4 bytes of data, but the file has 3"),
    ({"a": one()}, bytes(5), None, "the file has 5"),
    ({"a": one(offsets=(4, 0))}, bytes(4), None, "takes 4 bytes"),
    ({"a": one(offsets=(HUGE - 1, 2))}, bytes(4), None, "takes 4 bytes"),
    ({"a": one(shape=(1 << 33, 1 << 33))}, bytes(4), None, "no whole number"),
    ({"a": one(shape=(HUGE, 2))}, bytes(4), None, "cannot be"),
    ({"a": one("F64", (1 << 60, 2))}, bytes(4), None, "no whole number"),
    ({"a": one(shape=(0, HUGE), offsets=(0, 0))}, b"", None, "cannot be"),
    ({"a": one("F4", (3,), (0, 1))}, bytes(1), None, "no whole number"),
    ({"a": one(shape=(5,))}, bytes(4), None, "takes 5 bytes"),
    ({"a": one(shape=(-4,))}, bytes(4), None, "invalid value"),
    ({"a": one(shape=(4.0,))}, bytes(4), None, "invalid type"),
    ({"a": one("U9")}, bytes(4), None, "dtype"),
    ({"a": one("u8")}, bytes(4), None, "dtype"),
    ({"a": one(offsets=(0, 4, 8))}, bytes(4), None, "JSON"),
    ({"a": {"dtype": "U8", "shape": [4]}}, bytes(4), None, "needs dtype, shape and data_offsets"),
    ({"a": 5}, b"", None, "invalid type"),
    ({"__metadata__": {"a": 5}}, b"", None, "invalid type"),
    ({"__metadata__": [1]}, b"", None, "invalid type"),
    (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", None, "twice"),
    (b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x", None, "twice"),
    (b'{"__metadata__":{"k":"1","k":"2"}}', b"", None, "twice"),
    (b'{"__metadata__":{},"__metadata__":{}}', b"", None, "twice"),
    (b'{"a":' * 100000, b"", None, "JSON"),
    (b'{"a":{"x":' + b"[" * 100000, b"", None, "JSON"),
    (b"[]", b"", None, "begin with {"),
    (b" {}", b"", None, "begin with {"),
    (b"{}{}", b"", None, "JSON"),
    (b"{\xff}", b"", None, "JSON"),
    (b'{"a', b"", None, "JSON"),
    (b"", b"", None, "is none"),
    (b"{}", b"", HUGE, "the most is"),
    (b"{}", b"", 100_000_001, "the most is"),
    (b"{}", b"", 3, "but the file has"),
]  # fmt: skip


@pytest.mark.parametrize(("header", "data", "prefix", "why"), HOSTILE)
def test_hostile_headers(tmp_path, header, data, prefix, why):
    path = write(tmp_path / "hostile", header, data, prefix)
    with pytest.raises(SafetensorsError, match=why) as caught:
        load_file(path, device="emulated")
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("size", range(8))
def test_files_too_short_for_a_length(tmp_path, size):
    path = tmp_path / "short"
    path.write_bytes(bytes(size))
    with pytest.raises(SafetensorsError, match="too few"):
        load_file(path)


def test_unusual_but_valid_files(tmp_path):
    assert load_file(write(tmp_path / "a", b"{}      ", b""), "emulated") == {}
    extra = one() | {"later": [{"x": 1}, None]}
    loaded = load_file(write(tmp_path / "b", {"": extra, "z": one(shape=(0,), offsets=(0, 0))}, b"abcd"), "emulated")
    assert loaded[""].tobytes() == b"abcd" and loaded["z"].tobytes() == b""
    with safe_open(write(tmp_path / "c", {"__metadata__": None, "a": one()}, b"abcd"), "emulated") as f:
        assert f.metadata() is None


def test_missing_file_and_unknown_device(model, tmp_path):
    with pytest.raises(FileNotFoundError):
        load_file(tmp_path / "none")
    for device in ("tpu", "cuda:x", "emulated:", "cpu:-1"):
        if device == "emulated:":
            continue
        with pytest.raises(ValueError, match="is no device"):
            load_file(model, device=device)
    with pytest.raises(ValueError, match="not by"):
        load_file(model, device="cpu", library="cupy")


# ---- names, workers


def test_iterating_yields_names(model):
    with safe_open(model, "emulated") as f:
        assert list(f) == f.keys() and set(f) == set(TENSORS) and len(f) == len(TENSORS)
        assert "matrix" in f and "nothing" not in f


def test_worker_reopens_the_file(memory, model):
    with safe_open(model, memory.device, library=memory.library) as f:
        with pickle.loads(pickle.dumps(f)) as again:
            assert again.keys() == f.keys()
            assert same(host(memory, again.get_tensor("matrix")), TENSORS["matrix"])
    with pytest.raises(ValueError, match="closed"):
        pickle.dumps(f)


# ---- models of several files


def sharded(directory, files, index=None):
    for file, names in files.items():
        reference.save_file({name: TENSORS[name] for name in names}, directory / file)
    said = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, names in files.items() for n in names}}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(said if index is None else index))
    return path


def test_model_of_several_files(memory, tmp_path):
    files = {"model-00001-of-00002.safetensors": ["matrix", "empty"], "model-00002-of-00002.safetensors": ["scalar", "big", "flags"]}
    path = sharded(tmp_path, files)
    for name in (path, tmp_path, str(tmp_path)):
        loaded = load_sharded(name, memory.device, library=memory.library)
        assert set(loaded) == {"matrix", "empty", "scalar", "big", "flags"}
        for name, array in loaded.items():
            assert same(host(memory, array), TENSORS[name]), name
    # Tensors that the index does not name are left out.
    sharded(tmp_path, {}, {"weight_map": {"big": "model-00002-of-00002.safetensors"}})
    assert list(load_sharded(tmp_path, memory.device, library=memory.library)) == ["big"]


def test_invalid_index_is_rejected(tmp_path):
    os.mkdir(tmp_path / "model")
    path = sharded(tmp_path / "model", {"a": ["matrix"]})
    sharded(tmp_path, {"b": ["matrix"]})
    for index, why in [
        ({}, 'no "weight_map"'),
        ([], 'no "weight_map"'),
        ({"weight_map": ["a"]}, 'no "weight_map"'),
        ({"weight_map": {"matrix": "../b"}}, "not a file in the same directory"),
        ({"weight_map": {"matrix": str(tmp_path / "b")}}, "not a file in the same directory"),
        ({"weight_map": {"matrix": ".."}}, "not a file in the same directory"),
        ({"weight_map": {"matrix": ""}}, "not a file in the same directory"),
        ({"weight_map": {"matrix": "a\0"}}, "not a file in the same directory"),
        ({"weight_map": {"matrix": 5}}, "not a file in the same directory"),
        ({"weight_map": {"matrix": "\ud800"}}, "surrogates not allowed"),
        ({"weight_map": {"scalar": "a"}}, "no tensor 'scalar', which .*index.json names"),
    ]:
        path.write_text(json.dumps(index))
        with pytest.raises(SafetensorsError, match=why) as caught:
            load_sharded(path, "emulated")
        assert str(tmp_path / "model") in str(caught.value)
    for text in ("", "{", '{"weight_map": {"matrix": "a", "matrix": "a"}}', "[" * 100000, "\xff"):
        path.write_bytes(text.encode("latin-1"))
        with pytest.raises(SafetensorsError, match="the index is invalid"):
            load_sharded(path, "emulated")
    path.write_text('{"weight_map": {"matrix": "gone"}}')
    with pytest.raises(FileNotFoundError, match="gone"):
        load_sharded(path, "emulated")
    path.unlink()
    with pytest.raises(FileNotFoundError, match="index.json"):
        load_sharded(tmp_path / "model")


def test_error_after_some_bytes_is_raised(memory, bad_bytes):
    """A file with a bad block in its data is not reported as truncated."""
    with spinio.open(bad_bytes.path) as f:
        maker = _arrays.library(memory.device, memory.library)
        _fill(f, maker, memory.full(bad_bytes.good, 0), bad_bytes.start, bad_bytes.good)
        with pytest.raises(OSError) as raised:
            _fill(f, maker, memory.full(bad_bytes.size, 0), bad_bytes.start, bad_bytes.size)
    assert raised.value.errno == errno.EIO
