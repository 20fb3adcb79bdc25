"""Pinned files: registered with a device for repeated reads."""

from __future__ import annotations

import errno
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any

from spinio import _spinio
from spinio._deprecated import renamed

if TYPE_CHECKING:
    from spinio._file import File


class PinnedFile:
    """A pinned file, until `unpin`, the file's `close`, or until a process opens it for writing; a context manager."""

    def __init__(self, file: File, like: Any) -> None:
        self._file: File | None = None  # there is nothing to unpin yet
        self._generation = file._named(_spinio.pin_file, like)
        self._file, self._like = file, like
        file._pins.append(self)

    @property
    def is_pinned(self) -> bool:
        """Whether the file is still pinned, and no process waits to write it. Reads are correct in any case."""
        return self._file is not None and _spinio.is_pinned(self._file.fileno())

    def map(self, offset: int = 0, nbytes: int | None = None) -> Map:
        """Maps bytes of the file, so that GPU kernels read them in place; see Map.

        The range must be within the file; without nbytes, it extends to the end of the file. Errors are an OSError: ENODEV
        if the device's kernels cannot read host memory.
        """
        if self._file is None:
            raise ValueError("the file is no longer pinned")
        if nbytes is None:
            nbytes = max(0, os.fstat(self._file.fileno()).st_size - offset)
        return Map(self._file._named(_spinio.DeviceMapping, offset, nbytes, self._like))

    def unpin(self) -> None:
        """Unpins the file; a second call does nothing. Mappings stay until they are unmapped."""
        file, self._file = self._file, None
        if file is not None and not file.closed:
            file._pins.remove(self)
            try:
                _spinio.unpin_file(file.fileno(), self._generation)
            except OSError as error:
                # A file that was written meanwhile is no longer pinned. If it is pinned again, that is another object's.
                if error.errno != errno.ESTALE:
                    raise

    @property
    @renamed("Hold.is_held", "PinnedFile.is_pinned")
    def is_held(self) -> bool:
        """Deprecated: use `is_pinned`."""
        return self.is_pinned

    @renamed("Hold.release", "PinnedFile.unpin")
    def release(self) -> None:
        """Deprecated: use `unpin`."""
        self.unpin()

    def __repr__(self) -> str:
        return f"<spinio.PinnedFile of {self._file!r}>" if self._file is not None else "<spinio.PinnedFile unpinned>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a pinned file belongs to its process: a worker that opens the file pins it itself")

    def __enter__(self) -> PinnedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unpin()


class Map:
    """Bytes of a pinned file that GPU kernels read in place: `cupy.asarray(map)`. Read-only.

    While the file is mapped, a process that opens it for writing waits: poll `revoke_requested`, and `unmap`. If that takes
    longer than /proc/sys/fs/lease-break-time (45 s), the process may write nevertheless, and the memory shows the old
    contents. GPU kernels must have finished with it before `unmap`; arrays made of it must not be used afterwards.
    """

    def __init__(self, mapped: _spinio.DeviceMapping) -> None:
        self._mapped = mapped

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self._mapped.place[0]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._mapped.place[1]

    @property
    def revoke_requested(self) -> bool:
        """Whether a process waits to write the file."""
        return self._mapped.revoke_requested

    @property
    @renamed("Map.is_wanted_back", "revoke_requested")
    def is_wanted_back(self) -> bool:
        """Deprecated: use `revoke_requested`."""
        return self.revoke_requested

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
        """Unmaps; a second call does nothing."""
        self._mapped.unmap()

    def __enter__(self) -> Map:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unmap()
