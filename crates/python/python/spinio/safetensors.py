"""Safetensors files, read directly into device memory.

    from spinio.safetensors import load_file, safe_open

    weights = load_file("model.safetensors", device="cuda")       # a dict of tensors

    with safe_open("model.safetensors", device="cuda") as f:      # or one at a time, or parts
        one = f.get_tensor("embed.weight")
        rows = f.get_slice("lm_head.weight")[1000:2000]

    weights = load_file("model.safetensors", device="cuda", shared=True)    # one copy for all processes

`load_file` reads all data in one large request into one allocation and returns views of it: there is no second copy, and
the memory is freed when the last tensor is deleted. To keep a few tensors of many, use `safe_open`. Models of
several files have an index, which `load_sharded` takes.

With `shared=True` the tensors are views of a read-only map of the file, of which there is one copy on each GPU for all
processes of the user. `spinio gaia serve` keeps it. The tensors must not be written.
"""

from __future__ import annotations

import json
import math
import os
from types import TracebackType
from typing import Any, Iterator, NamedTuple, Sequence

from spinio import _arrays, _dtypes, _file, _spinio, gaia
from spinio._spinio import SafetensorsError

__all__ = ["SafetensorsError", "Slice", "load_file", "load_sharded", "safe_open"]

# The name of an index, and its maximum size: that of a header.
_INDEX, _LONGEST = "model.safetensors.index.json", 100_000_000


class _Tensor(NamedTuple):
    dtype: _dtypes.DType
    shape: tuple[int, ...]
    begin: int
    end: int


class _Header(NamedTuple):
    metadata: dict[str, str] | None
    tensors: dict[str, _Tensor]
    data: int  # offset of the data in the file
    size: int  # bytes of data


def _header(f: _file.File) -> _Header:
    file = os.fstat(f.fileno()).st_size
    try:
        length = _spinio.header_len(_whole(f, 8, 0), file)
        data = 8 + length
        texts, tensors = _spinio.parse(_whole(f, length, 8), file - data)
    except SafetensorsError as why:
        raise SafetensorsError(f"{_name(f)}: {why}") from None
    return _Header(
        None if texts is None else dict(texts),
        {n: _Tensor(_dtypes.SAFETENSORS[t], tuple(shape), begin, end) for n, t, shape, begin, end in tensors},
        data,
        file - data,
    )


def _name(f: _file.File) -> str:
    return str(f.name) if isinstance(f.name, int) else os.fsdecode(f.name)


def _whole(f: _file.File, size: int, at: int) -> bytes:
    into = bytearray(size)
    got = f._read_full(into, at)
    return bytes(into[:got])


def _fill(f: _file.File, maker: _arrays.Library, raw: Any, at: int, size: int) -> None:
    with maker.on_device():
        if size and f._read_full(raw, at) != size:
            raise SafetensorsError(f"{_name(f)}: the file was truncated while it was read")


def _require(f: _file.File, maker: _arrays.Library, name: str, tensor: _Tensor) -> None:
    """Raises a TypeError, before any read, if the library has no such element type."""
    try:
        maker.require(tensor.dtype)
    except TypeError as why:
        raise TypeError(f"{_name(f)}: tensor {name!r}: {why}") from None


def load_file(
    filename: _file.Path, device: Any = "cpu", *, library: str | None = None, shared: bool = False
) -> dict[str, Any]:
    """All tensors of a file, by name, in the order of their bytes.

    device: "cpu", "cuda", "cuda:1" ..., a number, a torch.device, or "emulated". library: the tensors' library, "torch",
    "cupy" or "numpy"; by default the one that the program has imported. The tensors share one allocation.

    shared: the tensors are read-only views of a map of the file, one copy on each GPU for all processes of this user,
    which is unmapped when the last tensor is deleted. It needs `spinio gaia serve`, and a file that no process has open
    for writing (ETXTBSY); if the file is written later, the tensors stay as they are. A tensor whose bytes are not aligned
    as its type needs is a copy of its own. Storing to the tensors is an error of the GPU.

    A file that cannot be read or shared is an OSError, an invalid header a SafetensorsError, an element type that the library does not
    have a TypeError.
    """
    return _load(filename, _arrays.library(device, library), shared)


def _load(filename: _file.Path, maker: _arrays.Library, shared: bool) -> dict[str, Any]:
    with gaia.open(filename) as f:
        header = _header(f)
        for name, t in header.tensors.items():
            _require(f, maker, name, t)
        raw, first = _map(f, maker, header) if shared and header.size else (maker.empty(header.size), 0)
        if not shared:
            _fill(f, maker, raw, header.data, header.size)
    return {name: maker.view(raw, first + t.begin, t.dtype, t.shape) for name, t in header.tensors.items()}


