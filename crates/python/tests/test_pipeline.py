"""NVMMU's pipeline: the output of a loop over NumPy arrays, with moves that overlap the bodies."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time

import pytest

import spinio
from spinio import _arrays, emulated, nvmmu

numpy = pytest.importorskip("numpy")

SIZES = [0, 4, 4096, 100_000, (1 << 20) + 12]


def wait_until(is_so):
    begun = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun < 600
        time.sleep(0.001)


def double(x, y):
    """On any device: y = 2 x + 1."""
    if isinstance(x, emulated.Array):
        y.set(x.numpy() * x.numpy().dtype.type(2) + x.numpy().dtype.type(1))
    else:
        y[:] = x * 2 + 1


@pytest.fixture
def numbers(tmp_path):
    def make(size, name="in"):
        values = numpy.random.default_rng(size).integers(0, 1 << 30, size // 4, dtype="int32")
        values.tofile(tmp_path / name)
        return tmp_path / name, values

    return make


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1000, 25_000, None])
@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_output_equals_numpy(device, numbers, tmp_path, size, count, slots):
    if size > 1 << 20 and count == 1000 and slots != 3:
        pytest.skip("long, and like its neighbours")
    path, values = numbers(size)
    out = tmp_path / "out"
    lengths = []
    with nvmmu.pipeline(
        path, out, "int32", count=count, slots=slots, device=device.device, library=device.library
    ) as pieces:
        for x, y in pieces:
            lengths.append(len(x))
            assert x.shape == y.shape
            double(x, y)
    assert numpy.array_equal(numpy.fromfile(out, "int32"), values * numpy.int32(2) + numpy.int32(1))
    assert sum(lengths) == len(values) and len(lengths) == len(pieces)
    assert all(n == lengths[0] for n in lengths[:-1])
    assert pieces.report["uploaded"] == pieces.report["downloaded"] == len(values) * 4


def test_part_of_a_file_into_part_of_another(device, numbers, tmp_path):
    path, values = numbers(400_000)
    out = tmp_path / "out"
    out.write_bytes(b"\xee" * 300_000)
    with nvmmu.pipeline(
        str(path), str(out), "int32", count=7000, offset=40, total=50_000, output_offset=100,
        device=device.device, library=device.library,
    ) as pieces:
        for x, y in pieces:
            double(x, y)
    got = out.read_bytes()
    want = values[10:50_010] * numpy.int32(2) + numpy.int32(1)
    assert got == b"\xee" * 100 + want.tobytes() + b"\xee" * (300_000 - 200_100)


def test_other_type_and_count_of_results(numbers, tmp_path):
    path, values = numbers(400_000)
    out = tmp_path / "out"
    with nvmmu.pipeline(
        path, out, "int32", count=9999, output_dtype="float64", output_count=33, device="emulated"
    ) as pieces:
        for step in pieces:
            x, y = step
            assert x is step.input and y is step.output and step.offset == step.number * 9999 * 4
            assert y.shape == (33 if len(x) == 9999 else -(-len(x) * 33 // 9999),)
            result = numpy.zeros(y.shape, "float64")
            result[0] = x.numpy().mean()
            y.set(result)
            with pytest.raises(ValueError, match="35 elements"):
                step.keep(35)
            # An odd piece has no output.
            step.keep(0 if step.number % 2 else 1)
    want = [values[at : at + 9999].mean() for at in range(0, len(values), 2 * 9999)]
    assert numpy.fromfile(out, "float64").tolist() == want


def test_no_output(numbers):
    path, values = numbers(100_000)
    total = 0
    with nvmmu.pipeline(path, dtype="int32", count=3000, device="emulated") as pieces:
        for x, y in pieces:
            assert y is None
            total += int(x.numpy().sum(dtype="int64"))
    assert total == values.sum(dtype="int64") and pieces.report["downloaded"] == 0


def test_upload_and_download_overlap_the_body(numbers, tmp_path):
    path, values = numbers(8 * 40_000)
    out, want = tmp_path / "out", values * numpy.int32(2) + numpy.int32(1)
    memory = []

    def piece(of, number):
        return of[number * 10_000 : (number + 1) * 10_000]

    with nvmmu.pipeline(path, out, "int32", count=10_000, device="emulated") as pieces:
        for step in pieces:
            memory.append(step.input)
            n = step.number
            if 2 <= n < 7:
                # The next piece was not requested yet: it is in the memory of the last but one.
                wait_until(lambda: numpy.array_equal(memory[n - 2].numpy(), piece(values, n + 1)))
            if n >= 1:
                wait_until(lambda: numpy.array_equal(piece(numpy.fromfile(out, "int32"), n - 1), piece(want, n - 1)))
            # The current piece was not downloaded, and is unchanged.
            assert len(numpy.fromfile(out, "int32")) <= n * 10_000
            assert numpy.array_equal(step.input.numpy(), piece(values, n))
            double(*step)
    assert numpy.array_equal(numpy.fromfile(out, "int32"), want)


def test_failing_body_raises_and_finished_pieces_are_written(numbers, tmp_path):
    path, values = numbers(400_000)
    out = tmp_path / "out"
    with pytest.raises(ZeroDivisionError):
        with nvmmu.pipeline(path, out, "int32", count=10_000, device="emulated") as pieces:
            for step in pieces:
                double(*step)
                if step.number == 3:
                    1 // 0
    want = values[:30_000] * numpy.int32(2) + numpy.int32(1)
    assert numpy.array_equal(numpy.fromfile(out, "int32"), want)
    assert pieces.report["downloaded"] == 120_000
    assert spinio.current_stream() == 0 and list(pieces) == []


def test_break_ends_the_pipeline(numbers, tmp_path):
    path, _ = numbers(400_000)
    with nvmmu.pipeline(path, tmp_path / "out", "int32", count=10_000, device="emulated") as pieces:
        for step in pieces:
            assert spinio.current_stream() != 0
            if step.number == 2:
                break
        # The loop can continue, but the current piece ends with it.
        assert next(pieces).number == 3
        report = pieces.end()
        assert spinio.current_stream() == 0 and list(pieces) == []
    assert pieces.end() == report and os.path.getsize(tmp_path / "out") == 120_000
    with pytest.raises(RuntimeError, match="inside its with block"):
        next(nvmmu.pipeline(path, dtype="int32", device="emulated"))


def test_file_that_is_too_short(numbers, tmp_path):
    path, _ = numbers(400_000)
    with pytest.raises(EOFError, match="in ends after 400000 bytes"):
        nvmmu.pipeline(path, dtype="int32", total=100_001, device="emulated")
    with pytest.raises(ValueError, match="not whole elements of float64"):
        nvmmu.pipeline(path, dtype="float64", offset=4, device="emulated")
    with pytest.raises(EOFError, match="in ends after 200000 bytes"):
        with nvmmu.pipeline(path, tmp_path / "out", "int32", count=10_000, device="emulated") as pieces:
            for step in pieces:
                if step.number == 0:
                    os.truncate(path, 200_000)
                double(*step)


def test_failing_download_ends_the_pipeline(numbers, tmp_path):
    path, _ = numbers(400_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            with nvmmu.pipeline(path, tmp_path / "out", "int32", count=10_000, device="emulated") as pieces:
                for step in pieces:
                    double(*step)
        assert caught.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert caught.value.filename == str(tmp_path / "out") and step.number < 9
        # The pipeline has ended nevertheless.
        assert pieces.end() == pieces.report and 0 < pieces.report["uploaded"] <= 400_000
        # Of two failures the body's is raised.
        with pytest.raises(ZeroDivisionError):
            with nvmmu.pipeline(path, tmp_path / "out", "int32", count=10_000, device="emulated") as pieces:
                for step in pieces:
                    double(*step)
                    if step.number == 3:
                        1 // 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_stream_is_restored_if_the_library_loses_it(numbers, monkeypatch):
    path, _ = numbers(120_000)
    outer = emulated.Stream()

    class Forgetful(_arrays.Emulated):
        """As CuPy after use() has set a stream."""

        @contextlib.contextmanager
        def on_stream(self, stream):
            spinio.set_stream(stream)
            yield
            spinio.set_stream(None)

    monkeypatch.setattr(_arrays, "Emulated", Forgetful)
    with spinio.stream(outer), nvmmu.pipeline(path, dtype="int32", count=10_000, device="emulated") as pieces:
        for _ in pieces:
            assert spinio.current_stream() not in (0, outer.handle)
        assert spinio.current_stream() == outer.handle


def test_invalid_arguments(numbers, tmp_path):
    path, _ = numbers(4000)
    for wrong in ({"count": 0}, {"slots": 0}, {"offset": -1}, {"output_count": 0}, {"total": -1}):
        with pytest.raises(ValueError, match="invalid"):
            nvmmu.pipeline(path, dtype="int32", device="emulated", **wrong)
    with pytest.raises(ValueError, match="no streams"):
        nvmmu.pipeline(path, device="cpu", library="numpy")
    with pytest.raises(FileNotFoundError) as caught:
        nvmmu.pipeline(tmp_path / "none", device="emulated")
    assert caught.value.filename == str(tmp_path / "none")
    with pytest.raises(TypeError, match="not whole bytes"):
        nvmmu.pipeline(path, dtype="float4_e2m1fn", device="emulated")
    with pytest.raises(IsADirectoryError):
        nvmmu.pipeline(path, tmp_path, device="emulated")


def test_input_and_output_are_the_same_file(numbers):
    path, values = numbers(400_000)
    with nvmmu.pipeline(path, path, "int32", count=10_000, device="emulated") as pieces:
        for step in pieces:
            double(*step)
    assert numpy.array_equal(numpy.fromfile(path, "int32"), values * numpy.int32(2) + numpy.int32(1))


def test_bodies_are_ordered(numbers, tmp_path, monkeypatch):
    """The marks and waits on a GPU's streams; the emulated device needs none."""
    path, _ = numbers(400_000)
    said = []

    class Recording(_arrays.Emulated):
        def current_stream(self):
            return super().current_stream() or "outer"

        def mark(self, stream):
            said.append(("mark", stream))
            return len(said)

        def follow(self, stream, mark):
            said.append(("follow", stream, said[mark - 1][1]))

    monkeypatch.setattr(_arrays, "Emulated", Recording)
    with nvmmu.pipeline(path, tmp_path / "out", "int32", count=20_000, device="emulated") as pieces:
        streams = []
        for step in pieces:
            said.append(("body", spinio.current_stream()))
            streams.append(spinio.current_stream())
            double(*step)
    a, b, c = streams[:3]
    assert len({a, b, c}) == 3 and streams == [a, b, c, a, b]
    calls = [(what[0], *(getattr(s, "handle", s) for s in what[1:])) for what in said]
    assert calls[:4] == [("mark", "outer")] + [("follow", s, "outer") for s in (a, b, c)]
    want = []
    for last, this in zip(["outer", *streams], streams):
        want += [("follow", this, last), ("body", this), ("mark", this)]
    assert calls[4:] == [*want, ("follow", "outer", streams[-1])]


