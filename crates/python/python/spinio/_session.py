"""Sessions of NVMMU, and the moves that they queue; see nvmmu.py."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Union

from spinio import _spinio

if TYPE_CHECKING:
    from spinio._spinio import _Report

Path = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class Ticket:
    """A move that was queued. Whoever lets go of it leaves the move to the session, which waits for it at its end."""

    def __init__(self, move: _spinio.NvmmuTicket) -> None:
        self._move = move

    def __repr__(self) -> str:
        return f"<spinio.nvmmu.Ticket {'of a move that is over' if self._move.done() else 'under way'}>"

    def wait(self) -> int:
        """Waits until the move is over; returns the bytes moved, fewer than the array has at the end of an upload's file.

        A move that failed is an OSError, each time it is asked for and once more at the session's end. Signal handlers run.
        """
        return self._move.wait()

    def done(self) -> bool:
        """Whether the move is over, well or not; does not wait."""
        return self._move.done()


class Session:
    """Moves that belong together; a context manager. One thread at a time works with it, others wait.

    Offsets and lengths are bytes. Arrays are C-contiguous and in memory of a device, else a BufferError says what is wrong.
    What a file or a device refuses is an OSError with errno and the file's name; a session that has ended is a ValueError,
    one of the process that this one was forked from a ProcessLookupError.
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
        """Brings an array of a device to the session's output, or to the file `path`, from byte `offset` on."""
        return self._moves.download(array, _decoded(path), offset)

    def upload_async(self, path: Path, array: Any, offset: int = 0) -> Ticket:
        """As upload, in the order of the array's stream.

        It begins when what is queued there is done, and what is queued there afterwards finds the bytes. The stream is what
        set_stream chose, else the one that the array names (docs/python.md), else the legacy default stream. The array's
        memory is kept until the move is over. EBUSY: the stream is being captured into a graph.
        """
        return Ticket(self._moves.upload_async(os.fsdecode(path), array, offset))

    def download_async(self, array: Any, offset: int = 0, *, path: Path | None = None) -> Ticket:
        """As download, in the order of the array's stream: what is queued there afterwards may use the memory again.

        Over when it returns: a download to an output on an array of disks with parity, and one larger than the staging memory
        (SPINIO_STAGING).
        """
        return Ticket(self._moves.download_async(array, _decoded(path), offset))

    def expect(self, offset: int, nbytes: int) -> None:
        """Says where downloads to the output will go, as early as that is known."""
        self._moves.expect(offset, nbytes)

    def flush(self) -> None:
        """Writes what is still gathered, so that others find it in the output."""
        self._moves.flush()

    def sync(self) -> None:
        """As flush, and waits until the storage has the output; not for other files that were downloaded into."""
        self._moves.sync()

    @property
    def report(self) -> _Report:
        """What was done, in bytes; waits for the preparation to be over.

        uploaded, downloaded: moved each way. promise: how the output could be prepared, in words. whole: written as whole
        stripes, neighbours: of these, old bytes that were not the session's. loose: written to the output as they came.
        read_ahead: old bytes that were read before the downloads.
        """
        return self._moves.report() if self._report is None else self._report

    def end(self) -> _Report:
        """Ends: everything is in the files, or an OSError says what is not; returns the report.

        A second time does nothing.
        """
        if self._report is None:
            # For who asks after it has failed.
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
    """Begins a session; `output` is the file that the results will go to, which is made if it is not there."""
    return Session(output)
