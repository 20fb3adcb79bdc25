"""Ranges of named files, moved to and from a device: NVMMU.

    from spinio import nvmmu

    with nvmmu.session("result.bin") as s:
        s.upload("input.bin", array)
        result = kernel(array)
        s.download(result)

The output is named before the kernel runs, so that its storage can be prepared meanwhile; docs/nvmmu.md says what that is
worth on which storage. A move is no POSIX call: it may reach the file in pieces and in any order, and small downloads may
be gathered. When the session has ended, everything is in the files.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, Union

from spinio import _spinio

__all__ = ["Session", "session"]

Path = Union[str, "os.PathLike[str]"]


class Session:
    """Moves that belong together; a context manager. One thread at a time works with it, others wait."""

    def __init__(self, output: Path | None = None) -> None:
        self._moves = _spinio.NvmmuSession(output)
        self._report: dict[str, Any] | None = None

    def upload(self, path: Path, array: Any, offset: int = 0) -> int:
        """Fills an array of a device from byte `offset` of a file; returns the bytes moved, fewer at the file's end."""
        return self._moves.upload(path, array, offset)

    def download(self, array: Any, offset: int = 0, *, path: Path | None = None) -> int:
        """Brings an array of a device to the session's output, or to the file `path`, from byte `offset` on."""
        return self._moves.download(array, path, offset)

    def expect(self, offset: int, nbytes: int) -> None:
        """Says where downloads to the output will go, as early as that is known."""
        self._moves.expect(offset, nbytes)

    def flush(self) -> None:
        """Writes what is still gathered, so that others find it in the output."""
        self._moves.flush()

    def sync(self) -> None:
        """As flush, and waits until the storage has it."""
        self._moves.sync()

    @property
    def report(self) -> dict[str, Any]:
        """What was done: bytes each way, how the output could be prepared, and how it was written."""
        return self._moves.report() if self._report is None else self._report

    def end(self) -> dict[str, Any]:
        """Ends: everything is in the files; returns the report. A second time does nothing."""
        report = self._moves.end()
        if report is not None:
            self._report = report
        return self.report

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def session(output: Path | None = None) -> Session:
    """Begins a session; `output` is the file that the results will go to, which is made if it is not there."""
    return Session(output)
