"""The loop for data larger than the device's memory: NVMMU's pipeline.

    slot 0   up 0 | body 0 | down 0 | up 3 | body 3 ...        a slot: a stream, an input and an output array
    slot 1   .... | up 1   | body 1 | down 1 ...
    slot 2   .............. | up 2  | body 2 ...

Within a slot the stream keeps the order. Bodies of different slots are ordered too: each begins after the work that the
previous one has queued. So a body may add to the results of an earlier one, and moves still overlap. A body may run a
pipeline itself, and two pipelines may be zipped: then the body runs with the stream of the last one, and the other's is
ordered with it.
"""

from __future__ import annotations

import operator
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, ContextManager, Iterator

from spinio import _arrays, _dtypes, _file, _session, _stream

if TYPE_CHECKING:
    from spinio._spinio import _Report

# Default bytes per piece.
_PIECE = 16 << 20


class Step:
    """A piece on the device: `x, y = step`, or its attributes. Later pieces reuse the arrays."""

    __slots__ = {
        "_kept": "Elements of the output to be written to the file.",
        "input": "The piece.",
        "number": "Counted from 0.",
        "offset": "Offset of the piece in its file, in bytes.",
        "output": "The array for its results; None without an output file.",
    }

    def __init__(self, number: int, offset: int, input: Any, output: Any, kept: int) -> None:
        self.number, self.offset, self.input, self.output, self._kept = number, offset, input, output, kept

    def __iter__(self) -> Iterator[Any]:
        return iter((self.input, self.output))

    def keep(self, count: int) -> None:
        """Writes only the first `count` elements of the output to the file; the next piece's follow directly."""
        number = operator.index(count)
        if not 0 <= number <= self._kept:
            raise ValueError(f"{count} elements of {self._kept} cannot be kept")
        self._kept = number

    def __repr__(self) -> str:
        return f"<spinio.nvmmu.Step {self.number}: {self.input!r} -> {self.output!r}>"


class _Slot:
    """A stream, and device memory for the input and the output of one piece."""

    def __init__(self, maker: _arrays.Library, into: int, out: int) -> None:
        self.stream = maker.new_stream()
        # Allocated on its stream: so the allocator does not reuse it before the work queued there is done.
        with maker.on_stream(self.stream):
            self.input, self.output = maker.empty(into), maker.empty(out) if out else None
        self.tickets: list[tuple[_session.Ticket, int]] = []


