"""Reads files directly into GPU memory: plain POSIX semantics, every byte on the fastest correct route.

    import spinio, torch

    weights = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    with spinio.open("weights.bin") as f:
        f.pread(weights, 0)

Arrays may be of NumPy, CuPy, PyTorch, or any object with DLPack, ``__cuda_array_interface__`` or the buffer protocol, in
host or device memory. See docs/python.md.
"""

from __future__ import annotations

from typing import Any

from spinio import _deprecated, emulated, gaia, net, nvmmu, safetensors
from spinio._arrays import fromfile
from spinio._file import File, open
from spinio._include import include
from spinio._pinned import Map, PinnedFile
from spinio._spinio import SafetensorsError, __version__, describe, stats
from spinio._stream import current_stream, set_stream, stream

__all__ = [
    "File",
    "Map",
    "PinnedFile",
    "SafetensorsError",
    "__version__",
    "current_stream",
    "describe",
    "emulated",
    "fromfile",
    "gaia",
    "include",
    "net",
    "nvmmu",
    "open",
    "safetensors",
    "set_stream",
    "stats",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name == "Hold":
        _deprecated.warn("spinio.Hold", "spinio.PinnedFile")
        return PinnedFile
    raise AttributeError(f"module 'spinio' has no attribute {name!r}")