def _map(f: gaia.File, maker: _arrays.Library, header: _Header) -> tuple[Any, int]:
    """A map of the data, and the data's first byte in it: a map begins at a page."""
    first = header.data % 4096
    mapped, raw = maker.mapped(f, header.data - first, first + header.size)
    if mapped.acquire() != first + header.size:
        raise SafetensorsError(f"{_name(f)}: the file was truncated while it was read")
    # It was read before writers were excluded.
    if _header(f) != header:
        raise SafetensorsError(f"{_name(f)}: the file was written while it was read")
    return raw, first


def load_sharded(
    index: str | os.PathLike[str], device: Any = "cpu", *, library: str | None = None, shared: bool = False
) -> dict[str, Any]:
    """All tensors of a model of several files, by name.

    index: a file such as "model.safetensors.index.json", which names the file of each tensor, or its directory.
    The other arguments are as for load_file; the tensors of one file share an allocation. Tensors that the index does not
    name are left out. An invalid index, or one that names missing tensors, is a SafetensorsError.
    """
    path = os.fspath(index)
    if os.path.isdir(path):
        path = os.path.join(path, _INDEX)
    shards = _shards(path)
    maker = _arrays.library(device, library)
    tensors: dict[str, Any] = {}
    for file, names in shards.items():
        where = os.path.join(os.path.dirname(path), file)
        loaded = _load(where, maker, shared)
        for name in names:
            if name not in loaded:
                raise SafetensorsError(f"{where}: there is no tensor {name!r}, which {path} names")
            tensors[name] = loaded[name]
    return tensors