def test_zipped_pipelines(numbers, tmp_path):
    (one, a), (two, b) = numbers(400_000, "one"), numbers(360_000, "two")
    out = tmp_path / "out"
    outer = emulated.Stream()
    with spinio.stream(outer):
        ones = nvmmu.pipeline(one, out, "int32", count=9000, total=90_000, device="emulated")
        streams = set()
        with ones as left, nvmmu.pipeline(two, dtype="int32", count=9000, device="emulated") as right:
            for (x, y), (z, none) in zip(left, right):
                streams.add(spinio.current_stream())
                assert none is None
                y.set(x.numpy() - z.numpy())
            assert spinio.current_stream() == outer.handle
        assert spinio.current_stream() == outer.handle and len(streams) == 3
    assert numpy.array_equal(numpy.fromfile(out, "int32"), a[:90_000] - b)


def test_stream_order_of_zipped_pipelines(numbers, monkeypatch):
    path, _ = numbers(120_000)
    said = []

    class Recording(_arrays.Emulated):
        def mark(self, stream):
            said.append(stream)
            return len(said)

        def follow(self, stream, mark):
            said.append((stream, said[mark - 1]))

    monkeypatch.setattr(_arrays, "Emulated", Recording)
    with nvmmu.pipeline(path, dtype="int32", count=10_000, device="emulated") as left:
        with nvmmu.pipeline(path, dtype="int32", count=10_000, device="emulated") as right:
            a, b = next(left), next(right)
            one, two = left._slots[0].stream, right._slots[0].stream
            assert spinio.current_stream() == two.handle and (a.number, b.number) == (0, 0)
            # The body, which uses both, is after the upload on the other's stream.
            assert said[-1] == (two, one)
            said.clear()
            next(left)
            # The next work on the other's stream is after the body.
            assert (one, two) in said and spinio.current_stream() == left._slots[1].stream.handle
            next(right)
            # By way of the stream of the previous body.
            assert said.index((two, left._slots[1].stream)) < said.index((right._slots[1].stream, two))
    assert spinio.current_stream() == 0


