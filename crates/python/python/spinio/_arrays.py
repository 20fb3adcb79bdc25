"""New arrays of a chosen library, on a chosen device, and views into their bytes."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import operator
import os
import stat
import sys
from typing import TYPE_CHECKING, Any, ContextManager, Iterator, Protocol, Sequence

from spinio import _dtypes, _file, _stream, emulated

if TYPE_CHECKING:
    from spinio import gaia


class Library(Protocol):
    """The interface to an array library. Its objects can be pickled: a worker process makes arrays as its parent does."""

    def require(self, dtype: _dtypes.DType) -> None:
        """Raises a TypeError if the library has no such type."""

    def on_device(self) -> ContextManager[Any]:
        """A block in which its arrays are made, copied and read into: their device is the library's current one."""

    def empty(self, nbytes: int) -> Any:
        """New memory, as an array of bytes."""

    def mapped(self, file: gaia.File, offset: int, nbytes: int) -> tuple[gaia.Map, Any]:
        """Bytes of a file, mapped read-only, and an array of them, which keeps the map."""

    def view(self, raw: Any, begin: int, dtype: _dtypes.DType, shape: Sequence[int]) -> Any:
        """Elements at `begin` in memory of `empty`; a copy of them if the type's alignment does not permit that byte."""

    def index(self, array: Any, keys: tuple[Any, ...]) -> Any:
        """Elements of an array, in memory of their own."""

    def current_stream(self) -> Any:
        """The current stream; host memory has none: a ValueError."""

    def new_stream(self) -> Any:
        """A new, empty stream."""

    def on_stream(self, stream: Any) -> ContextManager[Any]:
        """Makes it the current stream in a block."""

    def use(self, stream: Any) -> None:
        """Makes it the current stream permanently."""

    def mark(self, stream: Any) -> Any:
        """An event on a stream: after all work queued there."""

    def follow(self, stream: Any, mark: Any) -> None:
        """Work queued from now on begins after an event on another stream."""


def _unknown(library: str, dtype: _dtypes.DType) -> TypeError:
    return TypeError(f"{library} has no type for {dtype.name} (safetensors: {dtype.safetensors}) here")


class Torch:
    """PyTorch."""

    def __init__(self, device: str) -> None:
        self.torch = importlib.import_module("torch")
        self.device = self.torch.device(device)

    def __reduce__(self) -> tuple[Any, ...]:
        return Torch, (str(self.device),)

    def require(self, dtype: _dtypes.DType) -> None:
        self._dtype(dtype)

    def on_device(self) -> ContextManager[Any]:
        return contextlib.nullcontext()

    def empty(self, nbytes: int) -> Any:
        return self.torch.empty(nbytes, dtype=self.torch.uint8, device=self.device)

    def mapped(self, file: gaia.File, offset: int, nbytes: int) -> tuple[gaia.Map, Any]:
        if self.device.type != "cuda":
            raise _no_shared()
        number = self.torch.cuda.current_device() if self.device.index is None else self.device.index
        with self.torch.cuda.device(number):
            # A process that has not used the device yet has no context there; this makes it.
            self.torch.empty(1, device=f"cuda:{number}")
            mapped = file.map(offset, nbytes, device=number, write=False)
            return mapped, self.torch.from_dlpack(mapped)

    def view(self, raw: Any, begin: int, dtype: _dtypes.DType, shape: Sequence[int]) -> Any:
        kind = self._dtype(dtype)
        nbytes = _nbytes(dtype, shape)
        if not nbytes:
            # PyTorch checks the offset of an empty part too, which has no address that shows its alignment.
            return self.torch.empty(tuple(shape), dtype=kind, device=raw.device)
        part = raw[begin : begin + nbytes]
        if part.data_ptr() % dtype.itemsize:
            part = part.clone()
        return part.view(kind).view(tuple(shape))

    def index(self, array: Any, keys: tuple[Any, ...]) -> Any:
        # PyTorch has no slices with negative steps.
        forward: list[Any] = []
        back: list[int] = []
        for dim, key in enumerate(keys):
            if isinstance(key, slice) and (key.step or 1) < 0:
                back.append(sum(isinstance(k, slice) for k in forward))
                chosen = range(*key.indices(array.shape[dim]))
                key = slice(chosen[-1], chosen[0] + 1, -chosen.step) if chosen else slice(0, 0)
            forward.append(key)
        part = array[tuple(forward)]
        return part.flip(back) if back else part.clone()

    def current_stream(self) -> Any:
        if self.device.type != "cuda":
            raise _no_stream()
        return self.torch.cuda.current_stream(self.device)

    def new_stream(self) -> Any:
        return self.torch.cuda.Stream(self.device)

    def on_stream(self, stream: Any) -> ContextManager[Any]:
        return self.torch.cuda.stream(stream)  # type: ignore[no-any-return]

    def use(self, stream: Any) -> None:
        self.torch.cuda.set_stream(stream)

    def mark(self, stream: Any) -> Any:
        return stream.record_event()

    def follow(self, stream: Any, mark: Any) -> None:
        stream.wait_event(mark)

    def _dtype(self, dtype: _dtypes.DType) -> Any:
        kind = getattr(self.torch, dtype.torch, None) if dtype.torch else None
        if kind is None:
            raise _unknown("This PyTorch", dtype)
        return kind