def _shards(path: str) -> dict[str, list[str]]:
    """The files named by an index, and the tensors of each."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("it has a name twice")
        return found

    with open(path, "rb") as f:
        text = f.read(_LONGEST + 1)
    try:
        if len(text) > _LONGEST:
            raise ValueError(f"it is longer than {_LONGEST} bytes")
        said = json.loads(text, object_pairs_hook=once)
        files = said.get("weight_map") if isinstance(said, dict) else None
        if not isinstance(files, dict):
            raise ValueError('it has no "weight_map"')
        shards: dict[str, list[str]] = {}
        for tensor, file in files.items():
            # Untrusted input: it may name files in its own directory only.
            if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
                raise ValueError(f"tensor {tensor!r} is in {file!r}, which is not a file in the same directory")
            os.fsencode(file)
            shards.setdefault(file, []).append(tensor)
    except (ValueError, RecursionError) as why:
        raise SafetensorsError(f"{path}: the index is invalid: {why}") from None
    return shards


class safe_open:
    """A file whose tensors are read on request, each into memory of its own.

    filename, device, library and errors are as for load_file; an unknown name is a
    SafetensorsError. A context manager; iterating yields the names. A worker process that receives it (pickle) opens the
    file again.
    """

    def __init__(self, filename: _file.Path, device: Any = "cpu", *, library: str | None = None) -> None:
        maker = _arrays.library(device, library)
        self._open(_file.open(filename), maker)

    def _open(self, file: _file.File, maker: _arrays.Library) -> None:
        self._file, self._maker = file, maker
        try:
            self._header = _header(self._file)
        except BaseException:
            self._file.close()
            raise

    def __repr__(self) -> str:
        return f"<spinio.safetensors.safe_open {_name(self._file)!r}: {len(self)} tensors{', closed' * self._file.closed}>"

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; tensors already read stay valid."""
        self._file.close()

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of their bytes."""
        return list(self._header.tensors)

    offset_keys = keys

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __reduce__(self) -> tuple[Any, ...]:
        return safe_open._of, (self._file, self._maker)

    @classmethod
    def _of(cls, file: _file.File, maker: _arrays.Library) -> safe_open:
        self = cls.__new__(cls)
        self._open(file, maker)
        return self

    def __contains__(self, name: object) -> bool:
        return name in self._header.tensors

    def __len__(self) -> int:
        return len(self._header.tensors)

    def metadata(self) -> dict[str, str] | None:
        """The free-form metadata of the header, if any."""
        return self._header.metadata

    def get_tensor(self, name: str) -> Any:
        """One tensor, in memory of its own."""
        t = self._tensor(name)
        _require(self._file, self._maker, name, t)
        raw = self._maker.empty(t.end - t.begin)
        _fill(self._file, self._maker, raw, self._header.data + t.begin, t.end - t.begin)
        return self._maker.view(raw, 0, t.dtype, t.shape)

    def get_slice(self, name: str) -> Slice:
        """A tensor to be indexed before the read."""
        return Slice(self, name, self._tensor(name))

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._header.tensors[name]
        except KeyError:
            raise SafetensorsError(f"{_name(self._file)}: there is no tensor {name!r}") from None


class Slice:
    """A tensor of a file, of which an index reads a part: `s[1000:2000]`, `s[3, :, ::2]`.

    Leading numbers and the first range select the bytes to read, and so does a second range of at most half of each row;
    later indices select on the device. Supported are numbers, slices (also with negative steps) and ...; masks and
    lists are a TypeError, numbers out of range an IndexError.
    """

    def __init__(self, of: safe_open, name: str, tensor: _Tensor) -> None:
        self._of, self._name, self._tensor = of, name, tensor

    def __repr__(self) -> str:
        return f"<spinio.safetensors.Slice {self._name!r}: {self.get_dtype()}{self.get_shape()}>"

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The format's name of the element type, such as "F32"."""
        return str(self._tensor.dtype.safetensors)

    def __getitem__(self, key: Any) -> Any:
        t = self._tensor
        if not t.dtype.itemsize:
            raise TypeError(f"elements of {t.dtype.name} share bytes: read the whole tensor")
        _require(self._of._file, self._of._maker, self._name, t)
        keys = _full(key, t.shape)
        strides = _strides(t.shape, t.dtype.itemsize)
        at, dim = t.begin, 0
        while dim < len(keys) and isinstance(keys[dim], int):
            at += keys[dim] * strides[dim]
            dim += 1
        if dim == len(keys):
            return self._read(at, (), ())
        rows = range(*keys[dim].indices(t.shape[dim]))
        low, high = (min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1) if rows else (0, 0)
        at += low * strides[dim]
        rest = tuple(keys[dim + 1 :])
        if rows.step == 1 and rest and _is_range(rest[0]) and all(k == slice(None) for k in rest[1:]):
            columns = range(*rest[0].indices(t.shape[dim + 1]))
            if 2 * len(columns) <= t.shape[dim + 1]:
                # At most half of each row: read only that part.
                inner = (len(columns), *t.shape[dim + 2 :])
                return self._gather(at + columns.start * strides[dim + 1], len(rows), strides[dim], inner)
        within = slice(None) if rows.step == 1 else slice(None, None, rows.step)
        return self._read(at, (high - low, *t.shape[dim + 1 :]), (within, *rest))

    def _read(self, at: int, shape: tuple[int, ...], rest: tuple[Any, ...]) -> Any:
        """Consecutive elements from byte `at`, indexed by `rest`."""
        maker, header = self._of._maker, self._of._header
        size = math.prod(shape) * self._tensor.dtype.itemsize
        raw = maker.empty(size)
        _fill(self._of._file, maker, raw, header.data + at, size)
        array = maker.view(raw, 0, self._tensor.dtype, shape)
        return array if all(k == slice(None) for k in rest) else maker.index(array, rest)

    def _gather(self, at: int, rows: int, stride: int, inner: tuple[int, ...]) -> Any:
        """A part of each of `rows` rows, the first at byte `at`."""
        maker, first = self._of._maker, self._of._header.data + at
        size = math.prod(inner) * self._tensor.dtype.itemsize
        raw = maker.empty(rows * size)
        if rows * size:
            with maker.on_device():
                got = self._of._file.read_many(range(first, first + rows * stride, stride), size, raw)
            if any(n != size for n in got):
                raise SafetensorsError(f"{_name(self._of._file)}: the file was truncated while it was read")
        return maker.view(raw, 0, self._tensor.dtype, (rows, *inner))


def _is_range(key: Any) -> bool:
    return isinstance(key, slice) and key.step in (None, 1)


def _full(key: Any, shape: Sequence[int]) -> list[Any]:
    """One index for each dimension: numbers from 0, or slices."""
    keys = list(key) if isinstance(key, tuple) else [key]
    if sum(k is Ellipsis for k in keys) > 1:
        raise IndexError("more than one ...")
    named = sum(k is not Ellipsis for k in keys)
    if named > len(shape):
        raise IndexError(f"{named} indices for {len(shape)} dimensions")
    more = [slice(None)] * (len(shape) - named)
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
    keys = keys + more if at is None else keys[:at] + more + keys[at + 1 :]
    for dim, (one, length) in enumerate(zip(keys, shape)):
        if isinstance(one, slice):
            continue
        if isinstance(one, bool) or not _file.is_number(one):
            raise TypeError(f"a tensor of a file is indexed by numbers and slices, not by {type(one).__qualname__}")
        number = one.__index__()
        if not -length <= number < length:
            raise IndexError(f"index {number} is out of {length}")
        keys[dim] = number % length
    return keys


def _strides(shape: Sequence[int], itemsize: int) -> list[int]:
    strides, n = [], itemsize
    for length in reversed(shape):
        strides.append(n)
        n *= length
    return strides[::-1]
