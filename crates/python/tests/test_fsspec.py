"""The fsspec file system: fsspec's own behaviour, and files that accept device memory."""

from __future__ import annotations

import errno
import gzip
import pickle
import resource

import pytest

fsspec = pytest.importorskip("fsspec")

from spinio.fsspec import FileSystem, OpenFile  # noqa: E402


@pytest.fixture
def fs():
    return fsspec.filesystem("spinio", skip_instance_cache=True)


def test_protocol_is_registered(fs, data, noise):
    assert isinstance(fs, FileSystem)
    with fsspec.open(f"spinio://{data}") as f:
        assert isinstance(f, OpenFile) and f.size == len(noise)
        assert f.read(100) == noise[:100] and f.read() == noise[100:] and f.read(5) == b""
    with fsspec.open(f"spinio://{data}", "rt", encoding="latin-1") as f:
        assert f.read(10) == noise[:10].decode("latin-1")


def test_files_accept_device_memory(fs, memory, data, noise):
    array = memory.full(100000, 0)
    with fs.open(str(data)) as f:
        assert f.pread(array, 77) == 100000
    assert memory.read(array) == noise[77:100077]
    assert fs.cat_into(f"spinio://{data}", array, 5) == 100000
    assert memory.read(array) == noise[5:100005]


def test_other_operations_equal_local_file_system(fs, tmp_path, data, noise):
    assert fs.cat_file(str(data), 10, 20) == noise[10:20]
    assert fs.info(str(data))["size"] == len(noise)
    fs.pipe_file(str(tmp_path / "a"), b"hello")
    assert (tmp_path / "a").read_bytes() == b"hello"
    with fs.open(str(tmp_path / "a"), "ab") as f:
        f.write(b" you")
    assert fs.cat(str(tmp_path / "a")) == b"hello you"
    fs.copy(str(tmp_path / "a"), str(tmp_path / "b"))
    assert sorted(p.rsplit("/", 1)[1] for p in fs.ls(str(tmp_path), detail=False)) == ["a", "b"]
    with fs.transaction:
        with fs.open(str(tmp_path / "c"), "wb") as f:
            f.write(b"later")
        assert not (tmp_path / "c").exists()
    assert (tmp_path / "c").read_bytes() == b"later"


def test_lines_equal_those_of_a_plain_file(fs, tmp_path):
    text = b"\n".join(b"x" * n for n in (0, 1, 5, 8190, 8191, 8192, 8193, 30000, 0, 0, 7))
    path = tmp_path / "lines"
    for ending in (b"", b"\n"):
        path.write_bytes(text + ending)
        with fs.open(str(path)) as f, open(path, "rb") as want:
            assert f.readlines() == want.readlines() and f.readline() == b""
            for size in (-1, None, 0, 1, 3, 9000):
                f.seek(5), want.seek(5)
                assert [f.readline(size) for _ in range(20)] == [want.readline(-1 if size is None else size) for _ in range(20)]
                assert f.tell() == want.tell()
        with fs.open(str(path), "rt") as f:
            assert f.read() == (text + ending).decode()


def test_files_are_pickled_to_workers(fs, data, noise):
    with fs.open(str(data)) as f:
        assert f.path == str(data)
        f.seek(100)
        with pickle.loads(pickle.dumps(f)) as again:
            assert isinstance(again, OpenFile) and again.read(10) == noise[100:110]
    assert pickle.loads(pickle.dumps(fs)).cat_ranges([str(data)] * 2, [3, -5], [7, None]) == [noise[3:7], noise[-5:]]


def test_error_after_some_bytes_is_raised(fs, memory, bad_bytes):
    assert fs.cat_into(bad_bytes.path, memory.full(bad_bytes.good, 0), bad_bytes.start) == bad_bytes.good
    with pytest.raises(OSError) as raised:
        fs.cat_into(bad_bytes.path, memory.full(bad_bytes.size, 0), bad_bytes.start)
    assert raised.value.errno == errno.EIO


def test_short_writes_are_completed_or_raised(fs, memory, tmp_path):
    path, limit = str(tmp_path / "limited"), 100_000
    array = memory.full(150_000, 7)

    def write_array():
        with fs.open(path, "wb") as f:
            f.write(array)

    def write_text():
        with fs.open(path, "wt") as f:
            f.write("x" * 150_000)

    def write_gzip():
        with fs.open(path, "wb") as f, gzip.GzipFile(fileobj=f, mode="wb", compresslevel=0) as packed:
            packed.write(bytes(150_000))

    # The first system call writes what fits, and the second one fails.
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for write in (write_array, write_text, write_gzip, lambda: fs.pipe_file(path, bytes(150_000))):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError) as caught:
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert caught.value.errno == errno.EFBIG and fs.size(path) == limit
    write_array()
    assert fs.cat_file(path) == bytes([7]) * 150_000
