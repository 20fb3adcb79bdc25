"""Safetensors files, read straight into the memory of a device.

    from spinio.safetensors import load_file, safe_open

    weights = load_file("model.safetensors", device="cuda")       # a dict of tensors

    with safe_open("model.safetensors", device="cuda") as f:      # or one at a time, or parts
        one = f.get_tensor("embed.weight")
        rows = f.get_slice("lm_head.weight")[1000:2000]

`load_file` reads all data by one large request into one allocation and hands out views of it: nothing is copied again, and
the memory is freed when the last of the tensors is gone. To keep a few tensors of many, use `safe_open`.
"""

from __future__ import annotations

import math
import os
from types import TracebackType
from typing import Any, NamedTuple, Sequence

from spinio import _arrays, _dtypes, _file, _spinio
from spinio._spinio import SafetensorsError

__all__ = ["SafetensorsError", "Slice", "load_file", "safe_open"]


class _Tensor(NamedTuple):
    dtype: _dtypes.DType
    shape: tuple[int, ...]
    begin: int
    end: int


class _Header(NamedTuple):
    metadata: dict[str, str] | None
    tensors: dict[str, _Tensor]
    data: int  # where the data begins in the file
    size: int  # bytes of data


def _header(f: _file.File) -> _Header:
    file = os.fstat(f.fileno()).st_size
    try:
        length = _spinio.header_len(_whole(f, 8, 0), file)
        data = 8 + length
        texts, tensors = _spinio.parse(_whole(f, length, 8), file - data)
    except SafetensorsError as why:
        raise SafetensorsError(f"{os.fsdecode(f.name) if not isinstance(f.name, int) else f.name}: {why}") from None
    return _Header(
        None if texts is None else dict(texts),
        {n: _Tensor(_dtypes.SAFETENSORS[t], tuple(shape), begin, end) for n, t, shape, begin, end in tensors},
        data,
        file - data,
    )


def _whole(f: _file.File, size: int, at: int) -> bytes:
    into = bytearray(size)
    got = f.pread(into, at) or 0
    return bytes(into[:got])


def _fill(f: _file.File, raw: Any, at: int, size: int) -> None:
    if size and f.pread(raw, at) != size:
        raise SafetensorsError(f"{f.name}: the file became shorter while it was read")


def load_file(filename: _file.Path, device: Any = "cpu", *, library: str | None = None) -> dict[str, Any]:
    """All tensors of a file, by name.

    device: "cpu", "cuda", "cuda:1" ... or "emulated". library: who makes the tensors, "torch", "cupy" or "numpy"; without
    it the one that the program has imported. The tensors share one allocation.
    """
    maker = _arrays.library(device, library)
    with _file.open(filename) as f:
        header = _header(f)
        raw = maker.empty(header.size)
        _fill(f, raw, header.data, header.size)
    return {name: maker.view(raw, t.begin, t.dtype, t.shape) for name, t in header.tensors.items()}


class safe_open:
    """A file whose tensors are read when they are asked for, each into memory of its own."""

    def __init__(self, filename: _file.Path, device: Any = "cpu", *, library: str | None = None) -> None:
        self._maker = _arrays.library(device, library)
        self._file = _file.open(filename)
        try:
            self._header = _header(self._file)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> safe_open:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file; tensors that were read stay."""
        self._file.close()

    def keys(self) -> list[str]:
        """Names of the tensors, in the order of their bytes."""
        return list(self._header.tensors)

    offset_keys = keys

    def __contains__(self, name: object) -> bool:
        return name in self._header.tensors

    def __len__(self) -> int:
        return len(self._header.tensors)

    def metadata(self) -> dict[str, str] | None:
        """The free text of the header, if there is any."""
        return self._header.metadata

    def get_tensor(self, name: str) -> Any:
        """One tensor."""
        t = self._tensor(name)
        raw = self._maker.empty(t.end - t.begin)
        _fill(self._file, raw, self._header.data + t.begin, t.end - t.begin)
        return self._maker.view(raw, 0, t.dtype, t.shape)

    def get_slice(self, name: str) -> Slice:
        """One tensor to be indexed before it is read."""
        return Slice(self, self._tensor(name))

    def _tensor(self, name: str) -> _Tensor:
        try:
            return self._header.tensors[name]
        except KeyError:
            raise SafetensorsError(f"{self._file.name}: there is no tensor {name!r}") from None


class Slice:
    """A tensor of a file, of which an index reads a part: `s[1000:2000]`, `s[3, :, ::2]`.

    Leading numbers and the first range choose what is read, and a second range that takes at most half of each row; what
    follows chooses on the device.
    """

    def __init__(self, of: safe_open, tensor: _Tensor) -> None:
        self._of, self._tensor = of, tensor

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The format's name of its type, such as "F32"."""
        return str(self._tensor.dtype.safetensors)

    def __getitem__(self, key: Any) -> Any:
        t = self._tensor
        if not t.dtype.itemsize:
            raise TypeError(f"elements of {t.dtype.name} share bytes: read the whole tensor")
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
                # At most half of each row: only that is read.
                inner = (len(columns), *t.shape[dim + 2 :])
                return self._gather(at + columns.start * strides[dim + 1], len(rows), strides[dim], inner)
        within = slice(None) if rows.step == 1 else slice(None, None, rows.step)
        return self._read(at, (high - low, *t.shape[dim + 1 :]), (within, *rest))

    def _read(self, at: int, shape: tuple[int, ...], rest: tuple[Any, ...]) -> Any:
        """Elements that lie together from byte `at` on, and of these what `rest` chooses."""
        maker, header = self._of._maker, self._of._header
        size = math.prod(shape) * self._tensor.dtype.itemsize
        raw = maker.empty(size)
        _fill(self._of._file, raw, header.data + at, size)
        array = maker.view(raw, 0, self._tensor.dtype, shape)
        return array if all(k == slice(None) for k in rest) else maker.index(array, rest)

    def _gather(self, at: int, rows: int, stride: int, inner: tuple[int, ...]) -> Any:
        """A part of each of so many rows, the first at byte `at`."""
        maker, first = self._of._maker, self._of._header.data + at
        size = math.prod(inner) * self._tensor.dtype.itemsize
        raw = maker.empty(rows * size)
        if rows * size:
            got = self._of._file.read_many(range(first, first + rows * stride, stride), size, raw)
            if any(n != size for n in got):
                raise SafetensorsError(f"{self._of._file.name}: the file became shorter while it was read")
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
        if not hasattr(one, "__index__"):
            raise TypeError(f"a part of a file is chosen by numbers and slices, not by {type(one).__qualname__}")
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
