"""Held files: registered with a device for reads that come again and again."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spinio import _spinio

if TYPE_CHECKING:
    from spinio._file import File


class Hold:
    """A held file, until `release`, the file's `close`, or until somebody opens it for writing; a context manager."""

    def __init__(self, file: File, like: Any) -> None:
        self._file: File | None = None  # there is nothing to release yet
        file._named(_spinio.hold, like)
        self._file, self._like = file, like
        file._holds.append(self)

    @property
    def is_held(self) -> bool:
        """Whether it still is, and nobody waits to write it. Reads are right in any case."""
        return self._file is not None and _spinio.is_held(self._file.fileno())

    def map(self, offset: int = 0, nbytes: int | None = None) -> Map:
        """Bytes of the file in place, as memory that kernels of the device read; see Map.

        offset and nbytes must lie inside the file; without nbytes, all from offset on. An OSError says what cannot be: ENODEV
        where the device's kernels do not read the host's memory.
        """
        if self._file is None:
            raise ValueError("the file is no longer held")
        if nbytes is None:
            nbytes = max(0, os.fstat(self._file.fileno()).st_size - offset)
        return Map(self._file._named(_spinio.Mapped, offset, nbytes, self._like))

    def release(self) -> None:
        """Lets the file go; a second time does nothing. What is mapped stays until it is unmapped."""
        file, self._file = self._file, None
        if file is not None and not file.closed:
            file._holds.remove(self)
            # A file that somebody wrote meanwhile is not held any more, and need not be.
            if _spinio.is_held(file.fileno()):
                _spinio.release(file.fileno())

    def __repr__(self) -> str:
        return f"<spinio.Hold of {self._file!r}>" if self._file is not None else "<spinio.Hold released>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a hold belongs to its process: a worker that opens the file holds it itself")

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Map:
    """Bytes of a held file that kernels read in place: `cupy.asarray(map)`. Read-only.

    While it is mapped, who opens the file for writing waits: ask `is_wanted_back` now and then, and `unmap`. If that takes
    longer than /proc/sys/fs/lease-break-time (45 s), he may write all the same, and the memory shows what the file was.
    Kernels must be done with it before `unmap`; arrays made of it must not be used afterwards.
    """

    def __init__(self, mapped: _spinio.Mapped) -> None:
        self._mapped = mapped

    @property
    def address(self) -> int:
        """Address of the first byte, as the device knows it."""
        return self._mapped.place[0]

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self._mapped.place[1]

    @property
    def is_wanted_back(self) -> bool:
        """Whether somebody waits to write the file."""
        return self._mapped.is_wanted_back

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        address, nbytes = self._mapped.place
        return {"shape": (nbytes,), "typestr": "|u1", "data": (address, True), "strides": None, "version": 3}

    def __repr__(self) -> str:
        try:
            return f"<spinio.Map of {self.nbytes} bytes at {self.address:#x}>"
        except ValueError:
            return "<spinio.Map unmapped>"

    def unmap(self) -> None:
        """Ends it; a second time does nothing."""
        self._mapped.unmap()

    def __enter__(self) -> Map:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unmap()
