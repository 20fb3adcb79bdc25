"""The loop of programs that have more data than their device has memory: NVMMU's pipeline.

    slot 0   up 0 | body 0 | down 0 | up 3 | body 3 ...        a slot: a stream, an input and an output array
    slot 1   .... | up 1   | body 1 | down 1 ...
    slot 2   .............. | up 2  | body 2 ...

Within a slot the stream keeps the order, and from slot to slot bodies keep theirs: each begins behind what the one before
has queued. So a body may add to what an earlier one has left, and moves overlap all the same. A body may itself run a
pipeline, and two may be zipped: then it runs with the stream of the one that came last, and the other's keeps order with it.
"""

from __future__ import annotations

import operator
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, ContextManager, Iterator

from spinio import _arrays, _dtypes, _file, _session, _stream

if TYPE_CHECKING:
    from spinio._spinio import _Report

# Bytes of a piece, where nobody says how many elements it has.
_PIECE = 16 << 20


class Step:
    """A piece that is on the device: `x, y = step`, or its attributes. The arrays are the next pieces' afterwards."""

    __slots__ = {
        "_kept": "Elements of the output that go to the file.",
        "input": "The piece.",
        "number": "Counted from 0.",
        "offset": "Where in its file it begins, in bytes.",
        "output": "Where its results go; None without an output file.",
    }

    def __init__(self, number: int, offset: int, input: Any, output: Any, kept: int) -> None:
        self.number, self.offset, self.input, self.output, self._kept = number, offset, input, output, kept

    def __iter__(self) -> Iterator[Any]:
        return iter((self.input, self.output))

    def keep(self, count: int) -> None:
        """Says that only the first `count` elements of the output go to the file; the next piece's follow them there."""
        number = operator.index(count)
        if not 0 <= number <= self._kept:
            raise ValueError(f"{count} elements of {self._kept} cannot be kept")
        self._kept = number

    def __repr__(self) -> str:
        return f"<spinio.nvmmu.Step {self.number}: {self.input!r} -> {self.output!r}>"


class _Slot:
    """A stream, and the memory that pieces come and go by."""

    def __init__(self, maker: _arrays.Library, into: int, out: int) -> None:
        self.stream = maker.new_stream()
        # Made on its stream: so it is not anybody else's before what was queued there is done.
        with maker.on_stream(self.stream):
            self.input, self.output = maker.empty(into), maker.empty(out) if out else None
        self.tickets: list[tuple[_session.Ticket, int]] = []


