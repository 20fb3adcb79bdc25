"""The emulated device: a GPU in software, so that everything runs and is tested on any machine.

Neither the CPU nor a system call can access its memory; a thread of the device makes copies, in order. It is
as strict as a GPU. Its arrays have only the operations that programs need: `empty`, slices, `numpy()`.

SPINIO_EMULATED sets the device's properties, and how many there are (docs/settings.md): "emulated:1" names the second.
"""

from __future__ import annotations

import contextlib
import math
import operator
import weakref
from typing import Any, ContextManager, Generator, Iterator, Sequence

from spinio import _dtypes, _file, _spinio
from spinio._deprecated import renamed

__all__ = ["Array", "Stream", "array", "configure", "empty", "paused"]


class Array:
    """An array in memory of the emulated device; other libraries access it by DLPack (device type 12).

    A map of a file on a GPU (spinio.gaia) is such an array too, in the memory of that GPU.
    """

    __slots__ = {
        "_at": "Offset of the first element in the memory, in bytes.",
        "_memory": "The memory that it is a view of.",
        "_strides": "Distance between elements along each dimension, in elements.",
        "dtype": "Type of the elements.",
        "readonly": "Whether it is marked read-only.",
        "shape": "Number of elements along each dimension.",
    }

    shape: tuple[int, ...]
    dtype: _dtypes.DType
    readonly: bool

    def __init__(
        self,
        memory: _spinio.Memory,
        at: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: _dtypes.DType,
        readonly: bool = False,
    ) -> None:
        self._memory, self._at, self._strides = memory, at, strides
        self.shape, self.dtype, self.readonly = shape, dtype, readonly

    # ---- properties

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.dtype.bits // 8

    @property
    def strides(self) -> tuple[int, ...]:
        """Distance between elements along each dimension, in bytes."""
        return tuple(s * self.itemsize for s in self._strides)

    @property
    def address(self) -> int:
        """Device address of the first element."""
        return self._memory.address + self._at

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements are consecutive in memory, in C order."""
        return self.size == 0 or all(n == 1 or s == c for n, s, c in zip(self.shape, self._strides, _compact(self.shape)))

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("an array of no dimensions has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<spinio.emulated.Array {self.dtype.name}{list(self.shape)} at {self.address:#x}>"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this is device memory, which NumPy cannot access: numpy() copies it")

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        d = self.dtype
        return self._memory.dlpack(
            self._at, self.shape, self._strides, d.code, d.bits, self.readonly, stream, max_version, dl_device, copy
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._memory.device

    # ---- views

    def __getitem__(self, key: Any) -> Array:
        keys = key if isinstance(key, tuple) else (key,)
        if Ellipsis in keys:
            at = keys.index(Ellipsis)
            keys = keys[:at] + (slice(None),) * (self.ndim - len(keys) + 1) + keys[at + 1 :]
        if len(keys) > self.ndim:
            raise IndexError(f"{len(keys)} indices for {self.ndim} dimensions")
        at, shape, strides = self._at, [], []
        for i, (length, stride) in enumerate(zip(self.shape, self._strides)):
            one = keys[i] if i < len(keys) else slice(None)
            if isinstance(one, slice):
                start, stop, step = one.indices(length)
                chosen = range(start, stop, step)
                # The first element of an empty selection may be out of range.
                at += start * stride * self.itemsize if chosen else 0
                shape.append(len(chosen))
                strides.append(stride * step)
            else:
                one = _index(one)
                index = one + length if one < 0 else one
                if not 0 <= index < length:
                    raise IndexError(f"index {one} is out of {length}")
                at += index * stride * self.itemsize
        return type(self)(self._memory, at, tuple(shape), tuple(strides), self.dtype, self.readonly)

    def reshape(self, *shape: Any) -> Array:
        """The same elements in another shape; contiguous arrays only."""
        self._need_contiguous()
        wanted = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else list(shape)
        if -1 in wanted:
            known = math.prod(n for n in wanted if n != -1)
            wanted[wanted.index(-1)] = self.size // known if known else 0
        if math.prod(wanted) != self.size:
            raise ValueError(f"{self.size} elements do not fit the shape {wanted}")
        return type(self)(self._memory, self._at, tuple(wanted), _compact(wanted), self.dtype, self.readonly)

    def view(self, dtype: Any) -> Array:
        """The same bytes as elements of another type, in one dimension; contiguous arrays only."""
        self._need_contiguous()
        new = _dtypes.of(dtype)
        if self.nbytes * 8 % new.bits or (new.itemsize and self.address % new.itemsize):
            raise ValueError(f"{self.nbytes} bytes at {self.address:#x} cannot be viewed as {new.name}")
        count = self.nbytes * 8 // new.bits
        return type(self)(self._memory, self._at, (count,), (1,), new, self.readonly)

    def as_readonly(self) -> Array:
        """The same array, marked read-only."""
        return type(self)(self._memory, self._at, self.shape, self._strides, self.dtype, True)

    # ---- bytes

    def tobytes(self) -> bytes:
        """The elements' bytes, after all work that this thread has queued."""
        if self.is_contiguous:
            return self._memory.get(self._at, self.nbytes)
        return b"".join(part.tobytes() for part in self)

    def __iter__(self) -> Iterator[Array]:
        return (self[i] for i in range(len(self)))

    def numpy(self) -> Any:
        """A copy as a NumPy array; some types need ml_dtypes."""
        import numpy

        if self.dtype.numpy is None:
            raise TypeError(f"NumPy has no {self.dtype.name}")
        try:
            dtype = numpy.dtype(self.dtype.numpy)
        except TypeError:
            import ml_dtypes

            dtype = numpy.dtype(getattr(ml_dtypes, self.dtype.numpy))
        return numpy.frombuffer(self.tobytes(), dtype=dtype).reshape(self.shape)

    def set(self, host: Any) -> None:
        """Copies host memory of the same number of bytes into the array, and waits for the copy."""
        if self.readonly:
            raise ValueError("the array is read-only")
        self._need_contiguous()
        bytes_ = _spinio.describe(host)["bytes"]
        if bytes_ != self.nbytes:
            raise ValueError(f"{bytes_} bytes do not fit an array of {self.nbytes}")
        self._memory.put(self._at, host)

    def fill(self, byte: int) -> None:
        """Sets every byte."""
        self.set(bytes([byte]) * self.nbytes)

    def _need_contiguous(self) -> None:
        if not self.is_contiguous:
            raise ValueError("the array is not contiguous")