class NumPy:
    """NumPy; with ml_dtypes, if it is installed, for machine-learning types."""

    name = "NumPy"

    def __init__(self) -> None:
        self.module = importlib.import_module("numpy")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def require(self, dtype: _dtypes.DType) -> None:
        self._dtype(dtype)

    def on_device(self) -> ContextManager[Any]:
        return contextlib.nullcontext()

    def empty(self, nbytes: int) -> Any:
        return self.module.empty(nbytes, dtype="uint8")

    def mapped(self, file: gaia.File, offset: int, nbytes: int) -> tuple[gaia.Map, Any]:
        raise _no_shared()

    def view(self, raw: Any, begin: int, dtype: _dtypes.DType, shape: Sequence[int]) -> Any:
        # NumPy and CuPy do not check alignment.
        part = raw[begin : begin + _nbytes(dtype, shape)]
        if dtype.itemsize and begin % dtype.itemsize:
            part = part.copy()
        return part.view(self._dtype(dtype)).reshape(tuple(shape))

    def index(self, array: Any, keys: tuple[Any, ...]) -> Any:
        return array[keys].copy()

    def current_stream(self, *_arguments: Any) -> Any:
        raise _no_stream()

    new_stream = on_stream = use = mark = follow = current_stream

    def _dtype(self, dtype: _dtypes.DType) -> Any:
        numpy = importlib.import_module("numpy")
        if dtype.numpy is None:
            raise _unknown(self.name, dtype)
        try:
            return numpy.dtype(dtype.numpy)
        except TypeError:
            pass
        try:
            return numpy.dtype(getattr(importlib.import_module("ml_dtypes"), dtype.numpy))
        except (ImportError, AttributeError):
            raise _unknown(f"{self.name} without ml_dtypes", dtype) from None


class CuPy(NumPy):
    """CuPy, on one GPU."""

    name = "CuPy"

    def __init__(self, ordinal: int | None) -> None:
        self.module = importlib.import_module("cupy")
        self.ordinal = self.module.cuda.runtime.getDevice() if ordinal is None else ordinal

    def __reduce__(self) -> tuple[Any, ...]:
        return CuPy, (self.ordinal,)

    def on_device(self) -> ContextManager[Any]:
        return self.module.cuda.Device(self.ordinal)  # type: ignore[no-any-return]

    def view(self, raw: Any, begin: int, dtype: _dtypes.DType, shape: Sequence[int]) -> Any:
        with self.on_device():
            return super().view(raw, begin, dtype, shape)

    def index(self, array: Any, keys: tuple[Any, ...]) -> Any:
        with self.on_device():
            return super().index(array, keys)

    def empty(self, nbytes: int) -> Any:
        with self.on_device():
            return self.module.empty(nbytes, dtype="uint8")

    def mapped(self, file: gaia.File, offset: int, nbytes: int) -> tuple[gaia.Map, Any]:
        with self.on_device():
            # A process that has not used the device yet has no context there; this makes it.
            self.module.cuda.runtime.free(0)
            mapped = file.map(offset, nbytes, device=self.ordinal, write=False)
            return mapped, self.module.from_dlpack(mapped)

    def current_stream(self) -> Any:
        with self.on_device():
            return self.module.cuda.get_current_stream()

    def new_stream(self) -> Any:
        with self.on_device():
            return self.module.cuda.Stream(non_blocking=True)

    @contextlib.contextmanager
    def on_stream(self, stream: Any) -> Iterator[None]:
        with self.on_device(), stream:
            yield

    def use(self, stream: Any) -> None:
        with self.on_device():
            stream.use()

    def mark(self, stream: Any) -> Any:
        return stream.record()

    def follow(self, stream: Any, mark: Any) -> None:
        stream.wait_event(mark)


class Emulated:
    """An emulated device."""

    def __init__(self, device: str = "emulated") -> None:
        self.device = device

    def require(self, dtype: _dtypes.DType) -> None:
        """It has all types."""

    def on_device(self) -> ContextManager[Any]:
        return contextlib.nullcontext()

    def empty(self, nbytes: int) -> Any:
        return emulated.empty(nbytes, device=self.device)

    def mapped(self, file: gaia.File, offset: int, nbytes: int) -> tuple[gaia.Map, emulated.Array]:
        mapped = file.map(offset, nbytes, device=self.device, write=False)
        return mapped, mapped.view()

    def view(self, raw: emulated.Array, begin: int, dtype: _dtypes.DType, shape: Sequence[int]) -> emulated.Array:
        part = raw[begin : begin + _nbytes(dtype, shape)]
        if dtype.itemsize and part.address % dtype.itemsize:
            copy = emulated.empty(part.nbytes, device=self.device)
            copy.set(part.tobytes())
            part = copy
        return part.view(dtype).reshape(tuple(shape))

    def index(self, array: emulated.Array, keys: tuple[Any, ...]) -> emulated.Array:
        part = array[keys]
        copy = emulated.empty(part.shape, part.dtype, device=self.device)
        copy.set(part.tobytes())
        return copy

    def current_stream(self) -> emulated.Stream | None:
        # None: the default stream, with which all streams are ordered.
        return emulated.stream_of(_stream.current_stream())

    def new_stream(self) -> emulated.Stream:
        return emulated.Stream(self.device)

    def on_stream(self, stream: emulated.Stream) -> ContextManager[Any]:
        return _stream.stream(stream)

    def use(self, stream: emulated.Stream | None) -> None:
        _stream.set_stream(stream)

    def mark(self, stream: emulated.Stream | None) -> None:
        # There are no events: the stream is synchronized instead.
        if stream is not None:
            stream.synchronize()

    def follow(self, stream: emulated.Stream | None, mark: None) -> None:
        pass


