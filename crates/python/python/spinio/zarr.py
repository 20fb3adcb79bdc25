"""A Zarr v3 store in a local directory, whose chunks are read directly into the memory that Zarr requests,
and written directly from it.

    import zarr
    from spinio.zarr import Store

    zarr.config.enable_gpu()
    array = zarr.open_array(Store("data.zarr"), mode="r")
    part = array[1000:2000]                     # a CuPy array; uncompressed chunks are never in host memory

With Zarr's ordinary buffers it is equivalent to zarr.storage.LocalStore. Codecs run where Zarr runs them: chunks
compressed with a CPU codec pass through host memory.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable

try:
    from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
    from zarr.core.buffer import Buffer, default_buffer_prototype
    from zarr.storage import LocalStore
except ModuleNotFoundError as _missing:
    _why = f"spinio.zarr needs Zarr 3, which needs Python 3.11 or later: {_missing}"
    raise ModuleNotFoundError(_why, name=_missing.name) from None

from spinio import _arrays, _file, _spinio

if TYPE_CHECKING:
    from zarr.abc.store import ByteRequest
    from zarr.core.buffer import BufferPrototype

__all__ = ["Store"]

_ABSENT = (FileNotFoundError, IsADirectoryError, NotADirectoryError)


class Store(LocalStore):
    """A directory, as zarr.storage.LocalStore."""

    def __repr__(self) -> str:
        return f"Store('{self}')"

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """A value, or a part of one; None if it does not exist."""
        await self._ensure_open()
        return await asyncio.to_thread(_get, self.root / key, prototype or default_buffer_prototype(), byte_range)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """As get, synchronously."""
        self._ensure_open_sync()
        return _get(self.root / key, prototype or default_buffer_prototype(), byte_range)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Parts of several values."""
        return list(await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges)))

    async def _set(self, key: str, value: Buffer, exclusive: bool = False) -> None:
        await self._ensure_open()
        self._check(value)
        await asyncio.to_thread(_put, self.root / key, value, exclusive)

    def set_sync(self, key: str, value: Buffer) -> None:
        """Sets a value, synchronously."""
        self._ensure_open_sync()
        self._check(value)
        _put(self.root / key, value)

    def _check(self, value: Any) -> None:
        self._check_writable()
        if not isinstance(value, Buffer):
            raise TypeError(f"Store.set(): a value is a Buffer, not {type(value)}")


def _put(path: Path, value: Buffer, exclusive: bool = False) -> None:
    """Writes a file that appears atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid.uuid4().hex}.partial")
    array = value.as_array_like()
    try:
        with _file.open(partial, "w") as f:
            f._named(_spinio.write_full, array, 0)
        if exclusive:
            os.link(partial, path)  # fails if the file exists
            os.unlink(partial)
        else:
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _get(path: Path, prototype: BufferPrototype, byte_range: ByteRequest | None) -> Buffer | None:
    try:
        with _file.open(path) as f:
            start, end = _range(byte_range, os.fstat(f.fileno()).st_size)
            array = _maker(prototype).empty(end - start)
            # Another thread will use the array: the copy must be complete, not only queued.
            got = f._read_full(array, start, wait=True) if end > start else 0
            return prototype.buffer.from_array_like(array if got == end - start else array[:got])
    except _ABSENT:
        return None


def _range(request: ByteRequest | None, size: int) -> tuple[int, int]:
    if request is None:
        return 0, size
    if isinstance(request, RangeByteRequest):
        start, end = request.start, request.end
    elif isinstance(request, OffsetByteRequest):
        start, end = request.offset, size
    elif isinstance(request, SuffixByteRequest):
        start, end = max(0, size - request.suffix), size
    else:
        raise TypeError(f"Unexpected byte_range, got {request}.")
    end = min(end, size)
    return min(start, end), end


def _maker(prototype: BufferPrototype) -> _arrays.Library:
    """The library of these buffers' arrays, found from an empty buffer."""
    sample: Any = prototype.buffer.create_zero_length().as_array_like()
    kind = type(sample).__module__.partition(".")[0]
    if kind == "cupy":
        return _arrays.library("cuda", "cupy")
    if kind == "torch":
        return _arrays.library(sample.device, "torch")
    if kind == "spinio":
        return _arrays.library("emulated")
    return _arrays.library("cpu", "numpy")