def _index(value: Any) -> int:
    if not hasattr(value, "__index__"):
        raise TypeError(f"arrays of this device are indexed by numbers and slices, not by {type(value).__qualname__}")
    return operator.index(value)


def _compact(shape: Sequence[int]) -> tuple[int, ...]:
    strides, n = [], 1
    for length in reversed(shape):
        strides.append(n)
        n *= length
    return tuple(reversed(strides))


def ordinal_of(device: str) -> int:
    """The number of the emulated device of a name: "emulated", "emulated:1"."""
    kind, _, number = device.partition(":")
    if kind != "emulated" or (number and not number.isdigit()):
        raise ValueError(f'{device!r} is no emulated device: those are "emulated" and "emulated:1"')
    return int(number or 0)


def empty(
    shape: int | Sequence[int], dtype: Any = "uint8", *, host_mapped: bool = False, device: str = "emulated"
) -> Array:
    """A new array, filled with 0xA5: programs must not rely on its contents."""
    given: Any = shape
    lengths = tuple(map(operator.index, [given] if _file.is_number(given) else given))
    if any(n < 0 for n in lengths):
        raise ValueError(f"a shape of {lengths} is invalid")
    d = _dtypes.of(dtype)
    bits = math.prod(lengths) * d.bits
    if bits % 8:
        raise ValueError(f"{math.prod(lengths)} elements of {d.bits} bits are not whole bytes")
    return Array(_spinio.Memory(bits // 8, host_mapped, ordinal_of(device)), 0, lengths, _compact(lengths), d)


def array(host: Any, *, device: str = "emulated") -> Array:
    """A copy of a NumPy array."""
    import numpy

    host = numpy.ascontiguousarray(host)
    new = empty(host.shape, host.dtype, device=device)
    new.set(host)
    return new


class Stream:
    """A stream of the device, as a CUDA stream: `with spinio.stream(s):` queues transfers there. It must exist during them."""

    __slots__ = ("__weakref__", "_stream")

    def __init__(self, device: str = "emulated") -> None:
        self._stream = _spinio.Stream(ordinal_of(device))
        _streams[self.handle] = self

    @property
    def handle(self) -> int:
        """The handle for spinio.set_stream."""
        return self._stream.handle

    def synchronize(self) -> None:
        """Waits for the work queued on it."""
        self._stream.synchronize()

    def __repr__(self) -> str:
        return f"<spinio.emulated.Stream {self.handle}>"


_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()


def stream_of(handle: int) -> Stream | None:
    """The stream of a handle, if there is one."""
    return _streams.get(handle)


def configure(text: str) -> None:
    """Sets the device's properties, in the format of SPINIO_EMULATED (which takes precedence); before its first array."""
    _spinio.configure(text)


@contextlib.contextmanager
def paused() -> Generator[None, None, None]:
    """For tests: no copy starts on the first emulated device inside the block."""
    _spinio.pause()
    try:
        yield
    finally:
        _spinio.resume()


@renamed("emulated.held", "paused")
def held() -> ContextManager[None]:
    """Deprecated: use `paused`."""
    return paused()