class Pipeline:
    """The pieces of a file, one after the other; see pipeline(). A context manager, to be iterated in its block."""

    def __init__(
        self,
        input: _session.Path,
        output: _session.Path | None,
        dtype: Any,
        count: int | None,
        offset: int,
        total: int | None,
        output_dtype: Any,
        output_count: int | None,
        output_offset: int,
        slots: int,
        maker: _arrays.Library,
    ) -> None:
        self._ended = True  # nothing to end yet
        self._path = os.fsdecode(input)
        self._dtype, self._out_dtype = _dtypes.of(dtype), _dtypes.of(dtype if output_dtype is None else output_dtype)
        for d in (self._dtype, self._out_dtype):
            maker.require(d)
            if not d.itemsize:
                raise TypeError(f"{d.name} elements are not whole bytes")
        count = max(1, _PIECE // self._dtype.itemsize) if count is None else operator.index(count)
        out_count = count if output_count is None else operator.index(output_count)
        slots, offset, output_offset = map(operator.index, (slots, offset, output_offset))
        total = None if total is None else operator.index(total)
        if min(count, out_count, slots) < 1 or min(offset, output_offset, 0 if total is None else total) < 0:
            raise ValueError(
                f"pieces of {count} elements, outputs of {out_count}, {slots} slots, offsets {offset} and {output_offset}, "
                f"{total} elements in all: invalid"
            )
        self._total = self._elements(offset, total)
        # Allocate no more memory than the data needs.
        self._count, self._out_count = count, out_count
        first = min(count, self._total)
        self._offset, self._to = offset, output_offset
        self._pieces = -(-self._total // count)
        self._maker, self._has_output = maker, output is not None
        self._outer = maker.current_stream()
        mark = maker.mark(self._outer)
        out_bytes = self._results(first) * self._out_dtype.itemsize if output is not None else 0
        wanted = range(min(slots, self._pieces))
        self._slots = [_Slot(maker, first * self._dtype.itemsize, out_bytes) for _ in wanted]
        self._back_to(self._outer)
        for slot in self._slots:
            maker.follow(slot.stream, mark)
        self._mark = mark
        # One piece in upload and one in download, besides the current one.
        self._ahead = max(1, slots - 2) if slots > 1 else 0
        self._asked = self._number = 0
        self._step: Step | None = None
        self._current: ContextManager[Any] | None = None
        self._entered = False
        self._home = self._before = self._outer
        self._session = _session.Session(output)
        self._ended = False

    def _elements(self, offset: int, total: int | None) -> int:
        with _file.open(self._path) as f:
            size = _arrays.size_of(f)
        there = max(0, size - offset)
        if total is None:
            if there % self._dtype.itemsize:
                what = f"{there} bytes from {offset} on are not whole elements of {self._dtype.name}: name a total"
                raise ValueError(f"{self._path}: {what}")
            return there // self._dtype.itemsize
        if total * self._dtype.itemsize > there:
            raise self._too_short(size)
        return total

    def _too_short(self, size: int) -> EOFError:
        return EOFError(f"{self._path} ends after {size} bytes, within the requested range")

    def _results(self, count: int) -> int:
        """The number of output elements for `count` input elements."""
        return -(-count * self._out_count // self._count)

    def __repr__(self) -> str:
        return f"<spinio.nvmmu.Pipeline through {self._path!r}: piece {self._number} of {self._pieces}{', ended' * self._ended}>"

    def __len__(self) -> int:
        """The total number of pieces."""
        return self._pieces

    def __enter__(self) -> Pipeline:
        self._home = self._maker.current_stream()
        self._entered = True
        return self

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self._entered:
            raise RuntimeError("a pipeline must be iterated inside its with block")
        if self._ended:
            raise StopIteration
        self._finish()
        if self._number == self._pieces:
            self.end()
            raise StopIteration
        while self._asked < min(self._pieces, self._number + 1 + self._ahead):
            self._upload(self._asked)
        return self._begin()

    def _slot(self, number: int) -> _Slot:
        return self._slots[number % len(self._slots)]

    def _upload(self, number: int) -> None:
        slot, first = self._slot(number), number * self._count
        self._settle(slot)
        size = min(self._count, self._total - first) * self._dtype.itemsize
        with _stream.stream(slot.stream):
            at = self._offset + first * self._dtype.itemsize
            slot.tickets.append((self._session.upload_async(self._path, slot.input[:size], at), size))
        self._asked += 1

    def _begin(self) -> Step:
        """Returns the next piece, and makes its stream the current one."""
        slot, first = self._slot(self._number), self._number * self._count
        count = min(self._count, self._total - first)
        self._maker.follow(slot.stream, self._mark)
        self._before = self._maker.current_stream()
        if self._before != self._outer:
            # The stream of another pipeline, whose piece the body uses too; or one set after this pipeline was made.
            self._maker.follow(slot.stream, self._maker.mark(self._before))
        x = self._maker.view(slot.input, 0, self._dtype, (count,))
        y, kept = None, 0
        if slot.output is not None:
            kept = self._results(count)
            y = self._maker.view(slot.output, 0, self._out_dtype, (kept,))
        current = self._maker.on_stream(slot.stream)
        current.__enter__()
        self._current = current
        self._step = Step(self._number, self._offset + first * self._dtype.itemsize, x, y, kept)
        return self._step

    def _finish(self) -> None:
        """The body of the last piece has ended: queues the download of its output."""
        step = self._step
        self._leave()
        if step is None:
            return
        slot, size = self._slot(self._number), step._kept * self._out_dtype.itemsize
        if slot.output is not None and size:
            with _stream.stream(slot.stream):
                ticket = self._session.download_async(slot.output[:size], self._to)
            slot.tickets.append((ticket, size))
            self._to += size
        self._number += 1

    def _leave(self) -> None:
        """Makes the program's own stream the current one again, ordered after the work that the body queued."""
        current, self._current, self._step = self._current, None, None
        if current is None:
            return
        stream, last = self._slot(self._number).stream, self._maker.current_stream()
        if last != stream:
            # The body ran on the stream of a pipeline zipped with this one.
            self._maker.follow(stream, self._maker.mark(last))
        self._mark = self._maker.mark(stream)
        current.__exit__(None, None, None)
        # Zipped steps are not nested: leaving one would restore a stream of the other pipeline.
        self._back_to(self._before if last == stream else self._home)

    def _back_to(self, stream: Any) -> None:
        # CuPy loses a stream that was set by use() at the end of a block.
        if self._maker.current_stream() != stream:
            self._maker.use(stream)

    def _settle(self, slot: _Slot) -> None:
        tickets, slot.tickets = slot.tickets, []
        for ticket, size in tickets:
            if ticket.wait() != size:
                raise self._too_short(os.stat(self._path).st_size)

    def end(self) -> _Report:
        """Ends the pipeline before the last piece: waits for queued work; the current piece is not written. Returns the report.

        Iterating to the last piece, and leaving the block, do that too. A second call does nothing.
        """
        if not self._ended:
            self._ended = True
            self._leave()
            self._maker.follow(self._outer, self._mark)
            try:
                for slot in self._slots:
                    self._settle(slot)
            finally:
                self._session.end()
        return self.report

    @property
    def report(self) -> _Report:
        """The report, as a session's."""
        return self._session.report

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        except (OSError, EOFError):
            # Of two failures the body's, which was first, is raised.
            if kind is None:
                raise


def pipeline(
    input: _session.Path,
    output: _session.Path | None = None,
    dtype: Any = "uint8",
    *,
    count: int | None = None,
    offset: int = 0,
    total: int | None = None,
    output_dtype: Any = None,
    output_count: int | None = None,
    output_offset: int = 0,
    slots: int = 3,
    device: Any = "cuda",
    library: str | None = None,
) -> Pipeline:
    """Processes a file on a device piece by piece: during a body, the next piece is uploaded and the previous one downloaded.

        with nvmmu.pipeline("input.f32", "output.f32", "float32") as pieces:
            for x, y in pieces:
                torch.sqrt(x, out=y)

    x is a piece of the input, y the array for its results; the results are written consecutively to the output. Both are
    one-dimensional, and the last ones may be shorter. The body runs with the piece's stream as the current one, so its
    queued work needs no synchronization; bodies run in order, after the work queued before the pipeline was made. The arrays
    are reused for later pieces: copy what has to stay.

    input, output: files; without an output y is None. dtype, output_dtype: of the elements; the output's default is the
    input's. count, output_count: elements per piece (default: 16 MiB of input), and per output of a full piece (default: the
    same number); a shorter piece has proportionally fewer, rounded up. A body with fewer results calls keep:
    `for step in pieces: ...; step.keep(n)`, with step.input, step.output, step.number and step.offset. offset, total: first
    byte of the input, and number of elements; by default up to the end. output_offset: first byte of the output; the rest
    of that file is unchanged. slots: pieces on the device at a time. device, library: as for fromfile.

    An exception in the body, or a break, ends the pipeline: pieces finished before are in the file, the current one is not. A
    file that ends too early is an EOFError, an error of a file or the device an OSError, invalid numbers and a device
    without streams a ValueError.
    """
    return Pipeline(
        input,
        output,
        dtype,
        count,
        offset,
        total,
        output_dtype,
        output_count,
        output_offset,
        slots,
        _arrays.library(device, library),
    )