def test_pipeline_within_a_body(numbers, tmp_path):
    (one, a), (two, b) = numbers(80_000, "one"), numbers(40_000, "two")
    out = tmp_path / "out"
    with nvmmu.pipeline(one, out, "int32", count=7000, device="emulated") as pieces:
        for x, y in pieces:
            mine = spinio.current_stream()
            total = numpy.zeros((), "int32")
            with nvmmu.pipeline(two, dtype="int32", count=3000, device="emulated") as inner:
                for z, _ in inner:
                    assert spinio.current_stream() != mine
                    total += z.numpy().sum(dtype="int32")
                    w = x.numpy()
            assert spinio.current_stream() == mine
            y.set(w + total)
    assert numpy.array_equal(numpy.fromfile(out, "int32"), a + b.sum(dtype="int32"))


def test_torch_bodies_keep_order_across_streams(numbers, tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    path, values = numbers(4_000_000)
    with torch.cuda.stream(torch.cuda.Stream()):
        total = torch.empty((), dtype=torch.int64, device="cuda")
        torch.cuda._sleep(10_000_000)
        total.zero_()  # bodies run after it
        outer = torch.cuda.current_stream()
        with nvmmu.pipeline(path, tmp_path / "out", "int32", count=10_000, library="torch") as pieces:
            for x, y in pieces:
                assert torch.cuda.current_stream() != outer
                torch.cuda._sleep(1_000_000 if len(pieces) % 2 else 100_000)
                total += x.sum(dtype=torch.int64)
                torch.add(x, total.to(torch.int32), out=y)
        assert torch.cuda.current_stream() == outer
        total += 1  # and this runs after them
        assert int(total) == values.sum(dtype="int64") + 1
    sums = numpy.add.accumulate(values.reshape(-1, 10_000).sum(axis=1, dtype="int64")).astype("int32")
    assert numpy.array_equal(numpy.fromfile(tmp_path / "out", "int32"), (values.reshape(-1, 10_000) + sums[:, None]).ravel())


def test_cupy_bodies_keep_order_across_streams(numbers, tmp_path):
    cupy = pytest.importorskip("cupy")
    path, values = numbers(4_000_000)
    with cupy.cuda.Stream(non_blocking=True) as outer:
        total = cupy.zeros((), "int64")
        with nvmmu.pipeline(path, tmp_path / "out", "int32", count=10_000, library="cupy") as pieces:
            for x, y in pieces:
                assert cupy.cuda.get_current_stream() != outer
                total += x.sum(dtype="int64")
                cupy.add(x, total.astype("int32"), out=y)
        assert cupy.cuda.get_current_stream() == outer
        total += 1
        assert int(total) == values.sum(dtype="int64") + 1
    sums = numpy.add.accumulate(values.reshape(-1, 10_000).sum(axis=1, dtype="int64")).astype("int32")
    assert numpy.array_equal(numpy.fromfile(tmp_path / "out", "int32"), (values.reshape(-1, 10_000) + sums[:, None]).ravel())
