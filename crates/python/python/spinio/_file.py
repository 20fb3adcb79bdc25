"""The raw-IO object: an io.FileIO whose buffers may be device memory."""

from __future__ import annotations

import functools
import io
import operator
import os
import sys
from array import array
from typing import Any, Callable, TypeVar, Union

from spinio import _spinio
from spinio._deprecated import renamed
from spinio._pinned import PinnedFile

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]", int]
_T = TypeVar("_T")


class File(io.FileIO):
    """A file, unbuffered. All of io.FileIO works; these methods also take arrays of any device:

    ==================================  ===============================================
    readinto(array)                     reads at the file's own offset and advances it
    write(array)                        likewise
    pread(array, offset)                reads at an offset; the file's own is unchanged
    pwrite(array, offset)               likewise
    read_many(offsets, lengths, array)  many reads in one call
    pin()                               pins the file: keeps its pages registered
    ==================================  ===============================================

    An array may have any shape and type, must be C-contiguous, and is in host or device memory: of NumPy, CuPy, PyTorch, or
    any object with DLPack, __cuda_array_interface__ or the buffer protocol. Offsets and lengths are bytes.

    The methods return the number of bytes moved, which is less than the array's size at the end of the file, and None if a
    non-blocking descriptor has none. Errors: an OSError with errno, the file's name and the offset; a BufferError for an
    unsuitable array (strided, read-only, of objects), a TypeError for an object that is not an array, a ValueError for a
    closed file. The GIL is released during transfers. Signal handlers run meanwhile.
    """

    def __init__(
        self, file: Path, mode: str = "r", closefd: bool = True, opener: Callable[[str, int], int] | None = None
    ) -> None:
        super().__init__(file, mode, closefd, opener)
        self._has_name = opener is None and not isinstance(file, int)

    def __repr__(self) -> str:
        kind = "spinio.File" if type(self) is File else f"{type(self).__module__}.{type(self).__qualname__}"
        return f"<{kind} closed>" if self.closed else f"<{kind} name={self.name!r} mode={self.mode!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A worker process opens the file again, by its absolute name, with the same file offset."""
        if self.closed:
            raise ValueError("I/O operation on closed file")
        if not self._has_name or self.writable() or not self.seekable():
            raise TypeError(f"only a file that was opened by its name for reading can be pickled: {self!r} was not")
        return _open_again, (type(self), os.path.abspath(os.fspath(self.name)), self.tell())

    def __reduce_ex__(self, _protocol: Any, /) -> tuple[Any, ...]:
        return self.__reduce__()

    def readinto(self, buffer: Any, /) -> int | None:
        """Fills an array from the current file offset; returns the bytes read."""
        self._must(self.readable(), "reading")
        return self._named(_spinio.read, buffer, None)

    def pread(self, array: Any, /, offset: int) -> int | None:
        """Fills an array from `offset`; returns the bytes read."""
        self._must(self.readable(), "reading")
        return self._named(_spinio.read, array, _offset(offset))

    def _read_full(self, array: Any, offset: int, *, wait: bool = False) -> int:
        """As pread, until the array is full or the file ends: an error is raised even after bytes were read.

        wait: until they have arrived, not only until the copy is queued.
        """
        return self._named(lambda fd: _spinio.read_full(fd, array, _offset(offset), wait=wait))

    def write(self, buffer: Any, /) -> int | None:  # type: ignore[override]
        """Writes an array's bytes at the current file offset, or at its end in mode "a"; returns the bytes written."""
        self._must(self.writable(), "writing")
        return self._named(_spinio.write, buffer, None)

    def pwrite(self, array: Any, /, offset: int) -> int | None:
        """Writes an array's bytes at `offset`; returns the bytes written."""
        self._must(self.writable(), "writing")
        return self._named(_spinio.write, array, _offset(offset))

    def read_many(self, offsets: Any, lengths: Any, out: Any, *, errors: str = "raise") -> Any:
        """Makes many reads in one call, into an array, one after the other.

        Read i is `lengths[i]` bytes (or `lengths`, one number for all) from `offsets[i]`. Its position in `out` is the sum of
        the lengths before it, even if one of those reads ended early. Returns the number of bytes of each read, as
        8-byte integers: fewer than requested at the end of the file. Each read fails by itself: the first failure is raised
        as an OSError after all have been tried; with errors="return" its result is the negative errno instead.

        NumPy arrays of int64 are used without a copy; other iterables of integers are copied. Invalid numbers, and
        reads that do not fit into `out`, are a ValueError, and then nothing is read.
        """
        self._must(self.readable(), "reading")
        if errors not in ("raise", "return"):
            raise ValueError(f'errors is "raise" or "return", not {errors!r}')
        starts = _integers("offsets", offsets)
        lens = _length(lengths) if is_number(lengths) else _integers("lengths", lengths)
        results = _zeros(len(starts))
        failed = _spinio.read_many(self.fileno(), starts, lens, out, results)
        if failed and errors == "raise":
            at = next(i for i, got in enumerate(results) if got < 0)
            number = -int(results[at])
            what = f"Cannot read at offset {starts[at]}: {os.strerror(number)} ({failed} of {len(starts)} reads failed)"
            raise OSError(number, what, self.name)
        return results

    def pin(self, like: Any = None) -> PinnedFile:
        """Pins the file: keeps its pages registered with a device, for repeated reads.

        `like` is an array on that device; by default the device in use. The file is read into memory and stays there.
        An OSError reports the cause if writes to the file could not be detected: open for writing (ETXTBSY), owned by
        another user (EACCES), a file system without leases (EOPNOTSUPP). Closing the file unpins it.
        """
        return PinnedFile(self, like)

    @renamed("File.hold", "pin")
    def hold(self, like: Any = None) -> PinnedFile:
        """Deprecated: use `pin`."""
        return self.pin(like)

    def close(self) -> None:
        """Closes the file, and unpins it if it is pinned."""
        try:
            for pinned in [] if self.closed else list(self._pins):
                pinned.unpin()
        finally:
            super().close()

    @functools.cached_property
    def _pins(self) -> list[PinnedFile]:
        return []

    def _named(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Calls with the descriptor; adds the file's name to an OSError."""
        try:
            return call(self.fileno(), *arguments)
        except OSError as error:
            if error.filename is None and error.errno is not None:
                error.filename = self.name
            raise

    @staticmethod
    def _must(may: bool, what: str) -> None:
        if not may:
            raise io.UnsupportedOperation(f"File not open for {what}")


def _open_again(kind: type[File], path: str | bytes, at: int) -> File:
    file = kind(path)
    file.seek(at)
    return file


# The largest offset or length.
_LARGEST = (1 << 63) - 1


def is_number(value: Any) -> bool:
    """Whether it is a single integer: of Python or NumPy, or an array without dimensions."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def device_name(device: Any, kind_of_device: str) -> str | None:
    """Its name in the library; None for the device in use."""
    if device is None:
        return None
    text = f"cuda:{device}" if is_number(device) else str(device)
    kind, _, number = text.partition(":")
    if kind not in ("cuda", "emulated") or (number and not number.isdigit()):
        raise ValueError(f'{text!r} is no {kind_of_device}: those are "emulated", "emulated:1", "cuda" and "cuda:1"')
    return f"{kind}:{number or 0}"


def _offset(value: Any) -> int:
    if value is None:
        raise TypeError("an offset is an integer, not None: readinto() and write() go by the file's own")
    return operator.index(value)


def _length(value: Any) -> int:
    number = operator.index(value)
    if number < 0:
        raise ValueError(f"length {number} is negative")
    # No array has room for a larger one either.
    return min(number, _LARGEST)


def _integers(name: str, values: Any) -> Any:
    """8-byte integers: a NumPy array if the program uses NumPy, else an array of the standard library."""
    if is_number(values):
        raise TypeError(f"{name} are a sequence of integers, not one: pread() makes a single read")
    if values is None:
        raise TypeError(f"{name} are integers, not None")
    if not hasattr(values, "__len__"):
        values = list(values)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return values if isinstance(values, array) and values.typecode == "q" else array("q", values)
    found = numpy.asarray(values)
    if found.dtype.kind == "O" and found.ndim == 1 and all(map(is_number, values)):
        raise ValueError(f"{name} go up to {_LARGEST}, not to {max(values)}")
    if found.dtype.kind not in "iu" and found.size:
        raise TypeError(f"{name} are integers, not {found.dtype}")
    if found.ndim != 1:
        raise ValueError(f"{name} are one sequence, not an array of {found.ndim} dimensions")
    if found.dtype.kind == "u" and found.size and found.max() > _LARGEST:
        raise ValueError(f"{name} go up to {_LARGEST}, not to {found.max()}")
    return numpy.ascontiguousarray(found.astype("int64", copy=False))


def _zeros(n: int) -> Any:
    numpy = sys.modules.get("numpy")
    return array("q", bytes(8 * n)) if numpy is None else numpy.zeros(n, "int64")


def open(path: Path, mode: str = "r", *, closefd: bool = True, opener: Callable[[str, int], int] | None = None) -> File:
    """Opens a file as io.FileIO does, unbuffered and binary; returns a File.

    path: a name or a descriptor (which is closed with the file unless closefd=False). mode: "r" to read, "w" to truncate and
    write, "x" to create and write (an existing file is an error), "a" to append; with "+" to read and write.
    Errors of the kernel are an OSError.
    """
    return File(path, mode, closefd, opener)
