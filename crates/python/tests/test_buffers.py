"""Objects accepted as memory: every protocol, and invalid forms of each."""

from __future__ import annotations

import array as stdlib_array
import gc
import mmap

import pytest

import spinio
from spinio import emulated


@pytest.fixture
def f(data):
    with spinio.open(data) as f:
        yield f


class OnlyDlpack:
    """An array with DLPack only."""

    def __init__(self, of):
        self._of = of

    def __dlpack__(self, **options):
        return self._of.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._of.__dlpack_device__()


class Legacy(OnlyDlpack):
    """An array of a DLPack version before 1.0."""

    def __dlpack__(self, stream=None):
        return self._of.__dlpack__(stream=stream)


class OnlyInterface:
    """An array with the CUDA array interface only; the memory is the emulated device's."""

    def __init__(self, of, keep=True, **more):
        self._of = of if keep else None
        self.__cuda_array_interface__ = {
            "shape": of.shape,
            "typestr": f"|V{of.itemsize}",
            "data": (of.address, of.readonly),
            "strides": of.strides,
            "version": 3,
        } | more


@pytest.mark.parametrize("wrap", [OnlyDlpack, Legacy, OnlyInterface])
def test_other_protocols_use_the_same_memory(f, noise, wrap):
    array = emulated.empty((3, 1000), "int32")
    array.fill(0)
    assert f.pread(wrap(array), 40) == 12000
    assert array.tobytes() == noise[40:12040]
    assert f.pread(wrap(array[1]), 77) == 4000
    assert array[1].tobytes() == noise[77:4077]


@pytest.mark.parametrize("make", [bytearray, lambda n: memoryview(bytearray(n)), lambda n: stdlib_array.array("b", bytes(n)), lambda n: mmap.mmap(-1, n)])
def test_buffer_protocol(f, noise, make):
    buffer = make(5000)
    assert f.pread(buffer, 3) == 5000
    assert bytes(memoryview(buffer).cast("B")) == noise[3:5003]


def test_numpy_types_without_buffer_format(f, noise):
    numpy = pytest.importorskip("numpy")
    dates = numpy.zeros(10, "datetime64[s]")
    assert f.pread(dates, 8) == 80
    assert dates.tobytes() == noise[8:88]
    halves = numpy.zeros((4, 5), pytest.importorskip("ml_dtypes").bfloat16)
    assert f.pread(halves, 8) == 40
    assert halves.tobytes() == noise[8:48]
    with pytest.raises(BufferError, match="contiguous"):
        f.pread(dates[::2], 0)


def test_device_protocols_precede_buffer_protocol(f, noise):
    numpy = pytest.importorskip("numpy")

    class Both(numpy.ndarray):
        """As CuPy's arrays: its buffer protocol raises an exception."""

    array = emulated.empty(80)
    both = numpy.zeros(10, "datetime64[s]").view(Both)
    both.__cuda_array_interface__ = OnlyInterface(array).__cuda_array_interface__
    with pytest.raises(ValueError):
        memoryview(both)
    assert f.pread(both, 3) == 80
    assert array.tobytes() == noise[3:83]


def test_read_only_memory_is_rejected(f):
    numpy = pytest.importorskip("numpy")
    frozen = numpy.zeros(10)
    frozen.flags.writeable = False
    array = emulated.empty(10).as_readonly()
    for buffer in (b"abc", memoryview(b"abc"), frozen, array, OnlyInterface(array)):
        with pytest.raises(BufferError, match="read-only"):
            f.pread(buffer, 0)


def test_strided_memory_is_rejected_and_untouched(f):
    numpy = pytest.importorskip("numpy")
    table = emulated.empty((10, 10))
    table.fill(7)
    wrong = [
        numpy.zeros((4, 4))[:, 1:],
        numpy.zeros((4, 4), order="F"),
        memoryview(bytearray(10))[::2],
        table[:, 1:],
        table[::2],
        table[::-1],
        OnlyInterface(table[:, 3]),
        OnlyDlpack(table[:, 3]),
    ]
    for buffer in wrong:
        with pytest.raises(BufferError, match="contiguous"):
            f.pread(buffer, 0)
    assert table.tobytes() == b"\7" * 100


def test_object_references_are_rejected(f, tmp_path):
    numpy = pytest.importorskip("numpy")
    fields = [("O", "i4"), ("a", "M8[s]"), ("b", [("c", "f8"), ("d", "O", (2,))])]
    wrong = [
        numpy.array([None, "x"], dtype=object),
        numpy.zeros(3, [("a", "i4"), ("b", "O")]),
        numpy.zeros(3, fields),
        OnlyInterface(emulated.empty(16), typestr="|O8", shape=(2,), strides=None),
        OnlyInterface(emulated.empty(16), descr=[("a", [("b", "|O8")])]),
    ]
    if hasattr(getattr(numpy, "dtypes", None), "StringDType"):
        # These are references too, although NumPy does not report it.
        with pytest.raises(BufferError, match="unknown type"):
            f.pread(numpy.array(["a", "b"], dtype=numpy.dtypes.StringDType()), 0)
    with spinio.open(tmp_path / "out", "w") as out:
        for buffer in wrong:
            with pytest.raises(BufferError, match="references to objects"):
                f.pread(buffer, 0)
            with pytest.raises(BufferError, match="references to objects"):
                out.write(buffer)
    # Fields may have any name.
    plain = numpy.zeros(3, [("O", "i4"), ("OO", "S8"), ("a", [("O", "M8[s]")])])
    assert f.pread(plain, 0) == plain.nbytes
    assert f.pread(numpy.zeros(3, [("O", "i4")]), 0) == 12