class Pipeline:
    """Pieces of a file, one after another; see pipeline(). A context manager, to be iterated in its block."""

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
        self._ended = True  # there is nothing to end yet
        self._path = os.fsdecode(input)
        self._dtype, self._out_dtype = _dtypes.of(dtype), _dtypes.of(dtype if output_dtype is None else output_dtype)
        for d in (self._dtype, self._out_dtype):
            maker.require(d)
            if not d.itemsize:
                raise TypeError(f"{d.name} elements are no whole bytes")
        count = max(1, _PIECE // self._dtype.itemsize) if count is None else operator.index(count)
        out_count = count if output_count is None else operator.index(output_count)
        slots, offset, output_offset = map(operator.index, (slots, offset, output_offset))
        total = None if total is None else operator.index(total)
        if min(count, out_count, slots) < 1 or min(offset, output_offset, 0 if total is None else total) < 0:
            raise ValueError(
                f"pieces of {count} elements, outputs of {out_count}, {slots} slots, offsets {offset} and {output_offset}, "
                f"{total} elements in all: that cannot be"
            )
        self._total = self._elements(offset, total)
        # No more memory than there is data.
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
        # A piece that comes and one that goes, beside the one that is worked on.
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
                what = f"{there} bytes from {offset} on are no whole elements of {self._dtype.name}: name a total"
                raise ValueError(f"{self._path}: {what}")
            return there // self._dtype.itemsize
        if total * self._dtype.itemsize > there:
            raise self._too_short(size)
        return total

    def _too_short(self, size: int) -> EOFError:
        return EOFError(f"{self._path} ends after {size} bytes, in the middle of what was to be read")

    def _results(self, count: int) -> int:
        """Elements of output for so many of input."""
        return -(-count * self._out_count // self._count)

    def __repr__(self) -> str:
        return f"<spinio.nvmmu.Pipeline through {self._path!r}: piece {self._number} of {self._pieces}{', ended' * self._ended}>"

    def __len__(self) -> int:
        """How many pieces there are in all."""
        return self._pieces

    def __enter__(self) -> Pipeline:
        self._home = self._maker.current_stream()
        self._entered = True
        return self

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self._entered:
            raise RuntimeError("a pipeline is iterated inside of its with block")
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
        """Hands out the next piece, with its stream the current one."""
        slot, first = self._slot(self._number), self._number * self._count
        count = min(self._count, self._total - first)
        self._maker.follow(slot.stream, self._mark)
        self._before = self._maker.current_stream()
        if self._before != self._outer:
            # Another pipeline's, whose piece the body will work on too; or one that was chosen after this was made.
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
        """The body of the last piece is over: its output goes."""
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
        """The program's own stream is the current one again; what follows comes behind what the body queued."""
        current, self._current, self._step = self._current, None, None
        if current is None:
            return
        stream, last = self._slot(self._number).stream, self._maker.current_stream()
        if last != stream:
            # The body ran on the stream of a pipeline that this one is zipped with.
            self._maker.follow(stream, self._maker.mark(last))
        self._mark = self._maker.mark(stream)
        current.__exit__(None, None, None)
        # Zipped steps are not one inside the other: that brought back a stream of the other pipeline.
        self._back_to(self._before if last == stream else self._home)

    def _back_to(self, stream: Any) -> None:
        # CuPy forgets at the end of a block what was chosen by use().
        if self._maker.current_stream() != stream:
            self._maker.use(stream)

    def _settle(self, slot: _Slot) -> None:
        tickets, slot.tickets = slot.tickets, []
        for ticket, size in tickets:
            if ticket.wait() != size:
                raise self._too_short(os.stat(self._path).st_size)

    def end(self) -> _Report:
        """Ends it before the last piece: what is queued is waited for, the piece in hand is not written. The report.

        Iterating to the last piece, and the end of the block, do that too. A second time does nothing.
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
        """What was done, as a session's."""
        return self._session.report

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.end()
        except (OSError, EOFError):
            # Of two failures the body's is told, which came first.
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
    """A file through a device, piece by piece: while one is worked on, the next one comes and the last one goes.

        with nvmmu.pipeline("input.f32", "output.f32", "float32") as pieces:
            for x, y in pieces:
                torch.sqrt(x, out=y)

    x is a piece of the input, y is where its results go; the output's pieces lie one behind the other. Both are
    one-dimensional, and the last ones may be shorter. The body runs with a stream of the piece as the current one, so what it
    queues needs no waiting; bodies keep their order, and come behind what was queued before the pipeline was made. The arrays
    are used again for later pieces: what shall stay must be copied.

    input, output: files; without an output y is None. dtype, output_dtype: of the elements; the output's is the input's if
    nothing else is said. count, output_count: elements of a piece (16 MiB of input without it), and of the output of a whole
    piece (as many); a shorter one has as many in proportion, rounded up. A body that makes fewer says so:
    `for step in pieces: ...; step.keep(n)`, with step.input, step.output, step.number and step.offset. offset, total: first
    byte of the input, and elements in all; without it, up to the end. output_offset: first byte of the output; what else is
    in that file stays. slots: pieces on the device at a time. device, library: as for fromfile.

    An exception in the body, or a break, ends it: what was finished before is in the file, the piece in hand is not. A file
    that ends too early is an EOFError, what a file or the device refuses an OSError, numbers that cannot be and a device
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
