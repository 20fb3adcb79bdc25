"""The stream with which transfers are ordered."""

from __future__ import annotations

import contextlib
from typing import Any, Generator

from spinio import _spinio


def _handle(stream: Any) -> int:
    """The handle of a stream: an int, or a stream of PyTorch, CuPy, or any object with __cuda_stream__."""
    if stream is None:
        return 0
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        said: Any = protocol() if callable(protocol) else protocol
        _version, handle = said
        return int(handle)
    for name in ("cuda_stream", "ptr", "handle"):  # PyTorch, CuPy, Numba and cuda-python
        handle = getattr(stream, name, None)
        if handle is not None:
            return int(getattr(handle, "value", handle) or 0)
    raise TypeError(f"{type(stream).__qualname__} is no stream: pass one of PyTorch's, CuPy's, or a handle")


def set_stream(stream: Any) -> None:
    """Orders this thread's transfers after the work queued on `stream`, instead of on the stream that their arrays name.

    stream: of PyTorch, CuPy, Numba, any object with __cuda_stream__, or a handle; None, or the legacy default stream, resets
    it. The stream must exist until another one is set, and belong to the device of the arrays. Any other object is a
    TypeError.
    """
    _spinio.set_stream(_handle(stream))


def current_stream() -> int:
    """The handle of the stream that this thread has set; 0 if none."""
    return _spinio.stream()


@contextlib.contextmanager
def stream(stream: Any) -> Generator[None, None, None]:
    """As set_stream, for a block: `with spinio.stream(s): f.pread(array, 0)`. Restores the previous stream at its end."""
    before = _spinio.stream()
    _spinio.set_stream(_handle(stream))
    try:
        yield
    finally:
        _spinio.set_stream(before)
