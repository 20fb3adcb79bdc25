"""Where the headers are that device code includes: nvcc, NVRTC and C++ compilers get the folder by -I."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import pathlib
from typing import Iterator

_HEADER = pathlib.PurePath("include", "spinio", "net.h")


def _folders() -> Iterator[pathlib.Path]:
    try:
        files = importlib.metadata.files("spinio") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-3:] == _HEADER.parts:
            yield pathlib.Path(os.path.realpath(str(file.locate()))).parents[1]
    source = pathlib.Path(__file__).resolve()
    # `pip install --target` moves the headers beside the module, and writes elsewhere where they were.
    yield source.parents[1] / "include"
    # A module that is imported from the sources.
    if len(source.parents) > 4:
        yield source.parents[4] / "device" / "include"


def include() -> str:
    """The folder of the headers for kernels, such as <spinio/net.h>: an option -I of the compiler.

    For NVRTC, in CuPy: cupy.RawModule(code=..., options=("-std=c++17", "-I" + spinio.include())). FileNotFoundError: the
    module was installed without them.
    """
    for folder in _folders():
        if (folder / "spinio" / "net.h").is_file():
            return str(folder)
    raise FileNotFoundError(errno.ENOENT, "The module spinio was installed without its headers", str(_HEADER))