def _no_stream() -> ValueError:
    return ValueError("host memory has no streams: name a device")


def _no_shared() -> ValueError:
    return ValueError("only memory of a GPU is shared: name a device")


def _nbytes(dtype: _dtypes.DType, shape: Sequence[int]) -> int:
    bits = dtype.bits
    for length in shape:
        bits *= length
    return bits // 8


# Names of frameworks in the package safetensors, which takes them before the device.
_FRAMEWORKS = ("pt", "torch", "pytorch", "np", "numpy", "cp", "cupy")


def library(device: Any = "cpu", name: str | None = None) -> Library:
    """The library `name` on a device; without a name, the one that the program uses.

    device: "cpu", "cuda", "cuda:1", a number, a torch.device or "emulated".
    """
    text = f"cuda:{device}" if isinstance(device, int) else str(device)
    kind, _, number = text.partition(":")
    if kind not in ("cpu", "cuda", "emulated") or (number and not number.isdigit()):
        hint = ", and the framework is named by library=" if text in _FRAMEWORKS else ""
        raise ValueError(f'{text!r} is no device: devices are "cpu", "cuda", "cuda:1", "emulated" and "emulated:1"{hint}')
    fit = {"cpu": ("torch", "numpy"), "cuda": ("torch", "cupy"), "emulated": ("emulated",)}[kind]
    if name is None:
        have = [n for n in fit if n in sys.modules] if kind != "emulated" else ["emulated"]
        # The libraries that the program has imported; else those it could import.
        have = have or [n for n in reversed(fit) if importlib.util.find_spec(n)]
        if not have:
            raise ImportError(f"Arrays on {text!r} need one of these installed: {', '.join(fit)}")
        name = have[0]
    if name not in fit:
        raise ValueError(f"Arrays on {text!r} are made by {' or '.join(fit)}, not by {name!r}")
    if name == "torch":
        return Torch(text)
    if name == "numpy":
        return NumPy()
    if name == "cupy":
        return CuPy(int(number) if number else None)
    return Emulated(text)


def size_of(f: _file.File) -> int:
    """Size of a file or a disk in bytes; a file without a size is a ValueError."""
    mode = os.fstat(f.fileno()).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISBLK(mode):
        why = "only a file with a size can be read whole: open() and readinto() take pipes and devices"
        raise ValueError(f"{f.name if isinstance(f.name, int) else os.fsdecode(f.name)}: {why}")
    return f._named(os.lseek, 0, os.SEEK_END)


def fromfile(
    file: _file.Path,
    dtype: Any = "uint8",
    count: int = -1,
    offset: int = 0,
    *,
    device: Any = "cpu",
    library: str | None = None,
) -> Any:
    """A new one-dimensional array of a file's contents from byte `offset`: as numpy.fromfile, on any device.

    dtype: a name ("float32", "bfloat16", "float8_e4m3fn" ...), a torch.dtype, or a NumPy dtype of this machine's byte order.
    count: the most elements; -1 for all. A partial element at the end is left out. offset: in bytes.
    device: "cpu", "cuda", "cuda:1" ..., a number, a torch.device, or "emulated". library: the array's library, "torch",
    "cupy" or "numpy"; by default the one that the program has imported.

    A file that cannot be read is an OSError, a missing type or library a TypeError or an ImportError, a pipe or any other
    file without a size a ValueError.
    """
    d = _dtypes.of(dtype)
    if not d.itemsize:
        raise TypeError(f"{d.name} elements are not whole bytes")
    count, offset = operator.index(count), operator.index(offset)
    if count < -1 or offset < 0:
        raise ValueError(f"count {count} and offset {offset} are invalid")
    maker = globals()["library"](device, library)
    with _file.open(file) as f:
        there = max(0, size_of(f) - offset) // d.itemsize
        count = there if count == -1 else min(count, there)
        raw = maker.empty(count * d.itemsize)
        with maker.on_device():
            got = f._read_full(raw, offset) if count else 0
        # The file may have been truncated meanwhile.
        return maker.view(raw, 0, d, (got // d.itemsize,))
