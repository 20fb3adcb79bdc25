"""An fsspec file system over local files whose open files take arrays of any device.

    import fsspec

    fs = fsspec.filesystem("spinio")
    with fs.open("weights.bin") as f:
        f.pread(gpu_array, 4096)

All operations are those of fsspec's local file system; only `open` returns a `spinio.File`. So libraries
that read through fsspec work as before, and those that call `readinto` with a GPU array get the fast route. URLs begin
with ``spinio://``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from fsspec import register_implementation  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from spinio import _file, _spinio

__all__ = ["FileSystem", "OpenFile"]

# Bytes per read when searching for the end of a line.
_BLOCK = 8192


class OpenFile(_file.File):
    """A spinio.File whose calls move all requested bytes, as those of fsspec's files do."""

    def read(self, size: int | None = -1, /) -> bytes:
        """The next `size` bytes, fewer only at the end of the file; without a size, all remaining bytes."""
        if size is None or size < 0:
            return self.readall() or b""
        parts, missing = [], size
        while missing > 0:
            part = super().read(missing)
            if not part:
                break
            parts.append(part)
            missing -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line, at most `size` bytes. Reads a block to find its end: a raw file would read byte by byte."""
        if not self.seekable():
            return super().readline(size)
        parts, missing = [], sys.maxsize if size is None or size < 0 else size
        while missing > 0:
            block = super().read(min(missing, _BLOCK))
            line = block[: block.find(b"\n") + 1] or block
            parts.append(line)
            missing -= len(line)
            if len(line) < len(block):
                self.seek(len(line) - len(block), os.SEEK_CUR)
            if not block or line.endswith(b"\n"):
                break
        return b"".join(parts)

    def write(self, buffer: Any, /) -> int | None:  # type: ignore[override]
        """Writes all of an array's bytes: callers of a buffered file do not look at the count. An error is raised even after
        bytes were written."""
        self._must(self.writable(), "writing")
        return self._named(_spinio.write_full, buffer, None)

    @property
    def path(self) -> str:
        """The file's name, under the attribute name of fsspec's files."""
        return str(self.name)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self.fileno()).st_size


class FileSystem(LocalFileSystem):  # type: ignore[misc]
    """Local files; see the module."""

    protocol = "spinio"

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if not options.get("autocommit", True) and "r" not in mode:
            # In a transaction files appear at its end: the local file system implements that.
            return super()._open(path, mode, block_size, **options)
        path = self._strip_protocol(path)
        if self.auto_mkdir and "r" not in mode:
            self.makedirs(self._parent(path), exist_ok=True)
        return OpenFile(path, mode)

    def cat_into(self, path: str, array: Any, start: int = 0) -> int:
        """Fills an array of any device from byte `start` of a file; returns the bytes read."""
        with _file.open(self._strip_protocol(path)) as f:
            return f._read_full(array, start)


# With an installed wheel, fsspec finds it by its entry point; this is for imports without one.
register_implementation("spinio", FileSystem, clobber=True)
