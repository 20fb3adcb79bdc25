"""Pinned files: faster repeated reads, never stale bytes."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import sys

import pytest

import spinio
from spinio import _spinio


@pytest.fixture
def path(tmp_path, noise):
    path = tmp_path / "held"
    path.write_bytes(noise)
    return path


def pinned(f, like=None):
    """Pins a file; skips the test if the file system has no leases."""
    try:
        return f.pin(like)
    except OSError as why:
        if why.errno == errno.EOPNOTSUPP:
            pytest.skip(str(why))
        raise


def test_reads_of_a_pinned_file(device, path, noise):
    array = device.full(len(noise), 0)
    with spinio.open(path) as f, pinned(f, array) as h:
        assert h.is_pinned
        gauges = spinio.stats()["gauges"]
        assert gauges["pinned_files"][0] == 1 and gauges["pinned_file_bytes"][0] >= len(noise)
        for at, size in [(0, len(noise)), (5, 1 << 20), (4097, 100000), (1 << 20, 3), (len(noise) - 10, 100)]:
            want = noise[at : at + size]
            assert f.pread(array[:size], at) == len(want)
            assert device.read(array)[: len(want)] == want
        many = [(i * 7919) % 3000000 for i in range(500)]
        f.read_many(many, 1000, array[:500000])
        assert device.read(array)[:500000] == b"".join(noise[i : i + 1000] for i in many)
    assert not h.is_pinned
    assert spinio.stats()["gauges"]["pinned_files"][0] == 0


def test_writer_unpins_file_and_is_seen(path, noise):
    array = spinio.emulated.empty(1 << 20)
    with spinio.open(path) as f, pinned(f, array) as h:
        f.pread(array, 0)
        # Another process: a lease is not broken by the process that has it.
        code = f"open({str(path)!r}, 'r+b').write(b'X' * 100000)"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
        assert not h.is_pinned
        assert f.pread(array, 0) == 1 << 20
        assert array.tobytes() == b"X" * 100000 + noise[100000 : 1 << 20]
        h.unpin()
        # Once more, after the writer has closed the file.
        with f.pin(array) as again:
            assert again.is_pinned


def test_pin_errors_report_the_cause(path, tmp_path):
    array = spinio.emulated.empty(10)
    with spinio.open(path, "r+") as f:
        with pytest.raises(OSError, match="open for writing") as caught:
            f.pin(array)
        assert caught.value.errno in (errno.ETXTBSY, errno.EOPNOTSUPP)
    with spinio.open("/dev/zero") as f, pytest.raises(OSError) as caught:
        f.pin(array)
    assert caught.value.errno == errno.EINVAL
    with spinio.open(path) as f:
        with pytest.raises(ValueError, match="host"):
            f.pin(bytearray(10))
        with pytest.raises(TypeError):
            f.pin(5)


def test_close_unpins(path):
    array = spinio.emulated.empty(100)
    f = spinio.open(path)
    h = pinned(f, array)
    g = pinned(f, array)
    f.close()
    f.close()
    assert not h.is_pinned and not g.is_pinned
    h.unpin()
    assert spinio.stats()["gauges"]["pinned_files"][0] == 0
    # The open does not have to wait.
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


def test_unpin_leaves_later_pins_alone(path):
    array = spinio.emulated.empty(1 << 20)
    with spinio.open(path) as f:
        first = pinned(f, array)
        subprocess.run([sys.executable, "-c", f"open({str(path)!r}, 'r+b').write(b'X')"], check=True, timeout=600)
        assert not first.is_pinned
        with spinio.open(path) as other, pinned(other, array) as second:
            first.unpin()
            assert second.is_pinned
        assert not second.is_pinned


def test_close_after_writer_came(path, monkeypatch):
    """A writer may come after the question whether the file is pinned; whatever unpinning raises, the file is closed."""
    array = spinio.emulated.empty(100)
    for number in (errno.ESTALE, errno.EIO):
        f = spinio.open(path)
        pinned(f, array)
        descriptor = f.fileno()

        def unpin_file(fd, generation, number=number, unpin=_spinio.unpin_file):
            unpin(fd, generation)
            raise OSError(number, os.strerror(number))

        with monkeypatch.context() as patch:
            patch.setattr(_spinio, "unpin_file", unpin_file)
            if number == errno.ESTALE:
                f.close()
            else:
                with pytest.raises(OSError) as raised:
                    f.close()
                assert raised.value.errno == errno.EIO
        assert f.closed
        with pytest.raises(OSError):
            os.fstat(descriptor)


def test_forked_child_keeps_parents_pin_and_map(path, noise):
    array = spinio.emulated.empty(1 << 20)
    with spinio.open(path) as f, pinned(f, array) as h:
        with pytest.raises(TypeError, match="belongs to its process"):
            pickle.dumps(h)
        m = h.map(0, 8192)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.alarm(600)
                with pytest.raises(ValueError, match="forked from"):
                    m.address
                with pytest.raises(ValueError, match="forked from"):
                    m.__cuda_array_interface__
                with pytest.raises(ValueError, match="forked from"):
                    m.revoke_requested
                assert not h.is_pinned
                m.unmap()
                h.unpin()
                f.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert h.is_pinned and m.address and not m.revoke_requested
        assert f.pread(array, 0) == 1 << 20 and array.tobytes() == noise[: 1 << 20]
        m.unmap()


def test_maps(device, path, noise):
    array = device.full(10, 0)
    with spinio.open(path) as f, pinned(f, array) as h:
        try:
            m = h.map(4096, 1 << 20)
        except OSError as why:
            assert why.errno == errno.ENODEV  # GPU kernels of this device cannot read host memory
            return
        assert m.nbytes == 1 << 20 and m.address and not m.revoke_requested
        assert m.__cuda_array_interface__["data"] == (m.address, True)
        if device.name == "cupy":
            import cupy

            assert cupy.asarray(m).get().tobytes() == noise[4096:][: 1 << 20]
        m.unmap()
        m.unmap()
        with pytest.raises(ValueError, match="no longer mapped"):
            m.address
        with pytest.raises(OSError) as caught:
            h.map(len(noise), 1)
        assert caught.value.errno == errno.EINVAL
        with h.map() as whole:
            assert whole.nbytes == len(noise)
    with pytest.raises(ValueError, match="no longer pinned"):
        h.map()