def test_characters_have_four_bytes(f, noise):
    numpy = pytest.importorskip("numpy")

    class HostInterface:
        def __init__(self, array):
            self.array, self.__array_interface__ = array, array.__array_interface__

    text = numpy.zeros(25, "U8")
    assert spinio.describe(HostInterface(text))["bytes"] == text.nbytes == 800
    # The bytes are no characters, so they are looked at as bytes.
    assert f.pread(HostInterface(text), 0) == 800 and text.view("uint8").tobytes() == noise[:800]
    on_device = emulated.empty(800)
    assert f.pread(OnlyInterface(on_device, typestr="<U8", shape=(25,), strides=None), 0) == 800
    assert on_device.tobytes() == noise[:800]


def test_strides_of_dimensions_of_one_are_ignored(f, noise):
    table = emulated.empty((10, 10))
    assert f.pread(table[3:4, 2:7], 0) == 5
    assert table[3, 2:7].tobytes() == noise[:5]
    assert f.pread(table[5:5, ::3], 0) == 0


def test_non_memory_object_is_type_error(f):
    for thing in (None, 5, "text", [1, 2], object()):
        with pytest.raises(TypeError, match="is no memory"):
            f.pread(thing, 0)


def test_unknown_addresses_are_rejected(f):
    numpy = pytest.importorskip("numpy")
    array = emulated.empty(4096)
    with pytest.raises(ValueError, match="ends after"):
        f.pread(OnlyInterface(array, shape=(8192,), strides=None), 0)
    host = numpy.zeros(100, "uint8")
    with pytest.raises(BufferError, match="no device knows"):
        f.pread(OnlyInterface(array, data=(host.ctypes.data, False)), 0)
    address = array.address
    stale = OnlyInterface(array, keep=False)
    del array
    gc.collect()
    with pytest.raises(BufferError, match="no device knows"):
        f.pread(stale, 0)
    assert address


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"shape": (-1,)}, "cannot be"),
        ({"shape": (1 << 62, 8), "strides": None}, "cannot be"),
        ({"strides": (1, 1)}, "strides"),
        ({"typestr": "?"}, "unknown type"),
        ({"typestr": "<fx"}, "unknown type"),
        ({"typestr": "|t8"}, "unknown type"),
        ({"typestr": "<U17", "shape": (1,), "strides": None}, "ends after"),
        ({"typestr": f"<U{1 << 62}"}, "unknown type"),
        ({"stream": 0}, "stream 0"),
        ({"mask": object()}, "masked"),
        ({"data": None}, "."),
        ({"shape": "abc"}, "."),
    ],
)
def test_invalid_interfaces(f, more, error):
    with pytest.raises((ValueError, BufferError, TypeError), match=error):
        f.pread(OnlyInterface(emulated.empty(64), **more), 0)


def test_dlpack_on_an_unknown_device(f):
    class Elsewhere(OnlyDlpack):
        def __dlpack_device__(self):
            return (7, 0)

    with pytest.raises(BufferError, match="device type 7"):
        f.pread(Elsewhere(emulated.empty(10)), 0)


def test_memory_outlives_array_in_dlpack_tensors(f, noise):
    gc.collect()  # frees what earlier tests left, which would be freed later
    array = emulated.empty(5000)
    address = array.address
    capsule = array.__dlpack__(max_version=(1, 0))
    del array
    gc.collect()
    # Still in use: a new array is not placed there.
    assert emulated.empty(5000).address != address
    del capsule
    gc.collect()
    assert emulated.empty(5000).address == address


def test_describe(memory):
    said = spinio.describe(memory.full(100, 0))
    assert said["bytes"] == 100 and said["address"]
    assert said["device"].split(":")[0] == memory.device.split(":")[0]
    assert (said["stream"] is None) == (memory.device == "cpu")


# ---- streams


def test_stream_of_the_array_is_used(f):
    array = OnlyInterface(emulated.empty(64), stream=4711)
    assert spinio.describe(array)["stream"] == 4711
    assert spinio.describe(OnlyInterface(emulated.empty(64), stream=1))["stream"] == 0
    assert spinio.describe(OnlyInterface(emulated.empty(64)))["stream"] is None


def test_set_stream_accepts_framework_streams():
    class Torch:
        cuda_stream = 17

    class CuPy:
        ptr = 18

    class Protocol:
        def __cuda_stream__(self):
            return (0, 19)

    for given, handle in [(5, 5), (1, 0), (Torch(), 17), (CuPy(), 18), (Protocol(), 19), (None, 0)]:
        with spinio.stream(given):
            assert spinio.current_stream() == handle
        assert spinio.current_stream() == 0
    with pytest.raises(TypeError, match="is no stream"):
        spinio.set_stream("default")


