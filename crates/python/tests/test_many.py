"""Batches: every read has the result of the corresponding pread."""

from __future__ import annotations

import array
import errno
import random
import subprocess
import sys

import pytest

import spinio

numpy = pytest.importorskip("numpy")


def expected(noise, offsets, lengths, before):
    """The expected contents of `out`, and the result of each read."""
    out, got, at = bytearray(before), [], 0
    for offset, length in zip(offsets, lengths):
        piece = noise[offset : offset + length]
        out[at : at + len(piece)] = piece
        got.append(len(piece))
        at += length
    return bytes(out), got


@pytest.mark.parametrize("length", [1, 512, 4096, 70000])
def test_reads_of_one_length(memory, data, noise, length):
    n = min(1000, (4 << 20) // length)
    pick = random.Random(length)
    offsets = [pick.randrange(len(noise) + 5000) for _ in range(n)]
    out = memory.full(n * length + 10, 0xEE)
    with spinio.open(data) as f:
        got = f.read_many(numpy.array(offsets), length, out)
    want, counts = expected(noise, offsets, [length] * n, b"\xee" * (n * length + 10))
    assert got.tolist() == counts and got.dtype == "int64"
    assert memory.read(out) == want


def test_reads_of_any_length(memory, data, noise):
    pick = random.Random(5)
    lengths = [pick.choice([0, 1, 3, 100, 4096, 10000, 100000]) for _ in range(300)]
    offsets = [pick.randrange(len(noise)) for _ in lengths]
    offsets[7] = offsets[8] = offsets[6]  # the same offset repeatedly
    out = memory.full(sum(lengths), 0xEE)
    with spinio.open(data) as f:
        got = f.read_many(offsets, lengths, out)
    want, counts = expected(noise, offsets, lengths, b"\xee" * sum(lengths))
    assert list(got) == counts
    assert memory.read(out) == want


@pytest.mark.parametrize("make", [list, tuple, lambda v: array.array("q", v), lambda v: numpy.array(v, "uint32"), lambda v: numpy.array(v).repeat(2)[::2]])
def test_integers_of_any_kind(data, noise, make):
    out = spinio.emulated.empty(30)
    with spinio.open(data) as f:
        assert list(f.read_many(make([5, 100, 9]), make([10, 10, 10]), out)) == [10, 10, 10]
        assert list(f.read_many([], [], out)) == []
        assert list(f.read_many([], 5, out)) == []
    assert out.tobytes() == noise[5:15] + noise[100:110] + noise[9:19]


@pytest.mark.parametrize("number", [numpy.int64, numpy.uint8, numpy.array, int])
def test_one_length_for_all(data, noise, memory, number):
    out = memory.full(30, 0)
    with spinio.open(data) as f:
        assert f.read_many([5, 100, 9], number(10), out).tolist() == [10, 10, 10]
        assert memory.read(out) == noise[5:15] + noise[100:110] + noise[9:19]
        assert f.read_many([numpy.int64(5), numpy.uint16(7)], [number(1), 2], out).tolist() == [1, 2]
        assert f.read_many(numpy.array([5]), number(0), out).tolist() == [0]


def test_invalid_arguments(data):
    out = spinio.emulated.empty(100)
    with spinio.open(data) as f:
        for offsets, lengths, error in [
            ([0, 1], [60, 50], "do not fit"),
            ([0] * 101, 1, "do not fit"),
            ([0, 1], 1 << 62, "do not fit"),
            ([0, 1, 2], [1, 2], "2 lengths"),
            ([0, 1], 1 << 80, "do not fit: they have .* bytes, the array 100"),
            ([5, -1], 1, "Offset -1 of piece 1 is negative"),
            ([0], [-1], "Length -1 of piece 0 is negative"),
            ([0], -1, "length -1 is negative"),
            ([0], numpy.int8(-1), "length -1 is negative"),
            ([1 << 63], 1, "offsets go up to"),
            ([0], numpy.array([1 << 63], "uint64"), "lengths go up to"),
            ([[0, 1], [2, 3]], 1, "array of 2 dimensions"),
        ]:
            with pytest.raises(ValueError, match=error):
                f.read_many(offsets, lengths, out)
        for wrong in ([0.5], ["a"], None, [1 << 80], [True], numpy.array(["a"])):
            with pytest.raises((TypeError, ValueError)):
                f.read_many(wrong, 1, out)
        for wrong in (0, numpy.int64(0), numpy.array(0)):
            with pytest.raises(TypeError, match="offsets are a sequence"):
                f.read_many(wrong, 1, out)
        for wrong in (1.0, numpy.float64(1), None, "1", [1.0]):
            with pytest.raises(TypeError):
                f.read_many([0], wrong, out)
        with pytest.raises(ValueError, match="errors is"):
            f.read_many([0], 1, out, errors="ignore")
        with pytest.raises(BufferError, match="read-only"):
            f.read_many([0], 1, out.as_readonly())


def test_failures_raise_or_return(memory, tmp_path):
    with spinio.open("/proc/self/mem") as f:  # reads at offset 0 fail for every user
        out = memory.full(20, 0)
        with pytest.raises(OSError) as caught:
            f.read_many([0, 0], 10, out)
        assert caught.value.errno == errno.EIO and "2 of 2" in str(caught.value)
        assert list(f.read_many([0, 0], 10, out, errors="return")) == [-errno.EIO] * 2


def test_without_numpy(data):
    code = f"""
import sys, spinio
out = bytearray(20)
with spinio.open({str(data)!r}) as f:
    got = f.read_many([8, 0], 10, out)
assert list(got) == [10, 10] and "numpy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_batches_are_counted(data):
    before = spinio.stats()["batch"]
    with spinio.open(data) as f:
        f.read_many(range(0, 100000, 1000), 500, spinio.emulated.empty(50000))
    after = spinio.stats()["batch"]
    assert after["calls"] - before["calls"] == 1 and after["bytes"] - before["bytes"] == 50000
