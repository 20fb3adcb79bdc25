"""The build backend of `pip install .`: maturin's, and what `cargo x stage` lays out.

    cargo x stage ──> spinio._spinio.data/data/{bin,lib,include} ──> maturin ──> spinio-*.whl
                      (maturin looks there for the wheel's data)                 module + spinio-*.data/data/...

An installer puts the data under the environment's own prefix: the command into bin, the library into lib, the headers into
include. The folder lives only as long as maturin needs it, so that no later build takes an old tree.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from pathlib import Path
from typing import Any, Iterator, Mapping

import maturin
from maturin import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_ROOT = Path(__file__).resolve().parent.parent
# The name follows from `module-name` in pyproject.toml.
_DATA = _ROOT / "spinio._spinio.data"


@contextlib.contextmanager
def _staged() -> Iterator[None]:
    if shutil.which("cargo") is None:
        raise SystemExit("SPIN is built with Rust: install cargo (https://rustup.rs), or install a wheel that is built already")
    try:
        subprocess.run(["cargo", "x", "stage", "--wheel", str(_DATA / "data")], cwd=_ROOT, check=True)
        yield
    finally:
        shutil.rmtree(_DATA, ignore_errors=True)


def build_wheel(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    with _staged():
        return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(
    wheel_directory: str,
    config_settings: Mapping[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    with _staged():
        return maturin.build_editable(wheel_directory, config_settings, metadata_directory)
