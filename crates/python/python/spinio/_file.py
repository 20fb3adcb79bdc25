"""The raw-IO object: an io.FileIO whose buffers may be a device's memory."""

from __future__ import annotations

import io
import os
from typing import Any, Callable, Union

from spinio import _spinio

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]", int]


class File(io.FileIO):
    """A file, unbuffered. All of io.FileIO works; these take arrays of any device besides:

    ==========================  ==================================================
    readinto(array)             reads at the file's own offset, which moves
    write(array)                likewise
    pread(array, offset)        reads at an offset; the file's own stays
    pwrite(array, offset)       likewise
    ==========================  ==================================================

    They return how many bytes were moved, which is less than the array holds at the end of the file, and None where a
    descriptor that does not wait has none. What goes wrong is an OSError with errno; an array that will not do (strided,
    read-only) is a BufferError. The GIL is free while bytes move.
    """

    def readinto(self, buffer: Any, /) -> int | None:
        """Fills an array from where the file stands; returns the bytes read."""
        self._must(self.readable(), "reading")
        return self._named(_spinio.read, buffer, None)

    def pread(self, buffer: Any, offset: int, /) -> int | None:
        """Fills an array from `offset`; returns the bytes read."""
        self._must(self.readable(), "reading")
        return self._named(_spinio.read, buffer, offset)

    def write(self, buffer: Any, /) -> int | None:  # type: ignore[override]
        """Writes an array's bytes where the file stands, or at its end in mode "a"; returns the bytes written."""
        self._must(self.writable(), "writing")
        return self._named(_spinio.write, buffer, None)

    def pwrite(self, buffer: Any, offset: int, /) -> int | None:
        """Writes an array's bytes at `offset`; returns the bytes written."""
        self._must(self.writable(), "writing")
        return self._named(_spinio.write, buffer, offset)

    def _named(self, call: Callable[[int, Any, int | None], int | None], buffer: Any, offset: int | None) -> int | None:
        try:
            return call(self.fileno(), buffer, offset)
        except OSError as error:
            if error.filename is None and error.errno is not None:
                error.filename = self.name
            raise

    @staticmethod
    def _must(may: bool, what: str) -> None:
        if not may:
            raise io.UnsupportedOperation(f"File not open for {what}")


def open(path: Path, mode: str = "r", *, closefd: bool = True, opener: Callable[[str, int], int] | None = None) -> File:
    """Opens a file as io.FileIO does: `mode` is "r", "w", "x" or "a", with "+" for both directions; always binary."""
    return File(path, mode, closefd, opener)
