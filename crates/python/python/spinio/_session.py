"""NVMMU sessions, and their asynchronous moves; see nvmmu.py."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

from spinio import _spinio

if TYPE_CHECKING:
    from spinio._spinio import _Report

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class Ticket:
    """The handle of a queued move. If it is dropped, the session waits for the move at its end."""

    def __init__(self, move: _spinio.NvmmuTicket) -> None:
        self._move = move

    def __repr__(self) -> str:
        return f"<spinio.nvmmu.Ticket {'of a completed move' if self._move.done() else 'in flight'}>"

    def wait(self) -> int:
        """Waits until the move is complete; returns the bytes moved, fewer than the array's at the end of an upload's file.

        A failed move is an OSError, at each call and once more at the session's end. Signal handlers run meanwhile.
        """
        return self._move.wait()

    def done(self) -> bool:
        """Whether the move has completed or failed; does not wait."""
        return self._move.done()


class Session:
    """A session of moves; a context manager. One thread at a time uses it, other threads wait.

    Offsets and lengths are bytes. Arrays must be C-contiguous and in device memory, else a BufferError reports the cause.
    Errors of a file or a device are an OSError with errno and the file's name; a session that has ended is a ValueError,
    a session of the parent process a ProcessLookupError.
    """

    def __init__(self, output: Path | None = None) -> None:
        self._output = None if output is None else os.fsdecode(output)
        self._moves = _spinio.NvmmuSession(self._output)
        self._report: _Report | None = None

    def __repr__(self) -> str:
        output = "without output" if self._output is None else f"into {self._output!r}"
        return f"<spinio.nvmmu.Session {output}{'' if self._report is None else ', ended'}>"

    def upload(self, path: Path, array: Any, offset: int = 0) -> int:
        """Fills an array of a device from byte `offset` of a file; returns the bytes moved, fewer at the file's end."""
        return self._moves.upload(os.fsdecode(path), array, offset)

    def download(self, array: Any, offset: int = 0, *, path: Path | None = None) -> int:
        """Moves an array of a device to the session's output, or to the file `path`, starting at byte `offset`."""
        return self._moves.download(array, _decoded(path), offset)

    def upload_async(self, path: Path, array: Any, offset: int = 0) -> Ticket:
        """As upload, ordered with the array's stream.

        It begins after the work queued there, and work queued there afterwards sees the bytes. The stream is the one set by
        set_stream, else the one that the array names (docs/python.md), else the legacy default stream. The array's
        memory stays allocated until the move is complete. EBUSY: the stream is being captured into a graph.
        """
        return Ticket(self._moves.upload_async(os.fsdecode(path), array, offset))

    def download_async(self, array: Any, offset: int = 0, *, path: Path | None = None) -> Ticket:
        """As download, ordered with the array's stream: work queued there afterwards may reuse the memory.

        Complete on return: a download to an output on an array of disks with parity, and one larger than the bounce buffers
        (SPINIO_BOUNCE_LIMIT).
        """
        return Ticket(self._moves.download_async(array, _decoded(path), offset))

    def expect(self, offset: int, nbytes: int) -> None:
        """Announces the range of later downloads in the output, as early as it is known."""
        self._moves.expect(offset, nbytes)

    def flush(self) -> None:
        """Writes the gathered bytes, so that other processes read them in the output."""
        self._moves.flush()

    def sync(self) -> None:
        """As flush, and waits until the output is on storage; not for other files with downloads."""
        self._moves.sync()

    @property
    def report(self) -> _Report:
        """The session's counters, in bytes; waits until the preparation is complete.

        uploaded, downloaded: moved in each direction. promise: how the output was prepared, as text. whole: written as full
        stripes, neighbours: of these, old bytes that were not the session's. loose: written to the output unaligned.
        read_ahead: old bytes read before the downloads.
        """
        return self._moves.report() if self._report is None else self._report

    def end(self) -> _Report:
        """Ends the session: all bytes are in the files, or an OSError reports which are not; returns the report.

        A second call does nothing.
        """
        if self._report is None:
            # For a caller that asks after a failure.
            self._report = self._moves.report()
            self._report = self._moves.end() or self._report
        return self._report

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


def _decoded(path: Path | None) -> str | None:
    return None if path is None else os.fsdecode(path)


def session(output: Path | None = None) -> Session:
    """Begins a session; `output` is the file for the results, which is created if it does not exist."""
    return Session(output)
