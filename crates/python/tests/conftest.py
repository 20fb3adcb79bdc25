"""Every test that moves bytes runs on every kind of memory that this machine has; missing kinds are listed at the end."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import mmap
from typing import NamedTuple

import pytest
from mounted import Mount, command

import spinio

# A hang becomes a failure with a traceback.
faulthandler.dump_traceback_later(1400, exit=True)


@pytest.fixture(scope="module")
def mount():
    """A GAIA mount for the tests of a file."""
    command()
    mount = Mount()
    yield mount
    # Maps that no test closed.
    gc.collect()
    mount.close()


class Memory:
    """One kind of memory: functions that make arrays and read them back."""

    def __init__(self, name, new, read, device, library):
        self.name, self.new, self.read, self.device, self.library = name, new, read, device, library

    def full(self, size, byte):
        """An array of `size` bytes, all `byte`."""
        return self.new(bytes([byte]) * size)

    def __repr__(self):
        return self.name


def _emulated():
    def new(data):
        array = spinio.emulated.empty(len(data))
        array.set(data)
        return array

    return Memory("emulated", new, lambda a: a.tobytes(), "emulated", None)


def _numpy():
    numpy = pytest.importorskip("numpy")
    return Memory("numpy", lambda d: numpy.frombuffer(d, "uint8").copy(), lambda a: a.tobytes(), "cpu", "numpy")


def _torch(device):
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")

    def new(data):
        return torch.frombuffer(bytearray(data or b"x"), dtype=torch.uint8)[: len(data)].to(device)

    return Memory(f"torch-{device}", new, lambda a: a.cpu().numpy().tobytes(), device, "torch")


def _cupy():
    cupy = pytest.importorskip("cupy")
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as why:
        pytest.skip(f"CuPy finds no GPU: {why}")
    numpy = importlib.import_module("numpy")
    return Memory("cupy", lambda d: cupy.asarray(numpy.frombuffer(d, "uint8")), lambda a: a.get().tobytes(), "cuda", "cupy")


KINDS = {
    "emulated": _emulated,
    "numpy": _numpy,
    "torch-cpu": lambda: _torch("cpu"),
    "torch-cuda": lambda: _torch("cuda"),
    "cupy": _cupy,
}
HERE, MISSING = {}, {}
for _name, _make in KINDS.items():
    try:
        HERE[_name] = _make()
    except pytest.skip.Exception as why:
        MISSING[_name] = str(why)


@pytest.fixture(params=HERE)
def memory(request):
    """Each kind of memory available here."""
    return HERE[request.param]


@pytest.fixture(params=[name for name, memory in HERE.items() if memory.device != "cpu"])
def device(request):
    """Each kind of device memory available here."""
    return HERE[request.param]


def pytest_terminal_summary(terminalreporter):
    """Prints the kinds of memory that were not tested, and why."""
    terminalreporter.write_line(f"memory: {', '.join(HERE)}")
    for name, why in MISSING.items():
        terminalreporter.write_line(f"memory not here: {name}: {why}")


@pytest.fixture(scope="session")
def noise():
    """Bytes without short repetitions."""
    return b"".join(i.to_bytes(8, "little") for i in range(3 << 17))


@pytest.fixture(scope="session")
def data(tmp_path_factory, noise):
    """A file of these bytes: 3 MiB."""
    path = tmp_path_factory.mktemp("data") / "noise"
    path.write_bytes(noise)
    return path


class BadBytes(NamedTuple):
    """Bytes of a file that cannot be read from some offset on: reads end there, and one that begins there fails with EIO."""

    path: str
    start: int
    good: int
    size: int


@pytest.fixture
def bad_bytes(tmp_path):
    """8 MiB, of which 3 MiB can be read: a mapping of a file that was truncated, seen through this process's memory."""
    ctypes = importlib.import_module("ctypes")
    path = tmp_path / "truncated"
    path.write_bytes(bytes([5]) * (8 << 20))
    with path.open("r+b") as f:
        mapped = mmap.mmap(f.fileno(), 0)
        f.truncate(3 << 20)
    first = ctypes.c_char.from_buffer(mapped)
    yield BadBytes("/proc/self/mem", ctypes.addressof(first), 3 << 20, 8 << 20)
    del first
    mapped.close()
