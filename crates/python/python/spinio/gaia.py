"""Files in GPU memory, consistent with CPU programs that use the same files: GAIA.

    from spinio import gaia

    with gaia.open("data/graph.bin", "r+") as f, f.map(device="emulated") as m:
        with m.writing(0, 4096) as array:        # what others have written is in the array
            array.set(step(array.tobytes()))     # or a GPU kernel at m.address
        # what was stored is in the file, for every program

The file is below a GAIA mount (`spinio gaia mount data`). Other programs use it as any file; nothing is lost if several
change different bytes of one page. docs/gaia.md has the contract. On a GPU the array is one of the GPU's memory:
torch.as_tensor(array), cupy.asarray(array).

Any other local file can be mapped read-only while `spinio gaia serve` runs, with one copy on each GPU for all processes
of the user. `acquire` then fails with ETXTBSY while a process has the file open for writing.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Generator, TypeVar

from spinio import _dtypes, _file, _spinio, _stream, emulated

if TYPE_CHECKING:
    from spinio._spinio import _GaiaInfo

__all__ = ["File", "Map", "open"]

_T = TypeVar("_T")


class File(_file.File):
    """A spinio.File that can be mapped into device memory; all of its other methods work, on the same bytes."""

    def map(
        self,
        offset: int = 0,
        nbytes: int | None = None,
        *,
        device: Any = None,
        write: bool | None = None,
        in_place: bool = False,
    ) -> Map:
        """Maps bytes of the file into the memory of a device, as they are at each acquire; see Map.

        offset: a multiple of 4096. Without nbytes, the map extends to the end of the file. device: "emulated", "cuda"
        ...; by default the device in use. write: whether GPU kernels may store; by default whether the file is open for
        both reading and writing. The map stays when the file is closed. in_place: GPU kernels use the pages of the Linux
        kernel's page cache over the bus, and the map has no memory of the device; it is for reading by default. A device
        whose kernels access all memory of the process (HMM; info()["in_place"] is 2 or 3) gets a mapping of the file:
        what it and CPU programs store is visible to each other at once, and a file without a mount can be read. Other
        devices get maps in place for reading only, and only of files below a mount.

        Errors are an OSError: EACCES if the file is not open for this access, EINVAL for an offset inside a page, an
        empty range, or a map in place that is to be written on a device that can only read it, ENOMEM if the device is full
        or the server has no memory for the map, ENODEV if no device is in use, EUSERS if the user has too many maps, ENOTSUP if the device cannot map files, or the file is not below a GAIA
        mount, and it is to be written or no `spinio gaia serve` runs.
        """
        offset = _number("offset", offset)
        if nbytes is None:
            nbytes = max(0, os.fstat(self.fileno()).st_size - offset)
        writable = not in_place and self.readable() and self.writable() if write is None else bool(write)
        nbytes = _number("nbytes", nbytes)
        mapped = self._named(_spinio.GaiaMap, offset, nbytes, writable, bool(in_place), _file.device_name(device, "device that files are mapped on"))
        return Map(mapped, self.name, writable)


class _CudaArray(emulated.Array):
    """An array in the memory of a GPU."""

    __slots__ = ()

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        # acquire has waited for the memory, so there is no stream to wait for.
        return {
            "shape": self.shape,
            "typestr": _typestr(self.dtype),
            "data": (self.address, self.readonly),
            "strides": None if self.is_contiguous else self.strides,
            "stream": None,
            "version": 3,
        }


# The kinds of NumPy's type strings, by DLPack's codes.
_KINDS = {0: "i", 1: "u", 2: "f", 5: "c", 6: "b"}


def _typestr(dtype: _dtypes.DType) -> str:
    kind = _KINDS.get(dtype.code)
    if kind is None or not dtype.itemsize:
        raise AttributeError(f"__cuda_array_interface__ has no {dtype.name}: use DLPack")
    return f"{'|' if dtype.itemsize == 1 else '<'}{kind}{dtype.itemsize}"


class Map:
    """Bytes of a file in device memory; a context manager that unmaps.

    Between `acquire` and `release` lies an epoch: GPU kernels may load what was acquired, and store what was acquired
    for writing. `acquire` brings the range up to date with what all programs have written, and `release` publishes what
    was stored in it; before that, no other program sees it. An epoch belongs to pages of 4096 bytes of the map, not to
    a thread.

        with m.writing(0, n) as array: ...     # acquires for writing, and releases at the end; or discards
        with m.reading(0, n) as array: ...     # acquires, and gives up at the end

    Device memory is needed for what is in use: what was acquired and not given up. The rest may be evicted, and comes back
    with the next acquire.

    Both calls start after the work queued on this thread's stream (`spinio.stream`), and wait without the GIL; Ctrl-C
    waits for them. Ranges are bytes of the map; without nbytes, to its end.

    Errors are an OSError with errno and the file's name. ESTALE: the server was restarted in the epoch, and nothing of
    it was published; acquire again and redo it. EINVAL: the range is empty or outside of the map, or a released page
    was not acquired. EACCES: the map is read-only. ENOMEM: all device memory is in use; release ranges, or acquire less
    at once. ENOSPC: the server has no memory for so many pages; the
    epoch goes on, and parts of the range may fit. A map that was unmapped, or that the parent of this process has, is a
    ValueError.
    """

    def __init__(self, mapped: _spinio.GaiaMap, name: Any, write: bool) -> None:
        self._mapped, self._name, self._write = mapped, name, write

    @property
    def address(self) -> int:
        """Device address of the first byte."""
        return self._mapped.place[0]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self._mapped.place[1]

    @property
    def readonly(self) -> bool:
        """Whether GPU kernels may only load."""
        return not self._write

    def view(self, dtype: Any = "uint8") -> emulated.Array:
        """The memory as an array, until `unmap`; load and store only what was acquired."""
        return self._array(0, self.nbytes, self.readonly).view(dtype)

    @property
    def device(self) -> str:
        """Name of its device: "emulated:0", "cuda:0"."""
        return self._mapped.device

    def __getattr__(self, name: str) -> Any:
        # Only maps on a GPU have it: libraries ask for it to learn whether this is memory of a GPU.
        if name == "__cuda_array_interface__" and self.device.startswith("cuda"):
            return getattr(self.view(), name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __dlpack__(self, **options: Any) -> Any:
        return self.view().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.view().__dlpack_device__()

    def acquire(
        self, offset: int = 0, nbytes: int | None = None, *, write: bool = False, overwrite: bool = False
    ) -> int:
        """Begins an epoch for a range, or extends it; returns the bytes of the range that are in the file.

        Bytes past the end of the file are 0. Inside an epoch the stores that were not released are kept. With overwrite,
        which includes write, the program stores to all of the range before it releases: nothing is fetched, the memory
        has undefined bytes until then, and all of them are published.
        """
        offset, nbytes = self._range(offset, nbytes)
        return self._call(self._mapped.acquire, offset, nbytes, bool(write), bool(overwrite))

    def release(self, offset: int = 0, nbytes: int | None = None, *, handoff: bool = False) -> int:
        """Publishes the stores to a range that was acquired, and ends its epoch; all of it or nothing.

        Of pages that were acquired for reading only, nothing is published; kernels no longer use them. Returns the bytes of the pages that were published, 0 if no store changed a byte. Stores past the end of the
        file are dropped.

        With handoff the device memory of the range may be given to the server, which copies it after this has returned:
        the array has no memory then, until the next acquire. `info()["releases_handed_over"]` says whether it was.
        """
        return self._call(self._mapped.release, *self._range(offset, nbytes), bool(handoff))

    def acquire_async(
        self,
        offset: int = 0,
        nbytes: int | None = None,
        *,
        write: bool = False,
        overwrite: bool = False,
        stream: Any = None,
    ) -> None:
        """As acquire, in the order of a stream: it returns at once, begins when the work queued there is done, and work
        queued there afterwards waits for it.

        stream: as of `spinio.set_stream`; None is this thread's stream. An error that comes later is raised by the next
        acquire, release or sync of the map, which does nothing else; calls that are queued until then do not run. Maps
        of files without a mount have no such calls: ENOTSUP.
        """
        offset, nbytes = self._range(offset, nbytes)
        handle = _stream_handle(stream)
        self._call(self._mapped.acquire_async, offset, nbytes, bool(write), bool(overwrite), handle)

    def release_async(self, offset: int = 0, nbytes: int | None = None, *, stream: Any = None) -> None:
        """As release, in the order of a stream: see acquire_async. `sync` waits until it has published."""
        self._call(self._mapped.release_async, *self._range(offset, nbytes), _stream_handle(stream))

    def discard(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Drops the stores to a range that were not released, and ends its epoch: no program sees them.

        The range is extended to whole pages; the next acquire fetches them again. Of pages that were not acquired for
        writing only the reading ends, and an epoch that was lost just ends.
        """
        self._call(self._mapped.discard, *self._range(offset, nbytes))

    def sync(self, offset: int = 0, nbytes: int | None = None) -> None:
        """Returns when what was released of a range is on storage, as after os.fsync of the file."""
        self._call(self._mapped.sync, *self._range(offset, nbytes))

    @contextlib.contextmanager
    def reading(self, offset: int = 0, nbytes: int | None = None) -> Generator[emulated.Array, None, None]:
        """Acquires a range for a block, which gets it as a read-only array of bytes, and gives it up at the end.

        After that, device memory of these pages may be evicted, and GPU kernels must not load from them, unless another
        block reads or writes them. An earlier `acquire` for reading ends too; epochs for writing go on.
        """
        offset, nbytes = self._range(offset, nbytes)
        # Before the acquire: a block of another thread that ends meanwhile must not let the pages go.
        self._call(self._mapped.begin_block, offset, nbytes)
        try:
            self.acquire(offset, nbytes)
            yield self._array(offset, nbytes, True)
        finally:
            # ValueError: the block has unmapped.
            with contextlib.suppress(ValueError):
                self._call(self._mapped.end_block, offset, nbytes)

    @contextlib.contextmanager
    def writing(
        self, offset: int = 0, nbytes: int | None = None, *, overwrite: bool = False, handoff: bool = False
    ) -> Generator[emulated.Array, None, None]:
        """Acquires a range for writing, as an array of bytes, and releases it at the end of the block.

        overwrite: as of `acquire`; handoff: as of `release`. For checkpoints, both.

        After an exception in the block its stores are discarded; those of a block around it to the same pages too. Those
        to a map in place stay, as all programs have seen them.
        """
        offset, nbytes = self._range(offset, nbytes)
        self.acquire(offset, nbytes, write=True, overwrite=overwrite)
        try:
            yield self._array(offset, nbytes, False)
        except BaseException:
            # ValueError: the block has unmapped. ENOTSUP: a map in place, where all see stores at once.
            with contextlib.suppress(ValueError):
                try:
                    self.discard(offset, nbytes)
                except OSError as error:
                    if error.errno != errno.ENOTSUP:
                        raise
            raise
        self.release(offset, nbytes, handoff=handoff)

    def info(self) -> _GaiaInfo:
        """What the map has done: the fields of `struct spinio_gaia_info`."""
        return self._call(self._mapped.info)

    def unmap(self) -> None:
        """Unmaps; a second call does nothing. Stores that were not released are dropped.

        GPU kernels must have finished with it. Arrays of `view`, `reading` and `writing` cannot be used afterwards; a
        tensor that was made by DLPack keeps the memory, as it is, until the tensor is freed.
        """
        self._mapped.unmap()

    def _array(self, offset: int, nbytes: int, readonly: bool) -> emulated.Array:
        kind = _CudaArray if self.device.startswith("cuda") else emulated.Array
        return kind(self._mapped.memory(), offset, (nbytes,), (1,), _dtypes.of("uint8"), readonly)

    def _range(self, offset: int, nbytes: int | None) -> tuple[int, int]:
        offset = _number("offset", offset)
        return offset, max(0, self.nbytes - offset) if nbytes is None else _number("nbytes", nbytes)

    def _call(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Calls; adds the file's name to an OSError."""
        try:
            return call(*arguments)
        except OSError as error:
            if error.filename is None and error.errno is not None:
                error.filename = self._name
            raise

    def __repr__(self) -> str:
        try:
            access = "read-only" if self.readonly else "writable"
            return f"<spinio.gaia.Map of {self.nbytes} bytes at {self.address:#x}, {access}>"
        except ValueError:
            return "<spinio.gaia.Map unmapped>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a map belongs to its process: a worker that opens the file maps it itself")

    def __enter__(self) -> Map:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unmap()


def open(
    path: _file.Path, mode: str = "r", *, closefd: bool = True, opener: Callable[[str, int], int] | None = None
) -> File:
    """Opens a file as spinio.open does; returns a File, which can be mapped. Maps for writing need mode "r+"."""
    return File(path, mode, closefd, opener)


def _stream_handle(stream: Any) -> int:
    if stream is None:
        return _stream.current_stream()
    handle = _stream._handle(stream)
    return 0 if handle == 1 else handle  # CUDA's second handle of the default stream


def _number(name: str, value: Any) -> int:
    number = operator.index(value)
    # The Linux kernel's limit of offsets and sizes.
    if not 0 <= number < 1 << 63:
        raise ValueError(f"{name} {number} is invalid")
    return number