def test_transfer_keeps_the_set_stream(f):
    f.pread(OnlyInterface(emulated.empty(64)), 0)
    assert spinio.current_stream() == 0


# ---- PyTorch and CuPy, if installed


def test_torch_parameters_and_unusual_types(f, noise):
    torch = pytest.importorskip("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weight = torch.nn.Parameter(torch.zeros(10, 10, device=device))
    assert f.pread(weight, 0) == 400
    assert weight.detach().cpu().numpy().tobytes() == noise[:400]
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64"):
        if not hasattr(torch, name):
            continue  # an old PyTorch
        tensor = torch.zeros(64, device=device).to(getattr(torch, name))
        size = tensor.nelement() * tensor.element_size()
        assert f.pread(tensor, 8) == size
        assert tensor.view(torch.uint8).cpu().numpy().tobytes() == noise[8 : 8 + size]
    for wrong in (torch.zeros(4, 4, device=device).t(), torch.zeros(3, dtype=torch.complex64).conj(), torch.zeros(3).to_sparse()):
        with pytest.raises(BufferError):
            f.pread(wrong[:, :3] if wrong.dim() == 2 else wrong, 0)
    with pytest.raises(BufferError, match="meta"):
        f.pread(torch.zeros(3, device="meta"), 0)


def test_every_gpu_from_every_current_gpu(f, noise, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    gpus = range(torch.cuda.device_count())
    for current in gpus:
        with torch.cuda.device(current):
            for gpu in gpus:
                tensor = torch.zeros(1 << 20, dtype=torch.uint8, device=f"cuda:{gpu}")
                assert spinio.describe(tensor)["device"] == f"cuda:{gpu}"
                for size in (100, 65536, 1 << 20):
                    assert f.pread(tensor[:size], gpu) == size
                assert tensor.cpu().numpy().tobytes() == noise[gpu:][: 1 << 20]
                with spinio.open(tmp_path / "out", "w") as out:
                    assert out.write(tensor) == 1 << 20
                assert (tmp_path / "out").read_bytes() == noise[gpu:][: 1 << 20]


def test_torch_streams_keep_order(f, noise):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    want = torch.frombuffer(bytearray(noise[: 1 << 20]), dtype=torch.uint8)
    weight = torch.randn(2048, 2048, device="cuda")
    tensor = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()  # non-blocking: not ordered with the default stream
    for size in (100, 4096, 65536, 1 << 20) * 5:
        with torch.cuda.stream(side):
            for _ in range(10):
                weight = (weight @ weight).clamp_(-1, 1)
            tensor.fill_(1)  # after some milliseconds of work
            assert spinio.describe(tensor)["stream"] == side.cuda_stream
            assert f.pread(tensor[:size], 0) == size
            double = tensor[:size].to(torch.int16) * 2
        side.synchronize()
        assert torch.equal(double.cpu(), want[:size].to(torch.int16) * 2), size


def test_cupy_streams_keep_order(f, noise):
    cupy = pytest.importorskip("cupy")
    numpy = pytest.importorskip("numpy")
    want = numpy.frombuffer(noise[: 1 << 20], "uint8").astype("int16") * 2
    array = cupy.empty(1 << 20, "uint8")
    big = cupy.random.rand(2048, 2048)
    cupy.cuda.runtime.deviceSynchronize()
    side = cupy.cuda.Stream(non_blocking=True)
    for size in (100, 4096, 65536, 1 << 20) * 5:
        with side:
            for _ in range(10):
                big = cupy.clip(big @ big, -1, 1)
            array.fill(1)
            assert spinio.describe(array)["stream"] == side.ptr
            assert f.pread(array[:size], 0) == size
            double = array[:size].astype("int16") * 2
        side.synchronize()
        assert (double.get() == want[:size]).all(), size


def test_writes_follow_earlier_stream_work(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    weight = torch.randn(2048, 2048, device="cuda")
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with spinio.open(tmp_path / "out", "w") as out, torch.cuda.stream(side):
        for turn, size in enumerate((100, 4096, 65536, 1 << 20) * 5):
            for _ in range(10):
                weight = (weight @ weight).clamp_(-1, 1)
            tensor.fill_(turn + 1)
            assert out.pwrite(tensor[:size], 0) == size
            tensor.fill_(255)
            assert (tmp_path / "out").read_bytes()[:size] == bytes([turn + 1]) * size


def test_gpu_array_with_dlpack_only(f, noise):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    tensor = torch.zeros(5000, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        tensor.fill_(3)
        assert f.pread(OnlyDlpack(tensor), 1) == 5000
        # The copy was complete when the call returned, for every stream.
        double = tensor.to(torch.int16) * 2
    side.synchronize()
    assert (double.cpu().numpy() // 2).astype("uint8").tobytes() == noise[1:5001]
