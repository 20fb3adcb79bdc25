"""Names of earlier releases; the next release no longer has them (docs/deprecated.md)."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def warn(old: str, new: str, level: int = 3) -> None:
    """Reports the use of an old name, at the line of the program that uses it."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=level)


def renamed(old: str, new: str) -> Callable[[_F], _F]:
    """Decorates the function that an old name calls."""

    def decorate(call: _F) -> _F:
        @functools.wraps(call)
        def warned(*arguments: Any, **keywords: Any) -> Any:
            warn(old, new)
            return call(*arguments, **keywords)

        return warned  # type: ignore[return-value]

    return decorate
